/*
 * sim - a store, its engines and its disk in one process, where nothing happens by itself.
 *
 * Role        one seed decides everything: what engines do, when messages arrive, when a job of a
 *             worker runs, what the disk does, what time it is, which call fails. The store is the
 *             real one; what it stands on is replaced at link time by what steps on demand:
 *               world.c    time, randomness
 *               workers.c  storage/workers.h without threads
 *               disk.c     storage/tier.h in memory: late, failing, forgetting, rotting
 *               engines.c  engines, with messages that wait in both directions
 *               model.c    what must be true
 *               sim.c      the operations, and one seed
 *               main.c     the run over seeds
 * Threads     one
 */
#ifndef KVIST_TESTS_SIM_H
#define KVIST_TESTS_SIM_H

#include "storage/store.h"
#include "tests/support/engine.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KVIST_SIM_REQUIRE(condition)                                                               \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                  \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/* --- sim.c ----------------------------------------------------------------------------------- */

/* Of all seeds, by all processes. */
struct kvist_sim_totals {
    _Atomic uint64_t seeds;
    _Atomic uint64_t commits;
    _Atomic uint64_t evictions;
    _Atomic uint64_t kept_leased; /* found leased by a scan */
    _Atomic uint64_t spills;
    _Atomic uint64_t promotions;
    _Atomic uint64_t revokes;
    _Atomic uint64_t clears;
    _Atomic uint64_t adoptions;
    _Atomic uint64_t cold;   /* restarts */
    _Atomic uint64_t maps;   /* replaced */
    _Atomic uint64_t hits;   /* leases */
    _Atomic uint64_t faults; /* calls that failed because of us */
};

extern struct kvist_sim_run {
    struct kvist_sim_totals *totals;
    uint32_t steps; /* of a seed */
    /* Where it is now. */
    uint64_t seed;
    volatile uint32_t step;
    const char *operation;
} kvist_sim_run;

/** Run one world; what is wrong aborts. */
void kvist_sim_run_seed(uint64_t seed, bool verbose);

/* --- world.c --------------------------------------------------------------------------------- */

/** Start a world: everything that is drawn follows from the seed. */
void kvist_sim_world_init(uint64_t seed, bool verbose);

uint64_t kvist_sim_random(void);
/** From 0 to below `count`. */
uint32_t kvist_sim_below(uint32_t count);
bool kvist_sim_chance(uint32_t percent);

uint64_t kvist_sim_now_us(void);
void kvist_sim_pass_time(uint64_t us);

/** A line of the trace, when there is one. */
void kvist_sim_trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* --- workers.c ------------------------------------------------------------------------------- */

/** Run one job of those that wait, any. @return false: there is none */
bool kvist_sim_workers_step(void);

/* --- disk.c ---------------------------------------------------------------------------------- */

/** An empty disk, of no store. */
void kvist_sim_disk_init(void);
void kvist_sim_disk_fini(void);
/** Do one thing that was asked for, or one that disks do. @return false: nothing was asked for */
bool kvist_sim_disk_step(void);
/** What was asked for and not done is never done: the next close is a kill. */
void kvist_sim_disk_kill(void);
/** Whether there is a block of that key. */
bool kvist_sim_disk_has(const uint8_t *pool_id, const uint8_t *key);
/** How many calls of 100 fail from here on. */
void kvist_sim_disk_set_faults(uint32_t percent);

/* --- model.c --------------------------------------------------------------------------------- */

#define KVIST_SIM_POOLS 4U

void kvist_sim_model_init(void);
void kvist_sim_model_fini(void);

/** A pool is cleared: what was granted before is worthless from here on. @return its generation */
uint32_t kvist_sim_model_clear(uint32_t pool);
/** The caller was told that it is durable. */
void kvist_sim_model_cleared(uint32_t pool, uint32_t generation);
/** Nothing of what was in memory is left. */
void kvist_sim_model_forget_memory(void);
/** What the store believes to be on the disk is there; nothing may be under way. */
void kvist_sim_model_check_copies(struct kvist_store *store);
/** A grant was given now. */
void kvist_sim_model_granted(uint32_t pool, uint64_t reservation);
/** Whether the grant is from before a clear. */
bool kvist_sim_model_is_stale(uint32_t pool, uint64_t reservation);
/** An engine takes it, which it must do once; whether one has. */
void kvist_sim_model_take(uint64_t reservation);
bool kvist_sim_model_is_taken(uint64_t reservation);
/** A key that is, or once was, there. @return false: none was found */
bool kvist_sim_model_any_key(uint32_t pool, uint64_t *key_out);
/** Another content for a key, to be written into a slot. @return its number */
uint64_t kvist_sim_model_version(uint32_t pool, uint64_t key, uint64_t bytes, uint64_t reservation);
/** The store said that it has published it. */
void kvist_sim_model_committed(uint64_t version);
/** Somebody writes into the block, against the rules. */
void kvist_sim_model_spoil(uint64_t version);
/** What a lease shows is a version that may be there. @return which */
uint64_t kvist_sim_model_check(uint32_t pool, uint64_t key, const void *bytes, uint64_t length);
uint64_t kvist_sim_model_hits(void);
/** The bytes are still those. */
void kvist_sim_model_check_same(const void *bytes, uint64_t version);

/* --- engines.c ------------------------------------------------------------------------------- */

#define KVIST_SIM_ENGINES 3U
#define KVIST_SIM_FILLS   256U
#define KVIST_SIM_LEASES  16U
#define KVIST_SIM_ORDERS  1024U

struct kvist_sim_message; /* from the store, not arrived yet */

/* A grant in hand. */
struct kvist_sim_fill {
    uint64_t version; /* 0: none */
    uint32_t ordinal;
    struct kvist_store_grant grant;
    uint64_t key;
    uint64_t bytes;
    bool written;
    uint32_t marks; /* of ranks, bit by bit */
};

/* A commit or a return that has not arrived at the store. */
struct kvist_sim_order {
    struct kvist_sim_fill fill;
    bool returns;
    bool repeats; /* it was sent before, or something else of that grant */
};

struct kvist_sim_lease {
    const void *bytes; /* NULL: none */
    uint32_t ordinal;
    uint64_t version;
};

struct kvist_sim_engine {
    struct kvist_test_engine *engine; /* NULL: none */
    bool stopped;
    bool connected[KVIST_RANKS_MAX + 1];
    struct kvist_sim_message *first[KVIST_RANKS_MAX + 1];
    struct kvist_sim_message *last[KVIST_RANKS_MAX + 1];
    struct kvist_sim_fill fills[KVIST_SIM_FILLS];
    struct kvist_sim_lease leases[KVIST_SIM_LEASES]; /* by lease record */
    struct kvist_sim_order orders[KVIST_SIM_ORDERS];
    uint32_t order_count;
};

extern struct kvist_sim_engine kvist_sim_engines[KVIST_SIM_ENGINES];

/** Maps that engines were told of in place of others, so far. */
uint64_t kvist_sim_engines_maps(void);
/** Options whose events wait for kvist_sim_engine_receive(). */
struct kvist_store_options kvist_sim_engine_options(uint64_t arena_bytes);
void kvist_sim_engine_open(struct kvist_sim_engine *mine, struct kvist_store *store);
/** All its processes end, with what they had in hand. */
void kvist_sim_engine_close(struct kvist_sim_engine *mine);
/** The daemon is killed: all connections are lost, and what was under way on them. */
void kvist_sim_engine_lose(struct kvist_sim_engine *mine);
/** Go on with a store that has adopted it. */
void kvist_sim_engine_adopt(struct kvist_sim_engine *mine, struct kvist_store *store);
/** No store knows it any more: it leaves all behind. */
void kvist_sim_engine_abandon(struct kvist_sim_engine *mine);
/** Let messages arrive, at most so many of each process. */
void kvist_sim_engine_receive(struct kvist_sim_engine *mine, uint32_t count);
/** Let orders arrive. */
void kvist_sim_engine_send(struct kvist_sim_engine *mine, uint32_t count);
void kvist_sim_engine_attach(struct kvist_sim_engine *mine, struct kvist_store_pool *pool);
void kvist_sim_engine_detach(struct kvist_sim_engine *mine, uint32_t ordinal);
/** A process loses its connection, and what was under way on it; or gets a new one. */
void kvist_sim_engine_disconnect(struct kvist_sim_engine *mine, uint32_t member);
void kvist_sim_engine_reconnect(struct kvist_sim_engine *mine, uint32_t member);
void kvist_sim_engine_unmap(struct kvist_sim_engine *mine);
/** Take a grant for a key. @return false: there is none, or no place */
bool kvist_sim_engine_take(struct kvist_sim_engine *mine, uint32_t ordinal, uint64_t key);
/** Take a fill one step on: write, mark a rank, commit; sometimes otherwise. */
void kvist_sim_engine_fill(struct kvist_sim_engine *mine, struct kvist_sim_fill *fill);
/** Write, mark and commit all of it. */
void kvist_sim_engine_fill_all(struct kvist_sim_engine *mine, struct kvist_sim_fill *fill);
void kvist_sim_engine_lease(struct kvist_sim_engine *mine, uint32_t ordinal, uint64_t key);
void kvist_sim_engine_release(struct kvist_sim_engine *mine, uint32_t record);
/** Which pool an ordinal is; KVIST_SIM_POOLS: none. */
uint32_t kvist_sim_engine_pool(const struct kvist_sim_engine *mine, uint32_t ordinal);
/** The slot at an address. */
uint32_t
kvist_sim_engine_slot(const struct kvist_sim_engine *mine, uint32_t ordinal, const void *bytes);
/** What is leased is as it was. */
void kvist_sim_engine_check(const struct kvist_sim_engine *mine);

#endif
