/* evict: the order, leases that win, shares of many, and readers that race eviction. */
#include "storage/internal.h"
#include "tests/support/engine.h"
#include "tests/support/unit.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define SLOT_BYTES  (64ULL << 10)
#define ARENA       (16ULL << 20) /* 256 slots */
#define UNIVERSE    400U          /* keys that readers look for */
#define READERS     2U
#define ROUNDS      1500U
#define HITS_WANTED 200U

static struct kvist_store *store;
static struct kvist_store_pool *pool;
static struct kvist_test_engine *engine;

static void open_with(enum kvist_eviction eviction)
{
    struct kvist_store_options options = kvist_test_options(ARENA);
    options.eviction = eviction;
    store = kvist_test_store_open(&options);
    pool = kvist_test_pool_open(store, 1, SLOT_BYTES);
    engine = kvist_test_engine_open(store, 1, 1);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool), 0);
    kvist_test_settle(store);
}

static void setup(void)
{
    open_with(KVIST_EVICTION_REUSE);
}

static void teardown(void)
{
    kvist_test_engine_close(&engine);
    kvist_store_close(&store);
}

static void put_one(uint64_t number)
{
    for (unsigned attempt = 0; engine->pools[0].grant_count == 0 && attempt < 20; attempt++) {
        kvist_test_settle(store);
    }
    enum kvist_status status = kvist_test_engine_put(engine, 0, number, SLOT_BYTES);
    KVIST_TEST_FATAL(status == KVIST_OK || status == KVIST_EXISTS);
}

static void put_range(uint64_t first, uint64_t count)
{
    for (uint64_t number = first; number < first + count; number++) {
        put_one(number);
    }
    kvist_test_settle(store);
}

static uint64_t count_ready(uint64_t first, uint64_t count)
{
    uint64_t ready = 0;
    for (uint64_t number = first; number < first + count; number++) {
        ready += kvist_test_engine_probe(engine, 0, number) == KVIST_ENTRY_READY;
    }
    return ready;
}

static void fill_arena(void)
{
    put_range(100000, 600);
    KVIST_TEST_EQUAL(kvist_test_stats(store).arena_used_bytes, ARENA);
}

static uint64_t ref_of(uint64_t number)
{
    uint32_t slot = kvist_test_engine_slot_of(engine, 0, number);
    return slot == KVIST_SLOT_NONE ? 0 : kvist_slot_ref(0, slot);
}

static void touched_blocks_stay(void)
{
    fill_arena();
    put_range(0, 20);
    kvist_test_rest(store); /* what waits for its checksum cannot go */
    for (uint64_t first = 1000; first < 1600; first += 20) {
        for (uint64_t number = 20; number > 10; number--) {
            kvist_test_engine_touch(engine, ref_of(number - 1));
        }
        put_range(first, 20);
    }
    KVIST_TEST_EQUAL(count_ready(10, 10), 10);
    KVIST_TEST_EQUAL(count_ready(0, 10), 0);
    /* Touches that name nothing are ignored. */
    kvist_test_engine_touch(engine, 0);
    kvist_test_engine_touch(engine, UINT64_MAX);
    kvist_test_engine_touch(engine, kvist_slot_ref(0, UINT32_MAX));
    kvist_test_engine_touch(engine, kvist_slot_ref(7, 0));
    kvist_test_settle(store);
}

static void leaves_go_before_the_prefix_of_their_batch(void)
{
    fill_arena();
    put_range(0, 40); /* one chain, root first, in one turn or a few */
    uint64_t next = 1000;
    while (count_ready(0, 40) == 40) {
        put_range(next, 4);
        next += 4;
    }
    /* The batches of a turn go tail first: nowhere is a root gone and its batch's leaf there. */
    KVIST_TEST_TRUE(count_ready(0, 40) < 40);
    put_range(next, 4);
    kvist_test_settle(store);
    KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, 0, 0), KVIST_ENTRY_READY);
}

/* Each time that a lease kept one it counts as used; how often is a matter of the machine's pace, and
   what follows from it of the policy: this one goes by the last time alone. */
static void leased_blocks_are_taken_back(void)
{
    teardown();
    open_with(KVIST_EVICTION_LRU);
    fill_arena();
    put_range(0, 10);
    const void *bytes[10];
    for (uint32_t number = 0; number < 10; number++) {
        bytes[number] = kvist_test_engine_lease(engine, 0, number, number * 100);
        KVIST_TEST_FATAL(bytes[number] != NULL);
    }
    put_range(1000, 1000);
    KVIST_TEST_EQUAL(count_ready(0, 10), 10);
    KVIST_TEST_TRUE(kvist_test_stats(store).evictions_leased_total >= 10);
    KVIST_TEST_EQUAL(kvist_test_stats(store).leased_slots, 10);
    for (uint32_t number = 0; number < 10; number++) {
        /* Same slot, same generation: a second lease finds the same bytes. */
        const void *again = kvist_test_engine_lease(engine, 0, number, 5000);
        KVIST_TEST_TRUE(again == bytes[number]);
        KVIST_TEST_TRUE(kvist_test_holds(bytes[number], number, SLOT_BYTES));
        kvist_test_engine_release(engine, 5000);
        kvist_test_engine_release(engine, number * 100);
    }
    kvist_test_rest(store);
    put_range(3000, 1000);
    KVIST_TEST_EQUAL(count_ready(0, 10), 0);
}

static void what_cannot_go_hides_nothing(void)
{
    enum { PINNED = 88 }; /* a third of the pool */
    static uint32_t pinned[PINNED];
    fill_arena();
    KVIST_TEST_SETTLE_WHILE(store, pool->pin_count > 0);
    uint32_t slot = pool->ops->victim(pool->policy, KVIST_SLOT_NONE);
    for (unsigned index = 0; index < PINNED; index++) {
        KVIST_TEST_FATAL(slot != KVIST_SLOT_NONE);
        kvist_slot_pin(pool, slot);
        pinned[index] = slot;
        slot = pool->ops->victim(pool->policy, slot);
    }
    KVIST_TEST_EQUAL(kvist_evict_blocks(pool, 1), 1);
    for (unsigned index = 0; index < PINNED; index++) {
        KVIST_TEST_EQUAL(kvist_slot_state_of(pool, pinned[index]), KVIST_SLOT_READY);
        kvist_slot_unpin(pool, pinned[index]);
    }
}

static void a_pool_leased_whole_grants_nothing_and_recovers(void)
{
    fill_arena();
    uint32_t leased = 0;
    for (uint64_t number = 100000; number < 100600; number++) {
        leased += kvist_test_engine_lease(engine, 0, number, leased) != NULL;
    }
    KVIST_TEST_TRUE(leased > 50);
    while (kvist_test_engine_put(engine, 0, 1, SLOT_BYTES) != KVIST_BUSY) {
    }
    for (unsigned round = 0; round < 5; round++) {
        kvist_test_settle(store);
    }
    uint64_t held = kvist_test_stats(store).slots_ready;
    KVIST_TEST_TRUE(held >= leased);
    for (uint32_t record = 0; record < leased; record++) {
        kvist_test_engine_release(engine, record);
    }
    put_range(7000, 300);
}

/* --- Readers that race ----------------------------------------------------------------------- */

struct race {
    _Atomic bool stop;
    _Atomic uint64_t hits;
    _Atomic uint64_t misses;
    _Atomic uint64_t wrong;
};

struct reader {
    struct race *race;
    uint32_t record;
    unsigned seed;
};

/* Lease, look twice with a pause, release: a leased slot is never reused. */
static void *read_blocks(void *ctx)
{
    struct reader *reader = ctx;
    struct race *race = reader->race;
    while (!race->stop) {
        uint64_t number = (uint64_t)rand_r(&reader->seed) % UNIVERSE;
        const void *bytes = kvist_test_engine_lease(engine, 0, number, reader->record);
        if (bytes == NULL) {
            race->misses++;
            continue;
        }
        race->hits++;
        race->wrong += !kvist_test_holds(bytes, number, SLOT_BYTES);
        if (rand_r(&reader->seed) % 4 == 0) {
            (void)sched_yield();
            race->wrong += !kvist_test_holds(bytes, number, SLOT_BYTES);
        }
        kvist_test_engine_release(engine, reader->record);
    }
    return NULL;
}

static void evict_all_the_time(struct race *race)
{
    unsigned seed = 5;
    for (unsigned round = 0; round < ROUNDS || (race->hits < HITS_WANTED && round < 50 * ROUNDS);
         round++) {
        for (unsigned put = 0; put < 8; put++) {
            (void)kvist_test_engine_put(engine, 0, (uint64_t)rand_r(&seed) % UNIVERSE, SLOT_BYTES);
        }
        kvist_test_advance(store, 0);
        if (round % 20 == 0) {
            (void)sched_yield();
        }
        if (round % 500 == 0) {
            KVIST_TEST_TRUE(kvist_store_check(store) == NULL);
        }
    }
    race->stop = true;
}

static struct race *make_race(void)
{
    struct race *race =
        mmap(NULL, sizeof(*race), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    KVIST_TEST_FATAL(race != MAP_FAILED);
    fill_arena(); /* every segment is there, and mapped, before readers start */
    return race;
}

static void judge(struct race *race)
{
    (void)printf("hits %llu misses %llu evictions %llu kept %llu ",
                 (unsigned long long)race->hits,
                 (unsigned long long)race->misses,
                 (unsigned long long)kvist_test_stats(store).evictions_total,
                 (unsigned long long)kvist_test_stats(store).evictions_leased_total);
    KVIST_TEST_EQUAL(race->wrong, 0);
    KVIST_TEST_TRUE(race->hits >= HITS_WANTED);
    KVIST_TEST_TRUE(kvist_test_stats(store).evictions_total > 1000);
    KVIST_TEST_EQUAL(engine->pools[0].maps_replaced, 0);
    kvist_test_settle(store);
    (void)munmap(race, sizeof(*race));
}

static void threads_that_race_never_see_a_change(void)
{
    struct race *race = make_race();
    pthread_t threads[READERS];
    struct reader readers[READERS];
    for (uint32_t index = 0; index < READERS; index++) {
        readers[index] = (struct reader){.race = race, .record = index * 7, .seed = index};
        KVIST_TEST_FATAL(pthread_create(&threads[index], NULL, read_blocks, &readers[index]) == 0);
    }
    evict_all_the_time(race);
    for (uint32_t index = 0; index < READERS; index++) {
        (void)pthread_join(threads[index], NULL);
    }
    judge(race);
}

static void processes_that_race_never_see_a_change(void)
{
    struct race *race = make_race();
    pid_t children[READERS];
    for (uint32_t index = 0; index < READERS; index++) {
        children[index] = fork();
        KVIST_TEST_FATAL(children[index] >= 0);
        if (children[index] == 0) {
            struct reader reader = {.race = race, .record = 50 + index, .seed = index};
            (void)read_blocks(&reader);
            _exit(0);
        }
    }
    evict_all_the_time(race);
    for (uint32_t index = 0; index < READERS; index++) {
        int status = -1;
        KVIST_TEST_TRUE(waitpid(children[index], &status, 0) == children[index]);
        KVIST_TEST_EQUAL(status, 0);
    }
    judge(race);
}

/* Of a large pool, fewer slots are ahead than eviction wants free: here one that nobody writes. */
static void nothing_goes_while_the_arena_has_room(void)
{
    enum { BLOCKS = 160, LARGE = 256 << 10, ROOM = 64 << 20 }; /* segments of four slots */
    kvist_test_engine_close(&engine);
    kvist_store_close(&store);
    struct kvist_store_options options = kvist_test_options(ROOM);
    store = kvist_test_store_open(&options);
    pool = kvist_test_pool_open(store, 1, LARGE);
    engine = kvist_test_engine_open(store, 1, 1);
    KVIST_TEST_EQUAL(kvist_test_engine_attach(engine, pool), 0);
    for (uint64_t number = 0; number < BLOCKS; number++) {
        while (kvist_test_engine_put(engine, 0, number, LARGE) == KVIST_BUSY) {
            kvist_test_settle(store);
        }
    }
    kvist_test_engine_close(&engine);
    engine = kvist_test_engine_open(store, 2, 1);
    uint32_t ordinal = 0;
    KVIST_TEST_STATUS(
        kvist_store_attach(engine->members[0].process, pool, true, &ordinal, NULL), KVIST_OK);
    for (uint32_t segment = 0; segment < pool->segment_max; segment++) {
        engine->session->attachments[ordinal].mapped[segment] = pool->segments[segment].serial;
    }
    uint32_t taken = 0;
    while (pool->usable_free > kvist_evict_low(pool) - 2 &&
           kvist_session_take_slot(engine->session, ordinal, KVIST_SLOT_LOADING) !=
               KVIST_SLOT_NONE) {
        taken++;
    }
    KVIST_TEST_TRUE(taken > 0 && pool->used_bytes < ROOM);
    for (unsigned turn = 0; turn < 100; turn++) {
        (void)kvist_store_turn(store, store->now_us + 1000);
    }
    KVIST_TEST_EQUAL(pool->counts[KVIST_SLOT_READY], BLOCKS);
    for (uint32_t slot = 0; slot < pool->slot_max; slot++) {
        if (kvist_slot_state_of(pool, slot) == KVIST_SLOT_LOADING) {
            kvist_slot_drop(pool, slot);
        }
    }
    kvist_test_settle(store);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"touched blocks stay", touched_blocks_stay},
        {"leaves go before the prefix of their batch", leaves_go_before_the_prefix_of_their_batch},
        {"leased blocks are taken back", leased_blocks_are_taken_back},
        {"what cannot go hides nothing", what_cannot_go_hides_nothing},
        {"a pool leased whole recovers", a_pool_leased_whole_grants_nothing_and_recovers},
        {"nothing goes while the arena has room", nothing_goes_while_the_arena_has_room},
        {"threads that race never see a change", threads_that_race_never_see_a_change},
        {"processes that race never see a change", processes_that_race_never_see_a_change},
    };
    return kvist_unit_main("evict", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
}
