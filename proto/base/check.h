/*
 * check - assertions that stay on.
 *
 * Role        KVIST_CHECK guards an invariant of the daemon: a broken one means that shared state
 *             can no longer be trusted, so the process ends with a message. The client library
 *             uses KVIST_CHECK_OR: the call fails with BUG and nothing else happens.
 *             KVIST_DCHECK is for checks that cost O(n): debug and sanitizer builds only.
 * Threads     any
 */
#ifndef KVIST_BASE_CHECK_H
#define KVIST_BASE_CHECK_H

#include <kvist/status.h>

/** Print the broken condition with its place and abort. */
_Noreturn void kvist_check_failed(const char *expression, const char *file, int line);

#define KVIST_CHECK(condition)                                                                     \
    do {                                                                                           \
        if (__builtin_expect(!(condition), 0)) {                                                   \
            kvist_check_failed(#condition, __FILE__, __LINE__);                                    \
        }                                                                                          \
    } while (0)

#define KVIST_CHECK_OR(condition, result)                                                          \
    do {                                                                                           \
        if (__builtin_expect(!(condition), 0)) {                                                   \
            return (result);                                                                       \
        }                                                                                          \
    } while (0)

#ifdef KVIST_DEBUG
#define KVIST_DCHECK(condition) KVIST_CHECK(condition)
#else
#define KVIST_DCHECK(condition) ((void)sizeof(condition))
#endif

#define KVIST_ARRAY_COUNT(array) (sizeof(array) / sizeof((array)[0]))

#endif
