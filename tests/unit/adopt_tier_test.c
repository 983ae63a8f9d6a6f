/* adopt over a real tier: what is on NVMe is what the tier says, whatever the old index said. */
#include "proto/base/fault.h"
#include "storage/internal.h"
#include "tests/support/engine.h"
#include "tests/support/unit.h"
#include "tests/support/vault.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define SLOT_BYTES (64ULL << 10)
#define ARENA      (16ULL << 20) /* 256 slots */
#define BLOCKS     400U
#define TIER_BYTES (512ULL << 20)

static char path[64];
static struct kvist_test_vault vault;
static struct kvist_tier_options tier_options;
static struct kvist_store_options options;
static struct kvist_store *store;
static struct kvist_test_engine *engine;

static void remove_tier(void)
{
    kvist_unit_remove_tree(path);
}

static void open_store(void)
{
    options.tier = &tier_options;
    store = kvist_test_vault_open(&vault, &options);
}

static void open_engine(void)
{
    engine = kvist_test_engine_open(store, 1, 1);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, kvist_test_pool_open(store, 1, SLOT_BYTES)),
                     0);
    kvist_test_settle(store);
}

static void setup(void)
{
    (void)snprintf(path, sizeof(path), "adopt_tier_XXXXXX");
    KVIST_TEST_FATAL(mkdtemp(path) != NULL);
    tier_options = (struct kvist_tier_options){
        .path = path, .bytes_max = TIER_BYTES, .io_threads = 4, .extent_bytes = 8 << 20};
    options = kvist_test_options(ARENA);
    options.hold_us = 60000000;
    kvist_test_vault_init(&vault);
    open_store();
    open_engine();
}

static void teardown(void)
{
    kvist_test_engine_close(&engine);
    kvist_store_close(&store);
    KVIST_TEST_EQUAL(vault.count, 0);
    kvist_test_vault_fini(&vault);
    remove_tier();
}

static void wait_loaded(void)
{
    KVIST_TEST_SETTLE_WHILE(store, !store->tier_loaded);
    KVIST_TEST_FATAL(store->tier_loaded);
    kvist_test_settle(store);
}

/* The store is killed; the next one goes on with the engine, and knows its tier. */
static void restart_beside_engine(void)
{
    kvist_test_vault_kill(&store);
    open_store();
    kvist_test_engine_adopt(engine, store);
    wait_loaded();
}

static void restart_warm(void)
{
    kvist_test_vault_kill(&store);
    open_store();
    struct kvist_adoption adoption;
    kvist_store_adoption(store, &adoption);
    KVIST_TEST_FATAL(adoption.adopted);
    KVIST_TEST_TRUE(kvist_store_check(store) == NULL);
    kvist_test_engine_adopt(engine, store);
}

/* Until enough is free, and nothing is on its way to the tier: what is counted then stays. */
static void rest(void)
{
    const struct kvist_store_pool *pool = engine->pools[0].pool;
    KVIST_TEST_SETTLE_WHILE(store, pool->pin_count > 0 || pool->usable_free < kvist_evict_low(pool));
}

static void put_range(uint64_t first, uint64_t count)
{
    for (uint64_t number = first; number < first + count; number++) {
        enum kvist_status status = KVIST_BUSY;
        for (unsigned tries = 0; status != KVIST_OK && tries < 200; tries++) {
            status = kvist_test_engine_put(engine, 0, number, SLOT_BYTES);
            if (status != KVIST_OK || number % 16 == 0) {
                kvist_test_settle(store);
            }
        }
        KVIST_TEST_STATUS(status, KVIST_OK);
    }
    kvist_test_settle(store);
    rest();
}

struct places {
    uint32_t ready;
    uint32_t nvme;
};

static struct places count_places(uint64_t first, uint64_t count)
{
    struct places places = {0};
    for (uint64_t number = first; number < first + count; number++) {
        enum kvist_entry_state state = kvist_test_engine_probe(engine, 0, number);
        places.ready += state == KVIST_ENTRY_READY;
        places.nvme += state == KVIST_ENTRY_NVME;
    }
    return places;
}

static const void *fetch(uint64_t number)
{
    uint8_t key[1][KVIST_KEY_BYTES];
    kvist_test_key(number, key[0]);
    KVIST_TEST_STATUS(
        kvist_store_prefetch(engine->session, 0, (const uint8_t(*)[KVIST_KEY_BYTES])key, 1),
        KVIST_OK);
    for (unsigned round = 0; round < 200; round++) {
        kvist_test_settle(store);
        const void *slot = kvist_test_engine_lease(engine, 0, number, 3);
        if (slot != NULL) {
            return slot;
        }
    }
    return NULL;
}

static uint64_t tier_blocks(void)
{
    struct kvist_store_stats stats;
    kvist_store_stats(store, &stats);
    return stats.tier.blocks;
}

static void both_tiers_come_back(void)
{
    put_range(0, BLOCKS);
    struct places before = count_places(0, BLOCKS);
    KVIST_TEST_TRUE(before.ready > 0 && before.nvme > 0);
    restart_warm();
    KVIST_TEST_EQUAL(count_places(0, BLOCKS).ready, before.ready); /* at once */
    wait_loaded();
    struct places after = count_places(0, BLOCKS);
    KVIST_TEST_EQUAL(after.ready, before.ready);
    KVIST_TEST_TRUE(after.nvme >= before.nvme);
    KVIST_TEST_EQUAL(store->pools[0]->nvme_blocks, tier_blocks());
    unsigned fetched = 0;
    for (uint64_t number = 0; number < BLOCKS && fetched < 10; number++) {
        if (kvist_test_engine_probe(engine, 0, number) == KVIST_ENTRY_NVME) {
            const void *slot = fetch(number);
            KVIST_TEST_FATAL(slot != NULL);
            KVIST_TEST_TRUE(kvist_test_holds(slot, number, SLOT_BYTES));
            kvist_test_engine_release(engine, 3);
            fetched++;
        }
    }
    KVIST_TEST_EQUAL(fetched, 10);
    put_range(1000, 50);
}

static void a_tier_that_is_gone_is_not_believed(void)
{
    put_range(0, BLOCKS);
    uint32_t ready = count_places(0, BLOCKS).ready;
    kvist_test_vault_kill(&store);
    remove_tier();
    KVIST_TEST_FATAL(mkdir(path, 0700) == 0);
    open_store();
    kvist_test_engine_adopt(engine, store);
    wait_loaded();
    struct places after = count_places(0, BLOCKS);
    KVIST_TEST_EQUAL(after.nvme, 0);
    KVIST_TEST_EQUAL(after.ready, ready);
    put_range(1000, 300); /* they are written to the new one as they go */
    KVIST_TEST_TRUE(tier_blocks() > 0);
    KVIST_TEST_EQUAL(store->pools[0]->nvme_blocks, tier_blocks());
}

static void cleared(void *ctx, enum kvist_status status, uint64_t blocks, uint64_t bytes)
{
    (void)blocks;
    (void)bytes;
    *(enum kvist_status *)ctx = status;
}

static void saved(void *ctx, const struct kvist_store_saved *how)
{
    *(enum kvist_status *)ctx = how->status;
}

static void a_clear_under_way_is_finished(void)
{
    enum kvist_status status = KVIST_BUSY;
    put_range(0, BLOCKS);
    KVIST_TEST_STATUS(kvist_store_clear(store, engine->pools[0].pool, cleared, &status), KVIST_OK);
    uint64_t generation = engine->pools[0].pool->about.generation;
    restart_warm(); /* before the tier had heard of it */
    KVIST_TEST_STATUS(status, KVIST_CLOSED);
    wait_loaded();
    KVIST_TEST_EQUAL(engine->pools[0].pool->about.generation, generation);
    KVIST_TEST_SETTLE_WHILE(store, !engine->pools[0].pool->tier_knows);
    KVIST_TEST_TRUE(engine->pools[0].pool->tier_knows);
    struct places after = count_places(0, BLOCKS);
    KVIST_TEST_EQUAL(after.ready + after.nvme, 0);
    kvist_test_vault_kill(&store); /* nor later */
    kvist_test_vault_fini(&vault);
    kvist_test_engine_abandon(&engine);
    open_store();
    open_engine();
    wait_loaded();
    after = count_places(0, BLOCKS);
    KVIST_TEST_EQUAL(after.ready + after.nvme, 0);
}

static void clear_now(void)
{
    enum kvist_status status = KVIST_BUSY;
    KVIST_TEST_STATUS(
        kvist_store_clear(store, kvist_test_pool_open(store, 1, SLOT_BYTES), cleared, &status),
        KVIST_OK);
    KVIST_TEST_SETTLE_WHILE(store, status == KVIST_BUSY);
    KVIST_TEST_STATUS(status, KVIST_OK);
}

/* --- An index that grows while it is read back ------------------------------------------------ */

#define SMALL_BYTES  4096ULL
#define SMALL_BLOCKS 2400U /* the index begins with 1,024 entries */

static const struct kvist_store_pool *small_pool(void)
{
    return kvist_test_pool_open(store, 2, SMALL_BYTES);
}

/* Blocks of another pool in the tier, and a daemon that has kept nothing else of it.
   @return how many */
static uint64_t restart_cold_with_small_blocks(void)
{
    enum kvist_status status = KVIST_BUSY;
    uint32_t small = kvist_test_engine_attach(engine, kvist_test_pool_open(store, 2, SMALL_BYTES));
    for (uint64_t number = 0; number < SMALL_BLOCKS;) {
        status = kvist_test_engine_put(engine, small, number, SMALL_BYTES);
        number += status == KVIST_OK;
        if (status != KVIST_OK) {
            kvist_test_settle(store);
        }
    }
    status = KVIST_BUSY;
    KVIST_TEST_STATUS(kvist_store_save(store, saved, &status), KVIST_OK);
    KVIST_TEST_SETTLE_WHILE(store, status == KVIST_BUSY);
    uint64_t count = tier_blocks(); /* some are evicted while segments are populated */
    KVIST_TEST_FATAL(count > SMALL_BLOCKS / 2);
    kvist_test_vault_kill(&store);
    kvist_test_vault_fini(&vault);
    kvist_test_engine_abandon(&engine);
    open_store();
    return count;
}

static void turn_until_loaded(uint64_t turns_max)
{
    for (; !store->tier_loaded && turns_max > 0; turns_max--) {
        kvist_test_advance(store, 0);
    }
}

static void what_is_read_back_waits_for_room_in_the_index(void)
{
    uint64_t count = restart_cold_with_small_blocks();
    while (store->pools[0] == NULL || !kvist_pool_growth_waits(store->pools[0])) {
        kvist_test_advance(store, 0);
    }
    turn_until_loaded(1000);
    KVIST_TEST_TRUE(!store->tier_loaded && kvist_pool_growth_waits(store->pools[0]));
    KVIST_TEST_TRUE(kvist_test_stats(store).index_full_total == 0);
    open_engine(); /* settles: what is kept is safe from then on */
    wait_loaded();
    KVIST_TEST_EQUAL(small_pool()->nvme_blocks, count);
    KVIST_TEST_EQUAL(kvist_test_stats(store).index_full_total, 0);
}

/* A keeper that answers nothing keeps nobody from the tier. */
static void what_is_read_back_does_not_wait_for_ever(void)
{
    uint64_t count = restart_cold_with_small_blocks();
    while (store->pools[0] == NULL || !kvist_pool_growth_waits(store->pools[0])) {
        kvist_test_advance(store, 0);
    }
    kvist_test_advance(store, 10000000);
    KVIST_TEST_TRUE(!kvist_pool_growth_waits(store->pools[0]));
    while (!store->tier_loaded) {
        kvist_test_advance(store, 0);
    }
    uint64_t there = small_pool()->nvme_blocks;
    KVIST_TEST_EQUAL(there + kvist_test_stats(store).index_full_total, count);
    KVIST_TEST_TRUE(there >= small_pool()->map.capacity / 4 * 3);
    open_engine();
}

/* --- Another geometry -------------------------------------------------------------------------- */

static void save_now(void)
{
    enum kvist_status status = KVIST_BUSY;
    KVIST_TEST_STATUS(kvist_store_save(store, saved, &status), KVIST_OK);
    KVIST_TEST_SETTLE_WHILE(store, status == KVIST_BUSY);
    KVIST_TEST_STATUS(status, KVIST_OK);
}

static void restart_cold(void)
{
    kvist_test_vault_kill(&store);
    kvist_test_vault_fini(&vault);
    kvist_test_engine_abandon(&engine);
    open_store();
}

/* What was opened counts, and is remembered; none of the other blocks is ever told of. */
static void slots_of_another_size_are_another_pool(void)
{
    put_range(0, 40);
    save_now();
    KVIST_TEST_EQUAL(tier_blocks(), 40);
    restart_cold();
    KVIST_TEST_TRUE(!store->tier_loaded); /* it is opened before the tier has told of it */
    engine = kvist_test_engine_open(store, 1, 1);
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, 2 * SLOT_BYTES);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool), 0);
    wait_loaded();
    KVIST_TEST_EQUAL(kvist_test_stats(store).pools_resized_total, 1);
    KVIST_TEST_EQUAL(count_places(0, 40).nvme, 0);
    KVIST_TEST_SETTLE_WHILE(store, !pool->tier_knows);
    KVIST_TEST_TRUE(pool->tier_knows);
    put_range(100, 10);
    save_now();
    restart_cold();
    wait_loaded();
    engine = kvist_test_engine_open(store, 1, 1);
    (void)kvist_test_engine_attach(engine, kvist_test_pool_open(store, 1, 2 * SLOT_BYTES));
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(kvist_test_stats(store).pools_resized_total, 0);
    KVIST_TEST_EQUAL(count_places(0, 40).nvme, 0);
    KVIST_TEST_EQUAL(count_places(100, 10).nvme, 10);
}

/* --- Clears ------------------------------------------------------------------------------------ */

/* Blocks in the tier, and a cold daemon that has it switched off. */
static void begin_without_the_tier(void)
{
    enum kvist_status status = KVIST_BUSY;
    wait_loaded();
    clear_now();
    clear_now();
    put_range(0, 40);
    KVIST_TEST_STATUS(kvist_store_save(store, saved, &status), KVIST_OK);
    KVIST_TEST_SETTLE_WHILE(store, status == KVIST_BUSY);
    KVIST_TEST_EQUAL(tier_blocks(), 40);
    kvist_test_vault_kill(&store);
    kvist_test_vault_fini(&vault);
    kvist_test_engine_abandon(&engine);
    options.tier = NULL;
    store = kvist_test_vault_open(&vault, &options);
}

/* The tier is back; it, and every later daemon, has none of these. */
static void expect_none_for_ever(void)
{
    for (unsigned round = 0; round < 3; round++) {
        wait_loaded();
        struct places places = count_places(0, 40);
        KVIST_TEST_EQUAL(places.ready + places.nvme, 0);
        kvist_test_engine_close(&engine);
        kvist_test_vault_kill(&store);
        if (round == 1) {
            kvist_test_vault_fini(&vault);
        }
        open_store();
        open_engine();
    }
}

static void a_clear_without_the_tier_counts_when_it_is_back(void)
{
    begin_without_the_tier();
    open_engine();
    put_range(0, 10);
    clear_now(); /* its generation is still below the one that the tier knows */
    put_range(100, 5);
    restart_beside_engine();
    KVIST_TEST_EQUAL(count_places(100, 5).ready, 5);
    expect_none_for_ever();
}

/* A fill that was begun before the clear is of no generation that came later, however often the
   store is killed meanwhile. */
static void what_was_granted_before_a_clear_is_never_committed(void)
{
    begin_without_the_tier();
    open_engine();
    struct kvist_store_grant early;
    KVIST_TEST_FATAL(kvist_test_engine_take(engine, 0, &early));
    kvist_test_fill(kvist_test_engine_slot(engine, 0, early.slot), 7, SLOT_BYTES);
    kvist_test_engine_mark(engine, 0, &early);
    clear_now();
    uint64_t generation = engine->pools[0].pool->about.generation;
    for (unsigned round = 0; round < 2; round++) {
        restart_warm();
        wait_loaded();
        KVIST_TEST_TRUE(engine->pools[0].pool->about.generation > generation);
    }
    KVIST_TEST_STATUS(kvist_test_engine_commit(engine, 0, &early, 7, SLOT_BYTES), KVIST_STALE);
    expect_none_for_ever();
}

static void what_was_cleared_unseen_stays_cleared(void)
{
    begin_without_the_tier();
    KVIST_TEST_TRUE(!kvist_store_tier_hears(store));
    kvist_store_clear_rest(store, "");
    kvist_test_vault_kill(&store);
    open_store();
    KVIST_TEST_TRUE(!kvist_store_clears_are_durable(store));
    wait_loaded();
    KVIST_TEST_TRUE(kvist_store_tier_hears(store));
    KVIST_TEST_SETTLE_WHILE(store, !kvist_store_clears_are_durable(store));
    KVIST_TEST_TRUE(kvist_store_clears_are_durable(store));
    open_engine();
    expect_none_for_ever();
}

/* The pool is opened between the clear and what the tier tells of it. */
static void what_is_opened_before_the_tier_tells_stays_cleared(void)
{
    begin_without_the_tier();
    kvist_store_clear_rest(store, "");
    kvist_test_vault_kill(&store);
    open_store();
    KVIST_TEST_TRUE(!store->tier_loaded);
    open_engine();
    put_range(100, 5);
    KVIST_TEST_EQUAL(count_places(100, 5).ready, 5);
    expect_none_for_ever();
}

static void what_is_opened_after_the_clear_stays_cleared(void)
{
    begin_without_the_tier();
    kvist_store_clear_rest(store, "");
    open_engine();
    put_range(100, 5);
    restart_beside_engine();
    KVIST_TEST_EQUAL(count_places(100, 5).ready, 5);
    expect_none_for_ever();
}

/* There is too little memory for the pool when the tier tells of it. */
static void what_could_not_be_made_stays_cleared(void)
{
    begin_without_the_tier();
    kvist_store_clear_rest(store, "");
    kvist_test_vault_kill(&store);
    open_store();
    kvist_fault_arm("memfd.create", 1, false);
    wait_loaded();
    KVIST_TEST_EQUAL(kvist_fault_disarm(), 1);
    KVIST_TEST_TRUE(store->pools[0] == NULL);
    open_engine();
    expect_none_for_ever();
}

static void others_pools_are_not_cleared_unseen(void)
{
    begin_without_the_tier();
    for (unsigned index = 0; index < KVIST_ROSTER_CLEARED_MAX; index++) {
        char tenant[16];
        (void)snprintf(tenant, sizeof(tenant), "t%u", index);
        kvist_store_clear_rest(store, tenant);
        kvist_store_clear_rest(store, tenant);
    }
    KVIST_TEST_TRUE(kvist_roster_rest_cleared(store, "t3"));
    KVIST_TEST_TRUE(!kvist_roster_rest_cleared(store, "default"));
    kvist_test_vault_kill(&store);
    open_store();
    wait_loaded();
    open_engine();
    KVIST_TEST_EQUAL(count_places(0, 40).nvme, 40);
    KVIST_TEST_TRUE(!kvist_roster_rest_cleared(store, "t3"));
    for (unsigned index = 0; index <= KVIST_ROSTER_CLEARED_MAX; index++) {
        char tenant[16];
        (void)snprintf(tenant, sizeof(tenant), "t%u", index);
        kvist_roster_clear_rest(store, tenant);
    }
    KVIST_TEST_TRUE(kvist_roster_rest_cleared(store, "default")); /* rather than one too few */
    kvist_roster_rest_known(store);
}

static void blocks_from_before_a_clear_elsewhere_are_dropped(void)
{
    put_range(0, BLOCKS);
    kvist_test_vault_kill(&store);
    /* A daemon that was started without the fds clears the pool. */
    struct kvist_store_options plain = kvist_test_options(ARENA);
    plain.tier = &tier_options;
    store = kvist_test_store_open(&plain);
    wait_loaded();
    enum kvist_status status = KVIST_BUSY;
    KVIST_TEST_STATUS(
        kvist_store_clear(store, kvist_test_pool_open(store, 1, SLOT_BYTES), cleared, &status),
        KVIST_OK);
    KVIST_TEST_SETTLE_WHILE(store, status == KVIST_BUSY);
    KVIST_TEST_STATUS(status, KVIST_OK);
    struct kvist_test_engine *before = engine;
    open_engine();
    put_range(5000, 20);
    status = KVIST_BUSY;
    KVIST_TEST_STATUS(kvist_store_save(store, saved, &status), KVIST_OK);
    KVIST_TEST_SETTLE_WHILE(store, status == KVIST_BUSY);
    KVIST_TEST_STATUS(status, KVIST_OK);
    kvist_test_engine_close(&engine);
    kvist_store_close(&store);
    engine = before;
    open_store();
    kvist_test_engine_adopt(engine, store);
    wait_loaded();
    struct places after = count_places(0, BLOCKS);
    KVIST_TEST_EQUAL(after.ready + after.nvme, 0);
    KVIST_TEST_EQUAL(count_places(5000, 20).nvme, 20);
    put_range(0, 20);
    KVIST_TEST_EQUAL(count_places(0, 20).ready, 20);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"both tiers come back", both_tiers_come_back},
        {"a tier that is gone is not believed", a_tier_that_is_gone_is_not_believed},
        {"what is read back waits for room in the index",
         what_is_read_back_waits_for_room_in_the_index},
        {"what is read back does not wait for ever", what_is_read_back_does_not_wait_for_ever},
        {"slots of another size are another pool", slots_of_another_size_are_another_pool},
        {"a clear without the tier counts when it is back",
         a_clear_without_the_tier_counts_when_it_is_back},
        {"what was granted before a clear is never committed",
         what_was_granted_before_a_clear_is_never_committed},
        {"what was cleared unseen stays cleared", what_was_cleared_unseen_stays_cleared},
        {"what is opened before the tier tells stays cleared",
         what_is_opened_before_the_tier_tells_stays_cleared},
        {"what is opened after the clear stays cleared",
         what_is_opened_after_the_clear_stays_cleared},
        {"what could not be made stays cleared", what_could_not_be_made_stays_cleared},
        {"others' pools are not cleared unseen", others_pools_are_not_cleared_unseen},
        {"a clear under way is finished", a_clear_under_way_is_finished},
        {"blocks from before a clear elsewhere are dropped",
         blocks_from_before_a_clear_elsewhere_are_dropped},
    };
    return kvist_unit_main("adopt_tier", cases, KVIST_ARRAY_COUNT(cases), setup, teardown);
}
