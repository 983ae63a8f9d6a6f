#include "proto/base/check.h"

#include <stdio.h>
#include <stdlib.h>

_Noreturn void kvist_check_failed(const char *expression, const char *file, int line)
{
    (void)fprintf(stderr, "kvist: broken invariant: %s at %s:%d\n", expression, file, line);
    abort();
}
