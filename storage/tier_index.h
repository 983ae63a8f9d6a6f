/*
 * tier_index - where each block lies, in RocksDB. The only file that knows RocksDB.
 *
 * Role        maps (pool, key) to a record and (extent, offset) back to its (pool, key); keeps the
 *             pools. Reopens the database after a background error; never ends the process.
 * Shapes      tier_codec.h
 * Threads     any; the calls block. No iterator outlives a call: one that is alive at close would
 *             abort the process.
 * Limits      memory: the block cache (8 MiB) and two memtables; disk: kvist_tier_index_reserve()
 * Invariants  a "b" entry and its "x" entry are written and removed in one batch; put and remove
 *             are one at a time, so that what they read is still so when they write
 * Errors      NOT_FOUND: a miss; STALE: of an earlier generation of the pool; UNAVAILABLE: the
 *             database is closed after errors, and is tried again once a second;
 *             NO_SPACE, DENIED, CORRUPT, SYSTEM: RocksDB's, see err
 */
#ifndef KVIST_STORAGE_TIER_INDEX_H
#define KVIST_STORAGE_TIER_INDEX_H

#include "storage/record.h"

#include <stdatomic.h>

#define KVIST_TIER_BATCH            512U
#define KVIST_TIER_INDEX_LAST_BYTES (1U << 20)  /* and with less not even what frees space */

struct kvist_tier_index;

/* A walk over the index, a batch of records at a time; zeroed, it begins at the start. */
struct kvist_tier_walk {
    bool started;
    bool end;                         /* nothing comes after this batch */
    uint8_t pool_id[KVIST_KEY_BYTES]; /* the last entry that was seen */
    uint8_t key[KVIST_KEY_BYTES];
    uint64_t offset;
    size_t count; /* of records in this batch, may be 0 before the end */
    struct kvist_tier_record records[KVIST_TIER_BATCH];
};

/**
 * Open or make the database at path. A damaged one is destroyed and made anew: it is a cache's.
 *
 * @param memtable_bytes  write buffer; the log is bounded by it too
 * @param damaged_out     set when what was there had to go
 */
KVIST_MUST_USE enum kvist_status kvist_tier_index_open(const char *path,
                                                       uint64_t memtable_bytes,
                                                       struct kvist_tier_index **index_out,
                                                       bool *damaged_out,
                                                       struct kvist_error *err);

/** NULL is fine. */
void kvist_tier_index_close(struct kvist_tier_index **index);

/** OK when writes can be expected to work; reopens the database when it has failed. */
KVIST_MUST_USE enum kvist_status kvist_tier_index_ready(struct kvist_tier_index *index,
                                                        uint64_t free_bytes,
                                                        struct kvist_error *err);

/** Bytes on disk that the database may need at its peak, when its files now have disk_bytes. */
uint64_t
kvist_tier_index_reserve(uint64_t memtable_bytes, uint64_t disk_bytes, uint64_t records_more);

KVIST_MUST_USE enum kvist_status kvist_tier_index_get(struct kvist_tier_index *index,
                                                      const uint8_t pool_id[KVIST_KEY_BYTES],
                                                      const uint8_t key[KVIST_KEY_BYTES],
                                                      struct kvist_tier_record *record_out,
                                                      struct kvist_error *err);

/**
 * Put a record, in place of one that was there.
 *
 * @param generation    the pool's now; a record of an earlier one is refused (STALE)
 * @param only_at       NULL, or put only while the entry is still this one (else STALE)
 * @param old_out       the record that was replaced
 * @param replaced_out  whether there was one that was counted
 */
KVIST_MUST_USE enum kvist_status kvist_tier_index_put(struct kvist_tier_index *index,
                                                      const struct kvist_tier_record *record,
                                                      const _Atomic uint64_t *generation,
                                                      const struct kvist_tier_record *only_at,
                                                      struct kvist_tier_record *old_out,
                                                      bool *replaced_out,
                                                      struct kvist_error *err);

/**
 * Remove records, each only if the entry is still this one (extent and offset).
 *
 * @param removed_out  [count]; for each, whether it went and was counted
 */
KVIST_MUST_USE enum kvist_status kvist_tier_index_remove(struct kvist_tier_index *index,
                                                         const struct kvist_tier_record *records,
                                                         size_t count,
                                                         bool *removed_out,
                                                         struct kvist_error *err);

/**
 * Before anything is put: entries of extents up to extent_max are counted by who loads them. Until
 * the end of the load, put and remove report those only when the load has passed them.
 */
void kvist_tier_index_load_begin(struct kvist_tier_index *index, uint32_t extent_max);

/** Next records in key order, of extents up to extent_max. Malformed entries go. */
KVIST_MUST_USE enum kvist_status kvist_tier_index_load(struct kvist_tier_index *index,
                                                       struct kvist_tier_walk *walk,
                                                       struct kvist_error *err);

/** Next records of a pool, in key order. */
KVIST_MUST_USE enum kvist_status kvist_tier_index_walk_pool(struct kvist_tier_index *index,
                                                            const uint8_t pool_id[KVIST_KEY_BYTES],
                                                            struct kvist_tier_walk *walk,
                                                            struct kvist_error *err);

/** Next records of an extent that are current, in offset order. */
KVIST_MUST_USE enum kvist_status kvist_tier_index_walk_extent(struct kvist_tier_index *index,
                                                              uint32_t extent,
                                                              struct kvist_tier_walk *walk,
                                                              struct kvist_error *err);

/** Remove what is left of an extent's back entries. */
KVIST_MUST_USE enum kvist_status kvist_tier_index_forget_extent(struct kvist_tier_index *index,
                                                                uint32_t extent,
                                                                struct kvist_error *err);

/** Highest extent number that an entry names; 0: none. */
KVIST_MUST_USE enum kvist_status kvist_tier_index_extent_last(struct kvist_tier_index *index,
                                                              uint32_t *extent_out,
                                                              struct kvist_error *err);

/** Put a pool, durably. */
KVIST_MUST_USE enum kvist_status kvist_tier_index_put_pool(struct kvist_tier_index *index,
                                                           const struct kvist_tier_pool *pool,
                                                           struct kvist_error *err);

/** Remove a pool that has no entries any more. Not durable at once: without entries it is forgotten
 *  when the index is opened. */
KVIST_MUST_USE enum kvist_status
kvist_tier_index_forget_pool(struct kvist_tier_index *index,
                             const uint8_t pool_id[KVIST_KEY_BYTES],
                             struct kvist_error *err);

/** All pools that have entries; the others are forgotten. At most capacity. */
KVIST_MUST_USE enum kvist_status kvist_tier_index_pools(struct kvist_tier_index *index,
                                                        struct kvist_tier_pool *pools_out,
                                                        size_t capacity,
                                                        size_t *count_out,
                                                        struct kvist_error *err);

/** Make what was put durable. */
KVIST_MUST_USE enum kvist_status kvist_tier_index_sync(struct kvist_tier_index *index,
                                                       struct kvist_error *err);

/** Rewrite all files without what was removed. Takes as long as it takes. */
void kvist_tier_index_compact(struct kvist_tier_index *index);

#endif
