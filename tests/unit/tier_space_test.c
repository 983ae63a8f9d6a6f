/* tier: bytes on disk at every moment, what goes first, what is carried over. */
#include "proto/base/clock.h"
#include "storage/tier.h"
#include "tests/support/tier_rig.h"
#include "tests/support/unit.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB   (1ULL << 20)
#define CAP   (64 * MIB)
#define DEPTH 16U
#define DEEP  256U

static struct kvist_rig rig;

/* du, again and again, while the tier works. */
static struct {
    pthread_t thread;
    _Atomic bool stop;
    uint64_t most;
    uint64_t samples;
} watch;

static void *watch_main(void *unused)
{
    (void)unused;
    while (!atomic_load(&watch.stop)) {
        uint64_t bytes = kvist_rig_du(rig.path);
        watch.most = bytes > watch.most ? bytes : watch.most;
        watch.samples++;
        (void)usleep(1000);
    }
    return NULL;
}

static void watch_start(void)
{
    atomic_store(&watch.stop, false);
    watch.most = 0;
    watch.samples = 0;
    KVIST_TEST_FATAL(pthread_create(&watch.thread, NULL, watch_main, NULL) == 0);
}

static void watch_end(const char *what)
{
    atomic_store(&watch.stop, true);
    (void)pthread_join(watch.thread, NULL);
    (void)printf("    %s: du at most %.2f of %llu MiB in %llu samples\n",
                 what,
                 (double)watch.most / (double)MIB,
                 rig.options.bytes_max / MIB,
                 (unsigned long long)watch.samples);
    KVIST_TEST_TRUE(watch.most <= rig.options.bytes_max);
    KVIST_TEST_TRUE(watch.samples > 20);
}

static void setup(void)
{
    kvist_rig_init(&rig, CAP);
}

static void teardown(void)
{
    kvist_rig_fini(&rig);
}

/* Write blocks `first`..`last`, depth at a time; every block must be stored. */
static void write_deep(const struct kvist_tier_pool *pool,
                       uint64_t first,
                       uint64_t last,
                       uint64_t block_bytes,
                       uint64_t depth)
{
    uint64_t room_bytes = (block_bytes + 4095) / 4096 * 4096;
    uint8_t *memory = aligned_alloc(4096, depth * room_bytes);
    KVIST_TEST_FATAL(memory != NULL);
    while (first < last) {
        uint64_t batch = last - first < depth ? last - first : depth;
        uint64_t completed = rig.completed + batch;
        for (uint64_t index = 0; index < batch; index++) {
            uint8_t *bytes = memory + index * room_bytes;
            struct kvist_tier_block block =
                kvist_rig_block(pool, first + index, 1, block_bytes, bytes);
            KVIST_TEST_STATUS(kvist_rig_submit_write(&rig, &block, bytes), KVIST_OK);
        }
        uint64_t start_us = kvist_clock_now_us();
        while (rig.completed < completed) {
            KVIST_TEST_FATAL(kvist_clock_now_us() - start_us < 20000000);
            kvist_rig_turn(&rig);
        }
        first += batch;
    }
    free(memory);
}

static void
write_range(const struct kvist_tier_pool *pool, uint64_t first, uint64_t last, uint64_t block_bytes)
{
    write_deep(pool, first, last, block_bytes, DEPTH);
}

static uint64_t readable(const struct kvist_tier_pool *pool, uint64_t first, uint64_t last)
{
    uint64_t count = 0;
    for (uint64_t number = first; number < last; number++) {
        count += kvist_rig_read(&rig, pool, number) == KVIST_OK ? 1 : 0;
    }
    return count;
}

/* The cap is written five times over; what was stored last is there, all counts agree. */
static void turn_over(uint64_t block_bytes)
{
    char what[64];
    struct kvist_tier_pool pool = kvist_rig_pool(1, 8 * MIB, 1);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    uint64_t last = 5 * CAP / block_bytes;
    watch_start();
    write_range(&pool, 0, last, block_bytes);
    kvist_rig_turn_for(&rig, 300000);
    (void)snprintf(what, sizeof(what), "blocks of %llu", (unsigned long long)block_bytes);
    struct kvist_tier_stats stats = kvist_rig_stats(&rig);
    KVIST_TEST_EQUAL(rig.completed_ok, rig.completed);
    KVIST_TEST_EQUAL(stats.write_errors_total, 0);
    KVIST_TEST_EQUAL(stats.blocks + rig.dropped, last);
    KVIST_TEST_EQUAL(stats.carried_blocks_total, 0); /* nothing was read */
    (void)printf("\n    held %.2f MiB of blocks\n", (double)stats.block_bytes / (double)MIB);
    KVIST_TEST_TRUE(stats.block_bytes + stats.blocks * 4096 > CAP / 2);
    KVIST_TEST_TRUE(stats.disk_bytes <= CAP);
    uint64_t kept = stats.blocks;
    /* The oldest went; those that were in flight together may be in any order. */
    KVIST_TEST_EQUAL(readable(&pool, last - kept - DEPTH, last), kept);
    kvist_rig_close(&rig);
    kvist_rig_start(&rig);
    KVIST_TEST_TRUE(rig.loaded_count + rig.dropped >= kept);
    KVIST_TEST_EQUAL(rig.loaded_count, kept);
    write_range(&pool, last, last + kept, block_bytes);
    kvist_rig_turn_for(&rig, 100000);
    watch_end(what);
}

static void small_blocks_stay_below_the_cap(void)
{
    turn_over(8192);
}

static void middle_blocks_stay_below_the_cap(void)
{
    turn_over(131072);
}

static void large_blocks_stay_below_the_cap(void)
{
    turn_over(2 * MIB);
}

static void blocks_larger_than_an_extent_stay_below_the_cap(void)
{
    turn_over(5 * MIB);
}

/* What is read again and again outlives several turn-overs; what is not goes. */
static void blocks_in_use_are_carried_over(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, 65536, 1);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    watch_start();
    write_range(&pool, 0, 40, 65536);
    uint64_t next = 1000;
    for (uint32_t round = 0; round < 30; round++) {
        /* Four of the first blocks, spread over the extent. */
        (void)readable(&pool, 3, 5);
        (void)readable(&pool, 20, 22);
        write_range(&pool, next, next + 100, 65536);
        next += 100;
    }
    kvist_rig_turn_for(&rig, 200000);
    watch_end("with carrying over");
    struct kvist_tier_stats stats = kvist_rig_stats(&rig);
    KVIST_TEST_TRUE(stats.carried_blocks_total >= 4);
    KVIST_TEST_EQUAL(rig.moved, stats.carried_blocks_total);
    KVIST_TEST_EQUAL(readable(&pool, 3, 5) + readable(&pool, 20, 22), 4);
    KVIST_TEST_EQUAL(readable(&pool, 5, 20), 0);
    KVIST_TEST_EQUAL(stats.blocks + rig.dropped, 40 + next - 1000);
}

/* All blocks are in use: a tenth of each extent is carried, and writing amplifies no more. */
static void carrying_over_is_bounded(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, 32768, 1);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    uint64_t written = 0;
    for (uint64_t next = 0; next < 5 * CAP / 32768; next += 100) {
        write_range(&pool, next, next + 100, 32768);
        KVIST_TEST_EQUAL(readable(&pool, next, next + 100), 100);
        written += 100;
    }
    kvist_rig_turn_for(&rig, 200000);
    struct kvist_tier_stats stats = kvist_rig_stats(&rig);
    uint64_t asked = written * (32768 + 4096);
    (void)printf("\n    write amplification %.3f, %llu carried\n",
                 (double)stats.write_bytes_total / (double)asked,
                 (unsigned long long)stats.carried_blocks_total);
    KVIST_TEST_TRUE(stats.carried_blocks_total > 0);
    KVIST_TEST_TRUE(stats.write_bytes_total <= asked + asked / 10);
}

/* Several extents' worth of writes wait all the time: what is carried over has room all the same. */
static void writes_leave_room_for_what_is_carried(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, 65536, 1);
    rig.options.io_threads = 1; /* what the tier does by itself comes after all writes */
    rig.options.depth_max = DEEP;
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    uint64_t next = 700; /* without dropping one */
    write_range(&pool, 0, next, 65536);
    KVIST_TEST_EQUAL(readable(&pool, 0, next), next);
    watch_start();
    while (rig.dropped < 400) {
        write_deep(&pool, next, next + DEEP, 65536, DEEP);
        next += DEEP;
    }
    watch_end("with many writes waiting");
    struct kvist_tier_stats stats = kvist_rig_stats(&rig);
    (void)printf("\n    %llu carried, %llu dropped\n",
                 (unsigned long long)stats.carried_blocks_total,
                 (unsigned long long)rig.dropped);
    KVIST_TEST_TRUE(stats.carried_blocks_total * 20 >= rig.dropped); /* of a tenth, half at least */
}

/* A tenant that writes much pushes out its own blocks, not those of one that has little. */
static void the_tenant_with_most_loses(void)
{
    struct kvist_tier_pool modest = kvist_rig_pool(1, 65536, 1);
    struct kvist_tier_pool greedy = kvist_rig_pool(2, 65536, 1);
    (void)snprintf(greedy.tenant, sizeof(greedy.tenant), "greedy");
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &modest), KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &greedy), KVIST_OK);
    write_range(&modest, 0, 200, 65536); /* 13 MiB of 64 */
    write_range(&greedy, 0, 3 * CAP / 65536, 65536);
    KVIST_TEST_EQUAL(readable(&modest, 0, 200), 200);
    KVIST_TEST_TRUE(readable(&greedy, 0, 3 * CAP / 65536) > 300);
    /* The modest one asks for more than its half, and then loses its own oldest. */
    write_range(&modest, 200, 200 + 2 * CAP / 65536, 65536);
    KVIST_TEST_EQUAL(readable(&modest, 0, 200), 0);
    uint64_t modest_blocks = readable(&modest, 200, 200 + 2 * CAP / 65536);
    uint64_t greedy_blocks = readable(&greedy, 0, 3 * CAP / 65536);
    (void)printf("\n    modest %llu, greedy %llu blocks\n",
                 (unsigned long long)modest_blocks,
                 (unsigned long long)greedy_blocks);
    KVIST_TEST_TRUE(modest_blocks > 250 && greedy_blocks > 250);
}

/* A quota on disk is kept at every moment, at the cost of its own oldest blocks. */
static void a_quota_on_disk_is_a_bound(void)
{
    const uint64_t quota = 24 * MIB;
    struct kvist_tier_pool other = kvist_rig_pool(1, 65536, 1);
    struct kvist_tier_pool bound = kvist_rig_pool(2, 65536, 1);
    (void)snprintf(bound.tenant, sizeof(bound.tenant), "bound");
    kvist_rig_start(&rig);
    kvist_tier_set_tenant(rig.tier, "bound", quota, 1);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &other), KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &bound), KVIST_OK);
    write_range(&other, 0, 100, 65536);
    for (uint64_t first = 0; first < 1000; first += 2) {
        write_range(&bound, first, first + 2, 65536);
        KVIST_TEST_TRUE(kvist_tier_tenant_bytes(rig.tier, "bound") <= quota);
    }
    KVIST_TEST_EQUAL(rig.completed_ok, rig.completed);
    KVIST_TEST_TRUE(kvist_tier_tenant_bytes(rig.tier, "bound") > quota / 2);
    KVIST_TEST_EQUAL(readable(&other, 0, 100), 100);
    KVIST_TEST_EQUAL(readable(&bound, 950, 1000), 50);
    /* A lowered one is taken back without a write. */
    kvist_tier_set_tenant(rig.tier, "bound", 10 * MIB, 1);
    for (uint32_t turn = 0; turn < 200; turn++) {
        KVIST_TEST_EQUAL(readable(&other, 0, 1), 1); /* the tier turns when something is asked */
    }
    KVIST_TEST_TRUE(kvist_tier_tenant_bytes(rig.tier, "bound") <= 10 * MIB);
    KVIST_TEST_TRUE(readable(&bound, 0, 1000) > 0);
    KVIST_TEST_EQUAL(readable(&other, 0, 100), 100);
}

/* Many tenants, each with its own open extent: more than the tier has room for. */
static void more_tenants_than_extents(void)
{
    struct kvist_tier_pool pools[40];
    kvist_rig_start(&rig);
    watch_start();
    for (uint32_t index = 0; index < 40; index++) {
        pools[index] = kvist_rig_pool(index + 1, 65536, 1);
        (void)snprintf(pools[index].tenant, sizeof(pools[index].tenant), "tenant %u", index);
        KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pools[index]), KVIST_OK);
    }
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t index = 0; index < 40; index++) {
            write_range(&pools[index], round * 10, round * 10 + 10, 65536);
        }
    }
    KVIST_TEST_EQUAL(rig.completed_ok, 1200);
    kvist_rig_turn_for(&rig, 100000);
    uint64_t kept = 0;
    for (uint32_t index = 0; index < 40; index++) {
        kept += readable(&pools[index], 0, 30);
    }
    KVIST_TEST_EQUAL(kept, kvist_rig_stats(&rig).blocks);
    KVIST_TEST_TRUE(kept >= 100);
    watch_end("40 tenants");
}

/* A cap that was lowered is kept from the end of loading on. */
static void a_lowered_cap_is_kept(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, MIB, 1);
    rig.options.bytes_max = 3 * CAP;
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    write_range(&pool, 0, 150, MIB);
    KVIST_TEST_TRUE(kvist_rig_du(rig.path) > 2 * CAP);
    kvist_rig_close(&rig);
    rig.options.bytes_max = CAP;
    kvist_rig_start(&rig);
    KVIST_TEST_EQUAL(rig.loaded_count, 150);
    kvist_rig_turn_for(&rig, 500000);
    KVIST_TEST_TRUE(kvist_rig_du(rig.path) <= CAP);
    KVIST_TEST_EQUAL(rig.loaded_count - rig.dropped, kvist_rig_stats(&rig).blocks);
    KVIST_TEST_TRUE(kvist_rig_stats(&rig).blocks >= 30);
}

/* Clearing gives the room back without waiting for the extents' turn. */
static void clearing_frees_the_disk(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, 65536, 1);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    write_range(&pool, 0, 500, 65536);
    KVIST_TEST_TRUE(kvist_rig_du(rig.path) > 30 * MIB);
    pool.generation = 2;
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    kvist_rig_turn_for(&rig, 300000);
    KVIST_TEST_EQUAL(kvist_rig_stats(&rig).blocks, 0);
    KVIST_TEST_TRUE(kvist_rig_du(rig.path) < 10 * MIB);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"small blocks stay below the cap", small_blocks_stay_below_the_cap},
        {"middle blocks stay below the cap", middle_blocks_stay_below_the_cap},
        {"large blocks stay below the cap", large_blocks_stay_below_the_cap},
        {"blocks larger than an extent stay below the cap",
         blocks_larger_than_an_extent_stay_below_the_cap},
        {"blocks in use are carried over", blocks_in_use_are_carried_over},
        {"carrying over is bounded", carrying_over_is_bounded},
        {"writes leave room for what is carried", writes_leave_room_for_what_is_carried},
        {"the tenant with most loses", the_tenant_with_most_loses},
        {"a quota on disk is a bound", a_quota_on_disk_is_a_bound},
        {"more tenants than extents", more_tenants_than_extents},
        {"a lowered cap is kept", a_lowered_cap_is_kept},
        {"clearing frees the disk", clearing_frees_the_disk},
    };
    return kvist_unit_main("tier_space", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
}
