/* adopt: a store that ends without a word, and the next one that takes over what it has left. */
#include "proto/base/clock.h"
#include "proto/base/fault.h"
#include "proto/shm/memfd.h"
#include "storage/internal.h"
#include "tests/support/engine.h"
#include "tests/support/unit.h"
#include "tests/support/vault.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SLOT_BYTES (64ULL << 10)
#define ARENA      (16ULL << 20) /* 16 segments of 16 slots */

static struct kvist_test_vault vault;
static struct kvist_store_options options;
static struct kvist_store *store;
static struct kvist_test_engine *engine;
static uint32_t ordinal;

static void setup(void)
{
    kvist_test_vault_init(&vault);
    options = kvist_test_options(ARENA);
    store = kvist_test_vault_open(&vault, &options);
    engine = kvist_test_engine_open(store, 1, 1);
    ordinal = kvist_test_engine_attach(engine, kvist_test_pool_open(store, 1, SLOT_BYTES));
    kvist_test_settle(store);
}

static void teardown(void)
{
    if (engine != NULL) {
        kvist_test_engine_close(&engine);
    }
    if (store != NULL) {
        kvist_test_settle(store);
        kvist_store_close(&store);
    }
    KVIST_TEST_EQUAL(vault.count, 0); /* an orderly end without leave() takes all back */
    kvist_test_vault_fini(&vault);
}

static struct kvist_adoption adoption_now(void)
{
    struct kvist_adoption adoption;
    kvist_store_adoption(store, &adoption);
    return adoption;
}

/* Kill the store, and open the next. */
static void restart(void)
{
    kvist_test_vault_kill(&store);
    store = kvist_test_vault_open(&vault, &options);
}

static void restart_warm(void)
{
    restart();
    struct kvist_adoption adoption = adoption_now();
    if (!adoption.adopted) {
        (void)fprintf(stderr, "not adopted: %s\n", adoption.why);
    }
    KVIST_TEST_FATAL(adoption.adopted);
    const char *broken = kvist_store_check(store);
    if (broken != NULL) {
        (void)fprintf(stderr, "kvist_store_check: %s\n", broken);
    }
    KVIST_TEST_FATAL(broken == NULL);
}

/* Nothing is left of before: another instance, an engine that nobody knows. */
static void expect_cold(const char *why)
{
    restart();
    struct kvist_adoption adoption = adoption_now();
    KVIST_TEST_TRUE(!adoption.adopted);
    KVIST_TEST_TRUE(strstr(adoption.why, why) != NULL);
    if (strstr(adoption.why, why) == NULL) {
        (void)fprintf(stderr, "cold because of: %s\n", adoption.why);
    }
    KVIST_TEST_TRUE(kvist_store_check(store) == NULL);
    KVIST_TEST_EQUAL(vault.count, 1); /* the new roster */
    kvist_test_engine_abandon(&engine);
}

static struct kvist_store_pool *pool_now(void)
{
    return engine->pools[ordinal].pool;
}

static void put(uint64_t first, uint64_t count)
{
    for (uint64_t number = first; number < first + count; number++) {
        KVIST_TEST_STATUS(kvist_test_engine_put(engine, ordinal, number, SLOT_BYTES), KVIST_OK);
    }
}

/* Lease each and compare. @return how many are there */
static uint64_t count_right(uint64_t first, uint64_t count)
{
    uint64_t right = 0;
    for (uint64_t number = first; number < first + count; number++) {
        const void *slot = kvist_test_engine_lease(engine, ordinal, number, 900);
        if (slot != NULL) {
            KVIST_TEST_TRUE(kvist_test_holds(slot, number, SLOT_BYTES));
            kvist_test_engine_release(engine, 900);
            right++;
        }
    }
    return right;
}

static uint32_t slot_of(uint64_t number)
{
    uint8_t key[KVIST_KEY_BYTES];
    struct kvist_entry_copy entry;
    kvist_test_key(number, key);
    KVIST_TEST_FATAL(kvist_map_find(&pool_now()->map, key, &entry) != KVIST_ENTRY_NONE);
    return entry.slot;
}

static struct kvist_index_entry *entry_of(uint64_t number)
{
    uint8_t key[KVIST_KEY_BYTES];
    struct kvist_entry_copy entry;
    kvist_test_key(number, key);
    uint32_t position = kvist_map_find(&pool_now()->map, key, &entry);
    KVIST_TEST_FATAL(position != KVIST_ENTRY_NONE);
    return &pool_now()->map.index[position];
}

/* --- What comes back --------------------------------------------------------------------------- */

static void blocks_and_sessions_come_back(void)
{
    put(0, 30);
    uint64_t instance = kvist_store_instance(store);
    uint64_t reservation = store->roster->reservation_next;
    restart_warm();
    KVIST_TEST_EQUAL(kvist_store_instance(store), instance);
    KVIST_TEST_EQUAL(adoption_now().blocks, 30);
    KVIST_TEST_EQUAL(adoption_now().bytes, 30 * SLOT_BYTES);
    KVIST_TEST_EQUAL(adoption_now().blocks_dropped, 0);
    KVIST_TEST_EQUAL(adoption_now().sessions, 1);
    KVIST_TEST_EQUAL(count_right(0, 30), 30); /* before anybody has spoken to it */
    kvist_test_engine_adopt(engine, store);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(count_right(0, 30), 30);
    put(30, 60);
    KVIST_TEST_EQUAL(count_right(0, 90), 90);
    KVIST_TEST_TRUE(store->roster->reservation_next >= reservation);
}

static void restarts_follow_each_other(void)
{
    for (uint64_t round = 0; round < 12; round++) {
        put(round * 5, 5);
        restart_warm();
        KVIST_TEST_EQUAL(adoption_now().blocks, (round + 1) * 5);
        kvist_test_engine_adopt(engine, store);
        kvist_test_settle(store);
    }
    KVIST_TEST_EQUAL(count_right(0, 60), 60);
}

static void grants_and_marks_hold(void)
{
    struct kvist_store_grant marked;
    struct kvist_store_grant plain;
    KVIST_TEST_FATAL(kvist_test_engine_take(engine, ordinal, &marked));
    KVIST_TEST_FATAL(kvist_test_engine_take(engine, ordinal, &plain));
    kvist_test_fill(kvist_test_engine_slot(engine, ordinal, marked.slot), 7, SLOT_BYTES);
    kvist_test_engine_mark(engine, 0, &marked);
    restart_warm();
    kvist_test_engine_adopt(engine, store);
    KVIST_TEST_STATUS(kvist_test_engine_commit(engine, ordinal, &marked, 7, SLOT_BYTES), KVIST_OK);
    KVIST_TEST_STATUS(kvist_test_engine_commit(engine, ordinal, &plain, 8, SLOT_BYTES),
                      KVIST_NOT_FOUND);
    KVIST_TEST_EQUAL(count_right(7, 2), 1);
    KVIST_TEST_TRUE(kvist_store_check(store) == NULL);
}

static void what_was_granted_is_said_again(void)
{
    uint32_t granted = engine->session->granted_count;
    KVIST_TEST_TRUE(granted > 0);
    restart_warm();
    kvist_test_engine_adopt(engine, store);
    KVIST_TEST_EQUAL(engine->session->granted_count, granted);
    kvist_test_settle(store);
    KVIST_TEST_TRUE(engine->pools[ordinal].grant_count >= granted);
}

static void leases_hold(void)
{
    put(0, 4);
    const void *leased = kvist_test_engine_lease(engine, ordinal, 2, 0);
    KVIST_TEST_FATAL(leased != NULL);
    restart_warm();
    kvist_test_engine_adopt(engine, store);
    (void)kvist_evict_blocks(pool_now(), 4);
    KVIST_TEST_EQUAL(count_right(0, 4), 1);
    KVIST_TEST_TRUE(kvist_test_holds(leased, 2, SLOT_BYTES));
    kvist_test_engine_release(engine, 0);
}

static void retired_slots_wait_for_their_leases(void)
{
    put(0, 4);
    const void *leased = kvist_test_engine_lease(engine, ordinal, 2, 0);
    uint32_t slot = slot_of(2);
    kvist_slot_retire(pool_now(), slot); /* killed in the middle of evicting it */
    restart_warm();
    kvist_test_engine_adopt(engine, store);
    KVIST_TEST_EQUAL(kvist_slot_state_of(pool_now(), slot), KVIST_SLOT_RETIRED);
    kvist_test_advance(store, KVIST_RETIRED_SCAN_US);
    KVIST_TEST_EQUAL(kvist_slot_state_of(pool_now(), slot), KVIST_SLOT_RETIRED);
    KVIST_TEST_TRUE(kvist_test_holds(leased, 2, SLOT_BYTES));
    kvist_test_engine_release(engine, 0);
    kvist_test_advance(store, 2 * KVIST_RETIRED_SCAN_US);
    KVIST_TEST_TRUE(kvist_slot_state_of(pool_now(), slot) != KVIST_SLOT_RETIRED);
    KVIST_TEST_EQUAL(count_right(0, 4), 3);
}

static void a_cleared_pool_stays_cleared(void)
{
    put(0, 10);
    struct kvist_store_grant early;
    KVIST_TEST_FATAL(kvist_test_engine_take(engine, ordinal, &early));
    kvist_test_engine_mark(engine, 0, &early);
    struct kvist_entry_copy copy;
    KVIST_TEST_TRUE(kvist_entry_read(entry_of(3), &copy));
    /* Killed when the generation was written, and nothing else. */
    atomic_fetch_add(&pool_now()->map.header->generation, 1);
    restart_warm();
    KVIST_TEST_EQUAL(adoption_now().blocks, 0);
    KVIST_TEST_EQUAL(adoption_now().blocks_dropped, 10);
    kvist_test_engine_adopt(engine, store);
    KVIST_TEST_STATUS(kvist_test_engine_commit(engine, ordinal, &early, 3, SLOT_BYTES),
                      KVIST_STALE);
}

static void a_map_that_grew_is_found(void)
{
    enum { BLOCKS = 700, BYTES = 4096 };
    uint32_t small = kvist_test_engine_attach(engine, kvist_test_pool_open(store, 2, BYTES));
    uint32_t serial = engine->pools[small].pool->map.serial;
    for (uint64_t number = 0; number < BLOCKS; number++) {
        while (kvist_test_engine_put(engine, small, number, BYTES) == KVIST_BUSY) {
            kvist_test_settle(store);
        }
    }
    kvist_test_settle(store);
    KVIST_TEST_TRUE(engine->pools[small].pool->map.serial != serial);
    restart_warm();
    KVIST_TEST_EQUAL(adoption_now().blocks, BLOCKS);
    KVIST_TEST_TRUE(kvist_test_vault_find(&vault, KVIST_KEPT_MAP, serial) < 0);
    kvist_test_engine_adopt(engine, store);
    KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, small, BLOCKS - 1), KVIST_ENTRY_READY);
}

/* The two moments around `moved`, with both maps kept. */
static void either_map_is_right_while_it_moves(void)
{
    put(0, 10);
    struct kvist_store_pool *pool = pool_now();
    struct kvist_map next;
    const struct kvist_map_shape shape = {
        .arena = kvist_store_instance(store),
        .pool_id = pool->about.pool_id,
        .slot_bytes = SLOT_BYTES,
        .generation = pool->about.generation,
        .slots_per_segment = pool->slots_per_segment,
        .segment_max = pool->segment_max,
        .index_capacity = pool->map.capacity,
    };
    uint32_t serial = kvist_roster_serial(store);
    KVIST_TEST_FATAL(kvist_map_init(&shape, serial, &next, NULL) == KVIST_OK);
    memcpy(next.segments,
           pool->map.segments,
           (size_t)((char *)pool->map.index - (char *)pool->map.segments));
    KVIST_TEST_STATUS(kvist_roster_keep(store, KVIST_KEPT_MAP, serial, next.fd), KVIST_OK);
    kvist_roster_next_map(pool, serial);
    restart_warm();
    KVIST_TEST_EQUAL(adoption_now().blocks, 10);
    KVIST_TEST_TRUE(kvist_test_vault_find(&vault, KVIST_KEPT_MAP, serial) < 0);
    kvist_test_engine_adopt(engine, store);
    pool = pool_now();
    KVIST_TEST_STATUS(kvist_roster_keep(store, KVIST_KEPT_MAP, serial, next.fd), KVIST_OK);
    kvist_roster_next_map(pool, serial);
    atomic_store(&pool->map.header->moved, 1);
    restart_warm();
    KVIST_TEST_EQUAL(store->pools[0]->map.serial, serial);
    KVIST_TEST_EQUAL(adoption_now().blocks, 0); /* its index was empty here */
    kvist_test_engine_adopt(engine, store);
    kvist_map_fini(&next);
}

/* --- Who is gone ------------------------------------------------------------------------------- */

static void end_process(struct kvist_test_engine *of, uint32_t member)
{
    const struct kvist_store_process *process = of->members[member].process;
    struct stat info;
    int pidfd = kvist_test_dead_pidfd();
    KVIST_TEST_FATAL(fstat(pidfd, &info) == 0);
    store->roster->sessions[process->session->index].processes[process->index].inode = info.st_ino;
    kvist_test_vault_replace(&vault, KVIST_KEPT_PIDFD, process->serial, pidfd);
}

static void dead_sessions_give_all_back(void)
{
    put(0, 20);
    KVIST_TEST_FATAL(kvist_test_engine_lease(engine, ordinal, 1, 0) != NULL);
    struct kvist_store_grant grant;
    KVIST_TEST_FATAL(kvist_test_engine_take(engine, ordinal, &grant));
    end_process(engine, 0);
    restart_warm();
    kvist_test_engine_abandon(&engine);
    KVIST_TEST_EQUAL(adoption_now().blocks, 20);
    KVIST_TEST_EQUAL(adoption_now().sessions, 0);
    kvist_test_settle(store);
    kvist_test_advance(store, KVIST_RETIRED_SCAN_US);
    struct kvist_store_stats stats;
    kvist_store_stats(store, &stats);
    KVIST_TEST_EQUAL(stats.slots_granted + stats.slots_retired + stats.leased_slots, 0);
    engine = kvist_test_engine_open(store, 1, 1); /* the same id is free again */
    ordinal = kvist_test_engine_attach(engine, kvist_test_pool_open(store, 1, SLOT_BYTES));
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(count_right(0, 20), 20);
}

static void a_session_lives_with_one_of_its_ranks(void)
{
    struct kvist_test_engine *ranks = kvist_test_engine_open(store, 2, 3);
    (void)kvist_test_engine_attach(ranks, kvist_test_pool_open(store, 1, SLOT_BYTES));
    kvist_test_settle(store);
    end_process(ranks, 2);
    restart_warm();
    KVIST_TEST_EQUAL(adoption_now().sessions, 2);
    struct kvist_store_adopted adopted;
    KVIST_TEST_FATAL(kvist_store_adopted(store, 1, &adopted));
    KVIST_TEST_EQUAL(adopted.rank_count, 3);
    KVIST_TEST_EQUAL(adopted.process_count, 3);
    KVIST_TEST_TRUE(strcmp(adopted.about.name, "test") == 0);
    KVIST_TEST_EQUAL(adopted.processes[0].pid, getpid());
    kvist_test_engine_adopt(engine, store);
    kvist_test_engine_abandon(&ranks);
    struct kvist_store_session *session = adopted.session;
    kvist_store_session_close(&session);
}

/* --- What is torn or wrong --------------------------------------------------------------------- */

static void torn_entries_are_dropped(void)
{
    put(0, 20);
    atomic_fetch_or(&entry_of(4)->sequence, 1U);
    atomic_store(&entry_of(9)->state, 77U);
    restart_warm();
    KVIST_TEST_EQUAL(adoption_now().blocks, 18);
    KVIST_TEST_EQUAL(adoption_now().blocks_dropped, 2);
    kvist_test_engine_adopt(engine, store);
    KVIST_TEST_EQUAL(count_right(0, 20), 18);
    kvist_test_settle(store);
    put(4, 1);
    put(9, 1);
    KVIST_TEST_EQUAL(count_right(0, 20), 20);
}

static void two_entries_of_one_slot_are_both_dropped(void)
{
    put(0, 20);
    uint32_t slot = slot_of(5);
    atomic_store(&entry_of(11)->slot, slot);
    restart_warm();
    KVIST_TEST_EQUAL(adoption_now().blocks, 18);
    kvist_test_engine_adopt(engine, store);
    KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, ordinal, 5), KVIST_ENTRY_EMPTY);
    KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, ordinal, 11), KVIST_ENTRY_EMPTY);
    KVIST_TEST_EQUAL(count_right(0, 20), 18);
}

/* An index entry and a grant of one slot: others may have leased the block already. */
static void half_a_commit_is_not_granted_again(void)
{
    put(0, 3);
    struct kvist_slot_entry *entry = &pool_now()->map.slots[slot_of(1)];
    uint32_t slot = slot_of(1);
    const void *leased = kvist_test_engine_lease(engine, ordinal, 1, 0);
    atomic_store(&entry->state, KVIST_SLOT_GRANTED);
    atomic_store(&entry->entry, KVIST_ENTRY_NONE);
    atomic_store(&entry->session, engine->session->index);
    atomic_store(&entry->ticket, KVIST_GRANTS_MAX - 1);
    atomic_store(&entry->reservation, store->roster->reservation_first);
    restart_warm();
    kvist_test_engine_adopt(engine, store);
    KVIST_TEST_EQUAL(kvist_slot_state_of(pool_now(), slot), KVIST_SLOT_RETIRED);
    KVIST_TEST_EQUAL(count_right(0, 3), 2);
    KVIST_TEST_TRUE(kvist_test_holds(leased, 1, SLOT_BYTES));
    kvist_test_engine_release(engine, 0);
}

static void another_layout_is_not_adopted(void)
{
    put(0, 5);
    store->roster->layout_version++;
    expect_cold("another version");
}

static void a_broken_map_is_not_adopted(void)
{
    put(0, 5);
    pool_now()->map.header->slot_max++;
    expect_cold("pool map");
}

static void nothing_is_adopted_without_the_page(void)
{
    kvist_test_vault_replace(&vault, KVIST_KEPT_PAGE, engine->session->serial, -1);
    expect_cold("page");
}

static void nothing_is_adopted_without_the_roster(void)
{
    kvist_test_vault_replace(&vault, KVIST_KEPT_ROSTER, 0, -1);
    expect_cold("roster");
}

static void nothing_is_adopted_without_a_pidfd(void)
{
    kvist_test_vault_replace(
        &vault, KVIST_KEPT_PIDFD, engine->members[0].process->serial, open("/dev/null", O_RDONLY));
    expect_cold("pidfd");
}

static void nothing_is_adopted_without_a_mapped_segment(void)
{
    kvist_test_vault_replace(&vault, KVIST_KEPT_SEGMENT, pool_now()->segments[0].serial, -1);
    expect_cold("segment");
}

static void a_segment_that_nobody_maps_may_be_lost(void)
{
    put(0, 40);
    uint32_t in_first = 0;
    for (uint64_t number = 0; number < 40; number++) {
        in_first += slot_of(number) < pool_now()->slots_per_segment;
    }
    uint32_t serial = pool_now()->segments[0].serial;
    kvist_test_engine_close(&engine);
    kvist_test_vault_replace(&vault, KVIST_KEPT_SEGMENT, serial, -1);
    restart_warm();
    KVIST_TEST_EQUAL(adoption_now().blocks, 40 - in_first);
    KVIST_TEST_EQUAL(adoption_now().blocks_dropped, in_first);
}

static uint64_t memory_bytes;

static uint64_t available(void *ctx)
{
    KVIST_TEST_TRUE(ctx == &vault);
    return memory_bytes;
}

static void a_new_arena_grows_beside_the_old_one_as_there_is_memory(void)
{
    put(0, 5);
    options.available = available;
    memory_bytes = KVIST_AVAILABLE_SPARE_BYTES;
    store->roster->layout_version++;
    expect_cold("another version");
    KVIST_TEST_TRUE(adoption_now().released_bytes > 0);
    engine = kvist_test_engine_open(store, 1, 1);
    ordinal = kvist_test_engine_attach(engine, kvist_test_pool_open(store, 1, SLOT_BYTES));
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(store->used_bytes, 0);
    KVIST_TEST_TRUE(store->stats.populate_waits_total > 0);
    memory_bytes += ARENA;
    kvist_test_advance(store, 2 * KVIST_POPULATE_RETRY_US);
    kvist_test_settle(store);
    KVIST_TEST_TRUE(store->used_bytes > 0);
    put(0, 5);
}

static void daemons_that_die_of_it_stop_trying(void)
{
    put(0, 5);
    store->roster->adopts = KVIST_ADOPTS_MAX;
    expect_cold("died");
}

/* --- Limits ------------------------------------------------------------------------------------ */

static void what_cannot_be_kept_is_refused(void)
{
    vault.max = vault.count;
    struct kvist_tier_pool about = {.slot_bytes = SLOT_BYTES, .pool_id = {9}};
    struct kvist_store_pool *pool = NULL;
    struct kvist_store_session *session = NULL;
    const uint8_t id[16] = {42};
    KVIST_TEST_STATUS(kvist_store_pool_open(store, &about, &pool, NULL), KVIST_BUSY);
    KVIST_TEST_STATUS(kvist_store_session_open(store, id, 1, &session, NULL), KVIST_BUSY);
    vault.max++;
    KVIST_TEST_STATUS(kvist_store_session_open(store, id, 1, &session, NULL), KVIST_OK);
    struct kvist_store_process *process = NULL;
    KVIST_TEST_STATUS(kvist_store_process_open(session, true, true, 0, NULL, &process, NULL),
                      KVIST_OK);
    KVIST_TEST_STATUS(kvist_store_process_watch(process, 1, STDIN_FILENO), KVIST_NO_SPACE);
    kvist_store_session_close(&session);
    vault.max = KVIST_VAULT_MAX;
}

static void a_segment_is_lent_only_once_it_is_safe(void)
{
    struct kvist_test_engine *second = kvist_test_engine_open(store, 3, 1);
    uint32_t place = kvist_test_engine_attach(second, kvist_test_pool_open(store, 3, SLOT_BYTES));
    const struct kvist_store_pool *pool = second->pools[place].pool;
    uint64_t safe = store->keep_count;
    uint64_t deadline_us = kvist_clock_now_us() + 20000000;
    while (store->keep_count == safe && kvist_clock_now_us() < deadline_us) {
        (void)kvist_store_turn(store, kvist_clock_now_us());
    }
    for (unsigned turn = 0; turn < 10; turn++) {
        (void)kvist_store_turn(store, kvist_clock_now_us());
    }
    KVIST_TEST_TRUE(store->keep_count > safe);
    KVIST_TEST_EQUAL(kvist_evict_slot_count(pool), 0);
    KVIST_TEST_EQUAL(second->pools[place].granted_total, 0);
    kvist_store_kept(store, store->keep_count);
    (void)kvist_store_turn(store, kvist_clock_now_us());
    KVIST_TEST_TRUE(kvist_evict_slot_count(pool) > 0);
    kvist_test_engine_close(&second);
}

/* --- Leaving ----------------------------------------------------------------------------------- */

static void leave_is_a_kill_with_good_manners(void)
{
    put(0, 25);
    for (unsigned start = 0; start < KVIST_ADOPTS_MAX + 2; start++) {
        kvist_store_leave(store); /* again and again without a turn: a port was taken, say */
        kvist_store_close(&store);
        store = kvist_test_vault_open(&vault, &options);
    }
    KVIST_TEST_FATAL(adoption_now().adopted);
    KVIST_TEST_EQUAL(adoption_now().blocks, 25);
    kvist_test_engine_adopt(engine, store);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(count_right(0, 25), 25);
}

static void a_failed_start_leaves_all_for_the_next(void)
{
    put(0, 25);
    kvist_test_vault_kill(&store);
    for (uint64_t nth = 1; nth <= 2; nth++) {
        kvist_test_vault_options(&vault, &options);
        kvist_fault_arm("workers.thread", nth, false);
        enum kvist_status status = kvist_store_open(&options, &store, NULL);
        if (kvist_fault_disarm() < nth) {
            KVIST_TEST_STATUS(status, KVIST_OK);
            kvist_test_vault_kill(&store);
            break;
        }
        KVIST_TEST_TRUE(status != KVIST_OK);
    }
    store = kvist_test_vault_open(&vault, &options);
    KVIST_TEST_FATAL(adoption_now().adopted);
    KVIST_TEST_EQUAL(adoption_now().blocks, 25);
    kvist_test_engine_adopt(engine, store);
}

static void failing_calls_are_survived(void)
{
    put(0, 10);
    for (uint64_t nth = 1; nth < 40; nth++) {
        kvist_test_vault_kill(&store);
        kvist_test_vault_options(&vault, &options);
        kvist_fault_arm("memfd.map", nth, false);
        enum kvist_status status = kvist_store_open(&options, &store, NULL);
        bool failed = kvist_fault_disarm() >= nth;
        KVIST_TEST_STATUS(status, KVIST_OK);
        KVIST_TEST_TRUE(kvist_store_check(store) == NULL);
        if (!failed) {
            break;
        }
        KVIST_TEST_TRUE(!adoption_now().adopted);
        KVIST_TEST_EQUAL(vault.count, 1);
        kvist_test_engine_abandon(&engine);
        engine = kvist_test_engine_open(store, 1, 1);
        ordinal = kvist_test_engine_attach(engine, kvist_test_pool_open(store, 1, SLOT_BYTES));
        kvist_test_settle(store);
        put(0, 10);
    }
    KVIST_TEST_TRUE(adoption_now().adopted);
    kvist_test_engine_adopt(engine, store);
}

/* --- Any moment, any bytes --------------------------------------------------------------------- */

static uint64_t random_state = 88172645463325252ULL;

static uint64_t next_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* In a process of its own that shares the memory: changes it until it is killed. */
static void change_for_ever(void)
{
    kvist_fault_arm("workers.submit", 1, true);
    for (uint64_t number = 100;; number = 100 + (number - 99) % 60) {
        struct kvist_store_grant grant;
        if (kvist_test_engine_take(engine, ordinal, &grant)) {
            kvist_test_fill(
                kvist_test_engine_slot(engine, ordinal, grant.slot), number, SLOT_BYTES);
            kvist_test_engine_mark(engine, 0, &grant);
            (void)kvist_test_engine_commit(engine, ordinal, &grant, number, SLOT_BYTES);
        }
        if (number % 8 == 0) {
            (void)kvist_evict_blocks(pool_now(), 8);
        }
        kvist_grant_top_up(engine->session);
        if (number == 159 && next_random() % 4 == 0) {
            struct kvist_clear *before = store->clears;
            if (kvist_store_clear(store, pool_now(), NULL, NULL) == KVIST_OK) {
                free(store->clears);
                store->clears = before;
            }
        }
    }
}

static void any_moment_will_do(void)
{
    for (unsigned round = 0; round < 60; round++) {
        random_state += round;
        pid_t pid = fork();
        if (pid == 0) {
            change_for_ever();
        }
        const struct timespec pause = {.tv_nsec = (long)(next_random() % 8000000)};
        (void)nanosleep(&pause, NULL);
        KVIST_TEST_FATAL(pid > 0 && kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid);
        restart_warm();
        kvist_test_engine_adopt(engine, store);
        (void)count_right(100, 60); /* what is there is right */
        kvist_test_settle(store);
    }
}

/* Words of the maps, the roster and the page change at random: at worst everything is let go. */
static void flip_something(void)
{
    struct kvist_store_pool *pool = pool_now();
    uint32_t *words[] = {
        (uint32_t *)store->roster, (uint32_t *)pool->map.base, (uint32_t *)engine->page};
    uint64_t bytes[] = {sizeof(*store->roster), pool->map.bytes, engine->geometry.page_bytes};
    uint64_t which = next_random() % 6;
    uint64_t flips = 1 + next_random() % 20;
    for (uint64_t flip = 0; flip < flips; flip++) {
        if (which == 5) { /* aimed at an entry that is in use */
            uint32_t *entry = (uint32_t *)entry_of(next_random() % 30);
            entry[next_random() % 8] ^= 1U << next_random() % 32;
            return;
        }
        uint64_t target = which < 2 ? 0 : which < 4 ? 1 : 2;
        uint64_t limit = next_random() % 2 == 0 ? 4096 : bytes[target];
        words[target][next_random() % (limit / 4)] ^= 1U << next_random() % 32;
    }
}

static void nonsense_is_survived(void)
{
    unsigned warm = 0;
    for (unsigned round = 0; round < 400; round++) {
        put(0, 30);
        flip_something();
        restart();
        KVIST_TEST_TRUE(kvist_store_check(store) == NULL);
        if (adoption_now().adopted && kvist_test_engine_can_adopt(engine, store)) {
            kvist_test_engine_adopt(engine, store);
            (void)count_right(0, 30);
            warm++;
        }
        kvist_test_engine_abandon(&engine);
        /* Another daemon, another engine: nothing of before. */
        kvist_store_close(&store);
        kvist_test_vault_fini(&vault);
        kvist_test_vault_init(&vault);
        store = kvist_test_vault_open(&vault, &options);
        engine = kvist_test_engine_open(store, 1, 1);
        ordinal = kvist_test_engine_attach(engine, kvist_test_pool_open(store, 1, SLOT_BYTES));
        kvist_test_settle(store);
    }
    KVIST_TEST_TRUE(warm > 100);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"blocks and sessions come back", blocks_and_sessions_come_back},
        {"restarts follow each other", restarts_follow_each_other},
        {"grants and marks hold", grants_and_marks_hold},
        {"what was granted is said again", what_was_granted_is_said_again},
        {"leases hold", leases_hold},
        {"retired slots wait for their leases", retired_slots_wait_for_their_leases},
        {"a cleared pool stays cleared", a_cleared_pool_stays_cleared},
        {"a map that grew is found", a_map_that_grew_is_found},
        {"either map is right while it moves", either_map_is_right_while_it_moves},
        {"dead sessions give all back", dead_sessions_give_all_back},
        {"a session lives with one of its ranks", a_session_lives_with_one_of_its_ranks},
        {"torn entries are dropped", torn_entries_are_dropped},
        {"two entries of one slot are both dropped", two_entries_of_one_slot_are_both_dropped},
        {"half a commit is not granted again", half_a_commit_is_not_granted_again},
        {"another layout is not adopted", another_layout_is_not_adopted},
        {"a broken map is not adopted", a_broken_map_is_not_adopted},
        {"nothing is adopted without the page", nothing_is_adopted_without_the_page},
        {"nothing is adopted without the roster", nothing_is_adopted_without_the_roster},
        {"nothing is adopted without a pidfd", nothing_is_adopted_without_a_pidfd},
        {"nothing is adopted without a mapped segment",
         nothing_is_adopted_without_a_mapped_segment},
        {"a segment that nobody maps may be lost", a_segment_that_nobody_maps_may_be_lost},
        {"a new arena grows beside the old one as there is memory",
         a_new_arena_grows_beside_the_old_one_as_there_is_memory},
        {"daemons that die of it stop trying", daemons_that_die_of_it_stop_trying},
        {"what cannot be kept is refused", what_cannot_be_kept_is_refused},
        {"a segment is lent only once it is safe", a_segment_is_lent_only_once_it_is_safe},
        {"leave is a kill with good manners", leave_is_a_kill_with_good_manners},
        {"a failed start leaves all for the next", a_failed_start_leaves_all_for_the_next},
        {"failing calls are survived", failing_calls_are_survived},
        {"any moment will do", any_moment_will_do},
        {"nonsense is survived", nonsense_is_survived},
    };
    return kvist_unit_main("adopt", cases, KVIST_ARRAY_COUNT(cases), setup, teardown);
}
