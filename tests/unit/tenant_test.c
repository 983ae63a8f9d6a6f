/* tenants: what one takes, and what is the others' whatever it does. */
#include "tests/support/engine.h"
#include "tests/support/unit.h"

#include <stdio.h>
#include <string.h>

#define SLOT_BYTES  (64ULL << 10)
#define MIB         (1ULL << 20)
#define ARENA       (64 * MIB) /* segments of 1 MiB, 16 slots */
#define FLOOR_BYTES (4 * MIB)  /* a sixteenth */

enum { A, B, TENANTS };

static struct kvist_store *store;
static struct kvist_test_engine *engines[TENANTS];
static uint64_t next[TENANTS];

static void open_pool(uint32_t tenant)
{
    struct kvist_tier_pool about = {.slot_bytes = SLOT_BYTES, .description = "test"};
    about.pool_id[0] = (uint8_t)(1 + tenant);
    (void)snprintf(about.tenant, sizeof(about.tenant), "%c", 'a' + (char)tenant);
    struct kvist_store_pool *pool = NULL;
    KVIST_TEST_FATAL(kvist_store_pool_open(store, &about, &pool, NULL) == KVIST_OK);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engines[tenant], pool), 0);
}

static void set_limits(uint64_t a_bytes, uint64_t b_bytes, uint32_t a_weight)
{
    const struct kvist_store_tenant_limits limits[TENANTS] = {
        {.name = "a", .memory_bytes_max = a_bytes, .weight = a_weight},
        {.name = "b", .memory_bytes_max = b_bytes, .weight = 1},
    };
    kvist_store_set_tenants(store, limits, TENANTS);
}

static void setup(void)
{
    struct kvist_store_options options = kvist_test_options(ARENA);
    store = kvist_test_store_open(&options);
    set_limits(0, 0, 1);
    for (uint32_t tenant = 0; tenant < TENANTS; tenant++) {
        engines[tenant] = kvist_test_engine_open(store, (uint8_t)(1 + tenant), 1);
        next[tenant] = 0;
    }
}

static void teardown(void)
{
    kvist_test_clock(true);
    for (uint32_t tenant = 0; tenant < TENANTS; tenant++) {
        kvist_test_engine_close(&engines[tenant]);
    }
    kvist_store_close(&store);
}

static uint64_t bytes_of(uint32_t tenant)
{
    struct kvist_store_tenant_info info;
    for (uint32_t index = 0; kvist_store_tenant_info(store, index, &info); index++) {
        if (info.limits.name[0] == 'a' + (char)tenant) {
            return info.memory_bytes;
        }
    }
    return 0;
}

static void settle(void)
{
    kvist_test_settle(store);
    kvist_test_engine_unmap_revoked(engines[A]);
    kvist_test_engine_unmap_revoked(engines[B]);
    kvist_test_settle(store);
}

/* Store so many new blocks, or as many as there are grants for; it never has more than it may. */
static void flood(uint32_t tenant, uint32_t count, uint64_t bytes_max)
{
    uint32_t refused = 0;
    while (count > 0 && refused < 200) {
        if (kvist_test_engine_put(engines[tenant], 0, next[tenant], SLOT_BYTES) == KVIST_OK) {
            next[tenant]++;
            count--;
        } else {
            refused++;
            settle();
            KVIST_TEST_TRUE(bytes_of(tenant) <= bytes_max);
        }
    }
    settle();
    KVIST_TEST_TRUE(bytes_of(tenant) <= bytes_max);
}

static uint64_t ready_of(uint32_t tenant, uint64_t first, uint64_t count)
{
    uint64_t ready = 0;
    for (uint64_t number = first; number < first + count; number++) {
        ready += kvist_test_engine_probe(engines[tenant], 0, number) == KVIST_ENTRY_READY;
    }
    return ready;
}

static void a_flood_evicts_its_own_blocks_alone(void)
{
    set_limits(0, 16 * MIB, 1); /* what is granted to it besides is never more than its half */
    open_pool(B);
    flood(B, 100, 16 * MIB);
    open_pool(A);
    flood(A, 3000, ARENA);
    KVIST_TEST_EQUAL(ready_of(B, 0, 100), 100);
    KVIST_TEST_TRUE(bytes_of(A) >= ARENA / 4);
    /* Also when nobody uses it just now. */
    kvist_test_engine_detach(engines[B], 0);
    flood(A, 2000, ARENA);
    /* Its grants wait for what A gives back, but no longer than KVIST_SPILL_PATIENCE_US: then they
       take the place of its own blocks. */
    kvist_test_clock(false);
    open_pool(B);
    settle();
    KVIST_TEST_EQUAL(ready_of(B, 0, 100), 100);
}

static void who_has_most_gives_until_both_have_half(void)
{
    open_pool(A);
    flood(A, 2000, ARENA);
    KVIST_TEST_TRUE(bytes_of(A) >= ARENA - FLOOR_BYTES - MIB);
    open_pool(B);
    for (uint32_t round = 0; round < 40; round++) {
        flood(B, 100, ARENA);
        flood(A, 100, ARENA);
        kvist_test_advance(store, 300000); /* a pool that could not give is asked again */
    }
    (void)printf(
        "a %llu b %llu ", (unsigned long long)bytes_of(A), (unsigned long long)bytes_of(B));
    KVIST_TEST_TRUE(bytes_of(A) >= ARENA / 2 - 8 * MIB);
    KVIST_TEST_TRUE(bytes_of(B) >= ARENA / 2 - 8 * MIB);
}

static void a_weight_makes_a_share_larger(void)
{
    set_limits(0, 0, 3);
    open_pool(A);
    open_pool(B);
    for (uint32_t round = 0; round < 40; round++) {
        flood(B, 100, ARENA);
        flood(A, 100, ARENA);
        kvist_test_advance(store, 300000); /* a pool that could not give is asked again */
    }
    (void)printf(
        "a %llu b %llu ", (unsigned long long)bytes_of(A), (unsigned long long)bytes_of(B));
    KVIST_TEST_TRUE(bytes_of(A) >= 3 * ARENA / 4 - 5 * MIB);
    KVIST_TEST_TRUE(bytes_of(B) >= ARENA / 4 - 5 * MIB);
}

static void a_quota_is_a_bound(void)
{
    set_limits(10 * MIB, 0, 1);
    open_pool(A);
    flood(A, 1000, 10 * MIB);
    KVIST_TEST_TRUE(bytes_of(A) >= 8 * MIB);
    open_pool(B);
    flood(B, 2000, ARENA - FLOOR_BYTES);
    KVIST_TEST_TRUE(bytes_of(A) >= 8 * MIB);
    /* Also one that is lowered while it serves. */
    set_limits(4 * MIB, 0, 1);
    uint64_t until_us = kvist_clock_now_us() + KVIST_TEST_PATIENCE_US;
    while (bytes_of(A) > 4 * MIB && kvist_clock_now_us() < until_us) {
        kvist_test_advance(store, 300000);
        kvist_test_engine_give_back(engines[A]); /* what is granted, and not used */
        settle();
    }
    KVIST_TEST_TRUE(bytes_of(A) <= 4 * MIB);
    flood(A, 200, 4 * MIB);
}

/* What is granted ahead is a part of a quota as it is one of the arena: the rest is for blocks. */
static void a_quota_bounds_what_is_granted(void)
{
    const uint32_t slots = (uint32_t)(10 * MIB / SLOT_BYTES);
    set_limits(10 * MIB, 0, 1);
    open_pool(A);
    settle();
    KVIST_TEST_EQUAL(engines[A]->pools[0].grant_count, slots / 4);
    struct kvist_test_engine *second = kvist_test_engine_open(store, 9, 1);
    struct kvist_tier_pool about = {.pool_id = {9}, .slot_bytes = SLOT_BYTES, .tenant = "a"};
    struct kvist_store_pool *pool = NULL;
    KVIST_TEST_STATUS(kvist_store_pool_open(store, &about, &pool, NULL), KVIST_OK);
    (void)kvist_test_engine_attach(second, pool);
    settle();
    KVIST_TEST_TRUE(second->pools[0].grant_count >= slots / 8);
    KVIST_TEST_TRUE(second->pools[0].grant_count <= slots / 6);
    /* Another tenant's writer has no part in it, nor in what this one leaves. */
    open_pool(B);
    settle();
    KVIST_TEST_EQUAL(engines[B]->pools[0].grant_count, ARENA / SLOT_BYTES / 8);
    flood(A, 400, 10 * MIB);
    KVIST_TEST_TRUE(kvist_test_stats(store).slots_granted <=
                    slots / 4 + slots / 6 + ARENA / SLOT_BYTES / 8);
    KVIST_TEST_TRUE(ready_of(A, 0, 400) >= slots / 2);
    kvist_test_engine_close(&second);
}

/* One that lets go of nothing keeps the others from all but their floor. */
static void who_keeps_all_leaves_a_floor(void)
{
    engines[A]->keeps_revoked = true;
    open_pool(A);
    flood(A, 2000, ARENA - FLOOR_BYTES);
    open_pool(B);
    flood(B, 48, ARENA);
    KVIST_TEST_TRUE(bytes_of(B) >= FLOOR_BYTES - MIB);
    KVIST_TEST_TRUE(ready_of(B, 0, 48) >= 24);
}

static void what_a_tenant_has_is_summed_up(void)
{
    set_limits(20 * MIB, 0, 2);
    open_pool(A);
    flood(A, 10, ARENA);
    kvist_store_tenant_refused(store, "a");
    kvist_store_tenant_refused(store, "nobody");
    struct kvist_store_tenant_info info;
    uint32_t count = 0;
    while (kvist_store_tenant_info(store, count, &info)) {
        bool is_a = strcmp(info.limits.name, "a") == 0;
        KVIST_TEST_EQUAL(info.blocks, is_a ? 10 : 0);
        KVIST_TEST_EQUAL(info.block_bytes, is_a ? 10 * SLOT_BYTES : 0);
        KVIST_TEST_EQUAL(info.pools, is_a);
        KVIST_TEST_EQUAL(info.refusals_total, is_a);
        KVIST_TEST_EQUAL(info.limits.memory_bytes_max, is_a ? 20 * MIB : 0);
        count++;
    }
    KVIST_TEST_EQUAL(count, 2);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"a flood evicts its own blocks alone", a_flood_evicts_its_own_blocks_alone},
        {"who has most gives until both have half", who_has_most_gives_until_both_have_half},
        {"a weight makes a share larger", a_weight_makes_a_share_larger},
        {"a quota is a bound", a_quota_is_a_bound},
        {"a quota bounds what is granted", a_quota_bounds_what_is_granted},
        {"who keeps all leaves a floor", who_keeps_all_leaves_a_floor},
        {"what a tenant has is summed up", what_a_tenant_has_is_summed_up},
    };
    return kvist_unit_main("tenant", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
}
