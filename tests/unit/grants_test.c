/* grants: how much a writer is granted ahead of need, and what is left for others. */
#include "tests/support/engine.h"
#include "tests/support/unit.h"

/* As an arena of 2 GiB with blocks of 16 MiB: segments of 4 slots. */
#define SLOT_BYTES (512ULL << 10)
#define ARENA      (64ULL << 20)
#define SLOTS      (ARENA / SLOT_BYTES)
#define PROMPTS    31U /* blocks of two prompts */
#define FLOOR      4U

static struct kvist_store *store;

static void setup(void)
{
    struct kvist_store_options options = kvist_test_options(ARENA);
    store = kvist_test_store_open(&options);
}

static void teardown(void)
{
    kvist_store_close(&store);
}

static struct kvist_store_stats stats_now(void)
{
    struct kvist_store_stats stats;
    kvist_store_stats(store, &stats);
    return stats;
}

static struct kvist_test_engine *engine_with_pool(uint8_t number)
{
    struct kvist_test_engine *engine = kvist_test_engine_open(store, number, 1);
    KVIST_TEST_EQUAL(
        kvist_test_engine_attach(engine, kvist_test_pool_open(store, number, SLOT_BYTES)), 0);
    return engine;
}

/* Puts of a burst: no turn of the store comes between. @return how many found a grant */
static uint32_t put_burst(struct kvist_test_engine *engine, uint64_t first, uint32_t count)
{
    uint32_t stored = 0;
    for (uint64_t number = first; number < first + count; number++) {
        stored += kvist_test_engine_put(engine, 0, number, SLOT_BYTES) == KVIST_OK;
    }
    return stored;
}

static void a_new_engine_stores_whole_prompts(void)
{
    struct kvist_test_engine *engine = engine_with_pool(1);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(engine->pools[0].grant_count, SLOTS / 4);
    KVIST_TEST_TRUE(stats_now().arena_used_bytes <= ARENA / 4 + ARENA / 16);
    for (uint32_t burst = 0; burst < 2; burst++) {
        KVIST_TEST_EQUAL(put_burst(engine, burst * PROMPTS, PROMPTS), PROMPTS);
        kvist_test_settle(store);
        KVIST_TEST_EQUAL(stats_now().slots_ready, (burst + 1) * PROMPTS);
        KVIST_TEST_EQUAL(engine->pools[0].grant_count, SLOTS / 4);
    }
    /* Full: blocks go, and grants stay within their bound. */
    for (uint64_t first = 1000; first < 1010; first++) {
        KVIST_TEST_TRUE(put_burst(engine, first * 100, PROMPTS) >= PROMPTS * 3 / 4);
        kvist_test_settle(store);
    }
    struct kvist_store_stats stats = stats_now();
    KVIST_TEST_EQUAL(stats.arena_used_bytes, ARENA);
    KVIST_TEST_TRUE(stats.slots_granted <= SLOTS / 4);
    KVIST_TEST_TRUE(stats.slots_ready >= SLOTS / 2);
    kvist_test_engine_close(&engine);
}

/* Replicas of one model share its pool: each can store a prompt of its own. */
static void writers_of_a_pool_have_even_shares(void)
{
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    struct kvist_test_engine *engines[3];
    for (uint8_t index = 0; index < 3; index++) {
        engines[index] = kvist_test_engine_open(store, index, 1);
        (void)kvist_test_engine_attach(engines[index], pool);
        kvist_test_settle(store);
        KVIST_TEST_EQUAL(engines[index]->pools[0].grant_count, SLOTS / (2 * (index + 2U)));
    }
    for (uint32_t index = 0; index < 3; index++) {
        kvist_test_engine_close(&engines[index]);
    }
}

/* Let every engine do its part of what the store asks for. */
static void settle_all(struct kvist_test_engine **engines, uint32_t count)
{
    for (uint32_t round = 0; round < 10; round++) {
        for (uint32_t index = 0; index < count; index++) {
            kvist_test_engine_unmap_revoked(engines[index]);
        }
        kvist_test_advance(store, 20000);
        kvist_test_settle(store);
    }
}

static void idle_engines_leave_a_share_for_each(void)
{
    struct kvist_test_engine *engines[KVIST_SESSION_POOLS_MAX];
    uint32_t count = 0;
    while (count < KVIST_SESSION_POOLS_MAX) {
        engines[count] = engine_with_pool((uint8_t)(count + 1));
        count++;
        settle_all(engines, count);
        KVIST_TEST_TRUE(engines[count - 1]->pools[0].grant_count >= FLOOR);
    }
    /* The last one is busy beside seven idle ones. */
    struct kvist_test_engine *busy = engines[count - 1];
    uint32_t stored = 0;
    for (uint64_t number = 0; number < 3UL * PROMPTS; number++) {
        while (busy->pools[0].grant_count == 0) {
            settle_all(engines, count);
        }
        stored += put_burst(busy, number, 1);
    }
    KVIST_TEST_EQUAL(stored, 3 * PROMPTS);
    for (uint32_t index = 0; index < count; index++) {
        kvist_test_engine_close(&engines[index]);
    }
    KVIST_TEST_EQUAL(stats_now().slots_granted, 0);
}

/* A stopped engine answers nothing: it keeps its grants and what it has mapped, and no more. */
static void a_stopped_engine_keeps_its_bound(void)
{
    struct kvist_test_engine *stopped = engine_with_pool(1);
    kvist_test_settle(store);
    struct kvist_test_engine *other = engine_with_pool(2);
    for (uint64_t first = 0; first < 10; first++) {
        (void)put_burst(other, first * 100, PROMPTS);
        kvist_test_settle(store);
    }
    KVIST_TEST_EQUAL(stopped->pools[0].grant_count, SLOTS / 4);
    struct kvist_store_pool_info info;
    KVIST_TEST_FATAL(kvist_store_pool_info(store, 1, &info));
    uint64_t slots = info.slots_free + info.slots_granted + info.slots_ready;
    KVIST_TEST_TRUE(slots >= SLOTS - SLOTS / 4 - SLOTS / 16);
    kvist_test_engine_close(&stopped);
    for (uint64_t first = 10; first < 20; first++) {
        (void)put_burst(other, first * 100, PROMPTS);
        kvist_test_settle(store);
    }
    KVIST_TEST_FATAL(kvist_store_pool_info(store, 1, &info));
    KVIST_TEST_EQUAL(info.slots_free + info.slots_granted + info.slots_ready, SLOTS);
    kvist_test_engine_close(&other);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"a new engine stores whole prompts", a_new_engine_stores_whole_prompts},
        {"writers of a pool have even shares", writers_of_a_pool_have_even_shares},
        {"idle engines leave a share for each", idle_engines_leave_a_share_for_each},
        {"a stopped engine keeps its bound", a_stopped_engine_keeps_its_bound},
    };
    return kvist_unit_main("grants", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
}
