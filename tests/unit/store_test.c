/* store: sessions, grants, commit and its refusals, clear, revoke, what is left after a session. */
#include "proto/base/fault.h"
#include "tests/support/engine.h"
#include "tests/support/unit.h"

#include <stdlib.h>

#define SLOT_BYTES (64ULL << 10)
#define ARENA      (16ULL << 20) /* 16 segments of 16 slots */

static struct kvist_store *store;

static void setup(void)
{
    struct kvist_store_options options = kvist_test_options(ARENA);
    store = kvist_test_store_open(&options);
}

static void teardown(void)
{
    const char *broken = kvist_store_check(store);
    KVIST_TEST_TRUE(broken == NULL);
    kvist_store_close(&store);
    KVIST_TEST_TRUE(store == NULL);
}

static void options_are_checked(void)
{
    struct kvist_store *other = NULL;
    struct kvist_store_options options = kvist_test_options(1 << 20);
    KVIST_TEST_STATUS(kvist_store_open(&options, &other, NULL), KVIST_INVALID);
    options = kvist_test_options(ARENA);
    options.checksum_threads = 0;
    KVIST_TEST_STATUS(kvist_store_open(&options, &other, NULL), KVIST_INVALID);
    KVIST_TEST_TRUE(other == NULL);
}

static void pools_are_checked(void)
{
    struct kvist_tier_pool about = {.slot_bytes = 4097};
    struct kvist_store_pool *pool = NULL;
    KVIST_TEST_STATUS(kvist_store_pool_open(store, &about, &pool, NULL), KVIST_INVALID);
    about.slot_bytes = KVIST_BLOCK_BYTES_MAX + 4096;
    KVIST_TEST_STATUS(kvist_store_pool_open(store, &about, &pool, NULL), KVIST_INVALID);
    about.slot_bytes = 8 << 20;
    KVIST_TEST_STATUS(kvist_store_pool_open(store, &about, &pool, NULL), KVIST_NO_SPACE);
    about.slot_bytes = SLOT_BYTES;
    KVIST_TEST_STATUS(kvist_store_pool_open(store, &about, &pool, NULL), KVIST_OK);
    struct kvist_store_pool *again = NULL;
    KVIST_TEST_STATUS(kvist_store_pool_open(store, &about, &again, NULL), KVIST_OK);
    KVIST_TEST_TRUE(again == pool);
    about.slot_bytes = 2 * SLOT_BYTES;
    KVIST_TEST_STATUS(kvist_store_pool_open(store, &about, &again, NULL), KVIST_INVALID);
}

static void pools_are_bounded_and_empty_ones_make_place(void)
{
    for (unsigned number = 0; number < KVIST_POOLS_MAX; number++) {
        struct kvist_tier_pool about = {.slot_bytes = SLOT_BYTES};
        memcpy(about.pool_id, &number, sizeof(number));
        struct kvist_store_pool *pool = NULL;
        KVIST_TEST_STATUS(kvist_store_pool_open(store, &about, &pool, NULL), KVIST_OK);
    }
    struct kvist_test_engine *engine = kvist_test_engine_open(store, 1, 1);
    struct kvist_store_pool *fresh = kvist_test_pool_open(store, 77, SLOT_BYTES);
    uint32_t ordinal = kvist_test_engine_attach(engine, fresh);
    kvist_test_settle(store);
    KVIST_TEST_STATUS(kvist_test_engine_put(engine, ordinal, 1, SLOT_BYTES), KVIST_OK);
    KVIST_TEST_EQUAL(kvist_test_stats(store).pools, KVIST_POOLS_MAX);
    kvist_test_engine_close(&engine);
}

static void a_block_lives(void)
{
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    struct kvist_test_engine *writer = kvist_test_engine_open(store, 1, 1);
    struct kvist_test_engine *reader = kvist_test_engine_open(store, 2, 1);
    uint32_t ordinal = kvist_test_engine_attach(writer, pool);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(reader, pool), ordinal);
    kvist_test_settle(store);
    KVIST_TEST_TRUE(writer->pools[ordinal].grant_count > 0);
    KVIST_TEST_STATUS(kvist_test_engine_put(writer, ordinal, 7, SLOT_BYTES), KVIST_OK);
    const void *bytes = kvist_test_engine_lease(reader, ordinal, 7, 0);
    KVIST_TEST_FATAL(bytes != NULL);
    KVIST_TEST_TRUE(kvist_test_holds(bytes, 7, SLOT_BYTES));
    KVIST_TEST_TRUE(kvist_test_engine_lease(reader, ordinal, 8, 1) == NULL);
    KVIST_TEST_EQUAL(kvist_test_stats(store).leased_slots, 1);
    KVIST_TEST_EQUAL(kvist_test_stats(store).leased_bytes, SLOT_BYTES);

    kvist_test_settle_sums(store, 1);
    struct kvist_store_block_info info;
    uint8_t key[KVIST_KEY_BYTES];
    kvist_test_key(7, key);
    KVIST_TEST_STATUS(kvist_store_inspect(pool, key, &info), KVIST_OK);
    KVIST_TEST_TRUE(info.in_dram && !info.on_nvme && info.leased && info.checksummed);
    KVIST_TEST_EQUAL(info.block_bytes, SLOT_BYTES);
    kvist_test_engine_release(reader, 0);
    KVIST_TEST_STATUS(kvist_store_inspect(pool, key, &info), KVIST_OK);
    KVIST_TEST_TRUE(info.leased); /* leases are looked at once, and not for each answer */
    kvist_store_count_leases(store);
    KVIST_TEST_STATUS(kvist_store_inspect(pool, key, &info), KVIST_OK);
    KVIST_TEST_TRUE(!info.leased);
    kvist_test_key(8, key);
    KVIST_TEST_STATUS(kvist_store_inspect(pool, key, &info), KVIST_NOT_FOUND);

    kvist_test_engine_close(&writer);
    KVIST_TEST_TRUE(kvist_test_engine_lease(reader, ordinal, 7, 0) != NULL);
    kvist_test_engine_close(&reader);
    struct kvist_store_stats stats = kvist_test_stats(store);
    KVIST_TEST_EQUAL(stats.slots_ready, 1);
    KVIST_TEST_EQUAL(stats.slots_granted, 0);
    KVIST_TEST_EQUAL(stats.leased_slots, 0);
}

/* Every field of a commit that a peer can get wrong. */
static void commits_are_refused(void)
{
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    struct kvist_test_engine *engine = kvist_test_engine_open(store, 1, 1);
    struct kvist_test_engine *other = kvist_test_engine_open(store, 2, 1);
    uint32_t ordinal = kvist_test_engine_attach(engine, pool);
    (void)kvist_test_engine_attach(other, pool);
    kvist_test_settle(store);
    struct kvist_store_grant good;
    KVIST_TEST_FATAL(kvist_test_engine_take(engine, ordinal, &good));
    kvist_test_engine_mark(engine, 0, &good);
    struct kvist_store_commit commit = {
        .slot = good.slot,
        .ticket = good.ticket,
        .reservation = good.reservation,
        .block_bytes = SLOT_BYTES,
    };
    kvist_test_key(1, commit.key);
    struct kvist_store_commit bad = commit;
    bad.slot = UINT32_MAX;
    KVIST_TEST_STATUS(kvist_store_commit(engine->session, ordinal, &bad), KVIST_INVALID);
    bad = commit;
    bad.ticket = KVIST_GRANTS_MAX;
    KVIST_TEST_STATUS(kvist_store_commit(engine->session, ordinal, &bad), KVIST_INVALID);
    bad = commit;
    bad.reservation = 0;
    KVIST_TEST_STATUS(kvist_store_commit(engine->session, ordinal, &bad), KVIST_INVALID);
    bad = commit;
    bad.block_bytes = SLOT_BYTES + 1;
    KVIST_TEST_STATUS(kvist_store_commit(engine->session, ordinal, &bad), KVIST_INVALID);
    bad = commit;
    bad.block_bytes = 0;
    KVIST_TEST_STATUS(kvist_store_commit(engine->session, ordinal, &bad), KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_store_commit(engine->session, ordinal + 1, &commit), KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_store_commit(engine->session, UINT32_MAX, &commit), KVIST_INVALID);
    KVIST_TEST_EQUAL(kvist_test_stats(store).commits_refused_total, 7);
    /* Another session cannot commit it, nor give it back: nothing changes. */
    KVIST_TEST_STATUS(kvist_store_commit(other->session, ordinal, &commit), KVIST_NOT_FOUND);
    KVIST_TEST_STATUS(
        kvist_store_return(other->session, ordinal, good.slot, good.ticket, good.reservation),
        KVIST_NOT_FOUND);
    KVIST_TEST_STATUS(kvist_store_commit(engine->session, ordinal, &commit), KVIST_OK);
    KVIST_TEST_STATUS(kvist_store_commit(engine->session, ordinal, &commit), KVIST_OK);
    KVIST_TEST_EQUAL(kvist_test_stats(store).commits_total, 1);
    kvist_test_engine_close(&engine);
    kvist_test_engine_close(&other);
}

static void all_marks_of_all_ranks_must_stand(void)
{
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    struct kvist_test_engine *engine = kvist_test_engine_open(store, 1, 3);
    uint32_t ordinal = kvist_test_engine_attach(engine, pool);
    kvist_test_settle(store);
    struct kvist_store_grant grant;
    for (uint32_t missing = 0; missing < 3; missing++) {
        KVIST_TEST_FATAL(kvist_test_engine_take(engine, ordinal, &grant));
        for (uint32_t rank = 0; rank < 3; rank++) {
            if (rank != missing) {
                kvist_test_engine_mark(engine, rank, &grant);
            }
        }
        KVIST_TEST_STATUS(kvist_test_engine_commit(engine, ordinal, &grant, 1, SLOT_BYTES),
                          KVIST_NOT_FOUND);
        KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, ordinal, 1), KVIST_ENTRY_EMPTY);
    }
    KVIST_TEST_EQUAL(kvist_test_stats(store).commits_unmarked_total, 3);
    /* A mark of an earlier reservation on the same ticket is none. */
    KVIST_TEST_FATAL(kvist_test_engine_take(engine, ordinal, &grant));
    struct kvist_store_grant stale = grant;
    stale.reservation--;
    for (uint32_t rank = 0; rank < 3; rank++) {
        kvist_test_engine_mark(engine, rank, &stale);
    }
    KVIST_TEST_STATUS(kvist_test_engine_commit(engine, ordinal, &grant, 1, SLOT_BYTES),
                      KVIST_NOT_FOUND);
    KVIST_TEST_STATUS(kvist_test_engine_put(engine, ordinal, 1, SLOT_BYTES), KVIST_OK);
    kvist_test_settle(store);
    kvist_test_engine_close(&engine);
}

static void the_first_commit_wins(void)
{
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    struct kvist_test_engine *one = kvist_test_engine_open(store, 1, 1);
    struct kvist_test_engine *two = kvist_test_engine_open(store, 2, 1);
    uint32_t ordinal = kvist_test_engine_attach(one, pool);
    (void)kvist_test_engine_attach(two, pool);
    kvist_test_settle(store);
    KVIST_TEST_STATUS(kvist_test_engine_put(one, ordinal, 5, SLOT_BYTES), KVIST_OK);
    KVIST_TEST_STATUS(kvist_test_engine_put(two, ordinal, 5, SLOT_BYTES), KVIST_EXISTS);
    KVIST_TEST_EQUAL(kvist_test_stats(store).slots_ready, 1);
    KVIST_TEST_EQUAL(kvist_test_stats(store).commits_duplicate_total, 1);
    kvist_test_settle(store);
    kvist_test_engine_close(&one);
    kvist_test_engine_close(&two);
}

static void grants_need_all_ranks_and_are_bounded(void)
{
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    struct kvist_test_engine *alone = kvist_test_engine_open(store, 1, 1);
    uint32_t ordinal = kvist_test_engine_attach(alone, pool);
    kvist_test_settle(store);
    uint32_t held = alone->pools[ordinal].grant_count;
    struct kvist_store_stats stats = kvist_test_stats(store);
    KVIST_TEST_EQUAL(stats.slots_granted, held);

    struct kvist_test_engine *deaf = kvist_test_engine_open(store, 2, 2);
    deaf->maps_nothing = true;
    (void)kvist_test_engine_attach(deaf, pool);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(deaf->pools[ordinal].grant_count, 0);
    struct kvist_test_engine *other = kvist_test_engine_open(store, 3, 1);
    (void)kvist_test_engine_attach(other, pool);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(held, ARENA / SLOT_BYTES / 4); /* the arena has room: half of a half */
    KVIST_TEST_EQUAL(other->pools[ordinal].grant_count, ARENA / SLOT_BYTES / 8); /* of a quarter */

    /* Tickets and reservations are unique while they are out. */
    struct kvist_store_grant a;
    struct kvist_store_grant b;
    KVIST_TEST_FATAL(kvist_test_engine_take(alone, ordinal, &a));
    KVIST_TEST_FATAL(kvist_test_engine_take(alone, ordinal, &b));
    KVIST_TEST_TRUE(a.ticket != b.ticket && a.reservation != b.reservation && a.slot != b.slot);
    KVIST_TEST_STATUS(kvist_store_return(alone->session, ordinal, a.slot, a.ticket, a.reservation),
                      KVIST_OK);
    KVIST_TEST_STATUS(kvist_store_return(alone->session, ordinal, a.slot, a.ticket, a.reservation),
                      KVIST_NOT_FOUND);
    KVIST_TEST_STATUS(kvist_store_return(alone->session, ordinal, a.slot, a.ticket, 1),
                      KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_store_return(alone->session, 9, a.slot, a.ticket, a.reservation),
                      KVIST_INVALID);
    kvist_test_settle(store);
    kvist_test_engine_close(&deaf);
    kvist_test_engine_close(&other);
    kvist_test_engine_close(&alone);
    KVIST_TEST_EQUAL(kvist_test_stats(store).slots_granted, 0);
}

static void a_process_that_comes_back_is_told_again(void)
{
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    struct kvist_test_engine *engine = kvist_test_engine_open(store, 1, 1);
    uint32_t ordinal = kvist_test_engine_attach(engine, pool);
    kvist_test_settle(store);
    struct kvist_test_pool *mine = &engine->pools[ordinal];
    uint32_t held = mine->grant_count;
    struct kvist_test_member *member = &engine->members[0];
    kvist_store_process_set_ctx(member->process, NULL);
    KVIST_TEST_STATUS(kvist_test_engine_put(engine, ordinal, 1, SLOT_BYTES), KVIST_OK);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(mine->grant_count, held - 1);
    kvist_store_process_set_ctx(member->process, member);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(mine->grant_count, held - 1); /* nothing before it attaches */
    mine->grant_count = 0;
    (void)kvist_test_engine_attach(engine, pool);
    kvist_test_settle(store);
    KVIST_TEST_TRUE(mine->grant_count >= held - 1);
    KVIST_TEST_STATUS(kvist_test_engine_put(engine, ordinal, 2, SLOT_BYTES), KVIST_OK);
    kvist_test_settle(store);
    kvist_test_engine_close(&engine);
}

struct clear_result {
    unsigned calls;
    enum kvist_status status;
    uint64_t blocks;
};

static void cleared(void *ctx, enum kvist_status status, uint64_t blocks, uint64_t bytes)
{
    (void)bytes;
    struct clear_result *result = ctx;
    result->calls++;
    result->status = status;
    result->blocks = blocks;
}

static void clearing_waits_for_leases_and_stales_grants(void)
{
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    struct kvist_test_engine *engine = kvist_test_engine_open(store, 1, 1);
    uint32_t ordinal = kvist_test_engine_attach(engine, pool);
    kvist_test_settle(store);
    for (uint64_t number = 0; number < 5; number++) {
        KVIST_TEST_STATUS(kvist_test_engine_put(engine, ordinal, number, SLOT_BYTES), KVIST_OK);
    }
    const void *bytes = kvist_test_engine_lease(engine, ordinal, 3, 9);
    KVIST_TEST_FATAL(bytes != NULL);
    struct kvist_store_grant early[8];
    for (unsigned index = 0; index < 8; index++) {
        KVIST_TEST_FATAL(kvist_test_engine_take(engine, ordinal, &early[index]));
        kvist_test_engine_mark(engine, 0, &early[index]);
    }

    struct clear_result result = {.calls = 0};
    KVIST_TEST_STATUS(kvist_store_clear(store, pool, cleared, &result), KVIST_OK);
    KVIST_TEST_EQUAL(result.calls, 0);
    KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, ordinal, 1), KVIST_ENTRY_EMPTY);
    for (uint64_t index = 0; index < 4; index++) {
        KVIST_TEST_STATUS(
            kvist_test_engine_commit(engine, ordinal, &early[index], index, SLOT_BYTES),
            KVIST_STALE);
    }
    kvist_test_settle(store);
    for (uint64_t index = 4; index < 8; index++) {
        KVIST_TEST_STATUS(
            kvist_test_engine_commit(engine, ordinal, &early[index], index, SLOT_BYTES),
            KVIST_STALE);
    }
    KVIST_TEST_EQUAL(result.calls, 1);
    KVIST_TEST_EQUAL(result.blocks, 5);
    KVIST_TEST_STATUS(result.status, KVIST_OK);
    KVIST_TEST_EQUAL(kvist_test_stats(store).slots_retired, 1);
    KVIST_TEST_TRUE(kvist_test_holds(bytes, 3, SLOT_BYTES));
    struct kvist_store_pool_info info;
    KVIST_TEST_FATAL(kvist_store_pool_info(store, 0, &info));
    KVIST_TEST_EQUAL(info.generation, 2);
    KVIST_TEST_EQUAL(info.slots_leased, 1);

    kvist_test_engine_release(engine, 9);
    KVIST_TEST_FATAL(kvist_store_pool_info(store, 0, &info));
    KVIST_TEST_EQUAL(info.slots_leased, 1); /* as of the last count */
    kvist_test_advance(store, 100000);
    KVIST_TEST_EQUAL(kvist_test_stats(store).slots_retired, 0);
    KVIST_TEST_EQUAL(kvist_test_stats(store).commits_stale_total, 8);
    /* What was granted before goes back, and is replaced at once. */
    struct kvist_store_grant stale;
    uint32_t returned = 0;
    for (; kvist_test_engine_take(engine, ordinal, &stale); returned++) {
        KVIST_TEST_STATUS(
            kvist_store_return(
                engine->session, ordinal, stale.slot, stale.ticket, stale.reservation),
            KVIST_OK);
    }
    KVIST_TEST_TRUE(returned > 0);
    kvist_test_settle(store);
    KVIST_TEST_TRUE(engine->pools[ordinal].grant_count >= returned);
    KVIST_TEST_STATUS(kvist_test_engine_put(engine, ordinal, 3, SLOT_BYTES), KVIST_OK);
    kvist_test_engine_close(&engine);
}

/* Put blocks first .. first + count - 1, with turns between. @return how many were stored */
static uint64_t
put_many(struct kvist_test_engine *engine, uint32_t ordinal, uint64_t first, uint64_t count)
{
    uint64_t stored = 0;
    for (uint64_t number = first; number < first + count; number++) {
        if (engine->pools[ordinal].grant_count == 0) {
            kvist_test_settle(store);
        }
        stored += kvist_test_engine_put(engine, ordinal, number, SLOT_BYTES) == KVIST_OK;
    }
    kvist_test_settle(store);
    return stored;
}

static void a_second_pool_gets_its_share(void)
{
    struct kvist_store_pool *first_pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    struct kvist_store_pool *second_pool = kvist_test_pool_open(store, 2, SLOT_BYTES);
    struct kvist_test_engine *first = kvist_test_engine_open(store, 1, 1);
    uint32_t ordinal = kvist_test_engine_attach(first, first_pool);
    KVIST_TEST_EQUAL(put_many(first, ordinal, 0, 400), 400);
    struct kvist_store_stats stats = kvist_test_stats(store);
    KVIST_TEST_EQUAL(stats.arena_used_bytes, ARENA);
    KVIST_TEST_TRUE(stats.evictions_total > 100);

    /* Returned grants leave segments without any. */
    struct kvist_store_grant grant;
    while (kvist_test_engine_take(first, ordinal, &grant)) {
        KVIST_TEST_STATUS(kvist_store_return(
                              first->session, ordinal, grant.slot, grant.ticket, grant.reservation),
                          KVIST_OK);
    }
    struct kvist_test_engine *second = kvist_test_engine_open(store, 2, 1);
    (void)kvist_test_engine_attach(second, second_pool);
    kvist_test_settle(store);
    KVIST_TEST_TRUE(kvist_test_stats(store).revokes_total > 0);
    /* The members have not unmapped it: its memory counts, and the second pool has none. */
    KVIST_TEST_EQUAL(kvist_test_stats(store).arena_used_bytes, ARENA);
    KVIST_TEST_EQUAL(second->pools[0].grant_count, 0);
    for (unsigned round = 0; round < 40; round++) {
        kvist_test_engine_unmap_revoked(first);
        (void)put_many(second, 0, round * 10, 10);
    }
    KVIST_TEST_TRUE(second->pools[0].granted_total > 0);
    struct kvist_store_pool_info info[2];
    KVIST_TEST_FATAL(kvist_store_pool_info(store, 0, &info[0]));
    KVIST_TEST_FATAL(kvist_store_pool_info(store, 1, &info[1]));
    KVIST_TEST_TRUE(info[1].segments >= 6 && info[0].segments >= 6);
    KVIST_TEST_TRUE(info[0].segments + info[1].segments <= ARENA / (1 << 20));
    kvist_test_engine_close(&first);
    kvist_test_engine_close(&second);
}

static void an_idle_pool_yields_and_its_member_s_end_frees_it(void)
{
    struct kvist_store_pool *first_pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    struct kvist_store_pool *second_pool = kvist_test_pool_open(store, 2, SLOT_BYTES);
    struct kvist_test_engine *first = kvist_test_engine_open(store, 1, 1);
    uint32_t ordinal = kvist_test_engine_attach(first, first_pool);
    (void)put_many(first, ordinal, 0, 300);
    kvist_test_engine_close(&first);
    KVIST_TEST_EQUAL(kvist_test_stats(store).arena_used_bytes, ARENA);
    struct kvist_test_engine *second = kvist_test_engine_open(store, 2, 1);
    (void)kvist_test_engine_attach(second, second_pool);
    struct kvist_store_pool_info info = {0};
    /* While memory is on its way the pool evicts its own: how fast it grows is the machine's. */
    for (uint32_t round = 0; round < 20 && info.segments < 10; round++) {
        KVIST_TEST_EQUAL(put_many(second, 0, round * 200, 200), 200);
        KVIST_TEST_FATAL(kvist_store_pool_info(store, 1, &info));
    }
    KVIST_TEST_TRUE(info.segments >= 10);
    kvist_test_engine_close(&second);
}

static void places_in_a_session_are_bounded(void)
{
    struct kvist_store_session *session = NULL;
    uint8_t id[16] = {1};
    KVIST_TEST_STATUS(kvist_store_session_open(store, id, 0, &session, NULL), KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_store_session_open(store, id, KVIST_RANKS_MAX + 1, &session, NULL),
                      KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_store_session_open(store, id, 2, &session, NULL), KVIST_OK);
    struct kvist_store_session *again = NULL;
    KVIST_TEST_STATUS(kvist_store_session_open(store, id, 2, &again, NULL), KVIST_EXISTS);
    struct kvist_store_process *process = NULL;
    KVIST_TEST_STATUS(kvist_store_process_open(session, false, true, 2, NULL, &process, NULL),
                      KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_store_process_open(session, true, false, 0, NULL, &process, NULL),
                      KVIST_OK);
    struct kvist_store_process *other = NULL;
    KVIST_TEST_STATUS(kvist_store_process_open(session, true, false, 0, NULL, &other, NULL),
                      KVIST_EXISTS);
    KVIST_TEST_STATUS(kvist_store_process_open(session, false, true, 1, NULL, &other, NULL),
                      KVIST_OK);
    KVIST_TEST_STATUS(kvist_store_process_open(session, false, true, 1, NULL, &other, NULL),
                      KVIST_EXISTS);
    kvist_store_process_close(&process);
    KVIST_TEST_STATUS(kvist_store_process_open(session, true, false, 0, NULL, &process, NULL),
                      KVIST_OK);
    uint32_t ordinal = 0;
    for (uint8_t number = 0; number < KVIST_SESSION_POOLS_MAX; number++) {
        struct kvist_store_pool *pool = kvist_test_pool_open(store, number, SLOT_BYTES);
        KVIST_TEST_STATUS(kvist_store_attach(process, pool, false, &ordinal, NULL), KVIST_OK);
        KVIST_TEST_EQUAL(ordinal, number);
    }
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 99, SLOT_BYTES);
    KVIST_TEST_STATUS(kvist_store_attach(process, pool, false, &ordinal, NULL), KVIST_BUSY);
    /* Whatever a peer names here is ignored. */
    kvist_store_segment_mapped(process, UINT32_MAX, 0, 1);
    kvist_store_segment_mapped(process, 0, UINT32_MAX, 1);
    kvist_store_segment_unmapped(process, 0, 0, 0);
    kvist_store_segment_unmapped(process, 8, 600, 5);
    kvist_store_session_close(&session);

    struct kvist_store_session *many[KVIST_SESSIONS_MAX];
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX; index++) {
        uint8_t name[16] = {(uint8_t)index, 7};
        KVIST_TEST_FATAL(kvist_store_session_open(store, name, 1, &many[index], NULL) == KVIST_OK);
    }
    KVIST_TEST_STATUS(kvist_store_session_open(store, id, 1, &session, NULL), KVIST_BUSY);
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX; index++) {
        kvist_store_session_close(&many[index]);
    }
}

/* --- Suspects -------------------------------------------------------------------------------- */

/* Of blocks 0 to count - 1, with checksums. */
static struct kvist_test_engine *engine_with_blocks(uint64_t count, uint64_t slot_bytes)
{
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, slot_bytes);
    struct kvist_test_engine *engine = kvist_test_engine_open(store, 1, 1);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool), 0);
    for (uint64_t number = 0; number < count; number++) {
        while (engine->pools[0].grant_count == 0) {
            kvist_test_settle(store);
        }
        KVIST_TEST_STATUS(kvist_test_engine_put(engine, 0, number, slot_bytes), KVIST_OK);
    }
    kvist_test_settle_sums(store, count);
    return engine;
}

static void flip(struct kvist_test_engine *engine, uint64_t number)
{
    uint8_t *bytes = kvist_test_engine_bytes(engine, 0, number);
    KVIST_TEST_FATAL(bytes != NULL);
    bytes[SLOT_BYTES - 1] ^= 0x80;
}

/* Until what was suspected before has been looked at: a corrupt block that comes last is gone. */
static void settle_suspects(struct kvist_test_engine *engine, uint64_t last)
{
    KVIST_TEST_SETTLE_WHILE(store, kvist_test_engine_probe(engine, 0, last) == KVIST_ENTRY_READY);
    KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, 0, last), KVIST_ENTRY_EMPTY);
}

static void a_suspect_is_dropped_when_it_is_corrupt(void)
{
    struct kvist_test_engine *engine = engine_with_blocks(4, SLOT_BYTES);
    flip(engine, 1);
    flip(engine, 3);
    const void *leased = kvist_test_engine_lease(engine, 0, 1, 5);
    KVIST_TEST_FATAL(leased != NULL);
    KVIST_TEST_STATUS(kvist_test_engine_suspect(engine, 0, 0, 4), KVIST_OK);
    settle_suspects(engine, 3);
    kvist_test_advance(store, 100000);
    KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, 0, 0), KVIST_ENTRY_READY);
    KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, 0, 1), KVIST_ENTRY_EMPTY);
    KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, 0, 2), KVIST_ENTRY_READY);
    struct kvist_store_stats stats = kvist_test_stats(store);
    KVIST_TEST_EQUAL(stats.suspects_total, 4);
    KVIST_TEST_EQUAL(stats.suspects_confirmed_total, 2);
    KVIST_TEST_EQUAL(stats.checksum_mismatch_total, 2);
    KVIST_TEST_EQUAL(stats.checksums_total, 4);
    KVIST_TEST_EQUAL(stats.slots_retired, 1); /* it is leased: nobody writes there */
    kvist_test_engine_release(engine, 5);
    kvist_test_advance(store, 100000);
    KVIST_TEST_EQUAL(kvist_test_stats(store).slots_retired, 0);
    KVIST_TEST_STATUS(kvist_test_engine_put(engine, 0, 1, SLOT_BYTES), KVIST_OK);
    KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, 0, 1), KVIST_ENTRY_READY);
    kvist_test_engine_close(&engine);
}

/* Nobody knows what it was: it gets its checksum, and is judged by that from then on. */
static void a_suspect_without_a_checksum_stays(void)
{
    struct kvist_test_engine *engine = engine_with_blocks(2, SLOT_BYTES);
    struct kvist_store_grant grant;
    KVIST_TEST_FATAL(kvist_test_engine_take(engine, 0, &grant));
    kvist_test_fill(kvist_test_engine_slot(engine, 0, grant.slot), 7, SLOT_BYTES);
    kvist_test_engine_mark(engine, 0, &grant);
    KVIST_TEST_STATUS(kvist_test_engine_commit(engine, 0, &grant, 7, SLOT_BYTES), KVIST_OK);
    flip(engine, 7);
    flip(engine, 0);
    KVIST_TEST_STATUS(kvist_test_engine_suspect(engine, 0, 7, 1), KVIST_OK);
    KVIST_TEST_STATUS(kvist_test_engine_suspect(engine, 0, 0, 1), KVIST_OK);
    settle_suspects(engine, 0);
    kvist_test_settle_sums(store, 3);
    KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, 0, 7), KVIST_ENTRY_READY);
    KVIST_TEST_EQUAL(kvist_test_stats(store).suspects_confirmed_total, 1);
    flip(engine, 7);
    KVIST_TEST_STATUS(kvist_test_engine_suspect(engine, 0, 7, 1), KVIST_OK);
    settle_suspects(engine, 7);
    KVIST_TEST_EQUAL(kvist_test_stats(store).suspects_confirmed_total, 2);
    kvist_test_engine_close(&engine);
}

static void suspects_are_checked_and_bounded(void)
{
    struct kvist_test_engine *engine = engine_with_blocks(100, SLOT_BYTES);
    KVIST_TEST_STATUS(kvist_test_engine_suspect(engine, 1, 0, 1), KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_test_engine_suspect(engine, KVIST_SESSION_POOLS_MAX, 0, 1),
                      KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_test_engine_suspect(engine, 0, 1000, KVIST_SUSPECT_KEYS_MAX + 1),
                      KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_test_engine_suspect(engine, 0, 1000, KVIST_SUSPECT_KEYS_MAX),
                      KVIST_OK); /* they are not there */
    KVIST_TEST_EQUAL(kvist_test_stats(store).suspects_ignored_total, 0);
    /* Within one turn: the same blocks again and again wait once, and are read once. */
    for (unsigned round = 0; round < 1000; round++) {
        KVIST_TEST_STATUS(kvist_test_engine_suspect(engine, 0, 0, 50), KVIST_OK);
    }
    KVIST_TEST_EQUAL(kvist_test_stats(store).suspects_ignored_total, 0);
    KVIST_TEST_EQUAL(kvist_test_stats(store).suspects_total, KVIST_SUSPECT_KEYS_MAX + 50000);
    flip(engine, 50);
    KVIST_TEST_STATUS(kvist_test_engine_suspect(engine, 0, 50, 1), KVIST_OK);
    settle_suspects(engine, 50);
    KVIST_TEST_EQUAL(kvist_test_stats(store).suspects_confirmed_total, 1);
    KVIST_TEST_EQUAL(kvist_test_stats(store).slots_ready, 99);
    kvist_test_engine_close(&engine);
}

/* Until a turn lets time pass, a session gets no more read than one burst. */
static void suspicion_has_its_price(void)
{
    enum { COUNT = 70, LARGE = 4 << 20, BURST = KVIST_BLOCK_BYTES_MAX / LARGE };
    struct kvist_store_options options = kvist_test_options(64 * ARENA);
    kvist_store_close(&store);
    store = kvist_test_store_open(&options); /* where nothing is evicted */
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, LARGE);
    struct kvist_test_engine *engine = kvist_test_engine_open(store, 1, 1);
    struct kvist_test_engine *other = kvist_test_engine_open(store, 2, 1);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool), 0);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(other, pool), 0);
    for (uint64_t number = 0; number < COUNT; number++) {
        struct kvist_store_grant grant;
        while (!kvist_test_engine_take(engine, 0, &grant)) {
            kvist_test_settle(store);
        }
        kvist_test_engine_mark(engine, 0, &grant); /* what is in it does not matter */
        KVIST_TEST_STATUS(kvist_test_engine_commit(engine, 0, &grant, number, LARGE), KVIST_OK);
    }
    KVIST_TEST_STATUS(kvist_test_engine_suspect(engine, 0, 0, KVIST_SUSPECT_KEYS_MAX), KVIST_OK);
    KVIST_TEST_EQUAL(kvist_test_stats(store).suspects_ignored_total, 0);
    KVIST_TEST_EQUAL(BURST, KVIST_SUSPECT_KEYS_MAX);
    KVIST_TEST_STATUS(kvist_test_engine_suspect(engine, 0, BURST, COUNT - BURST), KVIST_OK);
    KVIST_TEST_EQUAL(kvist_test_stats(store).suspects_ignored_total, COUNT - BURST);
    /* Others have their own. */
    KVIST_TEST_STATUS(kvist_test_engine_suspect(other, 0, BURST, 1), KVIST_OK);
    KVIST_TEST_EQUAL(kvist_test_stats(store).suspects_ignored_total, COUNT - BURST);
    kvist_test_advance(store, 2000000);
    KVIST_TEST_STATUS(kvist_test_engine_suspect(engine, 0, BURST + 1, 1), KVIST_OK);
    KVIST_TEST_EQUAL(kvist_test_stats(store).suspects_ignored_total, COUNT - BURST);
    KVIST_TEST_EQUAL(kvist_test_stats(store).slots_ready, COUNT);
    kvist_test_engine_close(&other);
    kvist_test_engine_close(&engine);
}

/* More at a time than wait in line: the rest is left out, and counted. */
static void the_line_of_suspects_is_bounded(void)
{
    enum { COUNT = 1100, SMALL = 4096, LINE = 1024 };
    struct kvist_test_engine *engine = engine_with_blocks(COUNT, SMALL);
    for (uint64_t number = 0; number < COUNT; number++) {
        KVIST_TEST_STATUS(kvist_test_engine_suspect(engine, 0, number, 1), KVIST_OK);
    }
    KVIST_TEST_EQUAL(kvist_test_stats(store).suspects_ignored_total, COUNT - LINE);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(kvist_test_stats(store).slots_ready, COUNT);
    kvist_test_engine_close(&engine);
}

static void never_saved(void *ctx, const struct kvist_store_saved *saved)
{
    (void)ctx;
    (void)saved;
    KVIST_TEST_FATAL(false);
}

static void save_needs_a_tier(void)
{
    KVIST_TEST_STATUS(kvist_store_save(store, never_saved, NULL), KVIST_UNSUPPORTED);
}

/* Open, use and close another store; whatever fails, what is left is whole and can be closed. */
static bool live_once(void)
{
    struct kvist_store *other = NULL;
    struct kvist_store_pool *pool = NULL;
    struct kvist_store_session *session = NULL;
    struct kvist_store_process *process = NULL;
    struct kvist_tier_pool about = {.slot_bytes = SLOT_BYTES};
    uint8_t id[16] = {9};
    uint32_t ordinal = 0;
    struct kvist_store_options options = kvist_test_options(ARENA);
    struct kvist_test_engine silent = {.maps_nothing = true};
    struct kvist_test_member member = {.engine = &silent};
    bool whole =
        kvist_store_open(&options, &other, NULL) == KVIST_OK &&
        kvist_store_pool_open(other, &about, &pool, NULL) == KVIST_OK &&
        kvist_store_session_open(other, id, 1, &session, NULL) == KVIST_OK &&
        kvist_store_process_open(session, true, true, 0, &member, &process, NULL) == KVIST_OK &&
        kvist_store_attach(process, pool, false, &ordinal, NULL) == KVIST_OK;
    if (other != NULL) {
        kvist_test_settle(other);
        struct kvist_store_stats stats;
        kvist_store_stats(other, &stats);
        for (unsigned round = 0; whole && stats.slots_free == 0 && round < 4; round++) {
            kvist_test_advance(other, 1100000); /* populating is tried again after a second */
            kvist_test_settle(other);
            kvist_store_stats(other, &stats);
        }
        KVIST_TEST_TRUE(!whole || stats.slots_free > 0);
    }
    kvist_store_close(&other);
    return whole;
}

static void every_failure_leaves_it_whole(void)
{
    kvist_fault_arm(NULL, 0, false);
    KVIST_TEST_TRUE(live_once());
    uint64_t points = kvist_fault_disarm();
    KVIST_TEST_TRUE(points >= 8);
    unsigned failed = 0;
    for (uint64_t nth = 1; nth <= points; nth++) {
        kvist_fault_arm(NULL, nth, false);
        failed += !live_once();
        (void)kvist_fault_disarm();
    }
    KVIST_TEST_TRUE(failed > 0);
    KVIST_TEST_TRUE(live_once());
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"options are checked", options_are_checked},
        {"pools are checked", pools_are_checked},
        {"pools are bounded, empty ones make place", pools_are_bounded_and_empty_ones_make_place},
        {"a block lives", a_block_lives},
        {"commits are refused", commits_are_refused},
        {"all marks of all ranks must stand", all_marks_of_all_ranks_must_stand},
        {"the first commit wins", the_first_commit_wins},
        {"grants need all ranks and are bounded", grants_need_all_ranks_and_are_bounded},
        {"a process that comes back is told again", a_process_that_comes_back_is_told_again},
        {"clearing waits for leases and stales grants",
         clearing_waits_for_leases_and_stales_grants},
        {"a second pool gets its share", a_second_pool_gets_its_share},
        {"an idle pool yields", an_idle_pool_yields_and_its_member_s_end_frees_it},
        {"places in a session are bounded", places_in_a_session_are_bounded},
        {"a suspect is dropped when it is corrupt", a_suspect_is_dropped_when_it_is_corrupt},
        {"a suspect without a checksum stays", a_suspect_without_a_checksum_stays},
        {"suspects are checked and bounded", suspects_are_checked_and_bounded},
        {"suspicion has its price", suspicion_has_its_price},
        {"the line of suspects is bounded", the_line_of_suspects_is_bounded},
        {"save needs a tier", save_needs_a_tier},
        {"every failure leaves it whole", every_failure_leaves_it_whole},
    };
    return kvist_unit_main("store", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
}
