/*
 * clock - monotonic time, in microseconds.
 *
 * Role        the only source of time; never the wall clock, which jumps.
 * Threads     any
 * Source      clock_gettime(2) CLOCK_MONOTONIC
 */
#ifndef KVIST_BASE_CLOCK_H
#define KVIST_BASE_CLOCK_H

#include <stdint.h>

/** Microseconds since an arbitrary start, monotonic. */
uint64_t kvist_clock_now_us(void);

/** The same in nanoseconds, for measuring short spans. */
uint64_t kvist_clock_now_ns(void);

#endif
