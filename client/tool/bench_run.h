/*
 * bench_run - one block size, measured.
 *
 * Role        an engine of one process puts new blocks for ever, so that the daemon evicts all the
 *             time, and gets the latest ones back; beside it, memcpy between two mapped memfds of
 *             the same size, in turns with the rest.
 *     put     take, copy from private memory, mark, commit; until the last block of a run is found
 *     get     acquire, copy to private memory, release
 *     probe   kvist_pool_probe() of 512 keys that are there, at random
 *     lease   kvist_pool_acquire() and release of one key that is there, at random
 * Units       GB/s: 10^9 bytes a second; nanoseconds a key
 * Threads     the caller's, and libkvist's pumping thread
 */
#ifndef KVIST_TOOL_BENCH_RUN_H
#define KVIST_TOOL_BENCH_RUN_H

#include <kvist/error.h>

#include <stdbool.h>
#include <stdint.h>

#define KVIST_BENCH_RUNS_MAX 101U

/* Figures of each run; bench.c makes medians of them. */
enum kvist_bench_figure {
    KVIST_BENCH_MEMCPY,
    KVIST_BENCH_PUT,
    KVIST_BENCH_PUT_RATIO, /* to memcpy of the same run */
    KVIST_BENCH_GET,
    KVIST_BENCH_GET_RATIO,
    KVIST_BENCH_PROBE_NS,
    KVIST_BENCH_PROBE_MISS_NS,
    KVIST_BENCH_LEASE_NS,
    KVIST_BENCH_LEASE_P99_NS, /* of single calls */
    KVIST_BENCH_FIGURES,
};

struct kvist_bench_options {
    const char *socket_path;
    uint64_t block_bytes;
    uint64_t arena_bytes; /* how much to put before measuring, so that eviction goes on */
    double seconds;       /* of each figure in each run */
    uint32_t run_count;
    const volatile bool *stop; /* set by a signal */
};

struct kvist_bench_result {
    uint64_t block_bytes;
    double figures[KVIST_BENCH_FIGURES][KVIST_BENCH_RUNS_MAX];
    uint64_t blocks_put;
    uint64_t blocks_got;
    uint64_t get_misses;    /* evicted between put and get */
    uint64_t take_waits_us; /* spent without a slot to fill */
    uint64_t wrong_blocks;  /* got bytes that are not the key's: never */
};

KVIST_MUST_USE enum kvist_status kvist_bench_run(const struct kvist_bench_options *options,
                                                 struct kvist_bench_result *result_out,
                                                 struct kvist_error *err);

#endif
