/* kept: a keeper that gives back other fds than it was given. Never wrong bytes come of it. */
#include "proto/base/clock.h"
#include "proto/shm/memfd.h"
#include "storage/internal.h"
#include "storage/kept.h"
#include "tests/support/engine.h"
#include "tests/support/unit.h"
#include "tests/support/vault.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
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
    for (uint64_t number = 0; number < 40; number++) {
        KVIST_TEST_STATUS(kvist_test_engine_put(engine, ordinal, number, SLOT_BYTES), KVIST_OK);
    }
}

static void teardown(void)
{
    if (engine != NULL) {
        kvist_test_engine_close(&engine);
    }
    kvist_test_settle(store);
    kvist_store_close(&store);
    KVIST_TEST_EQUAL(vault.count, 0);
    kvist_test_vault_fini(&vault);
}

static void swap(char kind, uint32_t one, uint32_t other)
{
    int first = fcntl(kvist_test_vault_find(&vault, kind, one), F_DUPFD_CLOEXEC, 0);
    int second = fcntl(kvist_test_vault_find(&vault, kind, other), F_DUPFD_CLOEXEC, 0);
    KVIST_TEST_FATAL(first >= 0 && second >= 0);
    kvist_test_vault_replace(&vault, kind, one, second);
    kvist_test_vault_replace(&vault, kind, other, first);
}

static struct kvist_adoption restart(void)
{
    struct kvist_adoption adoption;
    kvist_test_vault_kill(&store);
    store = kvist_test_vault_open(&vault, &options);
    kvist_store_adoption(store, &adoption);
    KVIST_TEST_TRUE(kvist_store_check(store) == NULL);
    return adoption;
}

static void expect_cold(uint32_t mistaken, const char *why)
{
    struct kvist_adoption adoption = restart();
    KVIST_TEST_TRUE(!adoption.adopted);
    KVIST_TEST_EQUAL(adoption.files_mistaken, mistaken);
    KVIST_TEST_TRUE(strstr(adoption.why, why) != NULL);
    KVIST_TEST_EQUAL(vault.count, 1); /* the new roster */
    kvist_test_engine_abandon(&engine);
}

static struct kvist_store_pool *pool_now(void)
{
    return engine->pools[ordinal].pool;
}

static uint32_t segment_of(uint64_t number)
{
    uint8_t key[KVIST_KEY_BYTES];
    struct kvist_entry_copy entry;
    kvist_test_key(number, key);
    KVIST_TEST_FATAL(kvist_map_find(&pool_now()->map, key, &entry) != KVIST_ENTRY_NONE);
    return entry.slot / pool_now()->slots_per_segment;
}

/* That of the first block, and another one with blocks. */
static void choose_segments(uint32_t indices_out[2])
{
    uint64_t number = 1;
    indices_out[0] = segment_of(0);
    while (number < 40 && segment_of(number) == indices_out[0]) {
        number++;
    }
    indices_out[1] = segment_of(number);
}

static uint64_t blocks_in(uint32_t segment)
{
    uint64_t count = 0;
    for (uint64_t number = 0; number < 40; number++) {
        count += segment_of(number) == segment;
    }
    return count;
}

static void swapped_segments_are_dropped(void)
{
    uint32_t at[2];
    choose_segments(at);
    uint64_t left = 40 - blocks_in(at[0]) - blocks_in(at[1]);
    uint32_t serials[2] = {pool_now()->segments[at[0]].serial, pool_now()->segments[at[1]].serial};
    kvist_test_engine_close(&engine);
    swap(KVIST_KEPT_SEGMENT, serials[0], serials[1]);
    struct kvist_adoption adoption = restart();
    KVIST_TEST_TRUE(adoption.adopted);
    KVIST_TEST_EQUAL(adoption.files_mistaken, 2);
    KVIST_TEST_EQUAL(adoption.blocks, left);
    KVIST_TEST_EQUAL(adoption.blocks_dropped, 40 - left);
    KVIST_TEST_EQUAL(kvist_test_vault_find(&vault, KVIST_KEPT_SEGMENT, serials[0]), -1);
    engine = kvist_test_engine_open(store, 2, 1);
    ordinal = kvist_test_engine_attach(engine, kvist_test_pool_open(store, 1, SLOT_BYTES));
    kvist_test_settle(store);
    uint64_t right = 0;
    for (uint64_t number = 0; number < 40; number++) {
        const void *slot = kvist_test_engine_lease(engine, ordinal, number, 1);
        if (slot != NULL) {
            KVIST_TEST_TRUE(kvist_test_holds(slot, number, SLOT_BYTES));
            kvist_test_engine_release(engine, 1);
            right++;
        }
    }
    KVIST_TEST_EQUAL(right, left);
}

static void swapped_segments_that_are_mapped_end_the_arena(void)
{
    swap(KVIST_KEPT_SEGMENT, pool_now()->segments[0].serial, pool_now()->segments[1].serial);
    expect_cold(2, "segment");
}

/* Its serial is used again in each arena. */
static void a_segment_of_another_arena_is_not_believed(void)
{
    uint32_t at = segment_of(0);
    uint32_t serial = pool_now()->segments[at].serial;
    uint64_t left = 40 - blocks_in(at);
    int fd = -1;
    char name[KVIST_MEMFD_NAME_BYTES + 1];
    kvist_memfd_name(KVIST_KEPT_SEGMENT, serial, kvist_store_instance(store) + 1, name);
    KVIST_TEST_STATUS(kvist_memfd_create(name, pool_now()->segment_bytes, &fd, NULL), KVIST_OK);
    kvist_test_engine_close(&engine);
    kvist_test_vault_replace(&vault, KVIST_KEPT_SEGMENT, serial, fd);
    struct kvist_adoption adoption = restart();
    KVIST_TEST_EQUAL(adoption.files_mistaken, 1);
    KVIST_TEST_EQUAL(adoption.blocks, left);
}

/* Others might have opened it for writing. */
static void a_segment_that_others_may_open_is_not_believed(void)
{
    static const mode_t modes[] = {0600, 0440, 0404};
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(modes); index++) {
        uint32_t at = segment_of(0);
        uint32_t serial = pool_now()->segments[at].serial;
        uint64_t left = 40 - blocks_in(at);
        int fd = kvist_test_vault_find(&vault, KVIST_KEPT_SEGMENT, serial);
        kvist_test_engine_close(&engine);
        KVIST_TEST_FATAL(fchmod(fd, modes[index]) == 0);
        struct kvist_adoption adoption = restart();
        KVIST_TEST_EQUAL(adoption.blocks, left);
        KVIST_TEST_EQUAL(kvist_test_vault_find(&vault, KVIST_KEPT_SEGMENT, serial), -1);
        teardown();
        setup();
    }
}

static void swapped_pages_and_maps_are_not_believed(void)
{
    struct kvist_test_engine *other = kvist_test_engine_open(store, 2, 1);
    uint32_t there = kvist_test_engine_attach(other, kvist_test_pool_open(store, 2, SLOT_BYTES));
    swap(KVIST_KEPT_PAGE, engine->session->serial, other->session->serial);
    swap(KVIST_KEPT_MAP, pool_now()->map.serial, other->pools[there].pool->map.serial);
    expect_cold(4, "page");
    kvist_test_engine_abandon(&other);
}

static int pidfd_of(pid_t pid)
{
    int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    KVIST_TEST_FATAL(pidfd >= 0);
    return pidfd;
}

static void another_process_s_pidfd_is_not_believed(void)
{
    pid_t living = fork();
    if (living == 0) {
        (void)pause();
        _exit(0);
    }
    uint32_t serial = engine->members[0].process->serial;
    int own = kvist_test_vault_find(&vault, KVIST_KEPT_PIDFD, serial);
    struct stat info;
    KVIST_TEST_FATAL(fstat(own, &info) == 0);
    int pidfd = pidfd_of(living);
    KVIST_TEST_TRUE(kvist_kept_is_pidfd(own, (uint32_t)getpid(), info.st_ino));
    KVIST_TEST_TRUE(!kvist_kept_is_pidfd(pidfd, (uint32_t)getpid(), info.st_ino));
    KVIST_TEST_TRUE(!kvist_kept_is_pidfd(STDERR_FILENO, 0, info.st_ino));
    KVIST_TEST_TRUE(!kvist_kept_is_pidfd(-1, 0, 0));
    kvist_test_vault_replace(&vault, KVIST_KEPT_PIDFD, serial, pidfd);
    expect_cold(0, "pidfd");
    KVIST_TEST_EQUAL(kill(living, SIGKILL), 0);
    KVIST_TEST_EQUAL(waitpid(living, NULL, 0), living);
}

/* A map that was made after a restart is of the same arena as one that was made before. */
static void a_map_that_grows_after_a_restart_is_believed(void)
{
    enum { BLOCKS = 700, BYTES = 4096 };
    KVIST_TEST_EQUAL(restart().files_mistaken, 0);
    kvist_test_engine_adopt(engine, store);
    uint32_t small = kvist_test_engine_attach(engine, kvist_test_pool_open(store, 2, BYTES));
    KVIST_TEST_EQUAL(restart().files_mistaken, 0);
    kvist_test_engine_adopt(engine, store);
    uint32_t serial = engine->pools[small].pool->map.serial;
    for (uint64_t number = 0; number < BLOCKS; number++) {
        while (kvist_test_engine_put(engine, small, number, BYTES) == KVIST_BUSY) {
            kvist_test_settle(store);
        }
    }
    KVIST_TEST_TRUE(engine->pools[small].pool->map.serial != serial);
    KVIST_TEST_EQUAL(restart().files_mistaken, 0);
    kvist_test_engine_adopt(engine, store);
    KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, small, BLOCKS - 1), KVIST_ENTRY_READY);
}

/* --- Growing ----------------------------------------------------------------------------------- */

#define SMALL_BYTES 4096ULL

static struct kvist_store_pool *small_pool(uint32_t small)
{
    return engine->pools[small].pool;
}

/* Nothing becomes safe by it. */
static void turn_once(void)
{
    (void)kvist_store_turn(store, kvist_clock_now_us());
}

static void put_small(uint32_t small, uint64_t number)
{
    enum kvist_status status = kvist_test_engine_put(engine, small, number, SMALL_BYTES);
    KVIST_TEST_STATUS(status, KVIST_OK);
}

/* Fill the index of another pool until it is to grow in the next turn.
   @return how many blocks there are in it */
static uint64_t fill_small(uint32_t *small_out)
{
    uint32_t small = kvist_test_engine_attach(engine, kvist_test_pool_open(store, 2, SMALL_BYTES));
    uint64_t count = 0;
    while (!kvist_map_wants_growth(&small_pool(small)->map)) {
        if (engine->pools[small].grant_count == 0) {
            kvist_test_settle(store);
        }
        put_small(small, count++);
    }
    *small_out = small;
    return count;
}

static void expect_small(uint32_t small, uint64_t count)
{
    for (uint64_t number = 0; number < count; number++) {
        const void *slot = kvist_test_engine_lease(engine, small, number, 5);
        KVIST_TEST_FATAL(slot != NULL);
        KVIST_TEST_TRUE(kvist_test_holds(slot, number, SMALL_BYTES));
        kvist_test_engine_release(engine, 5);
    }
}

/* Whatever was under way to the keeper is lost. */
static void restart_without_what_is_not_safe(void)
{
    kvist_test_vault_lose(&vault, store->kept_count);
    struct kvist_adoption adoption = restart();
    KVIST_TEST_FATAL(adoption.adopted);
    KVIST_TEST_EQUAL(adoption.pools_dropped, 0);
    KVIST_TEST_EQUAL(adoption.blocks_dropped, 0);
    kvist_test_engine_adopt(engine, store);
}

static void a_map_is_moved_to_when_it_is_safe(void)
{
    uint32_t small = 0;
    uint64_t count = fill_small(&small);
    const struct kvist_map *map = &small_pool(small)->map;
    turn_once();
    KVIST_TEST_FATAL(map->next != NULL);
    for (unsigned turn = 0; turn < 10; turn++) { /* all goes on meanwhile */
        put_small(small, count++);
        turn_once();
        KVIST_TEST_EQUAL(map->header->moved, 0);
    }
    KVIST_TEST_TRUE(kvist_map_can_move(map) && kvist_store_check(store) == NULL);
    uint32_t before = map->serial;
    uint32_t next = map->next->serial;
    restart_without_what_is_not_safe();
    map = &small_pool(small)->map;
    KVIST_TEST_EQUAL(map->serial, before);
    expect_small(small, count);
    kvist_test_settle(store); /* now it grows */
    KVIST_TEST_TRUE(map->serial != before && map->serial != next && map->next == NULL);
    KVIST_TEST_EQUAL(kvist_test_vault_find(&vault, KVIST_KEPT_MAP, before), -1);
    restart_without_what_is_not_safe();
    expect_small(small, count);
}

static void a_growth_that_is_given_up_leaves_nothing(void)
{
    uint32_t small = 0;
    (void)fill_small(&small);
    turn_once();
    uint32_t next = small_pool(small)->map.next->serial;
    KVIST_TEST_TRUE(kvist_test_vault_find(&vault, KVIST_KEPT_MAP, next) >= 0);
    kvist_block_unpublish_all(small_pool(small));
    turn_once();
    KVIST_TEST_EQUAL(kvist_test_vault_find(&vault, KVIST_KEPT_MAP, next), -1);
    kvist_test_engine_detach(engine, small);
    (void)fill_small(&small);
    turn_once();
    KVIST_TEST_TRUE(small_pool(small)->map.next != NULL); /* so it is when the store is closed */
}

static void a_map_that_cannot_be_kept_is_not_moved_to(void)
{
    uint32_t small = 0;
    uint64_t count = fill_small(&small);
    const struct kvist_map *map = &small_pool(small)->map;
    uint32_t serial = map->serial;
    vault.max = vault.count;
    turn_once();
    KVIST_TEST_TRUE(map->next == NULL && map->serial == serial && map->header->moved == 0);
    vault.max = KVIST_VAULT_MAX;
    kvist_test_advance(store, KVIST_POPULATE_RETRY_US);
    kvist_test_settle(store);
    KVIST_TEST_TRUE(map->serial != serial);
    expect_small(small, count);
}

/* --- Not kept yet ------------------------------------------------------------------------------ */

/* Another engine with the same pool open, whose fds are not safe yet. */
static struct kvist_test_engine *young_engine(void)
{
    struct kvist_test_engine *young = kvist_test_engine_open(store, 2, 1);
    (void)kvist_test_engine_attach(young, kvist_test_pool_open(store, 1, SLOT_BYTES));
    (void)kvist_store_turn(store, kvist_clock_now_us());
    return young;
}

/* What the old engine has is there, and a young one is served. */
static void expect_warm_without(uint32_t processes, uint32_t pools)
{
    struct kvist_adoption adoption = restart();
    KVIST_TEST_FATAL(adoption.adopted);
    KVIST_TEST_EQUAL(adoption.blocks, 40);
    KVIST_TEST_EQUAL(adoption.sessions, 1);
    KVIST_TEST_EQUAL(adoption.processes_dropped, processes);
    KVIST_TEST_EQUAL(adoption.pools_dropped, pools);
    kvist_test_engine_adopt(engine, store);
    KVIST_TEST_EQUAL(kvist_test_engine_probe(engine, ordinal, 39), KVIST_ENTRY_READY);
    struct kvist_test_engine *young = young_engine();
    kvist_test_settle(store);
    KVIST_TEST_TRUE(kvist_test_engine_lease(young, 0, 39, 1) != NULL);
    kvist_test_engine_close(&young);
}

static void a_process_that_was_not_kept_is_dropped_alone(void)
{
    struct kvist_test_engine *young = young_engine();
    kvist_test_vault_replace(&vault, KVIST_KEPT_PIDFD, young->members[0].process->serial, -1);
    uint32_t page = young->session->serial;
    kvist_test_engine_abandon(&young);
    expect_warm_without(1, 0);
    KVIST_TEST_EQUAL(kvist_test_vault_find(&vault, KVIST_KEPT_PAGE, page), -1);
}

static void a_session_whose_page_was_not_kept_is_dropped_alone(void)
{
    struct kvist_test_engine *young = young_engine();
    kvist_test_vault_replace(&vault, KVIST_KEPT_PAGE, young->session->serial, -1);
    uint32_t pidfd = young->members[0].process->serial;
    kvist_test_engine_abandon(&young);
    expect_warm_without(1, 0);
    KVIST_TEST_EQUAL(kvist_test_vault_find(&vault, KVIST_KEPT_PIDFD, pidfd), -1);
}

static void a_rank_that_was_not_kept_may_join_its_session_again(void)
{
    struct kvist_test_engine *young = kvist_test_engine_open(store, 2, 2);
    (void)kvist_test_engine_attach(young, kvist_test_pool_open(store, 1, SLOT_BYTES));
    (void)kvist_store_turn(store, kvist_clock_now_us());
    kvist_test_vault_replace(&vault, KVIST_KEPT_PIDFD, young->members[1].process->serial, -1);
    uint32_t rank = young->members[1].process->rank;
    uint32_t place = young->session->index;
    kvist_test_engine_abandon(&young);
    struct kvist_adoption adoption = restart();
    KVIST_TEST_FATAL(adoption.adopted);
    KVIST_TEST_EQUAL(adoption.sessions, 2);
    KVIST_TEST_EQUAL(adoption.processes_dropped, 1);
    kvist_test_engine_adopt(engine, store);
    struct kvist_store_session *session = store->sessions[place];
    struct kvist_store_process *process = NULL;
    KVIST_TEST_STATUS(
        kvist_store_process_open(session, false, true, 1 - rank, NULL, &process, NULL),
        KVIST_EXISTS);
    KVIST_TEST_STATUS(kvist_store_process_open(session, false, true, rank, NULL, &process, NULL),
                      KVIST_OK);
    kvist_store_session_close(&session);
}

static void a_pool_whose_map_was_not_kept_is_dropped_alone(void)
{
    struct kvist_store_pool *pool = kvist_test_pool_open(store, 2, SLOT_BYTES);
    uint32_t there = 0;
    KVIST_TEST_STATUS(kvist_store_attach(engine->members[0].process, pool, false, &there, NULL),
                      KVIST_OK);
    (void)kvist_store_turn(store, kvist_clock_now_us());
    kvist_test_vault_replace(&vault, KVIST_KEPT_MAP, pool->map.serial, -1);
    expect_warm_without(0, 1);
    KVIST_TEST_TRUE(engine->session->attachments[there].pool == NULL);
}

static void who_was_lent_a_segment_is_not_dropped(void)
{
    struct kvist_test_engine *young = young_engine();
    const struct kvist_store_process *process = young->members[0].process;
    KVIST_TEST_TRUE(process->loans[0].lent[segment_of(0)] == 0);
    kvist_store_kept(store, store->keep_count);
    (void)kvist_store_turn(store, kvist_clock_now_us());
    KVIST_TEST_TRUE(process->loans[0].lent[segment_of(0)] != 0);
    kvist_test_vault_replace(&vault, KVIST_KEPT_PIDFD, process->serial, -1);
    kvist_test_engine_abandon(&young);
    expect_cold(0, "pidfd");
}

/* An old one that the keeper did not forget, before or after the right one. */
static void what_is_kept_twice_is_told_apart(void)
{
    struct kvist_kept_fd fds[3] = {
        {.name = "s1"}, {.name = "s1"}, {.name = "d1"}};
    for (unsigned right = 0; right < 2; right++) {
        for (unsigned index = 0; index < 2; index++) {
            char name[KVIST_MEMFD_NAME_BYTES + 1];
            kvist_memfd_name('s', 1, index == right ? 7 : 8, name);
            KVIST_TEST_STATUS(kvist_memfd_create(name, 4096, &fds[index].fd, NULL), KVIST_OK);
        }
        fds[2].fd = pidfd_of(getpid());
        const struct kvist_store_options of = {.kept = fds, .kept_count = 3};
        struct kvist_kept kept;
        KVIST_TEST_FATAL(kvist_kept_init(&kept, &of));
        KVIST_TEST_EQUAL(kvist_kept_look(&kept, KVIST_KEPT_SEGMENT, 1), -1);
        KVIST_TEST_EQUAL(kvist_kept_check(&kept, 7), 1);
        KVIST_TEST_EQUAL(kvist_kept_look(&kept, KVIST_KEPT_SEGMENT, 1), fds[right].fd);
        KVIST_TEST_EQUAL(kvist_kept_look(&kept, KVIST_KEPT_PIDFD, 1), fds[2].fd);
        KVIST_TEST_EQUAL(kvist_kept_look(&kept, KVIST_KEPT_PIDFD, 2), -1);
        (void)kvist_kept_release(&kept, &of);
        kvist_kept_fini(&kept);
    }
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"swapped segments are dropped", swapped_segments_are_dropped},
        {"swapped segments that are mapped end the arena",
         swapped_segments_that_are_mapped_end_the_arena},
        {"a segment of another arena is not believed", a_segment_of_another_arena_is_not_believed},
        {"a segment that others may open is not believed",
         a_segment_that_others_may_open_is_not_believed},
        {"swapped pages and maps are not believed", swapped_pages_and_maps_are_not_believed},
        {"another process's pidfd is not believed", another_process_s_pidfd_is_not_believed},
        {"a map that grows after a restart is believed",
         a_map_that_grows_after_a_restart_is_believed},
        {"a map is moved to when it is safe", a_map_is_moved_to_when_it_is_safe},
        {"a growth that is given up leaves nothing", a_growth_that_is_given_up_leaves_nothing},
        {"a map that cannot be kept is not moved to", a_map_that_cannot_be_kept_is_not_moved_to},
        {"a process that was not kept is dropped alone",
         a_process_that_was_not_kept_is_dropped_alone},
        {"a session whose page was not kept is dropped alone",
         a_session_whose_page_was_not_kept_is_dropped_alone},
        {"a rank that was not kept may join its session again",
         a_rank_that_was_not_kept_may_join_its_session_again},
        {"a pool whose map was not kept is dropped alone",
         a_pool_whose_map_was_not_kept_is_dropped_alone},
        {"who was lent a segment is not dropped", who_was_lent_a_segment_is_not_dropped},
        {"what is kept twice is told apart", what_is_kept_twice_is_told_apart},
    };
    return kvist_unit_main("kept", cases, KVIST_ARRAY_COUNT(cases), setup, teardown);
}
