/* What holds nothing goes before a live block does: an idle pool's, and what a busy one has spare.
 */
#include "tests/support/engine.h"
#include "tests/support/unit.h"

#define SMALL_BYTES (64ULL << 10)
#define LARGE_BYTES (1ULL << 20)
#define ARENA       (64ULL << 20)
#define LARGE_SLOTS (ARENA / LARGE_BYTES) /* of which an engine is granted some ahead of need */
#define PACE_US     33000U                /* thirty blocks a second */

static struct kvist_store *store;
static struct kvist_test_engine *first;
static struct kvist_test_engine *second;
static struct kvist_store_pool *small;

static void setup(void)
{
    struct kvist_store_options options = kvist_test_options(ARENA);
    store = kvist_test_store_open(&options);
    small = kvist_test_pool_open(store, 1, SMALL_BYTES);
    first = kvist_test_engine_open(store, 1, 1);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(first, small), 0);
    kvist_test_settle(store);
}

static void teardown(void)
{
    if (first != NULL) {
        kvist_test_engine_close(&first);
    }
    kvist_test_engine_close(&second);
    kvist_store_close(&store);
}

/* The first engine fills the arena. */
static void fill(void)
{
    for (uint64_t number = 0; number < 2 * ARENA / SMALL_BYTES; number++) {
        for (unsigned round = 0; first->pools[0].grant_count == 0 && round < 50; round++) {
            kvist_test_settle(store);
        }
        KVIST_TEST_FATAL(kvist_test_engine_put(first, 0, number, SMALL_BYTES) == KVIST_OK);
    }
    kvist_test_rest(store);
    KVIST_TEST_EQUAL(kvist_test_stats(store).arena_used_bytes, ARENA);
}

static void note_cleared(void *ctx, enum kvist_status status, uint64_t blocks, uint64_t bytes)
{
    (void)blocks;
    (void)bytes;
    KVIST_TEST_STATUS(status, KVIST_OK);
    *(bool *)ctx = true;
}

static void clear(void)
{
    bool done = false;
    KVIST_TEST_STATUS(kvist_store_clear(store, small, note_cleared, &done), KVIST_OK);
    kvist_test_settle(store);
    KVIST_TEST_TRUE(done);
    KVIST_TEST_EQUAL(kvist_test_stats(store).slots_ready, 0);
}

static void second_comes(void)
{
    second = kvist_test_engine_open(store, 2, 1);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(second, kvist_test_pool_open(store, 2, LARGE_BYTES)),
                     0);
    kvist_test_settle(store);
}

static void answer_revokes(void)
{
    if (first != NULL) {
        kvist_test_engine_unmap_revoked(first);
    }
}

/* The second engine stores at a steady pace. Time stands still meanwhile: what is looked at is not how
   fast memory comes on this machine. */
static void put_paced(uint64_t count)
{
    kvist_test_clock(false);
    for (uint64_t number = 0; number < count; number++) {
        for (unsigned round = 0; second->pools[0].grant_count == 0 && round < 50; round++) {
            answer_revokes();
            kvist_test_advance(store, PACE_US / 4);
            kvist_test_settle(store);
        }
        KVIST_TEST_STATUS(kvist_test_engine_put(second, 0, number, LARGE_BYTES), KVIST_OK);
        for (unsigned turn = 0; turn < 4; turn++) {
            answer_revokes();
            kvist_test_advance(store, PACE_US / 4);
            kvist_test_settle(store);
        }
    }
    kvist_test_clock(true);
    kvist_test_settle(store);
}

static uint64_t count_ready(uint64_t count)
{
    uint64_t ready = 0;
    for (uint64_t number = 0; number < count; number++) {
        ready += kvist_test_engine_probe(second, 0, number) == KVIST_ENTRY_READY;
    }
    return ready;
}

static void memory_of_a_cleared_pool_is_taken_first(void)
{
    fill();
    kvist_test_engine_close(&first);
    clear();
    second_comes();
    uint64_t evicted = kvist_test_stats(store).evictions_total;
    put_paced(LARGE_SLOTS * 5 / 8);
    KVIST_TEST_EQUAL(kvist_test_stats(store).evictions_total, evicted);
}

/* Its engine is still there with what it is granted, and stores nothing. */
static void memory_of_a_cleared_pool_in_use_is_taken_first(void)
{
    fill();
    clear();
    second_comes();
    uint64_t evicted = kvist_test_stats(store).evictions_total;
    put_paced(LARGE_SLOTS / 4);
    KVIST_TEST_EQUAL(kvist_test_stats(store).evictions_total, evicted);
}

/* An idle pool with blocks: they go before those of the pool that is in use. */
static void an_idle_pool_yields_before_a_busy_one_evicts(void)
{
    fill();
    kvist_test_engine_close(&first);
    second_comes();
    put_paced(LARGE_SLOTS * 5 / 8);
    KVIST_TEST_EQUAL(count_ready(LARGE_SLOTS * 5 / 8), LARGE_SLOTS * 5 / 8);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"memory of a cleared pool is taken first", memory_of_a_cleared_pool_is_taken_first},
        {"memory of a cleared pool in use is taken first",
         memory_of_a_cleared_pool_in_use_is_taken_first},
        {"an idle pool yields before a busy one evicts",
         an_idle_pool_yields_before_a_busy_one_evicts},
    };
    return kvist_unit_main("yield", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
}
