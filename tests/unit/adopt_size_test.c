/* adopt with another arena size: a smaller one is enforced, a larger one is used. */
#include "proto/base/clock.h"
#include "storage/internal.h"
#include "tests/support/engine.h"
#include "tests/support/unit.h"
#include "tests/support/vault.h"

#include <stdio.h>

#define SLOT_BYTES (64ULL << 10)
#define SMALL      (16ULL << 20) /* 16 segments of 16 slots */
#define LARGE      (4 * SMALL)
#define ENGINES    16U

static struct kvist_test_vault vault;
static struct kvist_store_options options;
static struct kvist_store *store;
static struct kvist_test_engine *engines[ENGINES];
static uint32_t engine_count;

static void open_store(uint64_t arena_bytes)
{
    options.arena_bytes = arena_bytes;
    store = kvist_test_vault_open(&vault, &options);
}

static void setup(void)
{
    kvist_test_vault_init(&vault);
    options = kvist_test_options(SMALL);
    engine_count = 0;
}

static void teardown(void)
{
    while (engine_count > 0) {
        kvist_test_engine_close(&engines[--engine_count]);
    }
    kvist_store_close(&store);
    KVIST_TEST_EQUAL(vault.count, 0);
    kvist_test_vault_fini(&vault);
}

/* Engines of a pool; all get what they are to be granted. */
static void open_engines(uint32_t count, uint8_t pool)
{
    for (; count > 0; count--) {
        struct kvist_test_engine *engine =
            kvist_test_engine_open(store, (uint8_t)(engine_count + 1), 1);
        (void)kvist_test_engine_attach(engine, kvist_test_pool_open(store, pool, SLOT_BYTES));
        engines[engine_count++] = engine;
    }
    kvist_test_settle(store);
}

/* Kill the store; the next one has another size, and all engines go on with it. */
static void restart_with(uint64_t arena_bytes)
{
    kvist_test_vault_kill(&store);
    open_store(arena_bytes);
    struct kvist_adoption adoption;
    kvist_store_adoption(store, &adoption);
    KVIST_TEST_FATAL(adoption.adopted);
    KVIST_TEST_TRUE(kvist_store_check(store) == NULL);
    for (uint32_t index = 0; index < engine_count; index++) {
        kvist_test_engine_adopt(engines[index], store);
    }
}

/* All engines answer what they are asked, but for one. */
static void answer(const struct kvist_test_engine *silent)
{
    for (uint32_t index = 0; index < engine_count; index++) {
        if (engines[index] != silent) {
            kvist_test_engine_give_back(engines[index]);
            kvist_test_engine_unmap_revoked(engines[index]);
        }
    }
}

/* Until the arena is as large as it may be, or patience ends. */
static void shrink(const struct kvist_test_engine *silent)
{
    uint64_t deadline_us = kvist_clock_now_us() + KVIST_TEST_PATIENCE_US / 3;
    while (store->used_bytes > store->options.arena_bytes && kvist_clock_now_us() < deadline_us) {
        kvist_test_settle(store);
        answer(silent);
    }
}

static uint64_t put(struct kvist_test_engine *engine, uint64_t first, uint64_t count)
{
    uint64_t stored = 0;
    for (uint64_t number = first; number < first + count; number++) {
        for (unsigned tries = 0; tries < 100; tries++) {
            if (kvist_test_engine_put(engine, 0, number, SLOT_BYTES) == KVIST_OK) {
                stored++;
                break;
            }
            answer(NULL);
            kvist_test_advance(store, 20000);
            kvist_test_settle(store);
        }
    }
    return stored;
}

/* --- Smaller ---------------------------------------------------------------------------------- */

static void blocks_that_fit_are_kept(void)
{
    open_store(2 * SMALL);
    open_engines(1, 1);
    open_engines(1, 3);
    for (uint64_t number = 0; number < 300; number++) {
        if (number % 16 == 0) {
            kvist_test_settle(store);
        }
        (void)kvist_test_engine_put(engines[0], 0, number, SLOT_BYTES);
        (void)kvist_test_engine_put(engines[1], 0, number, SLOT_BYTES);
    }
    KVIST_TEST_TRUE(store->used_bytes > SMALL);
    kvist_test_engine_close(&engines[--engine_count]); /* its pool is idle from now on */
    const struct kvist_store_pool *pool = engines[0]->pools[0].pool;
    uint32_t granted = pool->counts[KVIST_SLOT_GRANTED];
    restart_with(SMALL);
    KVIST_TEST_TRUE(store->used_bytes > SMALL);
    pool = engines[0]->pools[0].pool;
    uint64_t ready = pool->counts[KVIST_SLOT_READY];
    shrink(NULL);
    KVIST_TEST_TRUE(store->used_bytes <= SMALL);
    KVIST_TEST_TRUE(engines[0]->pools[0].grant_count <= granted); /* not as if new */
    KVIST_TEST_TRUE(pool->counts[KVIST_SLOT_READY] > ready / 2);
}

/* Slots that engines were granted and do not use fill all segments: they are asked for. */
static void unused_grants_are_called_back(void)
{
    open_store(LARGE);
    open_engines(ENGINES, 1);
    KVIST_TEST_EQUAL(put(engines[3], 0, 20), 20);
    kvist_test_settle(store);
    restart_with(SMALL);
    KVIST_TEST_TRUE(store->used_bytes > 3 * SMALL / 2);
    shrink(NULL);
    KVIST_TEST_TRUE(store->used_bytes <= SMALL);
    for (uint64_t index = 0; index < ENGINES; index++) {
        KVIST_TEST_EQUAL(put(engines[index], 1000 + index * 10, 5), 5);
        KVIST_TEST_TRUE(store->used_bytes <= SMALL);
    }
}

static void engines_of_many_pools_give_back(void)
{
    open_store(LARGE);
    for (uint8_t pool = 1; pool <= 4; pool++) {
        open_engines(2, pool);
    }
    restart_with(SMALL);
    KVIST_TEST_TRUE(store->used_bytes > SMALL);
    shrink(NULL);
    KVIST_TEST_TRUE(store->used_bytes <= SMALL);
    for (uint64_t index = 0; index < engine_count; index++) {
        KVIST_TEST_EQUAL(put(engines[index], index * 100, 5), 5);
    }
}

/* An engine that does not answer keeps what it has mapped, and keeps nobody else from storing. */
static void a_stopped_engine_is_not_waited_for(void)
{
    open_store(LARGE);
    open_engines(ENGINES, 1);
    restart_with(SMALL);
    shrink(engines[0]);
    uint64_t live_bytes = store->used_bytes - store->draining_bytes;
    KVIST_TEST_TRUE(live_bytes <= SMALL);
    KVIST_TEST_TRUE(store->used_bytes > SMALL); /* it has all of it mapped */
    KVIST_TEST_EQUAL(put(engines[1], 0, 20), 20);
    shrink(NULL);
    KVIST_TEST_TRUE(store->used_bytes <= SMALL);
}

/* --- Larger ----------------------------------------------------------------------------------- */

static uint32_t count_right(uint64_t first, uint64_t count)
{
    uint32_t right = 0;
    for (uint64_t number = first; number < first + count; number++) {
        const void *slot = kvist_test_engine_lease(engines[0], 0, number, 900);
        if (slot != NULL) {
            right += kvist_test_holds(slot, number, SLOT_BYTES);
            kvist_test_engine_release(engines[0], 900);
        }
    }
    return right;
}

static void a_pool_grows_into_a_larger_arena(void)
{
    open_store(SMALL);
    open_engines(1, 1);
    KVIST_TEST_EQUAL(put(engines[0], 0, 100), 100);
    restart_with(LARGE);
    KVIST_TEST_EQUAL(count_right(0, 100), 100);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(put(engines[0], 100, 500), 500);
    KVIST_TEST_TRUE(store->used_bytes > 2 * SMALL);
    KVIST_TEST_EQUAL(count_right(0, 600), 600);
    KVIST_TEST_EQUAL(kvist_test_stats(store).evictions_total, 0);
    restart_with(LARGE);
    KVIST_TEST_EQUAL(count_right(0, 600), 600);
    KVIST_TEST_EQUAL(put(engines[0], 600, 10), 10);
}

/* Segments of a small arena are many in a larger one: not more than can be kept. */
static void what_cannot_be_kept_is_not_made(void)
{
    options.keeper.segments_max = 20;
    open_store(SMALL);
    open_engines(1, 1);
    restart_with(LARGE);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(put(engines[0], 0, 500), 500);
    KVIST_TEST_EQUAL(store->segment_count, 20);
    KVIST_TEST_EQUAL(count_right(490, 10), 10);
}

/* Killed and opened again with another size. @return how many pools are bound by the old one */
static uint32_t count_bound(uint64_t before_bytes, uint64_t after_bytes, uint64_t slot_bytes)
{
    struct kvist_adoption adoption;
    open_store(before_bytes);
    (void)kvist_test_pool_open(store, 1, slot_bytes);
    kvist_test_vault_kill(&store);
    open_store(after_bytes);
    kvist_store_adoption(store, &adoption);
    KVIST_TEST_EQUAL(adoption.pools, 1);
    kvist_store_close(&store);
    return adoption.pools_bound;
}

/* But not those that would have no larger segments if they were new. */
static void pools_that_an_arena_has_outgrown_are_told(void)
{
    static const uint64_t slot_bytes[] = {16ULL << 20, 64ULL << 20, 96ULL << 20};
    for (unsigned index = 0; index < KVIST_ARRAY_COUNT(slot_bytes); index++) {
        KVIST_TEST_EQUAL(count_bound(2ULL << 40, 2ULL << 40, slot_bytes[index]), 0);
        KVIST_TEST_EQUAL(count_bound(1ULL << 40, 2ULL << 40, slot_bytes[index]), 0);
        KVIST_TEST_EQUAL(count_bound(64ULL << 30, 64ULL << 30, slot_bytes[index]), 0);
        KVIST_TEST_EQUAL(count_bound(64ULL << 30, 1ULL << 40, slot_bytes[index]), 1);
    }
    open_store(SMALL);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"blocks that fit are kept", blocks_that_fit_are_kept},
        {"unused grants are called back", unused_grants_are_called_back},
        {"engines of many pools give back", engines_of_many_pools_give_back},
        {"a stopped engine is not waited for", a_stopped_engine_is_not_waited_for},
        {"a pool grows into a larger arena", a_pool_grows_into_a_larger_arena},
        {"what cannot be kept is not made", what_cannot_be_kept_is_not_made},
        {"pools that an arena has outgrown are told", pools_that_an_arena_has_outgrown_are_told},
    };
    return kvist_unit_main("adopt_size", cases, KVIST_ARRAY_COUNT(cases), setup, teardown);
}
