/*
 * turnover - a load that turns an NVMe tier over, and what is measured of it.
 *
 * Role        turnover.c makes the load and measures; a store takes it: the tier itself
 *             (turnover_tier.c), or RocksDB with its values in blob files (turnover_blobdb.c). Each
 *             store is a program of its own with the same main() and prints the same line.
 * Load        keys of two kinds: popular ones, drawn by Zipf's law, and fresh ones, which nobody asks
 *             for again. A cache of memory's size stands in front, least recently used first. What it
 *             lacks is read from the store, or counts as computed; what it evicts is written, unless
 *             the store has it. Requests come as fast as reads and writes in flight allow.
 * Units       GB/s: 10^9 bytes a second; quantiles of what a read took from submit to completion
 * Threads     the main thread; the sampler of bytes on disk has its own
 */
#ifndef KVIST_TESTS_BENCH_TURNOVER_H
#define KVIST_TESTS_BENCH_TURNOVER_H

#include <kvist/error.h>

#include <stdbool.h>
#include <stdint.h>

#define TURNOVER_PATH_BYTES 256U

struct turnover_options {
    const char *path;         /* an empty directory, for the store alone */
    uint64_t cap_bytes;       /* that the store may take on disk */
    uint64_t block_bytes;     /* a multiple of 4096 */
    uint64_t turn_count;      /* of cap_bytes that are written while it is measured */
    uint64_t seconds_max;     /* ends the measurement earlier */
    uint64_t memory_percent;  /* of cap_bytes: the cache in front */
    uint64_t popular_percent; /* of cap_bytes: all popular keys together */
    uint64_t fresh_percent;   /* of requests */
    uint64_t skew_percent;    /* Zipf's exponent, in hundredths */
    uint64_t extent_bytes;    /* of a file of blocks; 0: the store's default */
    uint64_t thread_count;
    uint64_t read_depth;
    uint64_t write_depth;
    uint64_t carry_percent; /* tier: of an extent, at most */
    uint64_t carry_hits;    /* tier: of a block that is carried over, at least */
    uint64_t gc_percent;    /* blobdb: of the oldest blob files, whose values are moved; 0: none */
    uint64_t live_percent;  /* blobdb: of cap_bytes, what values may take before the oldest go */
    uint64_t family_count;  /* blobdb: column families, each with a flush of its own */
};

/* A read or a write. The store's from submit until turnover_done(). */
struct turnover_flight {
    uint64_t number; /* of the key */
    uint64_t start_ns;
    uint8_t *memory; /* block_bytes, page-aligned; of a write, its first 8 bytes are the number */
    bool write;
    struct turnover_flight *next; /* free list */
};

/* --- What a store calls, on the main thread ------------------------------------------------- */

/** A flight is over; OK, NOT_FOUND of a read, or another status that counts as an error. */
void turnover_done(struct turnover_flight *flight, enum kvist_status status);

/** The store no longer has a key. */
void turnover_gone(uint64_t number);

/* --- A store -------------------------------------------------------------------------------- */

extern const char turnover_store_name[];

KVIST_MUST_USE enum kvist_status turnover_store_open(const struct turnover_options *options,
                                                     struct kvist_error *err);
void turnover_store_close(void);

/** As many flights as read_depth and write_depth allow. */
void turnover_store_submit(struct turnover_flight *flight);

/** Wait up to 10 ms for flights to end, and call turnover_done() for them. */
void turnover_store_turn(void);

/** The measurement begins: forget what was counted. */
void turnover_store_begin(void);

/** More `key=value` of the measurement. */
void turnover_store_print(void);

/** For stores whose main thread waits on a descriptor. */
void turnover_wait(int fd);

#endif
