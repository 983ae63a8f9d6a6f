/* grants: how much a writer is granted ahead of need, and what is left for others. */
#include "storage/internal.h"
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

static struct kvist_test_engine *engine_with_pool(uint8_t number)
{
    struct kvist_test_engine *engine = kvist_test_engine_open(store, number, 1);
    KVIST_TEST_EQUAL(
        kvist_test_engine_attach(engine, kvist_test_pool_open(store, number, SLOT_BYTES)), 0);
    return engine;
}

/* Puts of a burst: no turn of the store comes between; what is lacking is told with the next.
   @return how many found a grant */
static uint32_t put_burst(struct kvist_test_engine *engine, uint64_t first, uint32_t count)
{
    uint32_t stored = 0;
    for (uint64_t number = first; number < first + count; number++) {
        stored += kvist_test_engine_put(engine, 0, number, SLOT_BYTES) == KVIST_OK;
    }
    struct kvist_test_pool *mine = &engine->pools[0];
    mine->used = mine->used > count - stored ? mine->used : count - stored;
    return stored;
}

static void a_new_engine_stores_whole_prompts(void)
{
    struct kvist_test_engine *engine = engine_with_pool(1);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(engine->pools[0].grant_count, SLOTS / 4);
    KVIST_TEST_TRUE(kvist_test_stats(store).arena_used_bytes <= ARENA / 4 + ARENA / 16);
    for (uint32_t burst = 0; burst < 2; burst++) {
        KVIST_TEST_EQUAL(put_burst(engine, burst * PROMPTS, PROMPTS), PROMPTS);
        kvist_test_settle(store);
        KVIST_TEST_EQUAL(kvist_test_stats(store).slots_ready, (burst + 1) * PROMPTS);
        KVIST_TEST_EQUAL(engine->pools[0].grant_count, SLOTS / 4);
    }
    /* Full: blocks go, and grants stay within their bound. */
    for (uint64_t first = 1000; first < 1010; first++) {
        KVIST_TEST_TRUE(put_burst(engine, first * 100, PROMPTS) >= PROMPTS * 3 / 4);
        kvist_test_settle(store);
    }
    struct kvist_store_stats stats = kvist_test_stats(store);
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
    KVIST_TEST_EQUAL(kvist_test_stats(store).slots_granted, 0);
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

/* --- Without room ---------------------------------------------------------------------------- */

#define LARGE      (256ULL << 20) /* 512 slots, as an arena of 512 MiB with blocks of 1 MiB */
#define PART_BYTES 4096ULL        /* of a block that is written */

static void reopen(uint64_t arena)
{
    kvist_store_close(&store);
    struct kvist_store_options options = kvist_test_options(arena);
    store = kvist_test_store_open(&options);
}

/* Store blocks one at a time, each engine in turn, until each has stored `count` more. */
static uint32_t store_slowly(struct kvist_test_engine **engines,
                             uint32_t engine_count,
                             uint64_t first,
                             uint32_t count)
{
    uint32_t stored = 0;
    for (uint64_t number = first; number < first + count; number++) {
        for (uint32_t index = 0; index < engine_count; index++) {
            kvist_test_engine_give_back(engines[index]);
            stored += kvist_test_engine_put(engines[index], 0, number * 16 + index, PART_BYTES) ==
                      KVIST_OK;
            kvist_test_engine_unmap_revoked(engines[index]);
            kvist_test_advance(store, 20000);
        }
        if (number % 32 == 0) {
            kvist_test_settle(store);
        }
    }
    return stored;
}

/* Fill the arena, then let every slot be used again; blocks hold nine slots of ten all the time. */
static void check_full(uint32_t engine_count, bool same_pool)
{
    struct kvist_test_engine *engines[4];
    struct kvist_store_stats stats;
    reopen(LARGE);
    for (uint32_t index = 0; index < engine_count; index++) {
        engines[index] = kvist_test_engine_open(store, (uint8_t)(index + 1), 1);
        (void)kvist_test_engine_attach(
            engines[index],
            kvist_test_pool_open(store, same_pool ? 1 : (uint8_t)(index + 1), SLOT_BYTES));
    }
    kvist_test_settle(store);
    /* The first is its own beginning: what it uses is known after so many commits. */
    (void)store_slowly(engines, engine_count, 0, 1200 / engine_count + 260);
    for (uint64_t round = 1; round <= 40; round++) {
        KVIST_TEST_EQUAL(store_slowly(engines, engine_count, round * 10000, 16), 16 * engine_count);
        stats = kvist_test_stats(store);
        KVIST_TEST_TRUE(stats.slots_ready * SLOT_BYTES * 10 >= LARGE * 9);
    }
    KVIST_TEST_EQUAL(stats.granted_bytes, stats.slots_granted * SLOT_BYTES);
    KVIST_TEST_EQUAL(stats.free_bytes, stats.slots_free * SLOT_BYTES);
    kvist_test_settle(store);
    for (uint32_t index = 0; index < engine_count; index++) {
        kvist_test_engine_close(&engines[index]);
    }
}

static void a_full_arena_is_full_of_blocks(void)
{
    check_full(1, true);
}

static void engines_of_one_pool_leave_it_full(void)
{
    check_full(4, true);
}

static void engines_of_many_pools_leave_it_full(void)
{
    check_full(2, false);
    check_full(4, false);
}

/* What an engine was granted when it began, and does not use, goes before a block does. */
static void unused_grants_go_before_blocks(void)
{
    reopen(LARGE);
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    struct kvist_test_engine *idle = kvist_test_engine_open(store, 1, 1);
    struct kvist_test_engine *busy = kvist_test_engine_open(store, 2, 1);
    (void)kvist_test_engine_attach(idle, pool);
    (void)kvist_test_engine_attach(busy, pool);
    kvist_test_settle(store);
    uint32_t begun = idle->pools[0].grant_count;
    KVIST_TEST_EQUAL(begun, LARGE / SLOT_BYTES / 6);
    kvist_test_advance(store, 30000000);
    kvist_test_advance(store, 30000000);
    for (uint64_t number = 0; idle->pools[0].recalled == 0 && number < 1000; number++) {
        (void)store_slowly(&busy, 1, number, 1);
    }
    uint32_t asked = idle->pools[0].recalled;
    KVIST_TEST_EQUAL(asked, begun - FLOOR);
    KVIST_TEST_EQUAL(kvist_test_stats(store).recalls_total, asked);
    KVIST_TEST_EQUAL(kvist_test_stats(store).evictions_total, 0);
    KVIST_TEST_EQUAL(idle->pools[0].grant_count, begun); /* it has not heard of it yet */
    KVIST_TEST_EQUAL(kvist_test_stats(store).slots_granted, begun + busy->pools[0].grant_count);
    kvist_test_engine_give_back(idle);
    for (uint64_t number = 1000; number < 1000 + asked - FLOOR; number++) {
        KVIST_TEST_EQUAL(store_slowly(&busy, 1, number, 1), 1);
    }
    KVIST_TEST_EQUAL(kvist_test_stats(store).evictions_total, 0);
    KVIST_TEST_EQUAL(idle->pools[0].grant_count, FLOOR);
    kvist_test_engine_close(&idle);
    kvist_test_engine_close(&busy);
}

/* Readers hold no grants: there is nothing to call back, and nobody to share with. */
static void a_reader_alone_is_asked_for_nothing(void)
{
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    struct kvist_test_engine *writer = kvist_test_engine_open(store, 1, 1);
    (void)kvist_test_engine_attach(writer, pool);
    kvist_test_settle(store);
    (void)store_slowly(&writer, 1, 0, 2 * SLOTS);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(kvist_test_stats(store).arena_used_bytes, ARENA);
    kvist_test_engine_close(&writer);
    struct kvist_test_engine *reader = kvist_test_engine_open(store, 2, 1);
    uint32_t ordinal = 0;
    KVIST_TEST_STATUS(
        kvist_store_attach(reader->members[0].process, pool, true, &ordinal, NULL), KVIST_OK);
    uint64_t recalls = kvist_test_stats(store).recalls_total;
    KVIST_TEST_TRUE(!kvist_grant_recall(pool)); /* as when promotions need slots */
    KVIST_TEST_EQUAL(kvist_test_stats(store).recalls_total, recalls);
    kvist_test_settle(store);
    kvist_test_engine_close(&reader);
}

/* Use at once is what counts, and is remembered for a while; then the grants go to others. */
static void grants_follow_what_is_used_at_once(void)
{
    reopen(LARGE);
    struct kvist_test_engine *engines[2] = {kvist_test_engine_open(store, 1, 1),
                                            kvist_test_engine_open(store, 2, 1)};
    for (uint32_t index = 0; index < 2; index++) {
        (void)kvist_test_engine_attach(engines[index], kvist_test_pool_open(store, 1, SLOT_BYTES));
    }
    (void)store_slowly(engines, 2, 0, 900);
    uint32_t held = engines[0]->pools[0].grant_count;
    KVIST_TEST_TRUE(held <= 8);
    KVIST_TEST_TRUE(put_burst(engines[0], 100000, PROMPTS) <= held);
    for (uint64_t burst = 1; burst <= 5; burst++) {
        for (uint32_t round = 0; round < 3; round++) {
            kvist_test_engine_give_back(engines[0]);
            kvist_test_advance(store, 20000);
            kvist_test_settle(store);
        }
        /* The first one to come tells what the one before lacked. */
        uint32_t stored = put_burst(engines[0], 100000 + burst * 100, PROMPTS);
        KVIST_TEST_TRUE(burst == 1 || stored == PROMPTS);
    }
    kvist_test_advance(store, 30000000);
    kvist_test_advance(store, 30000000);
    (void)store_slowly(engines, 2, 200000, 40);
    KVIST_TEST_TRUE(engines[0]->pools[0].grant_count <= 8);
    kvist_test_engine_close(&engines[0]);
    kvist_test_engine_close(&engines[1]);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"a new engine stores whole prompts", a_new_engine_stores_whole_prompts},
        {"writers of a pool have even shares", writers_of_a_pool_have_even_shares},
        {"idle engines leave a share for each", idle_engines_leave_a_share_for_each},
        {"a stopped engine keeps its bound", a_stopped_engine_keeps_its_bound},
        {"a full arena is full of blocks", a_full_arena_is_full_of_blocks},
        {"engines of one pool leave it full", engines_of_one_pool_leave_it_full},
        {"engines of many pools leave it full", engines_of_many_pools_leave_it_full},
        {"unused grants go before blocks", unused_grants_go_before_blocks},
        {"a reader alone is asked for nothing", a_reader_alone_is_asked_for_nothing},
        {"grants follow what is used at once", grants_follow_what_is_used_at_once},
    };
    return kvist_unit_main("grants", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
}
