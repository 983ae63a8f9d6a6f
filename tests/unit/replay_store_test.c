/*
 * replay_store - a store and a replay of the same requests keep the same blocks.
 *
 * The store gets them as an engine gives them: touches through the ring, blocks through grants and
 * commits. How many it evicts in a turn is its own affair (it depends on grants and time): the
 * replay evicts as many, and must choose the same ones.
 */
#include "client/tool/replay_cache.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "storage/internal.h"
#include "tests/support/engine.h"
#include "tests/support/traces.h"
#include "tests/support/unit.h"

#include <poll.h>

#define ARENA_BYTES (32ULL << 20)
#define BLOCK_BYTES 65536U
#define REQUESTS    1500U
#define BLOCK_MAX   65536U /* ids of so many requests are below it */

struct pair {
    struct kvist_store *store;
    struct kvist_test_engine *engine;
    struct kvist_replay_cache *cache;
    uint64_t now_us;  /* a clock of its own, so that grants do not depend on the machine */
    uint64_t evicted; /* by both */
    uint64_t store_hits;
    uint64_t replay_hits;
};

static uint64_t evictions_of(struct kvist_store *store)
{
    struct kvist_store_stats stats;
    kvist_store_stats(store, &stats);
    KVIST_TEST_EQUAL(stats.evictions_leased_total, 0);
    return stats.evictions_total;
}

/* A turn of the store, and what it is to the replay. A checksum that is being taken would pin its
   block, and have another one evicted: wait for those under way. */
static void turn(struct pair *pair)
{
    while (pair->store->sums_active > 0) {
        struct pollfd wait = {.fd = kvist_workers_fd(pair->store->idle), .events = POLLIN};
        (void)poll(&wait, 1, 1000);
        (void)kvist_workers_turn(pair->store->idle, 64);
    }
    pair->now_us += 1000;
    (void)kvist_store_turn(pair->store, pair->now_us);
    kvist_replay_cache_turn(pair->cache);
    uint64_t evicted = evictions_of(pair->store);
    uint32_t want = (uint32_t)(evicted - pair->evicted);
    KVIST_TEST_FATAL(want == 0 || kvist_replay_cache_evict(pair->cache, want) == want);
    pair->evicted = evicted;
}

static bool is_there(struct pair *pair, uint64_t block)
{
    return kvist_test_engine_probe(pair->engine, 0, block) == KVIST_ENTRY_READY;
}

/* As libkvist and the plugin: what is there is touched from its tail. @return hits */
static uint32_t find(struct pair *pair, const uint32_t *blocks, uint32_t count)
{
    uint32_t hits = 0;
    while (hits < count && is_there(pair, blocks[hits])) {
        hits++;
    }
    for (uint32_t left = count; left > 0; left--) {
        uint32_t slot = kvist_test_engine_slot_of(pair->engine, 0, blocks[left - 1]);
        if (slot != KVIST_SLOT_NONE) {
            kvist_test_engine_touch(pair->engine, kvist_slot_ref(0, slot));
        }
    }
    return hits;
}

static void serve(struct pair *pair, const uint32_t *blocks, uint32_t count)
{
    for (uint32_t index = 0; index < count; index++) {
        KVIST_TEST_FATAL(is_there(pair, blocks[index]) ==
                         kvist_replay_cache_has(pair->cache, blocks[index]));
    }
    pair->store_hits += find(pair, blocks, count);
    pair->replay_hits += kvist_replay_cache_find(pair->cache, blocks, count);
    turn(pair);
    for (uint32_t index = 0; index < count; index++) {
        if (is_there(pair, blocks[index])) {
            continue;
        }
        /* Without a grant neither stores it. */
        if (kvist_test_engine_put(pair->engine, 0, blocks[index], BLOCK_BYTES) == KVIST_OK) {
            KVIST_TEST_FATAL(kvist_replay_cache_store(pair->cache, blocks[index]));
        }
    }
    for (uint32_t again = 0; again < 4; again++) {
        turn(pair); /* orders, evicts, takes checksums, tops grants up */
    }
}

static void run(enum kvist_eviction eviction, enum kvist_test_workload workload)
{
    struct pair pair = {.evicted = 0};
    struct kvist_store_options options = kvist_test_options(ARENA_BYTES);
    options.eviction = eviction;
    pair.store = kvist_test_store_open(&options);
    struct kvist_store_pool *pool = kvist_test_pool_open(pair.store, 1, BLOCK_BYTES);
    pair.engine = kvist_test_engine_open(pair.store, 1, 1);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(pair.engine, pool), 0);
    kvist_test_settle(pair.store);
    pair.now_us = kvist_clock_now_us();
    KVIST_TEST_FATAL(kvist_replay_cache_create(kvist_policies[eviction],
                                               (uint32_t)(ARENA_BYTES / BLOCK_BYTES),
                                               BLOCK_MAX,
                                               &pair.cache) == KVIST_OK);
    uint64_t ids[KVIST_TEST_CHAIN_MAX];
    uint32_t blocks[KVIST_TEST_CHAIN_MAX];
    struct kvist_test_trace *trace = kvist_test_trace_create(workload, 5, REQUESTS);
    for (size_t count = 0; (count = kvist_test_trace_next(trace, ids)) > 0;) {
        /* Longer ones than the pool has slots say little. */
        for (size_t index = 0; index < count; index++) {
            KVIST_TEST_FATAL(ids[index] < BLOCK_MAX);
            blocks[index] = (uint32_t)ids[index];
        }
        serve(&pair, blocks, (uint32_t)(count < 64 ? count : 64));
    }
    KVIST_TEST_EQUAL(pair.store_hits, pair.replay_hits);
    KVIST_TEST_TRUE(pair.store_hits > 100 && pair.evicted > 100);
    kvist_test_trace_destroy(&trace);
    kvist_replay_cache_destroy(&pair.cache);
    kvist_test_engine_close(&pair.engine);
    kvist_store_close(&pair.store);
}

static void lru_chooses_the_same(void)
{
    run(KVIST_EVICTION_LRU, KVIST_TEST_ZIPF);
}

static void s3fifo_chooses_the_same(void)
{
    run(KVIST_EVICTION_S3FIFO, KVIST_TEST_ZIPF);
}

static void reuse_chooses_the_same(void)
{
    run(KVIST_EVICTION_REUSE, KVIST_TEST_ZIPF);
    run(KVIST_EVICTION_REUSE, KVIST_TEST_CHAT);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"lru chooses the same", lru_chooses_the_same},
        {"s3fifo chooses the same", s3fifo_chooses_the_same},
        {"reuse chooses the same", reuse_chooses_the_same},
    };
    return kvist_unit_main("replay_store", cases, KVIST_ARRAY_COUNT(cases), NULL, NULL);
}
