/*
 * engine - a client of the store that needs no socket.
 *
 * Role        opens a store whose events reach engines directly, and plays the client's side of
 *             proto/shm/layout.h: maps what it is lent, takes grants, fills, marks, commits,
 *             leases, touches, unmaps what is revoked.
 * Threads     one, but for lease and release, which any number of threads may call with different
 *             lease records
 */
#ifndef KVIST_TESTS_ENGINE_H
#define KVIST_TESTS_ENGINE_H

#include "proto/base/clock.h"
#include "proto/shm/layout.h"
#include "storage/store.h"

#include <stdbool.h>

struct kvist_test_engine;

struct kvist_test_member { /* a process of an engine; the store's process ctx */
    struct kvist_test_engine *engine;
    struct kvist_store_process *process;
};

struct kvist_test_segment {
    void *map;
    uint64_t bytes;
    uint32_t serial;
    bool revoked; /* told so, not unmapped yet */
};

struct kvist_test_pool {
    struct kvist_store_pool *pool;
    uint32_t ordinal;
    int map_fd;
    void *map;
    struct kvist_map_header header; /* a private copy */
    struct kvist_test_segment segments[KVIST_SEGMENTS_MAX];
    struct kvist_store_grant grants[KVIST_GRANTS_MAX];
    uint32_t grant_count;
    uint32_t granted_total;
    uint32_t taken; /* and not committed */
    uint32_t used;  /* the most of them at once since the last commit, and what was lacking */
    uint32_t maps_replaced;
    uint32_t recalled;   /* asked for, in all */
    uint32_t recall_due; /* by the last recall, not given back yet */
    uint32_t promoted;
};

struct kvist_test_engine {
    struct kvist_store *store;
    struct kvist_store_session *session;
    uint32_t rank_count;
    struct kvist_test_member members[KVIST_RANKS_MAX + 1];
    uint32_t member_count;
    void *page;
    struct kvist_page_header geometry;
    struct kvist_test_pool pools[KVIST_SESSION_POOLS_MAX];
    uint32_t pool_count;
    bool keeps_revoked; /* does not answer Revoke */
    bool maps_nothing;  /* does not map what it is lent */
};

/** Options with this arena, no tier, and events that reach engines. */
struct kvist_store_options kvist_test_options(uint64_t arena_bytes);

/** A fatal failure when it cannot be opened. */
struct kvist_store *kvist_test_store_open(const struct kvist_store_options *options);

/** Turn until nothing has happened for a while; checks all invariants. */
void kvist_test_settle(struct kvist_store *store);

struct kvist_store_stats kvist_test_stats(struct kvist_store *store);

/** Settle while a condition holds, for so long that only what is broken still does. */
#define KVIST_TEST_PATIENCE_US 60000000U
#define KVIST_TEST_SETTLE_WHILE(store, condition)                                                  \
    do {                                                                                           \
        uint64_t settle_until_us = kvist_clock_now_us() + KVIST_TEST_PATIENCE_US;                  \
        while ((condition) && kvist_clock_now_us() < settle_until_us) {                            \
            kvist_test_settle(store);                                                              \
        }                                                                                          \
    } while (0)

/** Turn once at a time that is so much later than the clock's, for ever after. */
void kvist_test_advance(struct kvist_store *store, uint64_t us);

/** Whether the store's time goes by itself, as it does at first, or only by kvist_test_advance(): then
    nothing depends on how long this machine takes. */
void kvist_test_clock(bool goes);

/** The 32-byte key number n. */
void kvist_test_key(uint64_t number, uint8_t key_out[KVIST_KEY_BYTES]);

/** Open (or find) the pool number n. */
struct kvist_store_pool *
kvist_test_pool_open(struct kvist_store *store, uint8_t number, uint64_t slot_bytes);

/** An engine of so many ranks: one process when it is one, else a scheduler and its workers. */
struct kvist_test_engine *
kvist_test_engine_open(struct kvist_store *store, uint8_t number, uint32_t rank_count);

/** Attach all its processes. @return the pool's ordinal */
uint32_t kvist_test_engine_attach(struct kvist_test_engine *engine, struct kvist_store_pool *pool);

/** Unmap all of a pool and detach all processes from it; its ordinal is free then. */
void kvist_test_engine_detach(struct kvist_test_engine *engine, uint32_t ordinal);

/**
 * Go on with a store that has adopted the engine's session: as after a new connection, with the
 * memory that is mapped already. Ordinals are as they were.
 */
void kvist_test_engine_adopt(struct kvist_test_engine *engine, struct kvist_store *store);

/** Whether the store has adopted all of the engine. */
bool kvist_test_engine_can_adopt(struct kvist_test_engine *engine, struct kvist_store *store);

/** Unmap and forget an engine whose session no store has any more. NULL is fine. */
void kvist_test_engine_abandon(struct kvist_test_engine **engine);

/** Every process ends, then the session. */
void kvist_test_engine_close(struct kvist_test_engine **engine);

/** Answer what was revoked. */
void kvist_test_engine_unmap_revoked(struct kvist_test_engine *engine);

/** Give back, of what is not taken, as many grants as were recalled. */
void kvist_test_engine_give_back(struct kvist_test_engine *engine);

/** Take a grant. false: there is none. */
bool kvist_test_engine_take(struct kvist_test_engine *engine,
                            uint32_t ordinal,
                            struct kvist_store_grant *grant_out);

/** The bytes of a slot. */
void *
kvist_test_engine_slot(struct kvist_test_engine *engine, uint32_t ordinal, uint32_t slot);

/** Write block number n into a slot: every byte depends on n. */
void kvist_test_fill(void *slot, uint64_t number, uint64_t bytes);

/** Whether a slot holds block number n. */
bool kvist_test_holds(const void *slot, uint64_t number, uint64_t bytes);

/** Set the fill mark of one rank. */
void kvist_test_engine_mark(struct kvist_test_engine *engine,
                            uint32_t rank,
                            const struct kvist_store_grant *grant);

/** Commit a grant under key number n. */
enum kvist_status kvist_test_engine_commit(struct kvist_test_engine *engine,
                                           uint32_t ordinal,
                                           const struct kvist_store_grant *grant,
                                           uint64_t number,
                                           uint64_t bytes);

/** Take, fill, mark, commit block number n. BUSY: no grant. */
enum kvist_status kvist_test_engine_put(struct kvist_test_engine *engine,
                                        uint32_t ordinal,
                                        uint64_t number,
                                        uint64_t bytes);

/** The state of key number n in the index; EMPTY: not there. */
enum kvist_entry_state
kvist_test_engine_probe(struct kvist_test_engine *engine, uint32_t ordinal, uint64_t number);

/** The bytes of key number n, READY, for a test that flips some; NULL: it is not. */
uint8_t *
kvist_test_engine_bytes(struct kvist_test_engine *engine, uint32_t ordinal, uint64_t number);

/** Its first process calls blocks first to first + count - 1 corrupt. */
enum kvist_status kvist_test_engine_suspect(struct kvist_test_engine *engine,
                                            uint32_t ordinal,
                                            uint64_t first,
                                            size_t count);

/** Settle until so many checksums have been taken: it is done at idle priority. */
void kvist_test_settle_sums(struct kvist_store *store, uint64_t count);
/** Settle until no checksum is due any more: they pin slots for as long as the machine is busy. */
void kvist_test_rest(struct kvist_store *store);
/** The slot of key number n; KVIST_SLOT_NONE: it is not READY. */
uint32_t
kvist_test_engine_slot_of(struct kvist_test_engine *engine, uint32_t ordinal, uint64_t number);

/**
 * Lease key number n with lease record `record`, by the protocol.
 *
 * @return the slot's bytes, or NULL: a miss, or its segment is not mapped yet
 */
const void *kvist_test_engine_lease(struct kvist_test_engine *engine,
                                    uint32_t ordinal,
                                    uint64_t number,
                                    uint32_t record);

void kvist_test_engine_release(struct kvist_test_engine *engine, uint32_t record);

/** Write a slot reference, or anything else, into the touch ring. */
void kvist_test_engine_touch(struct kvist_test_engine *engine, uint64_t ref);

#endif
