/*
 * store_bench - what the loop thread pays: commits, evictions under many leases, a turn, start-up
 * with many keys on NVMe. CPU time. Prints one `row=NAME key=value` line a figure; no thresholds.
 */
#include "proto/base/clock.h"
#include "storage/internal.h"
#include "tests/support/engine.h"
#include "tests/support/unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define SLOT_BYTES (64ULL << 10)
#define ARENA      (1ULL << 30) /* 16,384 slots */
#define SESSIONS   64U
#define BATCH      64U
#define LEASED     64U   /* different slots, of all leases */
#define EVICTED    1000U /* a figure */

static uint64_t cpu_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000ULL + (uint64_t)now.tv_nsec;
}

/* Put new blocks until so many were evicted for them. @return the next new one */
static uint64_t put_until_evicted(struct kvist_store *store,
                                  struct kvist_test_engine *engine,
                                  uint64_t number,
                                  uint64_t evictions)
{
    uint64_t last = number + 200000;
    uint64_t until = kvist_test_stats(store).evictions_total + evictions;
    do {
        while (kvist_test_engine_put(engine, 0, number, 4096) == KVIST_OK) {
            number++;
        }
        kvist_test_settle(store);
    } while (kvist_test_stats(store).evictions_total < until && number < last);
    return number;
}

static void measure_commits(struct kvist_store *store, struct kvist_test_engine *engine)
{
    uint64_t commit_ns = 0;
    uint64_t turn_ns = 0;
    uint64_t done = 0;
    for (uint64_t number = 1000000; done < 1000;) {
        uint64_t start = cpu_ns();
        for (unsigned put = 0; put < BATCH; put++, number++) {
            struct kvist_store_grant grant;
            if (!kvist_test_engine_take(engine, 0, &grant)) {
                break;
            }
            kvist_test_engine_mark(engine, 0, &grant);
            done += kvist_test_engine_commit(engine, 0, &grant, number, 4096) == KVIST_OK;
        }
        uint64_t middle = cpu_ns();
        kvist_test_advance(store, 0);
        commit_ns += middle - start;
        turn_ns += cpu_ns() - middle;
    }
    (void)printf("row=loop_commits figure=%.3f commits=%.3f turns=%.3f batch=%u\n",
                 (double)(commit_ns + turn_ns) / 1e3 / (double)done,
                 (double)commit_ns / 1e3 / (double)done,
                 (double)turn_ns / 1e3 / (double)done,
                 BATCH);
}

/* All of LEASED slots, again and again. */
static void lease_pages(struct kvist_test_engine **engines, uint32_t leases)
{
    for (uint32_t index = 0; index < SESSIONS; index++) {
        struct kvist_page_header *header = engines[index]->page;
        struct kvist_lease_record *records =
            (void *)((char *)engines[index]->page + engines[index]->geometry.lease_offset);
        for (uint32_t record = 0; record < leases; record++) {
            records[record].ref = kvist_slot_ref(0, record % LEASED);
        }
        header->lease_high = leases;
    }
}

/* What is leased goes back to the end of the order, so that few victims are among it. A call may
   find nothing but that and what is being checksummed; never for long in a pool that is full. */
static void measure_evictions(struct kvist_store *store,
                              struct kvist_store_pool *pool,
                              struct kvist_test_engine **engines,
                              uint32_t leases,
                              uint32_t batch)
{
    KVIST_TEST_FATAL(pool->counts[KVIST_SLOT_READY] > EVICTED + 2 * LEASED);
    lease_pages(engines, leases);
    struct kvist_store_stats before;
    struct kvist_store_stats after;
    kvist_store_stats(store, &before);
    uint64_t start = cpu_ns();
    uint32_t gone = 0;
    for (unsigned calls = 0; gone < EVICTED; calls++) {
        KVIST_TEST_FATAL(calls < EVICTED);
        uint32_t want = EVICTED - gone < batch ? EVICTED - gone : batch;
        gone += kvist_evict_blocks(pool, want);
    }
    uint64_t ns = cpu_ns() - start;
    kvist_store_stats(store, &after);
    lease_pages(engines, 0);
    (void)printf("row=loop_evictions_%u_%u figure=%.3f evicted=%llu sessions=%u\n",
                 leases,
                 batch,
                 (double)ns / 1e3 / (double)gone,
                 (unsigned long long)(after.evictions_total - before.evictions_total),
                 SESSIONS);
}

static void measure_loading(struct kvist_store *store)
{
    enum { COUNT = 1000000, AT_ONCE = 512 };
    static struct kvist_tier_block blocks[AT_ONCE];
    struct kvist_tier_pool about = {.slot_bytes = SLOT_BYTES, .generation = 1};
    about.pool_id[0] = 200;
    kvist_promote_events.pool_loaded(store, &about);
    uint64_t longest_ns = 0;
    uint64_t start = cpu_ns();
    for (uint64_t first = 0; first < COUNT; first += AT_ONCE) {
        for (uint64_t index = 0; index < AT_ONCE; index++) {
            struct kvist_tier_block *block = &blocks[index];
            memcpy(block->pool_id, about.pool_id, sizeof(block->pool_id));
            kvist_test_key(first + index, block->key);
            block->pool_generation = 1;
            block->extent = 1;
        }
        uint64_t before = cpu_ns();
        (void)kvist_promote_events.blocks_loaded(store, blocks, AT_ONCE);
        uint64_t ns = cpu_ns() - before;
        longest_ns = ns > longest_ns ? ns : longest_ns;
    }
    const struct kvist_store_pool *pool = kvist_store_pool_lookup(store, about.pool_id);
    (void)printf("row=loop_load figure=%.1f keys=%llu longest_us=%llu map_bytes_a_key=%llu\n",
                 (double)(cpu_ns() - start) / 1e6,
                 (unsigned long long)pool->nvme_blocks,
                 (unsigned long long)(longest_ns / 1000),
                 (unsigned long long)(pool->map.capacity * 64ULL / pool->nvme_blocks));
}

int main(void)
{
    struct kvist_store_options options = kvist_test_options(ARENA);
    struct kvist_store *store = kvist_test_store_open(&options);
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    struct kvist_test_engine *engines[SESSIONS];
    engines[0] = kvist_test_engine_open(store, 0, 1);
    (void)kvist_test_engine_attach(engines[0], pool);
    kvist_test_settle(store);
    uint64_t number = put_until_evicted(store, engines[0], 0, 2000);
    measure_commits(store, engines[0]);
    for (uint32_t index = 1; index < SESSIONS; index++) {
        engines[index] = kvist_test_engine_open(store, (uint8_t)index, 1);
        engines[index]->maps_nothing = true;
        (void)kvist_test_engine_attach(engines[index], pool);
    }
    kvist_test_settle(store);
    static const uint32_t leases[] = {0, 64, 512, 4096, KVIST_LEASES_MAX};
    static const uint32_t batches[] = {64, 512, 1024};
    for (unsigned batch = 0; batch < 3; batch++) {
        for (unsigned index = 0; index < 5; index++) {
            number = put_until_evicted(store, engines[0], number, 1);
            measure_evictions(store, pool, engines, leases[index], batches[batch]);
        }
    }
    uint64_t start = cpu_ns();
    for (unsigned turn = 0; turn < 1000; turn++) {
        kvist_test_advance(store, 0);
    }
    (void)printf("row=loop_turn figure=%.3f sessions=%u\n",
                 (double)(cpu_ns() - start) / 1e3 / 1000,
                 SESSIONS);
    measure_loading(store);
    for (uint32_t index = 0; index < SESSIONS; index++) {
        kvist_test_engine_close(&engines[index]);
    }
    kvist_store_close(&store);
    return 0;
}
