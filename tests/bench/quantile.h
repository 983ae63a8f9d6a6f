/* quantile - of samples that a benchmark took. */
#ifndef KVIST_TESTS_BENCH_QUANTILE_H
#define KVIST_TESTS_BENCH_QUANTILE_H

#include <stddef.h>
#include <stdint.h>

/** Sorts the samples; the one below which `share` of them lie. 0: there are none. */
uint64_t bench_quantile(uint64_t *samples, size_t count, double share);

#endif
