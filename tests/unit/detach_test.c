/* detach: pools that a session leaves, and what becomes of their ordinals, grants and memory. */
#include "tests/support/engine.h"
#include "tests/support/unit.h"

#include <stdio.h>
#include <stdlib.h>

#define SLOT_BYTES (64ULL << 10)
#define ARENA      (16ULL << 20) /* 256 slots */
#define POOLS      12U
#define STEPS      6000U

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

static struct kvist_store_pool_info info_of(uint32_t index)
{
    struct kvist_store_pool_info info;
    KVIST_TEST_FATAL(kvist_store_pool_info(store, index, &info));
    return info;
}

static struct kvist_store_pool *pool_of(uint8_t number)
{
    return kvist_test_pool_open(store, number, SLOT_BYTES);
}

static void check(void)
{
    const char *broken = kvist_store_check(store);
    if (broken != NULL) {
        (void)fprintf(stderr, "kvist_store_check: %s\n", broken);
    }
    KVIST_TEST_FATAL(broken == NULL);
}

static void
put_range(struct kvist_test_engine *engine, uint32_t ordinal, uint64_t first, uint64_t count)
{
    for (uint64_t number = first; number < first + count; number++) {
        for (unsigned wait = 0; engine->pools[ordinal].grant_count == 0 && wait < 400; wait++) {
            kvist_test_engine_unmap_revoked(engine); /* what its other pools have ahead */
            kvist_test_settle(store);
        }
        KVIST_TEST_STATUS(kvist_test_engine_put(engine, ordinal, number, SLOT_BYTES), KVIST_OK);
    }
}

static void a_session_goes_through_many_pools(void)
{
    struct kvist_test_engine *engine = kvist_test_engine_open(store, 1, 1);
    for (uint8_t number = 0; number < 3 * KVIST_SESSION_POOLS_MAX; number++) {
        KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool_of(number)), 0);
        put_range(engine, 0, 0, 10);
        KVIST_TEST_TRUE(kvist_test_stats(store).slots_granted > 0);
        struct kvist_store_grant grant;
        KVIST_TEST_FATAL(kvist_test_engine_take(engine, 0, &grant));
        kvist_test_engine_detach(engine, 0);
        check();
        KVIST_TEST_EQUAL(kvist_test_stats(store).slots_granted, 0);
        KVIST_TEST_EQUAL(info_of(number).sessions, 0);
        KVIST_TEST_TRUE(info_of(number).slots_ready > 0);
        /* Nothing is known of that place any more. */
        KVIST_TEST_STATUS(kvist_test_engine_commit(engine, 0, &grant, 99, SLOT_BYTES),
                          KVIST_INVALID);
        KVIST_TEST_STATUS(
            kvist_store_return(engine->session, 0, grant.slot, grant.ticket, grant.reservation),
            KVIST_INVALID);
        kvist_store_segment_mapped(engine->members[0].process, 0, 0, 1);
        kvist_store_segment_unmapped(engine->members[0].process, 0, 0, 1);
        kvist_test_engine_touch(engine, kvist_slot_ref(0, 1));
        kvist_store_detach(engine->members[0].process, 0);
        kvist_store_detach(engine->members[0].process, UINT32_MAX);
        kvist_test_settle(store);
    }
    kvist_test_engine_close(&engine);
}

static void holes_are_filled(void)
{
    struct kvist_test_engine *engine = kvist_test_engine_open(store, 1, 1);
    for (uint8_t number = 0; number < KVIST_SESSION_POOLS_MAX; number++) {
        KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool_of(number)), number);
        kvist_test_settle(store);
    }
    uint32_t ordinal = 0;
    struct kvist_store_process *process = engine->members[0].process;
    KVIST_TEST_STATUS(kvist_store_attach(process, pool_of(99), false, &ordinal, NULL), KVIST_BUSY);
    kvist_test_engine_detach(engine, 2);
    kvist_test_engine_detach(engine, 5);
    put_range(engine, 7, 0, 20);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool_of(4)), 4); /* it has its place */
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool_of(20)), 2);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool_of(5)), 5);
    KVIST_TEST_STATUS(kvist_store_attach(process, pool_of(99), false, &ordinal, NULL), KVIST_BUSY);
    kvist_test_settle(store);
    put_range(engine, 2, 0, 5);
    kvist_test_engine_close(&engine);
    KVIST_TEST_EQUAL(kvist_test_stats(store).slots_granted, 0);
    check();
}

static void the_last_process_ends_it(void)
{
    struct kvist_test_engine *engine = kvist_test_engine_open(store, 1, 2);
    struct kvist_store_pool *pool = pool_of(1);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool), 0);
    kvist_test_settle(store);
    put_range(engine, 0, 0, 5);
    KVIST_TEST_FATAL(kvist_test_engine_lease(engine, 0, 3, 1) != NULL);
    kvist_store_detach(engine->members[0].process, 0); /* the scheduler */
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(info_of(0).sessions, 1);
    KVIST_TEST_TRUE(kvist_test_stats(store).slots_granted > 0); /* a rank may be writing there */
    KVIST_TEST_EQUAL(info_of(0).slots_leased, 1);   /* and reading here */
    uint32_t ordinal = 9;
    struct kvist_store_process *scheduler = engine->members[0].process;
    KVIST_TEST_STATUS(kvist_store_attach(scheduler, pool_of(2), false, &ordinal, NULL), KVIST_OK);
    KVIST_TEST_EQUAL(ordinal, 1);
    kvist_store_detach(engine->members[1].process, 0);
    /* One that has lost its connection still has it mapped; one that has ended has not. */
    kvist_store_process_set_ctx(engine->members[2].process, NULL);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(info_of(0).sessions, 1);
    kvist_store_process_close(&engine->members[2].process);
    check();
    KVIST_TEST_EQUAL(info_of(0).sessions, 0);
    KVIST_TEST_EQUAL(kvist_test_stats(store).slots_granted, 0);
    KVIST_TEST_EQUAL(info_of(0).slots_leased, 0);
    KVIST_TEST_STATUS(kvist_store_attach(scheduler, pool_of(3), false, &ordinal, NULL), KVIST_OK);
    KVIST_TEST_EQUAL(ordinal, 0);
    kvist_test_engine_release(engine, 1);
    kvist_test_engine_close(&engine);
}

static void nothing_is_granted_without_a_rank(void)
{
    struct kvist_test_engine *engine = kvist_test_engine_open(store, 1, 2);
    struct kvist_store_pool *pool = pool_of(1);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool), 0);
    kvist_test_settle(store);
    put_range(engine, 0, 0, 5);
    uint32_t granted = engine->pools[0].granted_total;
    _Atomic uint32_t *mapped = (void *)((char *)engine->page + engine->geometry.mapped_offset);
    for (uint32_t segment = 0; segment < KVIST_SEGMENTS_MAX; segment++) {
        mapped[KVIST_SESSION_POOLS_MAX * KVIST_SEGMENTS_MAX + segment] = 0; /* of rank 1 */
    }
    struct kvist_store_process *rank = engine->members[2].process;
    kvist_store_detach(rank, 0);
    put_range(engine, 0, 100, engine->pools[0].grant_count);
    kvist_test_settle(store);
    kvist_test_advance(store, 5000000);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(engine->pools[0].granted_total, granted);
    uint32_t ordinal = 9;
    KVIST_TEST_STATUS(kvist_store_attach(rank, pool, false, &ordinal, NULL), KVIST_OK);
    KVIST_TEST_EQUAL(ordinal, 0);
    kvist_test_settle(store);
    KVIST_TEST_TRUE(engine->pools[0].granted_total > granted);
    kvist_test_engine_close(&engine);
}

static void a_rank_that_comes_back_gets_all_again(void)
{
    struct kvist_test_engine *engine = kvist_test_engine_open(store, 1, 1);
    struct kvist_store_pool *pool = pool_of(1);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool), 0);
    put_range(engine, 0, 0, 20);
    kvist_test_engine_detach(engine, 0);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool), 0);
    kvist_test_settle(store);
    for (uint64_t number = 0; number < 20; number++) {
        const void *bytes = kvist_test_engine_lease(engine, 0, number, 1);
        KVIST_TEST_TRUE(bytes != NULL && kvist_test_holds(bytes, number, SLOT_BYTES));
        kvist_test_engine_release(engine, 1);
    }
    put_range(engine, 0, 100, 20);
    kvist_test_engine_close(&engine);
}

/* The memory of a pool that nobody uses goes first, all of it. */
static void a_pool_that_was_left_gives_its_memory(void)
{
    struct kvist_test_engine *engine = kvist_test_engine_open(store, 1, 1);
    struct kvist_test_engine *other = kvist_test_engine_open(store, 2, 1);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool_of(1)), 0);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(other, pool_of(2)), 0);
    kvist_test_settle(store);
    put_range(engine, 0, 0, 200);
    put_range(other, 0, 0, 100);
    kvist_test_settle(store);
    uint64_t segments = info_of(1).segments;
    KVIST_TEST_EQUAL(kvist_test_stats(store).arena_used_bytes, ARENA);
    kvist_test_engine_detach(engine, 0);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool_of(3)), 0);
    kvist_test_settle(store);
    put_range(engine, 0, 1000, 500);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(info_of(0).segments, 0);
    KVIST_TEST_TRUE(info_of(1).segments >= segments);
    KVIST_TEST_TRUE(info_of(2).segments >= info_of(1).segments); /* both may want it */
    KVIST_TEST_EQUAL(kvist_test_stats(store).arena_used_bytes, ARENA);
    kvist_test_engine_close(&engine);
    kvist_test_engine_close(&other);
}

/* --- Any order ---------------------------------------------------------------------------------
 */

static uint64_t random_state;

static uint32_t draw(uint32_t below)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)((random_state >> 20) % below);
}

static void step(struct kvist_test_engine *engine)
{
    uint32_t ordinal = draw(KVIST_SESSION_POOLS_MAX);
    bool is_open = engine->pools[ordinal].pool != NULL;
    uint64_t number = draw(300);
    switch (draw(12)) {
    case 0:
        if (is_open) {
            kvist_test_engine_detach(engine, ordinal);
        }
        break;
    case 1: {
        struct kvist_store_pool *pool = pool_of((uint8_t)draw(POOLS));
        uint32_t given = 0;
        if (kvist_store_attach(engine->members[0].process, pool, false, &given, NULL) == KVIST_OK) {
            engine->pools[given].grant_count = 0; /* they are said again */
            KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool), given);
        }
        break;
    }
    case 2: /* a scheduler that goes and comes; its ranks stay */
        if (is_open && engine->rank_count > 1) {
            kvist_store_detach(engine->members[0].process, ordinal);
            check();
            if (draw(2) == 0) {
                engine->pools[ordinal].grant_count = 0;
                KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, engine->pools[ordinal].pool),
                                 ordinal);
            }
        }
        break;
    case 3:
        kvist_test_engine_touch(engine, kvist_slot_ref(ordinal, draw(300)));
        break;
    case 4:
        kvist_test_engine_unmap_revoked(engine);
        break;
    case 5: {
        struct kvist_store_grant grant;
        if (is_open && kvist_test_engine_take(engine, ordinal, &grant)) {
            KVIST_TEST_STATUS(
                kvist_store_return(
                    engine->session, ordinal, grant.slot, grant.ticket, grant.reservation),
                KVIST_OK);
        }
        break;
    }
    case 6:
        kvist_test_advance(store, 1); /* so that all segments are lent */
        if (is_open) {
            (void)kvist_test_engine_lease(engine, ordinal, number, draw(8));
        }
        break;
    default:
        if (is_open) {
            (void)kvist_test_engine_put(engine, ordinal, number, SLOT_BYTES);
        }
        break;
    }
}

static void any_order_keeps_the_invariants(void)
{
    struct kvist_test_engine *engines[3];
    random_state = 0x6b76697374ULL;
    for (uint8_t index = 0; index < 3; index++) {
        engines[index] = kvist_test_engine_open(store, index, index == 2 ? 2 : 1);
    }
    for (uint32_t number = 0; number < STEPS; number++) {
        step(engines[draw(3)]);
        check();
        if (draw(4) == 0) {
            kvist_test_advance(store, draw(30000));
            check();
        }
    }
    struct kvist_store_stats stats = kvist_test_stats(store);
    KVIST_TEST_TRUE(stats.commits_total > 500 && stats.evictions_total > 0 &&
                    stats.revokes_total > 0);
    for (uint32_t index = 0; index < 3; index++) {
        kvist_test_engine_close(&engines[index]);
        check();
    }
    KVIST_TEST_EQUAL(kvist_test_stats(store).slots_granted, 0);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"a session goes through many pools", a_session_goes_through_many_pools},
        {"holes are filled", holes_are_filled},
        {"the last process ends it", the_last_process_ends_it},
        {"nothing is granted without a rank", nothing_is_granted_without_a_rank},
        {"a rank that comes back gets all again", a_rank_that_comes_back_gets_all_again},
        {"a pool that was left gives its memory", a_pool_that_was_left_gives_its_memory},
        {"any order keeps the invariants", any_order_keeps_the_invariants},
    };
    return kvist_unit_main("detach", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
}
