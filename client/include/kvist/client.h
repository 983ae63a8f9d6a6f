/*
 * client - libkvist: an engine's side of the KV cache.
 *
 * Guide
 *   An engine is a session: one scheduler process and its worker processes (ranks), which share a
 *   random 128-bit session id. Each process makes one client; the client connects by itself, and
 *   again after the daemon was away. Each process opens the same pools.
 *     scheduler, reading:  kvist_pool_acquire() finds blocks and leases them; the slots' numbers go
 *                          to the ranks; when all ranks have copied, kvist_pool_release().
 *     scheduler, writing:  kvist_pool_take() takes granted slots; the ranks fill them and call
 *                          kvist_pool_mark(); then kvist_pool_commit() publishes them.
 *     rank:                kvist_pool_pin(), kvist_pool_slot_address(), copy, (mark), unpin.
 *   None of these waits for the daemon. While it is away, hits on what is mapped go on for
 *   detach_grace_us, takes answer nothing, commits and prefetches are dropped.
 *
 * Role        finds, leases, takes, marks, commits, addresses slots. Does not copy: see
 *             kvist/copy.h.
 * Units       bytes and microseconds (monotonic) as named
 * Ownership   client owns pools, mappings and its socket; leases and takes are plain values that
 *             must be given back
 * Threads     every function may be called from any thread; calls on the data path take one short
 *             lock that is never held over a system call that can wait. Messages are pumped by
 *             kvist_client_pump(), or by the one thread that kvist_client_thread_start() makes.
 *             Callbacks run on the thread that pumps.
 *             fork: a child must not use the parent's client; signals: none are used, SIGPIPE is
 *             never raised. The library never prints, aborts or exits.
 * Limits      limits.h
 * Errors      a miss is OK; UNAVAILABLE: the daemon is away (or never was there); STALE: a lease or
 *             a take from before the daemon came back with another arena; DENIED, VERSION: refused
 *             by the daemon, kvist_client_last_error() says why
 */
#ifndef KVIST_CLIENT_H
#define KVIST_CLIENT_H

#include <kvist/error.h>
#include <kvist/limits.h>
#include <kvist/status.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kvist_client;
struct kvist_pool;

enum kvist_role {
    KVIST_ROLE_TOOL = 0,      /* no session */
    KVIST_ROLE_SCHEDULER = 1, /* acquires, takes, commits */
    KVIST_ROLE_WORKER = 2,    /* one rank: addresses, marks */
    KVIST_ROLE_ENGINE = 3,    /* both, rank 0 of 1 */
};

struct kvist_client_options {
    size_t struct_bytes;     /* sizeof(struct kvist_client_options) */
    const char *socket_path; /* NULL: KVIST_SOCKET, else /run/kvist/kvist.sock */
    enum kvist_role role;
    uint8_t session_id[16]; /* random, equal in all processes of the session; TOOL: ignored */
    uint32_t rank;
    uint32_t rank_count;
    const char *name;         /* for logs and `kvist status`; copied */
    uint64_t detach_grace_us; /* 0: 60 s */
    /* A rank has mapped a segment and populated its page table, or is about to unmap it: the place
     * to register it with a device. Either may be NULL. They run without a lock and may take their
     * time, but must not pump, wait, close a pool or destroy the client. */
    void (*segment_mapped)(void *ctx, struct kvist_pool *pool, void *base, uint64_t bytes);
    void (*segment_unmapping)(void *ctx, struct kvist_pool *pool, void *base, uint64_t bytes);
    void *ctx;
};

#ifdef __cplusplus
#define KVIST_CLIENT_OPTIONS_INIT                                                                  \
    {                                                                                              \
        sizeof(struct kvist_client_options), NULL, KVIST_ROLE_TOOL, {0}, 0, 1, NULL, 0, NULL,      \
            NULL, NULL                                                                             \
    }
#else
#define KVIST_CLIENT_OPTIONS_INIT                                                                  \
    {                                                                                              \
        .struct_bytes = sizeof(struct kvist_client_options), .rank_count = 1                       \
    }
#endif

/**
 * Make a client. It need not find a daemon: it goes on trying, with back-off up to 1 s.
 *
 * @return OK; INVALID: an option is wrong; NO_MEMORY, SYSTEM
 */
KVIST_API KVIST_MUST_USE enum kvist_status
kvist_client_create(const struct kvist_client_options *options,
                    struct kvist_client **client_out,
                    struct kvist_error *err);

/** Stop its thread, close, unmap. Leases end with it. NULL is fine. */
KVIST_API void kvist_client_destroy(struct kvist_client **client);

/** Pollable: readable when kvist_client_pump() has something to do. Borrowed, never changes. */
KVIST_API int kvist_client_fd(const struct kvist_client *client);

/**
 * Handle what has arrived, connect or reconnect when due, send what is queued. Does not block
 * beyond mapping new segments. To be called when the fd is readable, and at least every second.
 */
KVIST_API void kvist_client_pump(struct kvist_client *client);

/** Pump from a thread of the library's own until destroy. All signals are blocked in it. */
KVIST_API KVIST_MUST_USE enum kvist_status kvist_client_thread_start(struct kvist_client *client,
                                                                     struct kvist_error *err);

/** Wait until connected, or until the deadline (from now). OK, TIMED_OUT, or the daemon's refusal.
 */
KVIST_API KVIST_MUST_USE enum kvist_status
kvist_client_wait(struct kvist_client *client, uint64_t timeout_us, struct kvist_error *err);

KVIST_API bool kvist_client_connected(const struct kvist_client *client);

/** The latest refusal or connection error; status OK when there was none. */
KVIST_API void kvist_client_last_error(const struct kvist_client *client,
                                       struct kvist_error *err_out);

struct kvist_client_stats {
    uint64_t connects; /* successful, the first included */
    uint64_t hits;     /* leases made by acquire */
    uint64_t misses;
    uint64_t lease_races;     /* a lease whose entry had changed: a miss */
    uint64_t unmapped_misses; /* a block that a rank had not mapped yet: a miss */
    uint64_t takes;
    uint64_t take_shortfalls; /* takes that a grant could not serve */
    uint64_t commits;
    uint64_t dropped_messages; /* posted while the daemon was away, or its queue full */
    uint64_t leases_held;
    uint64_t takes_held;
    uint64_t grants_held; /* free slots at hand */
    uint64_t mapped_bytes;
};

KVIST_API void kvist_client_stats(const struct kvist_client *client,
                                  struct kvist_client_stats *stats_out);

/* --- Pools ----------------------------------------------------------------------------------- */

struct kvist_pool_field {
    const char *name;
    const void *value;
    size_t value_bytes;
};

struct kvist_pool_options {
    size_t struct_bytes;
    const struct kvist_pool_field *fields; /* the identity, in a fixed order; copied */
    size_t field_count;
    uint64_t slot_bytes; /* of all ranks' parts of a block, rounded up to 4096 by the library */
    bool sparse;         /* windowed or recurrent groups: evict by plain recency */
    bool read_only;      /* never takes */
    const void
        *shape; /* WORKER: digest of the rank's tensor list, checked among sessions; or NULL */
    size_t shape_bytes;
};

#ifdef __cplusplus
#define KVIST_POOL_OPTIONS_INIT                                                                    \
    {                                                                                              \
        sizeof(struct kvist_pool_options), NULL, 0, 0, false, false, NULL, 0                       \
    }
#else
#define KVIST_POOL_OPTIONS_INIT                                                                    \
    {                                                                                              \
        .struct_bytes = sizeof(struct kvist_pool_options)                                          \
    }
#endif

/**
 * Open a pool, now or as soon as the daemon is there; again after every reconnect.
 *
 * @param pool_out  owned by the client until kvist_pool_close() or kvist_client_destroy()
 * @return OK; INVALID; BUSY: KVIST_SESSION_POOLS_MAX are open. What the daemon refuses comes from
 *         kvist_pool_wait(): the processes of a session can have KVIST_SESSION_POOLS_MAX different
 *         pools open at a time; one more waits until all of them have closed another. A pool that
 *         was open may be refused after a reconnect: then all of it is a miss, and it is unmapped
 *         when the last lease and pin is given back.
 */
KVIST_API KVIST_MUST_USE enum kvist_status kvist_pool_open(struct kvist_client *client,
                                                           const struct kvist_pool_options *options,
                                                           struct kvist_pool **pool_out,
                                                           struct kvist_error *err);

/**
 * Leases and takes of the pool must have been given back. NULL is fine. Unmaps, so it may wait for
 * the pumping thread; not to be called from a callback.
 */
KVIST_API void kvist_pool_close(struct kvist_pool **pool);

/**
 * Wait until the pool is open at the daemon and, for a rank, a first segment is mapped; for a
 * scheduler, a first grant is at hand (not for read_only).
 */
KVIST_API KVIST_MUST_USE enum kvist_status
kvist_pool_wait(struct kvist_pool *pool, uint64_t timeout_us, struct kvist_error *err);

/** The pool's id; zeros until it is open. */
KVIST_API void kvist_pool_id(const struct kvist_pool *pool, uint8_t id_out[KVIST_KEY_BYTES]);
KVIST_API uint64_t kvist_pool_slot_bytes(const struct kvist_pool *pool);

/**
 * The arena that slot numbers mean: changes when the daemon has come back without its memory. Goes
 * with slot numbers from the scheduler to the ranks. 0: none yet.
 */
KVIST_API uint64_t kvist_pool_instance(const struct kvist_pool *pool);

/* --- Scheduler: finding and reading ----------------------------------------------------------- */

enum kvist_probe {
    KVIST_PROBE_MISS = 0,
    KVIST_PROBE_READY = 1,   /* in DRAM */
    KVIST_PROBE_NVME = 2,    /* kvist_pool_prefetch() brings it */
    KVIST_PROBE_LOADING = 3, /* on its way */
};

/* A leased block. A plain value; give it back once with kvist_pool_release(). */
struct kvist_lease {
    uint64_t instance;
    uint64_t generation;
    uint64_t block_bytes;
    uint32_t slot;
    uint32_t record; /* the library's */
};

/**
 * Where keys are, without leasing.
 *
 * @param keys        [key_count][32], key_count up to KVIST_KEYS_MAX
 * @param probes_out  [key_count] of enum kvist_probe
 * @return OK, also when the daemon is away
 *
 * Blocks: no.  Allocates: no.  Cost: about one cache miss a key.
 */
KVIST_API KVIST_MUST_USE enum kvist_status kvist_pool_probe(struct kvist_pool *pool,
                                                            const uint8_t *keys,
                                                            size_t key_count,
                                                            uint8_t *probes_out);

/**
 * Find and lease the leading run of keys that are in DRAM and mapped by every rank: stops at the
 * first that is not, and says what that one is. Whoever needs single blocks calls it with one key.
 *
 * @param leases_out  [key_count]; the first *lease_count_out are valid and owned by the caller
 * @param stop_out    why the run ended: MISS, NVME or LOADING; READY when it did not end
 * @return OK; BUSY: the session's lease records are used up (leases made so far are valid)
 *
 * Blocks: no.  Allocates: no.
 */
KVIST_API KVIST_MUST_USE enum kvist_status kvist_pool_acquire(struct kvist_pool *pool,
                                                              const uint8_t *keys,
                                                              size_t key_count,
                                                              struct kvist_lease *leases_out,
                                                              size_t *lease_count_out,
                                                              enum kvist_probe *stop_out);

/** Give leases back, after the last byte was read. Also fine for leases of an arena that is gone.
 */
KVIST_API void
kvist_pool_release(struct kvist_pool *pool, const struct kvist_lease *leases, size_t lease_count);

/** Say that blocks were used without leasing them: keys in prefix order. Lossy. */
KVIST_API void kvist_pool_touch(struct kvist_pool *pool, const uint8_t *keys, size_t key_count);

/** Ask the daemon to bring blocks from NVMe. Posted. UNAVAILABLE: the daemon is away. */
KVIST_API KVIST_MUST_USE enum kvist_status
kvist_pool_prefetch(struct kvist_pool *pool, const uint8_t *keys, size_t key_count);

/* --- Scheduler: writing ----------------------------------------------------------------------- */

/* A granted slot that was taken to be filled. Give it back once: commit or untake. */
struct kvist_take {
    uint64_t instance;
    uint64_t reservation;
    uint32_t slot;
    uint32_t ticket;
};

/**
 * Take slots to fill.
 *
 * @param takes_out       [take_max]; the first *take_count_out are owned by the caller
 * @return OK, with fewer than take_max (down to 0) when the grant is used up or the daemon is away:
 *         skip these stores
 */
KVIST_API KVIST_MUST_USE enum kvist_status kvist_pool_take(struct kvist_pool *pool,
                                                           size_t take_max,
                                                           struct kvist_take *takes_out,
                                                           size_t *take_count_out);

/** Give taken slots back that no rank writes any more. Posted. */
KVIST_API void
kvist_pool_untake(struct kvist_pool *pool, const struct kvist_take *takes, size_t take_count);

/**
 * Publish filled slots; every rank has marked its part. Posted: others find the blocks soon after.
 *
 * @param keys         [take_count][32], in prefix order
 * @param parent       key of the block before the first, NULL: it is a root, or unknown. Every
 *                     further block's parent is the one before it.
 * @param block_bytes  of each block, at most slot_bytes
 * @return OK; UNAVAILABLE: the daemon is away, or does not read (BUSY): the takes are void;
 *         STALE: some are of an arena that is gone: those are void; INVALID
 */
KVIST_API KVIST_MUST_USE enum kvist_status kvist_pool_commit(struct kvist_pool *pool,
                                                             const struct kvist_take *takes,
                                                             const uint8_t *keys,
                                                             size_t take_count,
                                                             const uint8_t *parent,
                                                             uint64_t block_bytes);

/* --- Ranks ------------------------------------------------------------------------------------ */

/**
 * Keep the mappings of an arena while copying from or to it.
 *
 * @param instance  of the lease or take, from the scheduler
 * @return OK; STALE: that arena is gone, and the copy must not be made
 */
KVIST_API KVIST_MUST_USE enum kvist_status kvist_pool_pin(struct kvist_pool *pool,
                                                          uint64_t instance);
KVIST_API void kvist_pool_unpin(struct kvist_pool *pool, uint64_t instance);

/**
 * Address of a slot in this process; valid while pinned.
 *
 * @return NULL: the slot's segment is not mapped here (skip the store, fail the load)
 */
KVIST_API void *kvist_pool_slot_address(struct kvist_pool *pool, uint64_t instance, uint32_t slot);

/** Set this rank's fill mark: its bytes of the taken slot are there. The device's copy has ended.
 */
KVIST_API KVIST_MUST_USE enum kvist_status kvist_pool_mark(struct kvist_pool *pool,
                                                           const struct kvist_take *take);

/**
 * Verify a leased block against the checksum that was taken after its commit. The daemon is told of
 * one that is corrupt, and drops it when it finds the slot so too.
 *
 * @param address  block_bytes readable: the slot, or a copy of it
 * @return OK; CORRUPT: it is not what was committed; NOT_FOUND: no checksum has been taken yet
 */
KVIST_API KVIST_MUST_USE enum kvist_status kvist_pool_verify(struct kvist_pool *pool,
                                                             const uint8_t key[KVIST_KEY_BYTES],
                                                             uint64_t instance,
                                                             uint32_t slot,
                                                             const void *address,
                                                             uint64_t block_bytes);

/* --- Keys ------------------------------------------------------------------------------------- */

/** Make a key from an engine's: up to 32 bytes are zero-extended, longer ones are hashed. */
KVIST_API KVIST_MUST_USE enum kvist_status
kvist_client_key(const void *bytes, size_t length, uint8_t key_out[KVIST_KEY_BYTES]);

#ifdef __cplusplus
}
#endif

#endif
