/*
 * tier_internal - what the files of the tier share.
 *
 * Role        tier.c: front, requests; tier_pool.c: pools; tier_keeper.c: loading, room, clearing;
 *             tier_disk.c: the directory.
 * Threads     members are the loop's unless marked; a request or a keeper's step belongs to a
 *             worker while its job is submitted
 */
#ifndef KVIST_STORAGE_TIER_INTERNAL_H
#define KVIST_STORAGE_TIER_INTERNAL_H

#include "storage/extent.h"
#include "storage/tier.h"
#include "storage/tier_index.h"
#include "storage/workers.h"

#include <pthread.h>
#include <stdatomic.h>

#define KVIST_TIER_MAGIC     0x6b766e74U
#define KVIST_TIER_POOLS_MAX 1024U /* known at a time, on disk too */

struct kvist_tier_known_pool {
    struct kvist_tier_pool pool; /* its generation stands below; slot_bytes is under pool_lock */
    _Atomic uint64_t generation; /* any thread reads */
    uint32_t tenant;
    uint32_t puts_in_flight;
    bool loaded;            /* from disk, to be reported */
    bool unsaved;           /* the last put failed */
    bool purge;             /* has blocks of earlier generations, maybe */
    _Atomic bool forgotten; /* goes when it is purged, unless it is put again */
};

enum kvist_tier_request_kind {
    KVIST_TIER_WRITE,
    KVIST_TIER_READ,
    KVIST_TIER_PUT_POOL,
    KVIST_TIER_SYNC,
};

struct kvist_tier_request {
    struct kvist_job job; /* first: a job is cast back */
    struct kvist_tier *tier;
    struct kvist_tier_request *next; /* free list or waiting list */
    uint8_t *pages;
    enum kvist_tier_request_kind kind;
    struct kvist_tier_known_pool *pool;
    struct kvist_tier_record record;
    const void *source;
    void *target;
    uint64_t target_bytes;
    kvist_tier_done_fn *done; /* may be NULL */
    void *ctx;
    bool verified; /* the source was checked against its checksum */
    /* results */
    enum kvist_status status;
    struct kvist_error err;
    bool needs_room; /* a write found no extent to go to */
    bool stored;     /* bytes went to an extent */
    bool dropped;    /* a read removed a broken record */
};

enum kvist_tier_step {
    KVIST_TIER_STEP_LOAD,
    KVIST_TIER_STEP_MAKE,
    KVIST_TIER_STEP_TRIM,
    KVIST_TIER_STEP_RECLAIM,
    KVIST_TIER_STEP_PURGE,
    KVIST_TIER_STEP_SAMPLE,
    KVIST_TIER_STEP_COMPACT,
    KVIST_TIER_STEP_PROBE,
    KVIST_TIER_STEP_DROP,
};

/* Housekeeping, one step of bounded work at a time. */
struct kvist_tier_keeper {
    struct kvist_job job; /* first: a job is cast back */
    struct kvist_tier *tier;
    bool busy; /* the job is submitted */
    enum kvist_tier_step step;
    struct kvist_tier_walk walk;
    uint32_t extent;                    /* RECLAIM: the victim; 0: none is being emptied */
    uint32_t tenant;                    /* MAKE */
    uint64_t file_bytes;                /* MAKE */
    uint32_t sealed;                    /* TRIM; 0: none */
    bool keep;                          /* RECLAIM: the victim's file may be the spare */
    uint64_t room_bytes;                /* RECLAIM: what carrying may make extents from */
    uint64_t carry_bytes;               /* RECLAIM: what may still be carried */
    struct kvist_tier_known_pool *pool; /* PURGE */
    bool pool_gone;                     /* PURGE: nothing of it is in the index any more */
    uint8_t *buffer;                    /* RECLAIM: a block that is carried */
    uint64_t buffer_bytes;
    uint8_t *pages;
    /* results of a step */
    enum kvist_status status;
    struct kvist_error err;
    bool end;
    uint64_t other_bytes; /* SAMPLE */
    uint64_t index_bytes; /* SAMPLE */
    uint32_t corrupt;
    uint8_t corrupt_pool[KVIST_KEY_BYTES]; /* that of the last one */
    size_t count;                          /* of blocks: loaded or dropped */
    size_t moved_count;
    uint64_t moved_bytes;
    struct kvist_tier_block blocks[KVIST_TIER_BATCH];
    struct kvist_tier_block moved[KVIST_TIER_BATCH];
};

struct kvist_tier {
    uint32_t magic;
    char *path;
    int directory_fd;
    int lock_fd;
    uint64_t bytes_max;
    uint64_t extent_bytes;
    uint64_t memtable_bytes;
    struct kvist_tier_events events;
    void *ctx;
    struct kvist_workers *workers;
    struct kvist_extents *extents;
    struct kvist_tier_index *index;
    bool index_is_new;     /* there was none when the tier was opened */
    uint32_t extent_first; /* extents up to this one were found at start */
    bool closing;
    bool loading;
    bool load_waits; /* a batch was not taken to its end */
    bool load_failed;
    bool pools_reported;
    struct kvist_tier_keeper *loader;
    struct kvist_tier_keeper *keeper;
    /* Pools. The loop alone changes the table; it and workers look with the lock held. */
    struct kvist_tier_known_pool *pools[KVIST_TIER_POOLS_MAX]; /* NULL: a free place */
    uint32_t pool_high;
    pthread_mutex_t table_lock;
    pthread_mutex_t pool_lock; /* one writing of a pool at a time; taken alone */
    /* Requests. */
    struct kvist_tier_request *requests;
    uint8_t *request_pages;
    struct kvist_tier_request *free;
    struct kvist_tier_request *waiting; /* writes for room */
    struct kvist_tier_request **waiting_last;
    uint32_t depth_max;
    uint32_t in_flight;
    /* Blocks written or dropped since the batch that is being loaded was read; see loader. */
    uint64_t *since;
    size_t since_count;
    size_t since_capacity;
    bool since_lost;
    /* Space. */
    uint64_t file_bytes_max; /* the largest extent that was asked for */
    uint64_t other_bytes;    /* on disk, beside extents, as sampled; the index included */
    uint64_t index_bytes;
    uint64_t records_since; /* written since the sample */
    uint64_t sampled_us;
    /* Health. */
    struct kvist_tier_stats counters;
    char base_text[KVIST_ERROR_TEXT_BYTES]; /* true as long as the tier is open */
    char disk_text[KVIST_ERROR_TEXT_BYTES];
    char write_text[KVIST_ERROR_TEXT_BYTES];
    char read_text[KVIST_ERROR_TEXT_BYTES];
    uint64_t probe_after_us; /* while a text says that it is not well; 0: to be set */
    uint64_t probe_wait_us;  /* between two; 0: the last write succeeded */
};

/* tier_disk.c: the directory. */
KVIST_MUST_USE enum kvist_status kvist_tier_disk_open(struct kvist_tier *tier,
                                                      struct kvist_error *err);
void kvist_tier_disk_close(struct kvist_tier *tier);

/** Bytes on disk beside the extents' files, and of the index alone. Any thread. */
KVIST_MUST_USE enum kvist_status kvist_tier_disk_sample(const struct kvist_tier *tier,
                                                        uint64_t *other_bytes_out,
                                                        uint64_t *index_bytes_out,
                                                        struct kvist_error *err);

/** Bytes that may be promised now: below zero for a moment, when the cap was lowered or the index
 *  has grown. */
int64_t kvist_tier_room(const struct kvist_tier *tier, const struct kvist_extents_totals *totals);

/** Make all that is written durable: data before index. Worker, or when there are none. */
KVIST_MUST_USE enum kvist_status kvist_tier_disk_sync(const struct kvist_tier *tier,
                                                      struct kvist_error *err);

/** Largest record that this tier takes. */
uint64_t kvist_tier_record_bytes_max(const struct kvist_tier *tier);

/* tier_keeper.c: housekeeping. */
KVIST_MUST_USE enum kvist_status kvist_tier_keeper_create(struct kvist_tier *tier,
                                                          struct kvist_tier_keeper **keeper_out);
void kvist_tier_keeper_destroy(struct kvist_tier_keeper **keeper);

/** Start reading the index back. */
void kvist_tier_load_start(struct kvist_tier *tier);

/** Do what is due: make room for waiting writes, reclaim ahead, purge, sample. */
void kvist_tier_keep(struct kvist_tier *tier);

/* tier_pool.c: pools. */
KVIST_MUST_USE enum kvist_status kvist_tier_pools_open(struct kvist_tier *tier,
                                                       struct kvist_error *err);

/** NULL: no such pool. Any thread; what it answers lives while a block of the pool is in the index,
 *  or a request of it in flight, and until the loop's next turn. */
struct kvist_tier_known_pool *kvist_tier_pool_find(struct kvist_tier *tier,
                                                   const uint8_t pool_id[KVIST_KEY_BYTES]);

/** The pool's current generation, to be read again and again; NULL: no such pool. Any thread. */
const _Atomic uint64_t *kvist_tier_pool_generation(struct kvist_tier *tier,
                                                   const uint8_t pool_id[KVIST_KEY_BYTES]);

/** On a worker, a pool without a record in the index: remove it there if it is to be forgotten. */
KVIST_MUST_USE enum kvist_status kvist_tier_pool_erase(struct kvist_tier *tier,
                                                       struct kvist_tier_known_pool *pool,
                                                       bool *gone_out,
                                                       struct kvist_error *err);

/** Free the place of a pool that was erased, unless it was put again since. */
void kvist_tier_pool_remove(struct kvist_tier *tier, struct kvist_tier_known_pool *pool);

/** Try again what failed when the pool was put. */
void kvist_tier_pool_save(struct kvist_tier *tier, struct kvist_tier_known_pool *pool);

/* tier.c: requests. */

/** A request from the free list, cleared; NULL: the limit is reached. */
struct kvist_tier_request *kvist_tier_request_take(struct kvist_tier *tier,
                                                   enum kvist_tier_request_kind kind,
                                                   kvist_tier_done_fn *done,
                                                   void *ctx);

/** Give a request back and call its completion. */
void kvist_tier_request_finish(struct kvist_tier_request *request);
void kvist_tier_waiting_resubmit(struct kvist_tier *tier);
void kvist_tier_waiting_fail(struct kvist_tier *tier, enum kvist_status status);
void kvist_tier_text_set(char text[KVIST_ERROR_TEXT_BYTES], const struct kvist_error *err);

#endif
