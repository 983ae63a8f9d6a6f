/*
 * bench_engine - an engine that puts and gets for a benchmark.
 *
 * Role        a session of one process, with two private buffers: what is put comes from the first,
 *             what is got goes to the second. Keys are made of numbers, so that who knows an
 *             engine's salt knows its keys.
 * Units       GB/s: 10^9 bytes a second
 * Ownership   the caller's storage; open and close
 * Threads     the caller's, and libkvist's pumping thread
 */
#ifndef KVIST_TOOL_BENCH_ENGINE_H
#define KVIST_TOOL_BENCH_ENGINE_H

#include <kvist/client.h>

#define KVIST_BENCH_BATCH 16U /* blocks that are put, or got, together */

struct kvist_bench_setup {
    const char *socket_path;
    uint64_t block_bytes;
    uint64_t window_bytes;     /* of either private buffer, about */
    uint64_t salt;             /* engines of equal salt share a pool; 0: a random one */
    uint64_t key_first;        /* first number to put, from 1 */
    bool read_only;            /* never puts */
    bool verify;               /* gets check the copy against the block's checksum */
    const volatile bool *stop; /* waits end when it is set; may be NULL */
};

struct kvist_bench_engine {
    struct kvist_bench_setup setup;
    struct kvist_client *client;
    struct kvist_pool *pool;
    uint64_t window_blocks;
    uint64_t window_bytes; /* a multiple of the block */
    int fds[2];
    void *windows[2];
    uint64_t cursor;   /* next block in the windows */
    uint64_t key_next; /* from key_first up to it all were put */
    uint64_t recent;   /* how many of the latest keys gets ask for */
    uint64_t random;
    uint64_t blocks_put;
    uint64_t blocks_got;
    uint64_t get_misses;      /* evicted between put and get */
    uint64_t take_waits_us;   /* spent without a slot to fill */
    uint64_t wrong_blocks;    /* got bytes that are not the key's: never */
    uint64_t unverified_gets; /* with verify: no checksum had been taken yet */
};

/** Make the buffers, connect, open the pool; returns when there is something to take. */
KVIST_MUST_USE enum kvist_status kvist_bench_engine_open(const struct kvist_bench_setup *setup,
                                                         struct kvist_bench_engine *engine,
                                                         struct kvist_error *err);

/** Fine for an engine that failed to open. */
void kvist_bench_engine_close(struct kvist_bench_engine *engine);

void kvist_bench_key(const struct kvist_bench_engine *engine,
                     uint64_t number,
                     uint8_t key_out[KVIST_KEY_BYTES]);
uint64_t kvist_bench_random(struct kvist_bench_engine *engine);

/** Take, copy, mark and commit the next blocks: up to want of them, at least one. */
KVIST_MUST_USE enum kvist_status
kvist_bench_put(struct kvist_bench_engine *engine, size_t want, struct kvist_error *err);

/** Wait until the latest put is found. Commits are handled in order: then all are. */
KVIST_MUST_USE enum kvist_status kvist_bench_put_wait(struct kvist_bench_engine *engine,
                                                      struct kvist_error *err);

/**
 * Put once around an arena, and a quarter more, so that every further put evicts; gets ask for the
 * latest half.
 */
KVIST_MUST_USE enum kvist_status kvist_bench_fill_arena(struct kvist_bench_engine *engine,
                                                        uint64_t arena_bytes,
                                                        struct kvist_error *err);

/** Acquire, copy, check and release blocks that follow each other. @return blocks */
size_t kvist_bench_get(struct kvist_bench_engine *engine, uint64_t first, size_t want);

/** Copy between the two buffers, for seconds. @return GB/s */
double kvist_bench_memcpy_for(struct kvist_bench_engine *engine, double seconds);

/** Copy between the two buffers and checksum the copy, for seconds. @return GB/s */
double kvist_bench_checksum_for(struct kvist_bench_engine *engine, double seconds);

/** Put for seconds, until the last is found. */
KVIST_MUST_USE enum kvist_status kvist_bench_put_for(struct kvist_bench_engine *engine,
                                                     double seconds,
                                                     double *gbps_out,
                                                     struct kvist_error *err);

/** Get the recent keys in turn, for seconds. */
KVIST_MUST_USE enum kvist_status kvist_bench_get_for(struct kvist_bench_engine *engine,
                                                     double seconds,
                                                     double *gbps_out,
                                                     struct kvist_error *err);

/** A figure of the daemon's by its name; 0 where there is none. */
uint64_t kvist_bench_metric(const char *socket_path, uint64_t timeout_us, const char *name);

#endif
