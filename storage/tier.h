/*
 * tier - blocks on NVMe: an index in RocksDB, bytes in extent files.
 *
 * Role        writes blocks from slots, reads them back into slots, keeps within its bytes on disk.
 *             Knows nothing of DRAM, sessions or eviction there. All its I/O is on its own threads.
 * Files       PATH/index/ (RocksDB), PATH/extents/NNNNNNNN (append-only), PATH/lock.
 *             Extent: a 4096-byte header (magic, version, number, tenant, room for expiry and an
 *             encryption-key id), then records: a 4096-byte header (magic, pool, key, parent tag,
 *             pool generation, length, checksum, its own checksum), the block, zeros up to 4096.
 * Units       bytes on disk as st_blocks counts them, of everything under PATH
 * Ownership   source and target memory is lent from submit until the completion is called
 * Threads     all functions and callbacks: loop; the I/O threads are internal
 * Limits      bytes_max holds for `du PATH` at every moment: extents until their last fd is closed,
 *             one file that was an extent and will be one again, room for one more and for what is
 *             carried over, RocksDB with its compaction peak.
 *             A block takes at most an eighth of bytes_max. One fd an extent, at most 2,048.
 *             A disk with less than 32 MiB left gets no new extent, with less than 16 no block;
 *             the last of it is for clears, and for giving extents back.
 * Invariants  data before index; a record is believed only when pool, key, generation, length and
 *             both checksums match what was asked for; one record a key
 * Errors      NOT_FOUND: a miss; CORRUPT: a record did not check out, it has been dropped;
 *             BUSY: too many requests in flight, skip it; NO_SPACE, SYSTEM: the disk's; health says
 *             why. A failed write or read never fails the tier: it answers the next call too.
 * Source      Ceph BlueStore (index in RocksDB, data beside it); statx(2) STATX_DIOALIGN, open(2)
 *             O_DIRECT; architecture section 9
 */
#ifndef KVIST_STORAGE_TIER_H
#define KVIST_STORAGE_TIER_H

#include <kvist/error.h>
#include <kvist/limits.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVIST_TIER_CLEARED_NAME     "cleared" /* so a file of the daemon's may begin beside a tier */
#define KVIST_TIER_EXTENTS_MIN      8U /* of a size that bytes_max must hold */
#define KVIST_TIER_INDEX_FREE_BYTES (16U << 20) /* with less on the disk no block is put */

/* What names and checks a block on disk. */
struct kvist_tier_block {
    uint8_t pool_id[KVIST_KEY_BYTES];
    uint8_t key[KVIST_KEY_BYTES];
    uint64_t parent_tag;
    uint64_t pool_generation;
    uint64_t block_bytes;
    uint64_t checksum; /* XXH3-64 with kvist_key_checksum_seed(), verified after reading */
    uint32_t extent;   /* where it is; 0 in a write request */
};

/* What is remembered of a pool across restarts. */
struct kvist_tier_pool {
    uint8_t pool_id[KVIST_KEY_BYTES];
    uint64_t slot_bytes;
    uint64_t generation; /* blocks of an earlier one are gone */
    bool sparse;
    char tenant[KVIST_TENANT_BYTES_MAX + 1];
    char description[128];
};

/* Called on the loop thread, from kvist_tier_turn(). */
struct kvist_tier_events {
    /* At start: a pool, before its blocks. */
    void (*pool_loaded)(void *ctx, const struct kvist_tier_pool *pool);
    /* At start: blocks of pools that were reported. A block that was written since is not.
       Answers how many were taken, from the first on; the others are told again in a later turn. */
    size_t (*blocks_loaded)(void *ctx, const struct kvist_tier_block *blocks, size_t count);
    /* At start: nothing more to come. */
    void (*load_done)(void *ctx, enum kvist_status status);
    /* No longer on disk: their extent is about to go, or they did not check out. Blocks of an
     * earlier generation are not told, nor is a block that was written again elsewhere. */
    void (*blocks_dropped)(void *ctx, const struct kvist_tier_block *blocks, size_t count);
    /* Carried over to another extent: block->extent is the new one. */
    void (*block_moved)(void *ctx, const struct kvist_tier_block *block, uint32_t extent_before);
};

struct kvist_tier_options {
    const char *path;      /* made if missing; must be kvist's own, or empty */
    uint64_t bytes_max;    /* cap for everything under path, at least 64 MiB */
    uint64_t extent_bytes; /* 0: chosen from bytes_max (1/64 of it, 4 MiB to 1 GiB) */
    uint32_t io_threads;   /* 0: 8 */
    uint32_t depth_max;    /* requests in flight before BUSY; 0: 64 */
    struct kvist_tier_events events;
    void *ctx;
};

/* Counters and gauges; a plain copy. */
struct kvist_tier_stats {
    uint64_t blocks;
    uint64_t block_bytes;
    uint64_t disk_bytes;
    uint64_t disk_bytes_max;
    uint64_t extents;
    uint64_t writes_total;
    uint64_t write_bytes_total; /* handed to the file system for extents */
    uint64_t reads_total;
    uint64_t read_bytes_total;
    uint64_t carried_blocks_total;
    uint64_t dropped_blocks_total;
    uint64_t corrupt_total;
    uint8_t corrupt_pool[KVIST_KEY_BYTES]; /* that of the last one; 0: it was no block */
    uint64_t write_errors_total;
    uint64_t read_errors_total;
    uint64_t in_flight;
    bool direct;        /* direct I/O works here */
    bool loading;       /* the index is still being read back */
    char degraded[KVIST_ERROR_TEXT_BYTES]; /* "" or why */
    char notice[KVIST_ERROR_TEXT_BYTES];   /* what was lost before it was opened, for the log */
};

struct kvist_tier;

/* done: on the loop. block is the request's on failure, the record's on success. */
typedef void
kvist_tier_done_fn(void *ctx, enum kvist_status status, const struct kvist_tier_block *block);

/**
 * Open or make the tier; starts its threads and the reading back of the index.
 * A write-and-read trial of direct I/O comes first. A second opener of the same path is refused.
 *
 * @return OK; EXISTS: locked by another process; INVALID: path holds something else; UNSUPPORTED:
 *         built without RocksDB; UNAVAILABLE: the disk of a tier is in trouble, which may pass:
 *         full, read-only, I/O errors; NOT_FOUND, DENIED, NO_SPACE, SYSTEM: err says what to do
 */
KVIST_MUST_USE enum kvist_status kvist_tier_open(const struct kvist_tier_options *options,
                                                 struct kvist_tier **tier_out,
                                                 struct kvist_error *err);

/**
 * Whether a tier is there, or could be made: what kvist_tier_open() refuses at once of what the
 * directory holds. Makes nothing, and does not ask whether another process has it. Any thread.
 *
 * @return OK; INVALID: path holds something else; UNSUPPORTED: built without RocksDB
 */
KVIST_MUST_USE enum kvist_status kvist_tier_check(const char *path, struct kvist_error *err);

/**
 * Whether an error on the way to a tier's directory may pass, for it is the device's trouble: then
 * kvist_tier_open() answers UNAVAILABLE. A disk that is full or read-only and has never had a tier
 * is refused, for whoever configures it is there to hear. Any thread.
 *
 * @param code  errno
 */
bool kvist_tier_may_pass(const char *path, int code);

/** Finish what is in flight (completions are called), sync, close. NULL is fine. */
void kvist_tier_close(struct kvist_tier **tier);

/** Pollable: readable when kvist_tier_turn() has something to do, but for blocks that were not taken
 *  when they were loaded. Borrowed. */
int kvist_tier_fd(const struct kvist_tier *tier);

/** Call completions and events, a bounded number. @return true: call again soon */
bool kvist_tier_turn(struct kvist_tier *tier);

/**
 * Remember a pool (new, or a changed generation: its earlier blocks are dropped, durably, and their
 * slots may have had another size).
 * Blocks may be written from the call on; done tells when the generation is durable.
 *
 * @return OK; STALE: the tier knows a later generation (see pool_loaded), or this one with slots of
 *         another size; INVALID: sizes; BUSY, also when 1,024 pools are known; NO_MEMORY
 */
KVIST_MUST_USE enum kvist_status kvist_tier_put_pool(struct kvist_tier *tier,
                                                     const struct kvist_tier_pool *pool,
                                                     kvist_tier_done_fn *done,
                                                     void *ctx);

/**
 * Forget a pool: its blocks are dropped, and its place among 1,024 becomes free, in later turns.
 * Nothing is told of it, and nothing of it may be in flight. A put with a later generation than it
 * had makes it a pool again, empty. After a crash it may be loaded again, with what was not dropped
 * yet.
 */
void kvist_tier_forget_pool(struct kvist_tier *tier, const uint8_t pool_id[KVIST_KEY_BYTES]);

/**
 * Write a block. The very same block, when it is on disk already, is not written again.
 *
 * @param block   its checksum is valid; the pool was put before, or loaded
 * @param source  block_bytes, 4096-aligned, unchanging until done
 * @return OK; BUSY; INVALID: pool unknown, or length; STALE: generation; NO_SPACE: larger than
 *         this tier ever takes. done, besides the disk's errors: CORRUPT: source does not match its
 *         checksum; STALE: the pool was cleared meanwhile; CLOSED
 */
KVIST_MUST_USE enum kvist_status kvist_tier_write(struct kvist_tier *tier,
                                                  const struct kvist_tier_block *block,
                                                  const void *source,
                                                  kvist_tier_done_fn *done,
                                                  void *ctx);

/**
 * Read a block and verify it.
 *
 * @param target  4096-aligned, target_bytes; after a failure its content is undefined
 */
KVIST_MUST_USE enum kvist_status kvist_tier_read(struct kvist_tier *tier,
                                                 const uint8_t pool_id[KVIST_KEY_BYTES],
                                                 const uint8_t key[KVIST_KEY_BYTES],
                                                 uint64_t pool_generation,
                                                 void *target,
                                                 uint64_t target_bytes,
                                                 kvist_tier_done_fn *done,
                                                 void *ctx);

/** Make what was written durable: extents and index. For an orderly stop and `kvist save`. */
KVIST_MUST_USE enum kvist_status
kvist_tier_sync(struct kvist_tier *tier, kvist_tier_done_fn *done, void *ctx);

/**
 * Limits of a tenant's extents; any number of times. A quota is kept with room for one extent more,
 * which takes what is carried over: fewer than four extents' worth of it hold little.
 *
 * @param bytes_max  on disk; 0: no bound but the tier's
 * @param weight     of its share when the tier is full; at least 1
 */
void kvist_tier_set_tenant(struct kvist_tier *tier,
                           const char *tenant,
                           uint64_t bytes_max,
                           uint32_t weight);

/** Bytes on disk of a tenant's extents. */
uint64_t kvist_tier_tenant_bytes(struct kvist_tier *tier, const char *tenant);

void kvist_tier_stats(const struct kvist_tier *tier, struct kvist_tier_stats *stats_out);

#endif
