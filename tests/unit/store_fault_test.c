/*
 * store over a tier whose disk fails: what is lost is a copy, never a block in DRAM; a save says
 * what it could not write; all is well again by itself.
 */
#include "proto/base/fault.h"
#include "tests/support/engine.h"
#include "tests/support/unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define SLOT_BYTES (64ULL << 10)
#define ARENA      (16ULL << 20) /* 256 slots */
#define TIER_BYTES (512ULL << 20)
#define BLOCKS     60U
#define ROUNDS_MAX 4000U

static char path[64];
static struct kvist_tier_options tier_options;
static struct kvist_store *store;
static struct kvist_test_engine *engine;
static struct kvist_store_saved saved;
static unsigned saves; /* that have ended */

static void open_all(enum kvist_admission admission)
{
    struct kvist_store_options options = kvist_test_options(ARENA);
    options.tier = &tier_options;
    options.admission = admission;
    options.hold_us = 1000000;
    store = kvist_test_store_open(&options);
    engine = kvist_test_engine_open(store, 1, 1);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, kvist_test_pool_open(store, 1, SLOT_BYTES)),
                     0);
    kvist_test_settle(store);
}

static void close_all(void)
{
    kvist_test_engine_close(&engine);
    kvist_store_close(&store);
}

static void setup(void)
{
    (void)snprintf(path, sizeof(path), "store_fault_XXXXXX");
    KVIST_TEST_FATAL(mkdtemp(path) != NULL);
    tier_options = (struct kvist_tier_options){
        .path = path, .bytes_max = TIER_BYTES, .io_threads = 4, .extent_bytes = 8 << 20};
    open_all(KVIST_ADMIT_EVICTED);
}

static void teardown(void)
{
    (void)kvist_fault_disarm();
    if (store != NULL) {
        close_all();
    }
    kvist_unit_remove_tree(path);
}

static void put_range(uint64_t first, uint64_t count)
{
    for (uint64_t number = first; number < first + count; number++) {
        KVIST_TEST_SETTLE_WHILE(store, engine->pools[0].grant_count == 0);
        KVIST_TEST_STATUS(kvist_test_engine_put(engine, 0, number, SLOT_BYTES), KVIST_OK);
        if (number % 16 == 0) {
            kvist_test_settle(store);
        }
    }
    kvist_test_settle(store);
}

static void note_saved(void *ctx, const struct kvist_store_saved *result)
{
    (void)ctx;
    saved = *result;
    saves++;
}

static void save(void)
{
    unsigned before = saves;
    KVIST_TEST_STATUS(kvist_store_save(store, note_saved, NULL), KVIST_OK);
    KVIST_TEST_SETTLE_WHILE(store, saves == before);
    KVIST_TEST_FATAL(saves == before + 1);
}

/* Turn until the tier says that it is well, without being asked for anything. */
static bool heals(void)
{
    for (unsigned round = 0; round < ROUNDS_MAX; round++) {
        if (kvist_test_stats(store).tier.degraded[0] == '\0') {
            return true;
        }
        kvist_test_settle(store);
    }
    return false;
}

/* Of these blocks, those that a new daemon finds on NVMe. */
static uint64_t count_kept(uint64_t first, uint64_t count)
{
    uint64_t kept = 0;
    close_all();
    open_all(KVIST_ADMIT_EVICTED);
    for (uint64_t number = first; number < first + count; number++) {
        kept += kvist_test_engine_probe(engine, 0, number) == KVIST_ENTRY_NVME;
    }
    return kept;
}

static void a_save_tells_what_it_could_not_write(void)
{
    static const char *points[] = {"tier.extent.make", "tier.extent.write", "tier.index.put"};
    for (size_t index = 0; index < sizeof(points) / sizeof(points[0]); index++) {
        uint64_t first = index * BLOCKS;
        put_range(first, BLOCKS);
        kvist_fault_arm(points[index], 1, true);
        save();
        KVIST_TEST_TRUE(saved.status != KVIST_OK);
        KVIST_TEST_EQUAL(saved.blocks, 0);
        KVIST_TEST_EQUAL(saved.unsaved_blocks, BLOCKS);
        KVIST_TEST_EQUAL(saved.unsaved_bytes, BLOCKS * SLOT_BYTES);
        CU_ASSERT_STRING_EQUAL(saved.why, kvist_test_stats(store).tier.degraded);
        KVIST_TEST_TRUE(saved.why[0] != '\0');
        KVIST_TEST_EQUAL(kvist_test_stats(store).slots_ready, BLOCKS);
        (void)kvist_fault_disarm();
        save();
        KVIST_TEST_STATUS(saved.status, KVIST_OK);
        KVIST_TEST_EQUAL(saved.blocks, BLOCKS);
        KVIST_TEST_EQUAL(saved.unsaved_blocks, 0);
        CU_ASSERT_STRING_EQUAL(saved.why, "");
        /* The next fault is to meet an extent that has to be made. */
        close_all();
        open_all(KVIST_ADMIT_EVICTED);
    }
    KVIST_TEST_EQUAL(count_kept(0, 3 * BLOCKS), 3 * BLOCKS);
}

/* The disk fails in the middle for good: what was written before stays, the rest is counted. */
static void a_save_counts_what_a_disk_took_before_it_failed(void)
{
    put_range(0, BLOCKS);
    kvist_fault_arm("tier.extent.write", 20, true);
    save();
    KVIST_TEST_TRUE(saved.status != KVIST_OK);
    KVIST_TEST_EQUAL(saved.blocks, 19);
    KVIST_TEST_EQUAL(saved.unsaved_blocks, BLOCKS - 19);
    (void)kvist_fault_disarm();
    KVIST_TEST_EQUAL(count_kept(0, BLOCKS), 19);
}

/* One error at the k-th call, for every k: the save tries again, and nothing is missing. */
static void an_error_at_any_call_of_a_save_costs_nothing(void)
{
    static const char *points[] = {"tier.extent.make",
                                   "tier.extent.write",
                                   "tier.index.put",
                                   "tier.index.open",
                                   "tier.index.get",
                                   "tier.sync"};
    uint64_t number = 0;
    uint64_t faults = 0;
    for (size_t index = 0; index < sizeof(points) / sizeof(points[0]); index++) {
        for (uint64_t nth = 1; nth < 8; nth++) {
            put_range(number, 6);
            uint64_t errors = kvist_test_stats(store).tier.write_errors_total;
            kvist_fault_arm(points[index], nth, false);
            save();
            bool hit = kvist_fault_disarm() >= nth;
            faults += hit;
            if (saved.status != KVIST_OK) { /* not durable, and it says so */
                KVIST_TEST_TRUE(hit && saved.why[0] != '\0');
                KVIST_TEST_EQUAL(saved.unsaved_blocks, 0);
                save();
                KVIST_TEST_STATUS(saved.status, KVIST_OK);
            } else {
                KVIST_TEST_EQUAL(saved.blocks, 6);
            }
            KVIST_TEST_TRUE(hit || kvist_test_stats(store).tier.write_errors_total == errors);
            number += 6;
        }
    }
    KVIST_TEST_TRUE(faults > 20);
    KVIST_TEST_TRUE(heals());
    KVIST_TEST_EQUAL(count_kept(0, number), number);
}

static void write_behind_goes_on_when_the_disk_is_well(void)
{
    close_all();
    open_all(KVIST_ADMIT_ALL);
    kvist_fault_arm("tier.extent.write", 1, true);
    put_range(0, BLOCKS);
    KVIST_TEST_SETTLE_WHILE(store, kvist_test_stats(store).spill_failures_total == 0);
    KVIST_TEST_TRUE(kvist_test_stats(store).spill_failures_total > 0);
    KVIST_TEST_TRUE(kvist_test_stats(store).tier.degraded[0] != '\0');
    (void)kvist_fault_disarm();
    KVIST_TEST_SETTLE_WHILE(store, kvist_test_stats(store).spills_total < BLOCKS);
    KVIST_TEST_EQUAL(kvist_test_stats(store).spills_total, BLOCKS);
    KVIST_TEST_TRUE(heals());
}

/* An engine stores as fast as ever while nothing can be spilled, and the failures are few. */
static void a_broken_disk_is_left_alone(void)
{
    kvist_fault_arm("tier.extent.write", 1, true);
    put_range(0, 2000);
    struct kvist_store_stats stats = kvist_test_stats(store);
    KVIST_TEST_TRUE(stats.evictions_total > 1500);
    KVIST_TEST_TRUE(stats.spill_failures_total > 0 && stats.spill_failures_total < 1000);
    (void)kvist_fault_disarm();
    KVIST_TEST_TRUE(heals());
    kvist_test_advance(store, 20000000);
    put_range(2000, 300);
    KVIST_TEST_TRUE(kvist_test_stats(store).spills_total > 0);
}

/* Open with a tier that cannot be opened now, for this call fails. */
static void open_failing(const char *point, enum kvist_admission admission)
{
    close_all();
    kvist_fault_arm(point, 1, true);
    open_all(admission);
    KVIST_TEST_TRUE(kvist_test_stats(store).has_tier && kvist_test_stats(store).tier_is_away);
    KVIST_TEST_TRUE(strstr(kvist_test_stats(store).tier.degraded, path) != NULL);
}

static void open_without_tier(enum kvist_admission admission)
{
    open_failing("tier.open", admission);
}

static void wait_for_tier(void)
{
    kvist_test_advance(store, 500000);
    KVIST_TEST_TRUE(kvist_test_stats(store).tier_is_away); /* not before its time */
    (void)kvist_fault_disarm();
    for (unsigned round = 0; round < ROUNDS_MAX; round++) {
        struct kvist_store_stats stats = kvist_test_stats(store);
        if (!stats.tier_is_away && !stats.tier.loading) {
            break;
        }
        kvist_test_advance(store, 100000);
        kvist_test_settle(store);
    }
    KVIST_TEST_TRUE(!kvist_test_stats(store).tier_is_away);
    CU_ASSERT_STRING_EQUAL(kvist_test_stats(store).tier.degraded, "");
}

static void a_tier_that_is_away_at_start_comes_later(void)
{
    put_range(0, 20);
    save();
    open_without_tier(KVIST_ADMIT_EVICTED);
    put_range(10, 600); /* more than there is room for: evicted without a copy, and at once */
    KVIST_TEST_TRUE(kvist_test_stats(store).evictions_total > 300);
    KVIST_TEST_EQUAL(kvist_test_stats(store).spill_failures_total, 0);
    save();
    KVIST_TEST_STATUS(saved.status, KVIST_UNAVAILABLE);
    KVIST_TEST_EQUAL(saved.unsaved_blocks, kvist_test_stats(store).slots_ready);
    CU_ASSERT_STRING_EQUAL(saved.why, kvist_test_stats(store).tier.degraded);
    wait_for_tier();
    KVIST_TEST_EQUAL(kvist_test_stats(store).tier.blocks, 20);
    save();
    KVIST_TEST_STATUS(saved.status, KVIST_OK);
    KVIST_TEST_EQUAL(saved.blocks, kvist_test_stats(store).slots_ready);
    KVIST_TEST_EQUAL(count_kept(0, 20), 20);
}

/* An error tells nothing of whose the directory is, nor that it is empty. */
static void a_directory_that_cannot_be_read_is_not_judged(void)
{
    put_range(0, 20);
    save();
    open_failing("tier.lock", KVIST_ADMIT_EVICTED);
    wait_for_tier();
    KVIST_TEST_EQUAL(kvist_test_stats(store).tier.blocks, 20);
    close_all();
    kvist_unit_remove_tree(path);
    KVIST_TEST_FATAL(mkdir(path, 0700) == 0);
    kvist_fault_arm("tier.list", 1, true);
    open_all(KVIST_ADMIT_EVICTED);
    KVIST_TEST_TRUE(kvist_test_stats(store).tier_is_away);
    wait_for_tier();
    KVIST_TEST_EQUAL(kvist_test_stats(store).tier.blocks, 0);
}

static void what_was_stored_without_a_tier_is_written_behind(void)
{
    open_without_tier(KVIST_ADMIT_ALL);
    put_range(0, BLOCKS);
    kvist_test_settle_sums(store, BLOCKS);
    wait_for_tier();
    KVIST_TEST_SETTLE_WHILE(store, kvist_test_stats(store).spills_total < BLOCKS);
    KVIST_TEST_EQUAL(count_kept(0, BLOCKS), BLOCKS);
}

static void note_cleared(void *ctx, enum kvist_status status, uint64_t blocks, uint64_t bytes)
{
    (void)blocks;
    (void)bytes;
    *(enum kvist_status *)ctx = status;
}

static void a_clear_without_the_tier_is_told_and_made_good(void)
{
    enum kvist_status status = KVIST_BUG;
    put_range(0, 20);
    save();
    open_without_tier(KVIST_ADMIT_EVICTED);
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    put_range(5, 5);
    KVIST_TEST_STATUS(kvist_store_clear(store, pool, note_cleared, &status), KVIST_OK);
    kvist_test_settle(store);
    KVIST_TEST_STATUS(status, KVIST_UNAVAILABLE);
    wait_for_tier();
    KVIST_TEST_SETTLE_WHILE(store, kvist_test_stats(store).tier.blocks > 0);
    KVIST_TEST_EQUAL(kvist_test_stats(store).tier.blocks, 0);
    KVIST_TEST_EQUAL(count_kept(0, 20), 0);
}

/* Closing while a try is under way. */
static void a_store_closes_while_its_tier_is_being_opened(void)
{
    for (unsigned round = 0; round < 20; round++) {
        open_without_tier(KVIST_ADMIT_EVICTED);
        if (round % 2 == 0) {
            (void)kvist_fault_disarm();
        }
        kvist_test_advance(store, 31000000);
    }
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"a save tells what it could not write", a_save_tells_what_it_could_not_write},
        {"a save counts what a disk took before it failed",
         a_save_counts_what_a_disk_took_before_it_failed},
        {"an error at any call of a save costs nothing",
         an_error_at_any_call_of_a_save_costs_nothing},
        {"write-behind goes on when the disk is well", write_behind_goes_on_when_the_disk_is_well},
        {"a broken disk is left alone", a_broken_disk_is_left_alone},
        {"a tier that is away at start comes later", a_tier_that_is_away_at_start_comes_later},
        {"a directory that cannot be read is not judged",
         a_directory_that_cannot_be_read_is_not_judged},
        {"what was stored without a tier is written behind",
         what_was_stored_without_a_tier_is_written_behind},
        {"a clear without the tier is told and made good",
         a_clear_without_the_tier_is_told_and_made_good},
        {"a store closes while its tier is being opened",
         a_store_closes_while_its_tier_is_being_opened},
    };
    return kvist_unit_main("store_fault", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
}
