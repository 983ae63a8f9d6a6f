/*
 * adopt after a kill at any moment: what an engine can find is found by the next store too.
 *
 * How         a process of its own makes a change and is stepped instruction by instruction; after
 *             each that has changed the pool map there is a *shot* of it. Of every shot: an engine
 *             that looks at it finds what it found before, and so it does when a store has adopted
 * it
 */
#include "storage/internal.h"
#include "tests/support/engine.h"
#include "tests/support/unit.h"
#include "tests/support/vault.h"

#include <signal.h>
#include <stdio.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#define SLOT_BYTES (64ULL << 10)
#define ARENA      (16ULL << 20) /* 256 slots */
#define BLOCKS     20U
#define SHOTS_MAX  1024U
#define NUMBERS    (BLOCKS + 1U)
#define STEPS_MAX  20000000U

static struct kvist_test_vault vault;
static struct kvist_store_options options;
static struct kvist_store *store;
static struct kvist_test_engine *engine;
static struct kvist_store_grant filled; /* with block number BLOCKS */
static uint8_t *shots[SHOTS_MAX];
static uint32_t shot_count;

static struct kvist_map *map_now(void)
{
    return &store->pools[0]->map;
}

static void setup(void)
{
    kvist_test_vault_init(&vault);
    options = kvist_test_options(ARENA);
    store = kvist_test_vault_open(&vault, &options);
    engine = kvist_test_engine_open(store, 1, 1);
    (void)kvist_test_engine_attach(engine, kvist_test_pool_open(store, 1, SLOT_BYTES));
    kvist_test_settle(store);
    for (uint64_t number = 0; number < BLOCKS; number++) {
        KVIST_TEST_STATUS(kvist_test_engine_put(engine, 0, number, SLOT_BYTES), KVIST_OK);
    }
    KVIST_TEST_FATAL(kvist_test_engine_take(engine, 0, &filled));
    kvist_test_fill(kvist_test_engine_slot(engine, 0, filled.slot), BLOCKS, SLOT_BYTES);
    kvist_test_engine_mark(engine, 0, &filled);
    kvist_test_settle(store);
}

static void teardown(void)
{
    while (shot_count > 0) {
        free(shots[--shot_count]);
    }
    kvist_test_engine_close(&engine);
    kvist_test_settle(store);
    kvist_store_close(&store);
    kvist_test_vault_fini(&vault);
}

/* --- Shots ------------------------------------------------------------------------------------ */

static void take_shot(void)
{
    uint64_t bytes = map_now()->bytes;
    KVIST_TEST_FATAL(shot_count < SHOTS_MAX);
    shots[shot_count] = malloc(bytes);
    KVIST_TEST_FATAL(shots[shot_count] != NULL);
    memcpy(shots[shot_count++], map_now()->base, bytes);
}

/* Wait for a child that is traced. @return whether it has stopped, and not ended */
static bool has_stopped(pid_t pid)
{
    int status = 0;
    KVIST_TEST_FATAL(waitpid(pid, &status, 0) == pid);
    KVIST_TEST_FATAL(WIFSTOPPED(status) || (WIFEXITED(status) && WEXITSTATUS(status) == 0));
    return WIFSTOPPED(status);
}

static void shoot(void (*change)(void))
{
    take_shot();
    pid_t pid = fork();
    if (pid == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0 || raise(SIGSTOP) != 0) {
            _exit(1);
        }
        change();
        _exit(0);
    }
    KVIST_TEST_FATAL(pid > 0);
    uint32_t steps = 0;
    while (has_stopped(pid)) {
        if (memcmp(shots[shot_count - 1], map_now()->base, map_now()->bytes) != 0) {
            take_shot();
        }
        KVIST_TEST_FATAL(++steps < STEPS_MAX && ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL) == 0);
    }
}

static bool is_found(uint64_t number)
{
    const void *slot = kvist_test_engine_lease(engine, 0, number, 900);
    if (slot != NULL) {
        KVIST_TEST_TRUE(kvist_test_holds(slot, number, SLOT_BYTES));
        kvist_test_engine_release(engine, 900);
    }
    return slot != NULL;
}

/* @return how many of those that are known are not found; what is found is known from here on */
static uint32_t count_lost(bool known[NUMBERS])
{
    uint32_t lost = 0;
    for (uint64_t number = 0; number < NUMBERS; number++) {
        bool found = is_found(number);
        lost += known[number] && !found;
        known[number] = known[number] || found;
    }
    return lost;
}

/* Kill the store when it has made so much of its change. */
static void restart_from(uint32_t shot)
{
    memcpy(map_now()->base, shots[shot], map_now()->bytes);
    store->roster->adopts = 0; /* it was not killed while it adopted */
    kvist_test_vault_kill(&store);
    store = kvist_test_vault_open(&vault, &options);
    struct kvist_adoption adoption;
    kvist_store_adoption(store, &adoption);
    if (!adoption.adopted) {
        (void)fprintf(stderr, "not adopted: %s\n", adoption.why);
    }
    KVIST_TEST_FATAL(adoption.adopted);
    KVIST_TEST_TRUE(kvist_store_check(store) == NULL);
}

/* Make a change, and have it break off everywhere. */
static void expect_no_loss(void (*change)(void))
{
    bool known[NUMBERS] = {false};
    uint32_t misses = 0;
    uint32_t lost = 0;
    shoot(change);
    KVIST_TEST_TRUE(shot_count > 1);
    for (uint32_t shot = 0; shot < shot_count; shot++) {
        memcpy(map_now()->base, shots[shot], map_now()->bytes);
        misses += count_lost(known);
        restart_from(shot);
        lost += count_lost(known);
    }
    KVIST_TEST_EQUAL(misses, 0);
    KVIST_TEST_EQUAL(lost, 0);
    kvist_test_engine_adopt(engine, store);
}

/* --- Changes ---------------------------------------------------------------------------------- */

static uint32_t position_of(uint64_t number)
{
    struct kvist_entry_copy entry;
    uint8_t key[KVIST_KEY_BYTES];
    kvist_test_key(number, key);
    uint32_t position = kvist_map_find(map_now(), key, &entry);
    KVIST_TEST_FATAL(position != KVIST_ENTRY_NONE);
    return position;
}

static void note_a_copy(void)
{
    kvist_map_note_extent(map_now(), position_of(3), 7);
}

static void a_copy_on_nvme_is_noted(void)
{
    expect_no_loss(note_a_copy);
}

static bool keep_all(void *ctx, uint32_t position, const struct kvist_entry_copy *entry)
{
    (void)ctx;
    (void)position;
    (void)entry;
    return true;
}

static void sift(void)
{
    (void)kvist_map_sift(map_now(), keep_all, NULL);
}

static void a_map_is_adopted(void)
{
    for (uint64_t number = 0; number < BLOCKS; number++) {
        kvist_map_note_extent(map_now(), position_of(number), 7);
    }
    expect_no_loss(sift);
}

static void commit_one(void)
{
    (void)kvist_test_engine_commit(engine, 0, &filled, BLOCKS, SLOT_BYTES);
}

static void a_block_is_committed(void)
{
    expect_no_loss(commit_one);
}

static void raise_generation(void)
{
    kvist_pool_set_generation(store->pools[0], store->pools[0]->about.generation * 2 + 1);
}

static void a_generation_is_overtaken(void)
{
    expect_no_loss(raise_generation);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"a copy on NVMe is noted", a_copy_on_nvme_is_noted},
        {"a map is adopted", a_map_is_adopted},
        {"a block is committed", a_block_is_committed},
        {"a generation is overtaken", a_generation_is_overtaken},
    };
    return kvist_unit_main("adopt_kill", cases, KVIST_ARRAY_COUNT(cases), setup, teardown);
}
