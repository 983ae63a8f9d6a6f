/* spare: memory that is there before a pool asks for it; bounds, sizes, failures. */
#include "proto/base/fault.h"
#include "proto/shm/memfd.h"
#include "storage/internal.h"
#include "tests/support/engine.h"
#include "tests/support/unit.h"

#include <sys/mman.h>

#define ARENA       (64ULL << 20)
#define MOST        (ARENA / KVIST_SPARES_OF_ARENA)
#define LEAST       (1ULL << 20) /* a segment of an arena of that size */
#define SLOT_BYTES  (64ULL << 10)
#define LARGE_BYTES (512ULL << 10)

static struct kvist_store *store;
static struct kvist_test_engine *engine;

static void setup(void)
{
    struct kvist_store_options options = kvist_test_options(ARENA);
    options.populate_ahead = true;
    store = kvist_test_store_open(&options);
}

static void teardown(void)
{
    if (engine != NULL) {
        kvist_test_engine_close(&engine);
    }
    kvist_store_close(&store);
}

static void settle_full(void)
{
    KVIST_TEST_SETTLE_WHILE(store, store->spare.busy || kvist_spare_bytes(store) < MOST);
    KVIST_TEST_EQUAL(kvist_test_stats(store).spare_bytes, MOST);
}

static void attach(uint64_t slot_bytes)
{
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, slot_bytes);
    engine = kvist_test_engine_open(store, 1, 1);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool), 0);
}

/* Pages of a segment that exist, by what the kernel says of its mapping. */
static uint64_t resident_bytes(const struct kvist_segment *segment)
{
    static unsigned char pages[KVIST_SEGMENTS_MAX * 16];
    uint64_t count = segment->bytes / 4096;
    KVIST_TEST_FATAL(count <= sizeof(pages));
    KVIST_TEST_EQUAL(mincore(segment->map, segment->bytes, pages), 0);
    uint64_t resident = 0;
    for (uint64_t page = 0; page < count; page++) {
        resident += (pages[page] & 1U) != 0;
    }
    return resident * 4096;
}

static void memory_is_there_before_pools(void)
{
    settle_full();
    KVIST_TEST_EQUAL(kvist_test_stats(store).arena_used_bytes, 0);
    KVIST_TEST_EQUAL(store->spare.bytes, LEAST);
}

/* No larger than a segment, however large the arena; nothing is populated here. */
static void memory_of_a_large_arena_is_of_a_segment(void)
{
    for (uint64_t arena_bytes = 256ULL << 30; arena_bytes <= 4ULL << 40; arena_bytes *= 2) {
        kvist_store_close(&store);
        struct kvist_store_options options = kvist_test_options(arena_bytes);
        options.populate_ahead = true;
        store = kvist_test_store_open(&options);
        const struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
        KVIST_TEST_EQUAL(store->spare.bytes, pool->segment_bytes);
        KVIST_TEST_TRUE(store->spare.count_max > 0);
    }
}

/* A segment has its pages when it is made, before any worker has touched it. */
static void a_segment_is_made_of_it(void)
{
    settle_full();
    uint32_t serial = store->spare.ready[store->spare.count - 1].serial;
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    KVIST_TEST_STATUS(kvist_arena_grow(pool), KVIST_OK);
    KVIST_TEST_EQUAL(pool->segments[0].serial, serial);
    KVIST_TEST_EQUAL(resident_bytes(&pool->segments[0]), LEAST);
    KVIST_TEST_EQUAL(kvist_spare_bytes(store), MOST - LEAST);
    KVIST_TEST_STATUS(kvist_memfd_check_own(pool->segments[0].fd, LEAST, NULL), KVIST_OK);
    settle_full(); /* another one takes its place */
}

static void a_larger_segment_is_sized_and_sealed(void)
{
    uint64_t slot_bytes = 300 << 10; /* four of them are more than a spare */
    settle_full();
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, slot_bytes);
    KVIST_TEST_STATUS(kvist_arena_grow(pool), KVIST_OK);
    KVIST_TEST_TRUE(pool->segment_bytes > LEAST);
    KVIST_TEST_STATUS(kvist_memfd_check_own(pool->segments[0].fd, pool->segment_bytes, NULL),
                      KVIST_OK);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(resident_bytes(&pool->segments[0]), pool->segment_bytes);
}

static void pools_get_all_of_the_arena(void)
{
    settle_full(); /* a segment takes one, and as much again */
    attach(LARGE_BYTES);
    for (uint64_t number = 0; number < 2 * ARENA / LARGE_BYTES; number++) {
        KVIST_TEST_SETTLE_WHILE(store, engine->pools[0].grant_count == 0);
        KVIST_TEST_STATUS(kvist_test_engine_put(engine, 0, number, LARGE_BYTES), KVIST_OK);
        (void)kvist_store_turn(store, store->now_us + 1);
        /* The one that is coming goes when it has come. */
        KVIST_TEST_FATAL(store->used_bytes + store->spare.count * store->spare.bytes <= ARENA);
    }
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(store->used_bytes, ARENA);
    KVIST_TEST_EQUAL(kvist_spare_bytes(store), 0);
    for (uint64_t number = 2 * ARENA / LARGE_BYTES - 64; number < 2 * ARENA / LARGE_BYTES;
         number++) {
        const void *slot = kvist_test_engine_lease(engine, 0, number, 0);
        KVIST_TEST_FATAL(slot != NULL && kvist_test_holds(slot, number, LARGE_BYTES));
        kvist_test_engine_release(engine, 0);
    }
}

/* Segments take the place of what is there already when one more is on its way. */
static void one_that_is_coming_counts(void)
{
    struct kvist_spare *spare = &store->spare;
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    while (store->used_bytes < ARENA - MOST) {
        settle_full();
        KVIST_TEST_STATUS(kvist_arena_grow(pool), KVIST_OK);
    }
    uint64_t until_us = kvist_clock_now_us() + KVIST_TEST_PATIENCE_US;
    while ((spare->count < spare->count_max - 1 || !spare->busy) &&
           kvist_clock_now_us() < until_us) {
        (void)kvist_store_turn(store, store->now_us + 1);
    }
    KVIST_TEST_FATAL(spare->busy && spare->count == spare->count_max - 1);
    KVIST_TEST_EQUAL(kvist_spare_bytes(store), MOST);
    pool = kvist_test_pool_open(store, 2, LARGE_BYTES);
    KVIST_TEST_STATUS(kvist_arena_grow(pool), KVIST_OK);
    KVIST_TEST_EQUAL(pool->segment_bytes, 2 * LEAST);
    KVIST_TEST_EQUAL(spare->count, spare->count_max - 3); /* one was taken, one given back */
    KVIST_TEST_EQUAL(store->used_bytes + kvist_spare_bytes(store), ARENA);
}

/* Whatever fails, memory comes later, and nothing is lost. */
static void failures_are_tried_again(void)
{
    static const char *const points[] = {"memfd.create", "memfd.map", "memfd.populate"};
    for (unsigned index = 0; index < KVIST_ARRAY_COUNT(points); index++) {
        kvist_fault_arm(points[index], 1, false);
        kvist_test_settle(store);
        KVIST_TEST_TRUE(kvist_fault_disarm() >= 1);
        settle_full();
        kvist_spare_fini(store);
    }
    settle_full();
    uint32_t serial = store->spare.ready[store->spare.count - 1].serial;
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    kvist_fault_arm("memfd.seal", 1, false);
    KVIST_TEST_STATUS(kvist_arena_grow(pool), KVIST_OK);
    KVIST_TEST_TRUE(kvist_fault_disarm() >= 1);
    KVIST_TEST_TRUE(pool->segments[0].serial != serial); /* of memory that is new */
    KVIST_TEST_EQUAL(kvist_spare_bytes(store), MOST - LEAST);
    settle_full();
}

static void nobody_waits_for_it(void)
{
    kvist_test_advance(store, 0);
    KVIST_TEST_TRUE(store->spare.busy);
    kvist_store_close(&store); /* while one is coming */
    struct kvist_store_options options = kvist_test_options(ARENA);
    store = kvist_test_store_open(&options);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(kvist_spare_bytes(store), 0); /* not asked for */
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"memory is there before pools", memory_is_there_before_pools},
        {"memory of a large arena is of a segment", memory_of_a_large_arena_is_of_a_segment},
        {"a segment is made of it", a_segment_is_made_of_it},
        {"a larger segment is sized and sealed", a_larger_segment_is_sized_and_sealed},
        {"pools get all of the arena", pools_get_all_of_the_arena},
        {"one that is coming counts", one_that_is_coming_counts},
        {"failures are tried again", failures_are_tried_again},
        {"nobody waits for it", nobody_waits_for_it},
    };
    return kvist_unit_main("spare", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
}
