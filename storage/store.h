/*
 * store - the blocks of a host: pools, sessions, and the life of every block.
 *
 * Role        owns the arena (segments), the pool maps, the session pages and the NVMe tier, and
 *             makes every transition of architecture section 4. No sockets: the daemon calls in
 *             with what peers asked for, and is called back with what to tell them.
 * Life        FREE -> GRANTED [top-up] -> READY [commit] -> RETIRED [evict, clear] -> FREE;
 *             GRANTED -> FREE [return, session close, commit refused]; FREE -> LOADING [prefetch]
 *             -> READY | FREE; RETIRED -> READY when eviction finds a lease; RETIRED waits for its
 *             leases on clear
 * Threads     the loop thread, every function and every event. Populating, checksums and tier I/O
 *             run on workers and come back through kvist_store_turn().
 * Grants      while the arena has room (a free segment that no smaller pool waits for), a writer is
 *             granted up to 1 / (2 * (writers + 1)) of the arena's slots, writers being the
 *             attachments of all pools that write: half of an even share, with one more to come; and
 *             so of a quota, writers being those of its tenant.
 *             Pools grow for it without waiting for commits. Without room the bound is also half of
 *             the pool's slots, or an eighth beside another writer of the pool, 1 / (4 * n) beside
 *             more. With a tier a writer that is the only one may have 256, up to half of the
 *             slots: in a small arena it stores whole prompts, too. Within these bounds a writer is
 *             granted half more than it was seen to use or lack at once in the last 30 to 60 s, as
 *             it says itself (kvist_store_used); at least 256 while there is room, and 256 until it
 *             has made so many commits or 30 s are over; without room at least an even share of
 *             1/64 of the arena, 256 at most. Always at least 4; KVIST_GRANTS_MAX a session. What
 *             is held beyond that is called back before blocks go (recalled), and is the session's
 *             until it gives it back: one that is stopped keeps no more than its bound was
 * Restart     with a keeper, maps, segments, pages, pidfds and the roster (roster.h) outlive this
 *             process. The next store is given them, believes nothing of them that it has not
 *             checked, and goes on: same instance, sessions, ordinals, grants, leases, blocks. It
 *             adopts all or nothing: when something is missing that a living process may still use,
 *             everything is let go, and the instance is another one.
 * Ownership   fds and pointers handed out are borrowed and live as long as their object
 * Limits      limits.h; nothing here allocates on the path of commit, return, touch and eviction
 * Invariants  every slot is in exactly one state; FREE + GRANTED + READY + RETIRED + LOADING ==
 *             slots of live segments; an index entry and its slot entry name each other; the arena
 *             never exceeds arena_bytes, memory that members still map included (kvist_store_check)
 * Errors      INVALID: a peer asked for what cannot be (close its connection); STALE: from before a
 *             clear; EXISTS, NOT_FOUND: normal outcomes; BUSY: a limit; NO_MEMORY, SYSTEM
 */
#ifndef KVIST_STORAGE_STORE_H
#define KVIST_STORAGE_STORE_H

#include "storage/policy/policy.h"
#include "storage/tier.h"

#include <kvist/error.h>
#include <kvist/limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvist_store;
struct kvist_store_pool;    /* all blocks of one identity */
struct kvist_store_session; /* one engine: a page, leases, grants */
struct kvist_store_process; /* one process of a session, that is lent fds */

struct kvist_store_grant {
    uint32_t slot;
    uint32_t ticket;
    uint64_t reservation;
};

/* What the daemon tells a process, from within kvist_store_turn(). The store goes on whether or not
   the message can be sent. A process with ctx NULL is told nothing; what it missed is said again
   after it has attached anew: live segments, revoked ones, and all grants that are outstanding,
   with their reservations (a receiver ignores those it has, and returns those it has filled). */
struct kvist_store_events {
    /* Send this segment's fd (read-write, borrowed). */
    void (*segment_lent)(void *ctx,
                         struct kvist_store_process *process,
                         uint32_t pool,
                         uint32_t segment,
                         uint32_t serial,
                         int fd,
                         uint64_t bytes);
    /* The pool's map was replaced by this one (read-only fd, borrowed until the next turn). */
    void (*map_replaced)(
        void *ctx, struct kvist_store_process *process, uint32_t pool, int fd, uint64_t bytes);
    /* Slots to fill, to the session's scheduler process. */
    void (*granted)(void *ctx,
                    struct kvist_store_process *process,
                    uint32_t pool,
                    const struct kvist_store_grant *grants,
                    size_t count);
    /* Unmap this segment and answer with kvist_store_segment_unmapped(). */
    void (*revoked)(void *ctx,
                    struct kvist_store_process *process,
                    uint32_t pool,
                    uint32_t segment,
                    uint32_t serial);
    /* Give back up to so many grants that were not taken, with kvist_store_return(). */
    void (*recalled)(void *ctx, struct kvist_store_process *process, uint32_t pool, uint32_t count);
    /* Of so many keys that the session asked to prefetch nothing more will come: they are there, or
       were not on NVMe, or failed, or were refused. Every key asked for is told once. */
    void (*promoted)(void *ctx, struct kvist_store_process *process, uint32_t pool, uint32_t count);
};

/* Has fds outlive this process. Both NULL: nothing does. Called with the options' ctx. */
struct kvist_store_keeper {
    /* Keep a duplicate of fd; name: a letter and up to 8 hex digits, unique.
       NO_SPACE: no more can be kept. */
    enum kvist_status (*keep)(void *ctx, const char *name, int fd);
    void (*forget)(void *ctx, const char *name);
    uint32_t segments_max; /* that it, and this process, has places for; 0: any number */
};

/* An fd that an earlier process had kept. */
struct kvist_kept_fd {
    char name[16];
    int fd;
};

#define KVIST_POOL_CLEARS_MAX   16U  /* that wait to be durable */
#define KVIST_STORE_TENANTS_MAX 257U /* with limits of their own */

struct kvist_store_tenant_limits {
    char name[KVIST_TENANT_BYTES_MAX + 1];
    uint64_t memory_bytes_max; /* of segments; 0: no bound but the arena */
    uint64_t nvme_bytes_max;   /* of extents on disk; 0: no bound but the tier's */
    uint32_t weight;           /* of its share between tenants; at least 1 */
};

enum kvist_admission {
    KVIST_ADMIT_EVICTED, /* spill what is evicted from DRAM, and what is hot at a save */
    KVIST_ADMIT_ALL,     /* write every block behind its commit */
};

struct kvist_store_options {
    enum kvist_eviction eviction; /* of every pool */
    uint64_t arena_bytes;      /* at least KVIST_ARENA_BYTES_MIN */
    bool huge_pages;           /* ask for them */
    bool populate_ahead;       /* a part of the arena, before there are pools */
    bool make_way;             /* checksums rest while the host is busy */
    uint32_t checksum_threads; /* at idle priority; 1..8 */
    uint64_t hold_us;          /* how long a promoted block waits for its session's lease */
    enum kvist_admission admission;
    const struct kvist_tier_options *tier; /* path, sizes, threads; events are the store's own.
                                              NULL: no NVMe */
    struct kvist_store_events events;
    struct kvist_store_keeper keeper;
    /* Bytes that can be allocated now. Asked after segments were let go at start: engines may have
       them mapped for a while, and the new arena grows beside them only as there is memory. NULL:
       never asked. */
    uint64_t (*available)(void *ctx);
    uint64_t let_go_bytes;      /* of segments that were let go before */
    struct kvist_kept_fd *kept; /* [kept_count] those that it has taken have fd -1 afterwards */
    size_t kept_count;
    void *ctx;
};

/* Counters and gauges, a plain copy; daemon/metrics.def says what each means. */
struct kvist_store_stats {
    uint64_t arena_bytes;
    uint64_t arena_used_bytes;      /* segments that exist, also those being revoked */
    uint64_t populated_bytes;
    uint64_t spare_bytes;           /* populated ahead of segments */
    uint64_t pools;
    uint64_t sessions;
    uint64_t processes;
    uint64_t segments;
    uint64_t slots_free;
    uint64_t slots_granted;
    uint64_t free_bytes;            /* of slots */
    uint64_t granted_bytes;         /* of slots */
    uint64_t slots_ready;
    uint64_t slots_retired;
    uint64_t slots_loading;
    uint64_t block_bytes_ready;
    uint64_t leased_slots;          /* as of the last scan */
    uint64_t leased_bytes;
    uint64_t map_bytes;             /* pool maps and session pages, resident or not */
    uint64_t commits_total;
    uint64_t commit_bytes_total;
    uint64_t commits_duplicate_total; /* the key was there */
    uint64_t commits_unmarked_total;  /* a rank had not filled its part */
    uint64_t commits_stale_total;     /* from before a clear */
    uint64_t commits_refused_total;   /* no such grant: a buggy or hostile peer */
    uint64_t returns_total;
    uint64_t grants_total;
    uint64_t recalls_total;           /* grants that engines were asked to give back unused */
    uint64_t evictions_total;
    uint64_t evictions_leased_total;  /* found leased and kept */
    uint64_t touches_total;
    uint64_t spills_total;
    uint64_t spill_bytes_total;
    uint64_t spill_failures_total;
    uint64_t spill_skipped_total;     /* the tier was busy */
    uint64_t promotes_total;
    uint64_t promote_bytes_total;
    uint64_t promote_failures_total;
    uint64_t promote_refused_total;   /* beyond the session's share of DRAM, or no room */
    uint64_t checksums_total;
    uint64_t
        checksum_mismatch_total; /* DRAM bytes changed after commit; those blocks are dropped */
    uint8_t corrupt_pool[KVIST_KEY_BYTES]; /* that of the last mismatch */
    uint64_t suspects_total;          /* keys that sessions called corrupt */
    uint64_t suspects_ignored_total;  /* not looked at: too many at a time, or too fast */
    uint64_t suspects_confirmed_total; /* found corrupt here too, and dropped */
    uint64_t clears_total;
    uint64_t pools_dropped_total;     /* idle ones, for others that were opened */
    uint64_t pools_resized_total;     /* opened with slots of another size than those on NVMe */
    uint64_t revokes_total;
    uint64_t index_full_total;
    uint64_t adopted_blocks;          /* at start, from the store before */
    uint64_t adopted_bytes;
    uint64_t adopted_blocks_dropped;
    uint64_t adopted_us;              /* that it took */
    uint64_t adopted_files_mistaken;  /* not what they were kept as */
    uint64_t adopted_processes_dropped;
    uint64_t adopted_pools_dropped;
    uint64_t populate_waits_total;    /* a segment waited for memory that was let go */
    uint64_t populate_failures_total; /* a segment got no memory; tried again after a second */
    bool has_tier;                    /* one is wanted */
    bool tier_is_away;                /* its disk keeps it from being opened; tier.degraded: why */
    struct kvist_tier_stats tier;
};

/**
 * Open a store: starts workers, opens the tier, whose pools and blocks come in while it serves. A
 * tier that is there, but whose disk is in trouble, is opened later: until then there is DRAM.
 *
 * @return OK; INVALID: an option is out of range; NO_MEMORY; what kvist_tier_open() answers
 */
KVIST_MUST_USE enum kvist_status kvist_store_open(const struct kvist_store_options *options,
                                                  struct kvist_store **store_out,
                                                  struct kvist_error *err);

/** Of the arena: random, and the same as before when it was adopted. */
uint64_t kvist_store_instance(const struct kvist_store *store);

/** The first `count` fds that were handed to keep() are safe: segments among them are lent, and to
    processes whose pidfds are. */
void kvist_store_kept(struct kvist_store *store, uint64_t count);

/* What became of what was kept. */
struct kvist_adoption {
    bool adopted;
    uint32_t pools;
    uint32_t sessions;
    uint32_t segments;
    uint64_t blocks;
    uint64_t bytes;          /* of blocks */
    uint64_t blocks_dropped; /* index entries that did not check out; all on NVMe come back later */
    uint64_t arena_bytes; /* of the store before */
    uint32_t pools_bound; /* whose segments are those of a smaller arena: they cannot fill this one */
    uint64_t released_bytes; /* of segments that were let go; engines may still map them */
    uint32_t files_mistaken; /* kept fds that were not what they were kept as, and let go */
    uint32_t processes_dropped; /* not kept, or not their session's page; they had mapped nothing */
    uint32_t pools_dropped;     /* whose map was not kept, or is broken */
    uint64_t took_us;
    char why[120]; /* not adopted: what was wrong; "" when nothing was kept */
};
void kvist_store_adoption(const struct kvist_store *store, struct kvist_adoption *adoption_out);

/** Segments that an arena of this size is cut into at most. */
uint64_t kvist_store_segments_max(uint64_t arena_bytes);

/** The arena_bytes of the store that has kept these fds; 0: they do not say. Borrows them. */
uint64_t kvist_store_kept_arena(const struct kvist_kept_fd *kept, size_t kept_count);

/**
 * Stop without undoing: ends workers and tier, and makes what is shared private, so that what
 * closing does from here on is seen by nobody and the next store finds all as it was. Needs a
 * keeper; else it does nothing.
 */
void kvist_store_leave(struct kvist_store *store);

/** Close; sessions and pools go with it. Does not save: see kvist_store_save(). NULL is fine. */
void kvist_store_close(struct kvist_store **store);

/** Pollable fds: call kvist_store_turn() when one is readable. A tier that is opened later adds one
 *  at the end. @return count, at most 4 */
size_t kvist_store_fds(const struct kvist_store *store, int fds_out[4]);

/**
 * Bounded work: mailboxes, touches, grant top-ups, populating ahead, write-behind, retired slots.
 * To be called when an fd is readable, after a batch of commits or returns, and every 20 ms.
 *
 * @return true: call again without waiting
 */
bool kvist_store_turn(struct kvist_store *store, uint64_t now_us);

/* --- Sessions -------------------------------------------------------------------------------- */

/**
 * Make a session with its page.
 *
 * @return OK; EXISTS: the id is in use; BUSY: KVIST_SESSIONS_MAX; INVALID: rank_count
 */
KVIST_MUST_USE enum kvist_status kvist_store_session_open(struct kvist_store *store,
                                                          const uint8_t session_id[16],
                                                          uint32_t rank_count,
                                                          struct kvist_store_session **session_out,
                                                          struct kvist_error *err);

/* Who a session is, as the daemon knows it. */
struct kvist_store_about {
    uint32_t uid;
    char tenant[KVIST_TENANT_BYTES_MAX + 1];
    char name[KVIST_NAME_BYTES_MAX + 1];
};

/** From here on the session outlives this process, with those of its processes that are watched. */
void kvist_store_session_describe(struct kvist_store_session *session,
                                  const struct kvist_store_about *about);

/** Take back leases, grants and holds; closes its processes. Only when all of them have ended. */
void kvist_store_session_close(struct kvist_store_session **session);

/** The page's memfd, to be sent read-write. Borrowed. */
int kvist_store_session_page_fd(const struct kvist_store_session *session);

/** Set the places, by kvist_store_pool_index(), of the pools that the session has open. */
void kvist_store_session_pools(const struct kvist_store_session *session,
                               bool open_out[KVIST_POOLS_MAX]);
uint64_t kvist_store_session_page_bytes(const struct kvist_store_session *session);

/**
 * Add a process to a session.
 *
 * @param rank       below rank_count; ignored when !maps_segments
 * @param schedules  it gets the grants: one a session
 * @param maps_segments  it is lent segments: one a rank
 * @param ctx        the daemon's, see kvist_store_process_ctx()
 * @return OK; EXISTS: that place is taken by a process that lives; BUSY; INVALID
 */
KVIST_MUST_USE enum kvist_status kvist_store_process_open(struct kvist_store_session *session,
                                                          bool schedules,
                                                          bool maps_segments,
                                                          uint32_t rank,
                                                          void *ctx,
                                                          struct kvist_store_process **process_out,
                                                          struct kvist_error *err);

/**
 * Keep the pidfd (borrowed) that says when the process has ended, and with it the process.
 * To be called before it is lent anything. NO_SPACE: no more fds can be kept.
 */
KVIST_MUST_USE enum kvist_status
kvist_store_process_watch(struct kvist_store_process *process, uint32_t pid, int pidfd);

/* A session that was adopted, for the daemon to watch. */
struct kvist_store_adopted {
    struct kvist_store_session *session;
    uint8_t id[16];
    uint32_t rank_count;
    struct kvist_store_about about;
    size_t process_count;
    struct {
        struct kvist_store_process *process;
        bool schedules;
        bool maps_segments;
        uint32_t rank;
        uint32_t pid;
        int pidfd; /* borrowed; duplicate it */
    } processes[KVIST_RANKS_MAX + 1];
};

/** @param place  0 to KVIST_SESSIONS_MAX - 1; @return false: no adopted session there */
bool kvist_store_adopted(const struct kvist_store *store,
                         uint32_t place,
                         struct kvist_store_adopted *adopted_out);

/** The process has ended: its mappings are gone. */
void kvist_store_process_close(struct kvist_store_process **process);

/**
 * The process lost its connection but lives (ctx NULL), or has a new one: what it is lent is sent
 * again by attaching. Its leases, grants and mappings stay as they are.
 */
void kvist_store_process_set_ctx(struct kvist_store_process *process, void *ctx);
void *kvist_store_process_ctx(const struct kvist_store_process *process);

/* --- Pools ----------------------------------------------------------------------------------- */

/**
 * Find or make a pool. When there are KVIST_POOLS_MAX, one that no session has open is dropped for
 * it, in both tiers: an empty one, else the longest idle one of the tenant that has most pools.
 *
 * @param pool  its generation is ignored
 * @return OK; INVALID: slot_bytes out of range or not that of the existing pool; BUSY:
 *         KVIST_POOLS_MAX pools, all of them in use; NO_SPACE: the arena holds fewer than
 *         KVIST_SEGMENT_SLOTS_MIN slots of that size
 */
KVIST_MUST_USE enum kvist_status kvist_store_pool_open(struct kvist_store *store,
                                                       const struct kvist_tier_pool *pool,
                                                       struct kvist_store_pool **pool_out,
                                                       struct kvist_error *err);

/**
 * Attach a process to a pool: the first of a session gives the pool its ordinal there. Segments
 * are lent at once through events (in a later turn), grants follow when all ranks have mapped.
 *
 * Attaching again, over a new connection, has everything said again.
 *
 * @param read_only  no grants for the session's sake
 * @param ordinal_out  equal for all processes of the session, until all have detached
 * @return OK; BUSY: the session has KVIST_SESSION_POOLS_MAX pools; NO_MEMORY
 */
KVIST_MUST_USE enum kvist_status kvist_store_attach(struct kvist_store_process *process,
                                                    struct kvist_store_pool *pool,
                                                    bool read_only,
                                                    uint32_t *ordinal_out,
                                                    struct kvist_error *err);

/**
 * The process has unmapped what it was lent of a pool, and writes there no more. When no process
 * of the session is attached any more, grants and holds go back and the ordinal may become another
 * pool's. Leases that the session has left under it keep slots of that one from being reused.
 *
 * @param pool  the ordinal; one that the process has not attached is ignored
 */
void kvist_store_detach(struct kvist_store_process *process, uint32_t pool);

/** The pool's current map, to be sent: read-only, borrowed. */
int kvist_store_pool_map_fd(const struct kvist_store_pool *pool);
uint64_t kvist_store_pool_map_bytes(const struct kvist_store_pool *pool);
const uint8_t *kvist_store_pool_id(const struct kvist_store_pool *pool);
uint32_t kvist_store_pool_index(const struct kvist_store_pool *pool);
const char *kvist_store_pool_tenant(const struct kvist_store_pool *pool);
uint64_t kvist_store_pool_slot_bytes(const struct kvist_store_pool *pool);
uint32_t kvist_store_pool_slots_per_segment(const struct kvist_store_pool *pool);
/** NULL when no pool has that id. */
struct kvist_store_pool *kvist_store_pool_lookup(struct kvist_store *store,
                                                 const uint8_t pool_id[KVIST_KEY_BYTES]);

/* --- What sessions ask for ------------------------------------------------------------------- */

struct kvist_store_commit {
    uint32_t slot;
    uint32_t ticket;
    uint64_t reservation;
    uint8_t key[KVIST_KEY_BYTES];
    uint64_t parent_tag;
    uint64_t block_bytes;
};

/**
 * Publish a filled slot. Idempotent: a commit that was done already is OK.
 * Whatever the answer but INVALID, the grant has ended, and the slot is free again if not OK.
 *
 * @return OK; EXISTS: the key is there; STALE: cleared since; NOT_FOUND: a mark is missing, or the
 *         grant has ended before; NO_SPACE: the index is full, it will grow; INVALID: never a grant,
 *         or sizes beyond limits: nothing was changed
 */
KVIST_MUST_USE enum kvist_status kvist_store_commit(struct kvist_store_session *session,
                                                    uint32_t pool,
                                                    const struct kvist_store_commit *commit);

/**
 * The most slots that the scheduler had taken at once since its last commit, with those that it
 * wanted and did not get; 0: it does not say, all that are granted. Said before the commit; decides
 * how many it is granted. Any value is good: bounds hold.
 */
void kvist_store_used(struct kvist_store_session *session, uint32_t pool, uint32_t used);

/**
 * Give a granted slot back unfilled. It is not replaced by another grant within a second, unless
 * the session commits, or a clear had made the grant worthless. NOT_FOUND: the grant has ended
 * before; INVALID: never a grant.
 */
KVIST_MUST_USE enum kvist_status kvist_store_return(struct kvist_store_session *session,
                                                    uint32_t pool,
                                                    uint32_t slot,
                                                    uint32_t ticket,
                                                    uint64_t reservation);

/** Promote blocks that are on NVMe alone; what is not there, or is no longer, is skipped.
 *  INVALID: no such pool of the session, or more than KVIST_KEYS_MAX keys. */
KVIST_MUST_USE enum kvist_status kvist_store_prefetch(struct kvist_store_session *session,
                                                      uint32_t pool,
                                                      const uint8_t (*keys)[KVIST_KEY_BYTES],
                                                      size_t key_count);

/**
 * A process found blocks corrupt. It is not believed: the checksum of each is taken again at idle
 * priority, and a block in DRAM that does not match is dropped and counted; its copy on NVMe has a
 * checksum of its own and stays. A block whose checksum was never taken cannot be judged: it is
 * taken now, and the block stays. Keys that are not in DRAM are skipped, those that wait already
 * are not queued twice, and a session gets no more than KVIST_SUSPECT_BYTES_PER_US read for it.
 *
 * @return OK; INVALID: the process has not attached that pool, or too many keys
 */
KVIST_MUST_USE enum kvist_status kvist_store_suspect(struct kvist_store_process *process,
                                                     uint32_t pool,
                                                     const uint8_t (*keys)[KVIST_KEY_BYTES],
                                                     size_t key_count);

/** A rank says that it has mapped a segment: grants in it may now follow. */
void kvist_store_segment_mapped(struct kvist_store_process *process,
                                uint32_t pool,
                                uint32_t segment,
                                uint32_t serial);

/** The answer to `revoked`. Ignored when it does not fit. */
void kvist_store_segment_unmapped(struct kvist_store_process *process,
                                  uint32_t pool,
                                  uint32_t segment,
                                  uint32_t serial);

/* --- For operators --------------------------------------------------------------------------- */

typedef void kvist_store_done_fn(void *ctx,
                                 enum kvist_status status,
                                 uint64_t blocks,
                                 uint64_t bytes);

/**
 * Drop every block of a pool, in both tiers; earlier grants and promotions can no longer commit.
 * done is called when it is durable, in a later turn; with UNAVAILABLE when the tier is away: then
 * it is not durable before the tier is back.
 *
 * @return OK; NO_MEMORY; BUSY: KVIST_POOL_CLEARS_MAX of the pool wait to be durable, nothing is done
 */
KVIST_MUST_USE enum kvist_status kvist_store_clear(struct kvist_store *store,
                                                   struct kvist_store_pool *pool,
                                                   kvist_store_done_fn *done,
                                                   void *ctx);

/**
 * Clear the pools of a tenant ("": of all) that a tier may hold which this store has not, or not
 * yet, or not to the end, read. It is remembered for the tier as long as the arena lives.
 */
void kvist_store_clear_rest(struct kvist_store *store, const char *tenant);

/** Whether a tier hears of a clear now; else it is for the caller to remember beyond the arena. */
bool kvist_store_tier_hears(const struct kvist_store *store);

/** Whether a tier has heard, durably, of all clears so far. */
bool kvist_store_clears_are_durable(const struct kvist_store *store);

/* How a save ended. */
struct kvist_store_saved {
    enum kvist_status status; /* OK: all of it is written, and durable */
    uint64_t blocks;          /* written */
    uint64_t bytes;
    uint64_t unsaved_blocks; /* that could not be written, and are still in DRAM alone */
    uint64_t unsaved_bytes;
    char why[KVIST_ERROR_TEXT_BYTES]; /* of a status that is not OK */
};

typedef void kvist_store_saved_fn(void *ctx, const struct kvist_store_saved *saved);

/**
 * Write what is in DRAM alone to NVMe, most recently used first, and sync. What cannot be written
 * is tried again for 3 s. UNSUPPORTED: no tier; BUSY: one is going on.
 */
KVIST_MUST_USE enum kvist_status
kvist_store_save(struct kvist_store *store, kvist_store_saved_fn *done, void *ctx);

/** Whether a tier is wanted, and could not be opened yet. */
bool kvist_store_tier_is_away(const struct kvist_store *store);

/** Look at all leases of all sessions, for what says how many there are. Cost: O(leases). */
void kvist_store_count_leases(struct kvist_store *store);

/** Counts leases. */
void kvist_store_stats(struct kvist_store *store, struct kvist_store_stats *stats_out);

/**
 * Limits of all tenants that are configured; any number of times. What is over a quota that was
 * lowered is taken back in later turns, as fast as it is let go. A tenant that is not named has no
 * quota and weight 1. With two named or more, each has a floor that the others leave free for it.
 *
 * @param count  at most KVIST_STORE_TENANTS_MAX
 */
void kvist_store_set_tenants(struct kvist_store *store,
                             const struct kvist_store_tenant_limits *limits,
                             size_t count);

struct kvist_store_tenant_info {
    struct kvist_store_tenant_limits limits;
    uint64_t memory_bytes; /* of segments, those being revoked included */
    uint64_t pools;
    uint64_t blocks; /* in memory */
    uint64_t block_bytes;
    uint64_t nvme_blocks;
    uint64_t nvme_bytes; /* of extents on disk */
    uint64_t refusals_total;
};

/** @param index  0, 1, …; @return false past the last tenant that is configured or has a pool */
bool kvist_store_tenant_info(struct kvist_store *store,
                             uint32_t index,
                             struct kvist_store_tenant_info *info_out);

/** Count that something was refused to a tenant. */
void kvist_store_tenant_refused(struct kvist_store *store, const char *name);

struct kvist_store_pool_info {
    uint8_t pool_id[KVIST_KEY_BYTES];
    const char *tenant;      /* borrowed */
    const char *description; /* borrowed */
    uint64_t slot_bytes;
    uint64_t generation;
    uint32_t segments;
    uint32_t sessions;
    uint64_t slots_free;
    uint64_t slots_granted;
    uint64_t slots_ready;
    uint64_t slots_leased; /* as of kvist_store_count_leases() */
    uint64_t nvme_blocks;
    uint64_t block_bytes_ready;
};

/** @param index  0, 1, …; @return false past the last pool */
bool kvist_store_pool_info(struct kvist_store *store,
                           uint32_t index,
                           struct kvist_store_pool_info *info_out);

struct kvist_store_session_info {
    uint64_t slots_leased;
    uint64_t slots_granted;
};

void kvist_store_session_info(struct kvist_store_session *session,
                              struct kvist_store_session_info *info_out);

struct kvist_store_block_info {
    bool in_dram;
    bool on_nvme;
    bool checksummed;
    bool leased;          /* as of kvist_store_count_leases() */
    uint64_t block_bytes; /* 0 when on NVMe alone */
    uint64_t generation;
    uint64_t parent_tag;
    uint64_t checksum;
};

/** NOT_FOUND when the pool does not hold the key. */
KVIST_MUST_USE enum kvist_status kvist_store_inspect(struct kvist_store_pool *pool,
                                                     const uint8_t key[KVIST_KEY_BYTES],
                                                     struct kvist_store_block_info *info_out);

/** Verify all invariants; O(slots + index). @return the first broken one, or NULL */
const char *kvist_store_check(struct kvist_store *store);

#endif
