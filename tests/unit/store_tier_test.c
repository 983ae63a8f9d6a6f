/* store over a real tier: spill, promote, hold, save, restart, clear, corrupt bytes. */
#include "tests/support/engine.h"
#include "tests/support/unit.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define SLOT_BYTES (64ULL << 10)
#define ARENA      (16ULL << 20) /* 256 slots */
#define BLOCKS     1000U
#define HOLD_US    60000000ULL
#define TIER_BYTES (512ULL << 20)

static char path[64];
static struct kvist_tier_options tier_options;
static struct kvist_store *store;
static struct kvist_store_pool *pool;
static struct kvist_test_engine *engine;
static uint64_t skipped;      /* blocks that were dropped because NVMe did not keep up */
static uint64_t skipped_seen; /* of those that this store counts */

static void open_all(enum kvist_admission admission)
{
    struct kvist_store_options options = kvist_test_options(ARENA);
    options.tier = &tier_options;
    options.admission = admission;
    options.eviction = KVIST_EVICTION_LRU; /* cases push blocks out by writing others */
    options.hold_us = HOLD_US;
    store = kvist_test_store_open(&options);
    skipped_seen = 0;
    pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    engine = kvist_test_engine_open(store, 1, 1);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool), 0);
    kvist_test_settle(store);
}

static void close_all(void)
{
    kvist_test_engine_close(&engine);
    kvist_store_close(&store);
}

static void setup(void)
{
    (void)snprintf(path, sizeof(path), "store_tier_XXXXXX");
    KVIST_TEST_FATAL(mkdtemp(path) != NULL);
    tier_options = (struct kvist_tier_options){
        .path = path, .bytes_max = TIER_BYTES, .io_threads = 4, .extent_bytes = 8 << 20};
    skipped = 0;
    open_all(KVIST_ADMIT_EVICTED);
}

static void teardown(void)
{
    if (store != NULL) {
        close_all();
    }
    kvist_unit_remove_tree(path);
}

/* Promotions evict too, so what is read counts as well as what is put. */
static void note_skipped(void)
{
    uint64_t now = kvist_test_stats(store).spill_skipped_total;
    skipped += now - skipped_seen;
    skipped_seen = now;
}

static void put_range(uint64_t first, uint64_t count)
{
    for (uint64_t number = first; number < first + count; number++) {
        for (unsigned attempt = 0; engine->pools[0].grant_count == 0 && attempt < 50; attempt++) {
            kvist_test_settle(store);
        }
        enum kvist_status status = kvist_test_engine_put(engine, 0, number, SLOT_BYTES);
        if (status == KVIST_STALE) {
            number--; /* a grant from before a clear */
            continue;
        }
        KVIST_TEST_FATAL(status == KVIST_OK);
        if (number % 16 == 0) {
            kvist_test_settle(store);
        }
    }
    kvist_test_settle(store);
    note_skipped();
}

static void prefetch(uint64_t first, uint64_t count)
{
    static uint8_t keys[KVIST_KEYS_MAX][KVIST_KEY_BYTES];
    for (uint64_t index = 0; index < count; index++) {
        kvist_test_key(first + index, keys[index]);
    }
    uint32_t before = engine->pools[0].promoted;
    KVIST_TEST_STATUS(
        kvist_store_prefetch(engine->session, 0, (const uint8_t(*)[KVIST_KEY_BYTES])keys, count),
        KVIST_OK);
    KVIST_TEST_SETTLE_WHILE(store, engine->pools[0].promoted - before < count);
    KVIST_TEST_EQUAL(engine->pools[0].promoted - before, count);
}

static uint64_t count_ready(uint64_t first, uint64_t count)
{
    uint64_t ready = 0;
    for (uint64_t number = first; number < first + count; number++) {
        ready += kvist_test_engine_probe(engine, 0, number) == KVIST_ENTRY_READY;
    }
    return ready;
}

/* A block, fetched when it is on NVMe, as often as it is evicted before it is leased. */
static const void *lease_at_last(uint64_t number)
{
    const void *bytes = kvist_test_engine_lease(engine, 0, number, 1);
    for (unsigned attempt = 0; bytes == NULL && attempt < 20 &&
                               kvist_test_engine_probe(engine, 0, number) != KVIST_ENTRY_EMPTY;
         attempt++) {
        prefetch(number, 1);
        bytes = kvist_test_engine_lease(engine, 0, number, 1);
    }
    return bytes;
}

/* Every block of a range can be read, but for what was dropped because the disk was too slow. */
static void read_range(uint64_t first, uint64_t count)
{
    uint64_t missing = 0;
    prefetch(first, count);
    for (uint64_t number = first; number < first + count; number++) {
        const void *bytes = lease_at_last(number);
        if (bytes == NULL) {
            missing++;
        } else {
            KVIST_TEST_TRUE(kvist_test_holds(bytes, number, SLOT_BYTES));
            kvist_test_engine_release(engine, 1);
        }
    }
    note_skipped();
    KVIST_TEST_TRUE(missing <= skipped);
    kvist_test_advance(store, 2 * HOLD_US);
}

/* More than a quarter of the arena at once, again and again: DRAM is what they pass through. */
static void prompts_are_stored_whole_in_a_small_arena(void)
{
    const uint32_t prompt = (uint32_t)(ARENA / SLOT_BYTES / 5 * 2);
    for (uint64_t first = 0; first < 5000; first += 1000) {
        uint32_t stored = 0;
        for (uint64_t number = first; number < first + prompt; number++) {
            stored += kvist_test_engine_put(engine, 0, number, SLOT_BYTES) == KVIST_OK;
        }
        KVIST_TEST_FATAL(stored == prompt);
        struct kvist_test_pool *mine = &engine->pools[0];
        KVIST_TEST_SETTLE_WHILE(store, mine->grant_count < prompt);
    }
    note_skipped();
    KVIST_TEST_TRUE(kvist_test_stats(store).slots_granted <= ARENA / SLOT_BYTES / 2);
}

static void evicted_blocks_come_back(void)
{
    put_range(0, BLOCKS);
    struct kvist_store_stats stats = kvist_test_stats(store);
    KVIST_TEST_TRUE(stats.spills_total > BLOCKS / 2);
    KVIST_TEST_EQUAL(stats.spill_failures_total, 0);
    struct kvist_store_pool_info info;
    KVIST_TEST_FATAL(kvist_store_pool_info(store, 0, &info));
    KVIST_TEST_EQUAL(info.nvme_blocks, stats.spills_total);
    for (uint64_t first = 0; first < BLOCKS; first += 50) {
        read_range(first, 50);
    }
    KVIST_TEST_TRUE(kvist_test_stats(store).promotes_total > BLOCKS / 2);
    KVIST_TEST_EQUAL(kvist_test_stats(store).promote_failures_total, 0);
}

static void a_restart_reads_the_keys_back(void)
{
    put_range(0, BLOCKS);
    while (kvist_test_stats(store).tier.in_flight > 0) { /* what is written while the store closes counts too */
        kvist_test_settle(store);
    }
    struct kvist_store_pool_info before;
    KVIST_TEST_FATAL(kvist_store_pool_info(store, 0, &before));
    close_all();
    open_all(KVIST_ADMIT_EVICTED);
    struct kvist_store_pool_info after;
    KVIST_TEST_FATAL(kvist_store_pool_info(store, 0, &after));
    KVIST_TEST_EQUAL(after.nvme_blocks, before.nvme_blocks);
    KVIST_TEST_EQUAL(after.generation, before.generation);
    read_range(0, 100);
}

struct done_result {
    unsigned calls;
    enum kvist_status status;
    uint64_t blocks;
};

static void note_saved(void *ctx, const struct kvist_store_saved *saved)
{
    struct done_result *result = ctx;
    result->calls++;
    result->status = saved->status;
    result->blocks = saved->blocks;
    KVIST_TEST_EQUAL(saved->bytes, saved->blocks * SLOT_BYTES);
    KVIST_TEST_EQUAL(saved->unsaved_blocks, 0);
}

static void note_cleared(void *ctx, enum kvist_status status, uint64_t blocks, uint64_t bytes)
{
    (void)bytes;
    struct done_result *result = ctx;
    result->calls++;
    result->status = status;
    result->blocks = blocks;
}

static void a_save_writes_what_is_in_dram_alone(void)
{
    put_range(0, 100);
    KVIST_TEST_EQUAL(kvist_test_stats(store).spills_total, 0);
    struct done_result result = {.calls = 0};
    KVIST_TEST_STATUS(kvist_store_save(store, note_saved, &result), KVIST_OK);
    KVIST_TEST_STATUS(kvist_store_save(store, note_saved, &result), KVIST_BUSY);
    KVIST_TEST_SETTLE_WHILE(store, result.calls == 0);
    KVIST_TEST_EQUAL(result.calls, 1);
    KVIST_TEST_STATUS(result.status, KVIST_OK);
    KVIST_TEST_EQUAL(result.blocks, 100);
    close_all();
    open_all(KVIST_ADMIT_EVICTED);
    read_range(0, 100);
    result.calls = 0;
    KVIST_TEST_STATUS(kvist_store_save(store, note_saved, &result), KVIST_OK);
    KVIST_TEST_SETTLE_WHILE(store, result.calls == 0);
    KVIST_TEST_EQUAL(result.blocks, 0);
}

static void write_behind_copies_every_block(void)
{
    close_all();
    open_all(KVIST_ADMIT_ALL);
    put_range(0, 60);
    KVIST_TEST_SETTLE_WHILE(store, kvist_test_stats(store).spills_total < 60);
    KVIST_TEST_EQUAL(kvist_test_stats(store).spills_total, 60);
    KVIST_TEST_EQUAL(kvist_test_stats(store).slots_ready, 60);
}

static void a_clear_reaches_both_tiers_for_good(void)
{
    put_range(0, 600);
    struct done_result result = {.calls = 0};
    KVIST_TEST_STATUS(kvist_store_clear(store, pool, note_cleared, &result), KVIST_OK);
    KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, 0, 1), KVIST_ENTRY_EMPTY);
    KVIST_TEST_SETTLE_WHILE(store, result.calls == 0);
    KVIST_TEST_STATUS(result.status, KVIST_OK);
    KVIST_TEST_EQUAL(result.blocks + skipped, 600);
    put_range(5000, 300);
    close_all();
    open_all(KVIST_ADMIT_EVICTED);
    for (uint64_t number = 0; number < 600; number++) {
        KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, 0, number), KVIST_ENTRY_EMPTY);
    }
    uint64_t kept = 0;
    for (uint64_t number = 5000; number < 5300; number++) {
        kept += kvist_test_engine_probe(engine, 0, number) == KVIST_ENTRY_NVME;
    }
    KVIST_TEST_TRUE(kept > 0);
}

static void clears_that_wait_for_the_disk_are_bounded(void)
{
    struct done_result results[KVIST_POOL_CLEARS_MAX + 1] = {{.calls = 0}};
    put_range(0, 10);
    for (unsigned index = 0; index < KVIST_POOL_CLEARS_MAX; index++) {
        KVIST_TEST_STATUS(kvist_store_clear(store, pool, note_cleared, &results[index]), KVIST_OK);
    }
    struct done_result *refused = &results[KVIST_POOL_CLEARS_MAX];
    KVIST_TEST_STATUS(kvist_store_clear(store, pool, note_cleared, refused), KVIST_BUSY);
    for (unsigned index = 0; index < KVIST_POOL_CLEARS_MAX; index++) {
        KVIST_TEST_SETTLE_WHILE(store, results[index].calls == 0);
        KVIST_TEST_STATUS(results[index].status, KVIST_OK);
        KVIST_TEST_EQUAL(results[index].calls, 1);
    }
    KVIST_TEST_STATUS(kvist_store_clear(store, pool, note_cleared, refused), KVIST_OK);
    KVIST_TEST_SETTLE_WHILE(store, refused->calls == 0);
    KVIST_TEST_STATUS(refused->status, KVIST_OK);
}

static void a_promotion_that_a_clear_overtakes_is_dropped(void)
{
    put_range(0, 600);
    static uint8_t keys[600][KVIST_KEY_BYTES];
    for (uint64_t index = 0; index < 600; index++) {
        kvist_test_key(index, keys[index]);
    }
    KVIST_TEST_STATUS(
        kvist_store_prefetch(engine->session, 0, (const uint8_t(*)[KVIST_KEY_BYTES])keys, 600),
        KVIST_OK);
    for (unsigned turn = 0; turn < 1000 && kvist_test_stats(store).slots_loading == 0; turn++) {
        kvist_test_advance(store, 1); /* submits them, as soon as there are slots */
    }
    KVIST_TEST_TRUE(kvist_test_stats(store).slots_loading > 0);
    struct done_result result = {.calls = 0};
    KVIST_TEST_STATUS(kvist_store_clear(store, pool, note_cleared, &result), KVIST_OK);
    KVIST_TEST_TRUE(kvist_store_check(store) == NULL);
    KVIST_TEST_SETTLE_WHILE(store, result.calls == 0);
    KVIST_TEST_SETTLE_WHILE(store, engine->pools[0].promoted < 600);
    KVIST_TEST_EQUAL(engine->pools[0].promoted, 600);
    KVIST_TEST_EQUAL(kvist_test_stats(store).slots_loading, 0);
    KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, 0, 3), KVIST_ENTRY_EMPTY);
}

static void flip_bytes_of_extents(void)
{
    char name[128];
    (void)snprintf(name, sizeof(name), "%s/extents", path);
    DIR *directory = opendir(name);
    KVIST_TEST_FATAL(directory != NULL);
    for (struct dirent *entry = readdir(directory); entry != NULL; entry = readdir(directory)) {
        char file[512];
        (void)snprintf(file, sizeof(file), "%s/%s", name, entry->d_name);
        int fd = open(file, O_RDWR | O_CLOEXEC);
        if (fd < 0) {
            continue;
        }
        /* A byte in the middle of every block: records are 4096 + 65536. */
        for (off_t at = 4096 + 4096 + 1000; at < (8 << 20); at += 4096 + 65536) {
            uint8_t byte = 0;
            if (pread(fd, &byte, 1, at) == 1) {
                byte ^= 1;
                KVIST_TEST_FATAL(pwrite(fd, &byte, 1, at) == 1);
            }
        }
        (void)close(fd);
    }
    (void)closedir(directory);
}

static void a_flipped_byte_on_disk_is_a_miss(void)
{
    put_range(0, 600);
    close_all();
    flip_bytes_of_extents();
    open_all(KVIST_ADMIT_EVICTED);
    uint64_t on_nvme = 0;
    for (uint64_t number = 0; number < 100; number++) {
        on_nvme += kvist_test_engine_probe(engine, 0, number) == KVIST_ENTRY_NVME;
    }
    KVIST_TEST_TRUE(on_nvme > 0);
    prefetch(0, 100);
    for (uint64_t number = 0; number < 100; number++) {
        KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, 0, number), KVIST_ENTRY_EMPTY);
    }
    KVIST_TEST_EQUAL(kvist_test_stats(store).promote_failures_total, on_nvme);
    KVIST_TEST_EQUAL(kvist_test_stats(store).slots_loading, 0);
}

static void a_flipped_byte_in_dram_is_not_spilled(void)
{
    put_range(0, 1);
    kvist_test_settle_sums(store, 1);
    uint8_t *bytes = kvist_test_engine_bytes(engine, 0, 0);
    KVIST_TEST_FATAL(bytes != NULL);
    bytes[777] ^= 1;
    put_range(1, 600);
    KVIST_TEST_EQUAL(kvist_test_stats(store).checksum_mismatch_total, 1);
    KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, 0, 0), KVIST_ENTRY_EMPTY);
    KVIST_TEST_TRUE(kvist_test_engine_probe(engine, 0, 1) != KVIST_ENTRY_EMPTY);
}

/* What is wrong in memory is dropped there; the copy on NVMe was right, and is read again. */
static void a_suspect_that_is_corrupt_comes_back_from_nvme(void)
{
    struct done_result result = {.calls = 0};
    put_range(0, 2);
    KVIST_TEST_STATUS(kvist_store_save(store, note_saved, &result), KVIST_OK);
    KVIST_TEST_SETTLE_WHILE(store, result.calls == 0);
    KVIST_TEST_EQUAL(result.blocks, 2);
    uint8_t *bytes = kvist_test_engine_bytes(engine, 0, 0);
    KVIST_TEST_FATAL(bytes != NULL);
    bytes[777] ^= 1;
    KVIST_TEST_STATUS(kvist_test_engine_suspect(engine, 0, 0, 2), KVIST_OK);
    KVIST_TEST_SETTLE_WHILE(store, kvist_test_stats(store).suspects_confirmed_total == 0);
    KVIST_TEST_EQUAL(kvist_test_stats(store).suspects_confirmed_total, 1);
    KVIST_TEST_EQUAL(kvist_test_stats(store).checksum_mismatch_total, 1);
    KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, 0, 0), KVIST_ENTRY_NVME);
    KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, 0, 1), KVIST_ENTRY_READY);
    const void *again = lease_at_last(0);
    KVIST_TEST_FATAL(again != NULL);
    KVIST_TEST_TRUE(kvist_test_holds(again, 0, SLOT_BYTES));
    kvist_test_engine_release(engine, 1);
}

/* One engine that goes through more pools than there are places, as after as many resets. */
static void idle_pools_make_place(void)
{
    enum { POOLS = KVIST_POOLS_MAX + 40 };
    struct kvist_store_pool *one = NULL;
    uint8_t first[KVIST_KEY_BYTES];
    memcpy(first, kvist_store_pool_id(pool), sizeof(first));
    put_range(POOLS, 1);
    kvist_test_engine_detach(engine, 0); /* from another tenant's only pool */
    for (uint32_t number = 0; number < POOLS; number++) {
        struct kvist_tier_pool about = {.slot_bytes = SLOT_BYTES, .tenant = "busy"};
        memcpy(about.pool_id, &number, sizeof(number));
        about.pool_id[8] = 1;
        KVIST_TEST_STATUS(kvist_store_pool_open(store, &about, &one, NULL), KVIST_OK);
        KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, one), 0);
        put_range(number, 1);
        kvist_test_engine_detach(engine, 0);
        kvist_test_advance(store, 20000);
    }
    KVIST_TEST_EQUAL(kvist_test_stats(store).pools, KVIST_POOLS_MAX);
    KVIST_TEST_EQUAL(kvist_test_stats(store).pools_dropped_total, 41);
    KVIST_TEST_TRUE(kvist_store_pool_lookup(store, first) != NULL || skipped > 0);
    /* The oldest has gone, and is a pool as any other when it comes again; the others are there. */
    static const uint32_t numbers[] = {POOLS - 1, POOLS / 2, 50, 0, 0};
    for (size_t index = 0; index < sizeof(numbers) / sizeof(numbers[0]); index++) {
        struct kvist_tier_pool about = {.slot_bytes = SLOT_BYTES, .tenant = "busy"};
        memcpy(about.pool_id, &numbers[index], sizeof(numbers[index]));
        about.pool_id[8] = 1;
        KVIST_TEST_STATUS(kvist_store_pool_open(store, &about, &one, NULL), KVIST_OK);
        KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, one), 0);
        kvist_test_settle(store);
        const void *bytes = lease_at_last(numbers[index]);
        KVIST_TEST_TRUE(index == 3 ? bytes == NULL : bytes != NULL || skipped > 0);
        KVIST_TEST_TRUE(bytes == NULL || kvist_test_holds(bytes, numbers[index], SLOT_BYTES));
        kvist_test_engine_release(engine, 1);
        if (index == 3) {
            put_range(0, 1);
        }
        kvist_test_engine_detach(engine, 0);
    }
    /* One block a pool, and nothing is left of those that were dropped. */
    KVIST_TEST_SETTLE_WHILE(store, kvist_test_stats(store).tier.blocks > KVIST_POOLS_MAX);
    KVIST_TEST_TRUE(kvist_test_stats(store).tier.blocks <= KVIST_POOLS_MAX);
}

static void promotions_are_bounded(void)
{
    put_range(0, BLOCKS);
    /* Half of the pool's slots at most; the rest is refused, and told to have ended. */
    prefetch(0, 400);
    struct kvist_store_stats stats = kvist_test_stats(store);
    KVIST_TEST_TRUE(stats.promotes_total > 0);
    KVIST_TEST_TRUE(stats.promotes_total <= 128);
    KVIST_TEST_TRUE(stats.promote_refused_total >= 100);
    prefetch(500, 50);
    KVIST_TEST_EQUAL(kvist_test_stats(store).promotes_total, stats.promotes_total); /* all is held */
    kvist_test_advance(store, 2 * HOLD_US);
    prefetch(500, 50);
    KVIST_TEST_TRUE(kvist_test_stats(store).promotes_total > stats.promotes_total);
}

/* An engine that reads fast has released its leases before anyone looks for them. */
static void blocks_that_were_leased_are_no_longer_held(void)
{
    put_range(0, BLOCKS);
    for (uint64_t first = 0; first < 800; first += 50) {
        uint64_t before = kvist_test_stats(store).promote_refused_total;
        prefetch(first, 50);
        KVIST_TEST_EQUAL(kvist_test_stats(store).promote_refused_total, before);
        for (uint64_t number = first; number < first + 50; number++) {
            if (kvist_test_engine_lease(engine, 0, number, 1) != NULL) {
                uint32_t slot = kvist_test_engine_slot_of(engine, 0, number);
                kvist_test_engine_touch(engine, kvist_slot_ref(0, slot));
                kvist_test_engine_release(engine, 1);
            }
        }
    }
}

static void promoted_blocks_are_held_until_they_are_leased(void)
{
    put_range(0, BLOCKS);
    prefetch(0, 60);
    uint64_t held = count_ready(0, 60);
    KVIST_TEST_TRUE(held > 0);
    put_range(7000, 200);
    KVIST_TEST_EQUAL(count_ready(0, 60), held);
    kvist_test_advance(store, 2 * HOLD_US);
    put_range(8000, 400);
    KVIST_TEST_EQUAL(count_ready(0, 60), 0);
}

static void a_session_that_goes_leaves_nothing_behind(void)
{
    put_range(0, 600);
    uint8_t keys[60][KVIST_KEY_BYTES];
    for (uint64_t index = 0; index < 60; index++) {
        kvist_test_key(index, keys[index]);
    }
    KVIST_TEST_STATUS(
        kvist_store_prefetch(engine->session, 0, (const uint8_t(*)[KVIST_KEY_BYTES])keys, 60),
        KVIST_OK);
    kvist_test_advance(store, 1);
    kvist_test_engine_close(&engine);
    KVIST_TEST_SETTLE_WHILE(store, kvist_test_stats(store).slots_loading > 0);
    struct kvist_store_stats stats = kvist_test_stats(store);
    KVIST_TEST_EQUAL(stats.slots_loading, 0);
    KVIST_TEST_EQUAL(stats.slots_granted, 0);
    engine = kvist_test_engine_open(store, 2, 1);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool), 0);
    kvist_test_settle(store);
    read_range(0, 60);
}

/* What was promoted, or is on its way, for a pool that a session has left is not counted against
   the next one at its ordinal. */
static void an_ordinal_s_next_pool_owes_nothing(void)
{
    static uint8_t keys[60][KVIST_KEY_BYTES];
    put_range(0, 600);
    for (uint64_t index = 0; index < 60; index++) {
        kvist_test_key(index, keys[index]);
    }
    for (unsigned round = 0; round < 3; round++) {
        KVIST_TEST_STATUS(
            kvist_store_prefetch(engine->session, 0, (const uint8_t(*)[KVIST_KEY_BYTES])keys, 60),
            KVIST_OK);
        if (round == 1) {
            kvist_test_settle(store); /* all are held */
        } else if (round == 2) {
            for (unsigned wait = 0; kvist_test_stats(store).slots_loading == 0 && wait < 50; wait++) {
                kvist_test_advance(store, 1000); /* until some are being read */
            }
        }
        kvist_test_engine_detach(engine, 0);
        KVIST_TEST_TRUE(kvist_store_check(store) == NULL);
        KVIST_TEST_STATUS(
            kvist_store_prefetch(engine->session, 0, (const uint8_t(*)[KVIST_KEY_BYTES])keys, 60),
            KVIST_INVALID);
        KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool), 0);
        for (unsigned wait = 0; kvist_test_stats(store).slots_loading > 0 && wait < 100; wait++) {
            kvist_test_settle(store);
        }
        kvist_test_settle(store);
        KVIST_TEST_EQUAL(engine->pools[0].promoted, 0);
        put_range(10000 + 300 * round, 300); /* pushes them out of DRAM: none is held */
        KVIST_TEST_EQUAL(count_ready(0, 60), 0);
        kvist_test_advance(store, 2 * HOLD_US);
        uint64_t refused = kvist_test_stats(store).promote_refused_total;
        read_range(0, 60);
        KVIST_TEST_EQUAL(kvist_test_stats(store).promote_refused_total, refused);
        put_range(20000 + 300 * round, 300);
    }
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"prompts are stored whole in a small arena", prompts_are_stored_whole_in_a_small_arena},
        {"evicted blocks come back", evicted_blocks_come_back},
        {"a restart reads the keys back", a_restart_reads_the_keys_back},
        {"a save writes what is in DRAM alone", a_save_writes_what_is_in_dram_alone},
        {"write-behind copies every block", write_behind_copies_every_block},
        {"a clear reaches both tiers for good", a_clear_reaches_both_tiers_for_good},
        {"clears that wait for the disk are bounded", clears_that_wait_for_the_disk_are_bounded},
        {"a promotion that a clear overtakes is dropped",
         a_promotion_that_a_clear_overtakes_is_dropped},
        {"a flipped byte on disk is a miss", a_flipped_byte_on_disk_is_a_miss},
        {"a flipped byte in DRAM is not spilled", a_flipped_byte_in_dram_is_not_spilled},
        {"a suspect that is corrupt comes back from NVMe",
         a_suspect_that_is_corrupt_comes_back_from_nvme},
        {"idle pools make place", idle_pools_make_place},
        {"promotions are bounded", promotions_are_bounded},
        {"blocks that were leased are no longer held", blocks_that_were_leased_are_no_longer_held},
        {"promoted blocks are held until they are leased",
         promoted_blocks_are_held_until_they_are_leased},
        {"a session that goes leaves nothing behind", a_session_that_goes_leaves_nothing_behind},
        {"an ordinal's next pool owes nothing", an_ordinal_s_next_pool_owes_nothing},
    };
    return kvist_unit_main("store_tier", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
}
