#include "tests/bench/quantile.h"

#include <stdlib.h>

static int compare_samples(const void *one, const void *other)
{
    const uint64_t *a = one;
    const uint64_t *b = other;
    return (*a > *b) - (*a < *b);
}

uint64_t bench_quantile(uint64_t *samples, size_t count, double share)
{
    if (count == 0) {
        return 0;
    }
    qsort(samples, count, sizeof(samples[0]), compare_samples);
    return samples[(size_t)((double)(count - 1) * share)];
}
