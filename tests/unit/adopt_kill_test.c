/*
 * adopt after a kill at any moment: what an engine can find is found by the next store too.
 *
 * How         a process of its own makes a change and is stepped instruction by instruction; after
 *             each that has changed the pool map (of a growth: what says which map it is) there is a
 *             *shot* of all that it writes. Of every shot: an engine that looks at it finds what it
 *             found before (of a growth: may miss it), and so it does when a store has adopted it
 */
#include "proto/shm/memfd.h"
#include "storage/internal.h"
#include "tests/support/engine.h"
#include "tests/support/unit.h"
#include "tests/support/vault.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#define SLOT_BYTES (64ULL << 10)
#define ARENA      (16ULL << 20) /* 256 slots */
#define BLOCKS     20U
#define SHOTS_MAX  1024U
#define PARTS_MAX  3U
#define NUMBERS    (BLOCKS + 1U)
#define STEPS_MAX  20000000U

static struct kvist_test_vault vault;
static struct kvist_store_options options;
static struct kvist_store *store;
static struct kvist_test_engine *engine;
static struct kvist_store_grant filled; /* with block number BLOCKS */
static uint8_t *shots[SHOTS_MAX];       /* of all parts, one after the other */
static uint32_t shot_count;

static struct kvist_store_pool *pool_now(void)
{
    return store->pools[0];
}

static struct kvist_map *map_now(void)
{
    return &pool_now()->map;
}

/* Memory that a change writes, mapped for the test alone: it outlives stores. */
struct part {
    int fd;
    void *base;
    uint64_t bytes;
    char kind; /* as what it is kept, */
    uint32_t serial;
    uint64_t watched_from; /* where it is looked at after each instruction */
    uint64_t watched_bytes;
};

static struct part parts[PARTS_MAX];
static uint32_t part_count;

static void add_part(char kind,
                     uint32_t serial,
                     int fd,
                     uint64_t bytes,
                     uint64_t watched_from,
                     uint64_t watched_bytes)
{
    struct part *part = &parts[part_count++];
    *part = (struct part){.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0),
                          .bytes = bytes,
                          .kind = kind,
                          .serial = serial,
                          .watched_from = watched_from,
                          .watched_bytes = watched_bytes};
    KVIST_TEST_FATAL(part->fd >= 0);
    KVIST_TEST_STATUS(kvist_memfd_map(part->fd, bytes, KVIST_MEMFD_WRITE, &part->base, NULL),
                      KVIST_OK);
}

static void add_map(const struct kvist_map *map, uint64_t watched_bytes)
{
    add_part(KVIST_KEPT_MAP, map->serial, map->fd, map->bytes, 0, watched_bytes);
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
    while (part_count > 0) {
        part_count--;
        kvist_memfd_unmap(&parts[part_count].base, parts[part_count].bytes);
        (void)close(parts[part_count].fd);
    }
    kvist_test_engine_close(&engine);
    kvist_test_settle(store);
    kvist_store_close(&store);
    kvist_test_vault_fini(&vault);
}

/* --- Shots ------------------------------------------------------------------------------------ */

static void take_shot(void)
{
    uint64_t bytes = 0;
    for (uint32_t index = 0; index < part_count; index++) {
        bytes += parts[index].bytes;
    }
    KVIST_TEST_FATAL(shot_count < SHOTS_MAX);
    uint8_t *at = shots[shot_count++] = malloc(bytes);
    KVIST_TEST_FATAL(at != NULL);
    for (uint32_t index = 0; index < part_count; index++) {
        memcpy(at, parts[index].base, parts[index].bytes);
        at += parts[index].bytes;
    }
}

static bool differs_from(const uint8_t *shot)
{
    bool differs = false;
    for (uint32_t index = 0; index < part_count && !differs; index++) {
        const struct part *part = &parts[index];
        differs = memcmp(shot + part->watched_from,
                         (const uint8_t *)part->base + part->watched_from,
                         part->watched_bytes) != 0;
        shot += part->bytes;
    }
    return differs;
}

static void bring_back(const uint8_t *shot)
{
    for (uint32_t index = 0; index < part_count; index++) {
        memcpy(parts[index].base, shot, parts[index].bytes);
        shot += parts[index].bytes;
    }
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
        if (differs_from(shots[shot_count - 1])) {
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

/* Kill the store when it has made so much of its change: nothing is forgotten by then. */
static void restart_from(uint32_t shot)
{
    store->roster->adopts = 0; /* it was not killed while it adopted */
    kvist_test_vault_kill(&store);
    bring_back(shots[shot]);
    for (uint32_t index = 0; index < part_count; index++) {
        kvist_test_vault_replace(&vault,
                                 parts[index].kind,
                                 parts[index].serial,
                                 fcntl(parts[index].fd, F_DUPFD_CLOEXEC, 0));
    }
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
    add_map(map_now(), map_now()->bytes);
    shoot(change);
    KVIST_TEST_TRUE(shot_count > 1);
    for (uint32_t shot = 0; shot < shot_count; shot++) {
        bring_back(shots[shot]);
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
    kvist_pool_set_generation(pool_now(), pool_now()->about.generation * 2 + 1);
}

static void a_generation_is_overtaken(void)
{
    expect_no_loss(raise_generation);
}

/* --- Growing ---------------------------------------------------------------------------------- */

static void grow(void)
{
    kvist_pool_grow_map(pool_now());
}

/* From the first to the last word that a growth writes where the next store begins to read. */
static void a_map_is_moved_to(void)
{
    bool known[NUMBERS] = {false};
    uint32_t before = map_now()->serial;
    uint32_t moved = 0;
    uint32_t lost = count_lost(known);
    options.arena_bytes *= 2; /* there are to be more segments */
    kvist_test_vault_kill(&store);
    store = kvist_test_vault_open(&vault, &options);
    kvist_test_engine_adopt(engine, store);
    grow();
    KVIST_TEST_FATAL(kvist_map_can_move(map_now())); /* and does not, for it is not safe */
    kvist_store_kept(store, store->keep_count);
    add_map(map_now(), KVIST_HEADER_BYTES);
    add_map(map_now()->next, 0);
    add_part(KVIST_KEPT_ROSTER,
             0,
             store->roster_fd,
             sizeof(*store->roster),
             (uint64_t)((char *)&store->roster->pools[pool_now()->index] - (char *)store->roster),
             sizeof(store->roster->pools[0]));
    shoot(grow);
    KVIST_TEST_TRUE(shot_count > 3);
    for (uint32_t shot = 0; shot < shot_count; shot++) {
        restart_from(shot);
        kvist_test_engine_adopt(engine, store);
        moved += map_now()->serial != before;
        lost += count_lost(known);
    }
    KVIST_TEST_EQUAL(lost, 0);
    KVIST_TEST_TRUE(moved > 0 && moved < shot_count);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"a copy on NVMe is noted", a_copy_on_nvme_is_noted},
        {"a map is adopted", a_map_is_adopted},
        {"a block is committed", a_block_is_committed},
        {"a generation is overtaken", a_generation_is_overtaken},
        {"a map is moved to", a_map_is_moved_to},
    };
    return kvist_unit_main("adopt_kill", cases, KVIST_ARRAY_COUNT(cases), setup, teardown);
}
