/* tier: round trips, restart, clearing, damage on disk, faults, limits. */
#include "proto/base/check.h"
#include "proto/base/fault.h"
#include "storage/tier_codec.h"
#include "tests/support/tier_rig.h"
#include "tests/support/unit.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MIB (1ULL << 20)

static struct kvist_rig rig;

static void setup(void)
{
    kvist_rig_init(&rig, 128 * MIB);
}

static void teardown(void)
{
    (void)kvist_fault_disarm();
    kvist_rig_fini(&rig);
}

/* Path of the n-th extent file (from 0) in the order of numbers; false: there is none. */
static bool extent_path(uint32_t nth, char *path_out, size_t path_bytes)
{
    char directory[KVIST_RIG_PATH_BYTES + 16];
    struct dirent **entries = NULL;
    (void)snprintf(directory, sizeof(directory), "%s/extents", rig.path);
    int count = scandir(directory, &entries, NULL, alphasort);
    uint32_t seen = 0;
    bool found = false;
    for (int index = 0; index < count; index++) {
        if (entries[index]->d_name[0] != '.' && seen++ == nth) {
            found = snprintf(path_out, path_bytes, "%s/%s", directory, entries[index]->d_name) <
                    (int)path_bytes;
        }
        free(entries[index]);
    }
    free(entries);
    return found;
}

static uint32_t extent_files(void)
{
    char path[2 * KVIST_RIG_PATH_BYTES];
    uint32_t count = 0;
    while (extent_path(count, path, sizeof(path))) {
        count++;
    }
    return count;
}

static void flip_byte(uint32_t nth, off_t offset)
{
    char path[2 * KVIST_RIG_PATH_BYTES];
    uint8_t byte = 0;
    KVIST_TEST_FATAL(extent_path(nth, path, sizeof(path)));
    int fd = open(path, O_RDWR | O_CLOEXEC);
    KVIST_TEST_FATAL(fd >= 0);
    KVIST_TEST_EQUAL(pread(fd, &byte, 1, offset), 1);
    byte ^= 0x10;
    KVIST_TEST_EQUAL(pwrite(fd, &byte, 1, offset), 1);
    KVIST_TEST_EQUAL(fsync(fd), 0);
    KVIST_TEST_EQUAL(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    (void)close(fd);
}

/* What a power failure leaves of a record whose index entry was faster. */
static void write_zeros(uint32_t nth, off_t offset, size_t bytes)
{
    char path[2 * KVIST_RIG_PATH_BYTES];
    KVIST_TEST_FATAL(extent_path(nth, path, sizeof(path)));
    int fd = open(path, O_RDWR | O_CLOEXEC);
    uint8_t *zeros = calloc(1, bytes);
    KVIST_TEST_FATAL(fd >= 0 && zeros != NULL);
    KVIST_TEST_EQUAL(pwrite(fd, zeros, bytes, offset), bytes);
    KVIST_TEST_EQUAL(fsync(fd), 0);
    free(zeros);
    (void)close(fd);
}

static void open_says_what_is_wrong(void)
{
    struct kvist_rig other = rig;
    rig.options.bytes_max = 64 * MIB - 1;
    KVIST_TEST_STATUS(kvist_rig_open(&rig), KVIST_INVALID);
    rig.options.bytes_max = 64 * MIB;
    rig.options.path = "";
    KVIST_TEST_STATUS(kvist_rig_open(&rig), KVIST_INVALID);
    rig.options.path = "/nonexistent/directory/tier";
    KVIST_TEST_STATUS(kvist_rig_open(&rig), KVIST_NOT_FOUND);
    KVIST_TEST_TRUE(strstr(rig.err.text, "/nonexistent") != NULL);
    rig.options.path = "/proc/self/exe";
    KVIST_TEST_TRUE(kvist_rig_open(&rig) != KVIST_OK);
    KVIST_TEST_TRUE(rig.tier == NULL);
    rig.options.path = rig.path;
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_open(&other), KVIST_EXISTS);
    KVIST_TEST_TRUE(strstr(other.err.text, "another kvistd") != NULL);
    KVIST_TEST_TRUE(other.tier == NULL);
    kvist_rig_close(&rig);
    kvist_rig_start(&rig);
}

static void a_foreign_directory_is_left_alone(void)
{
    char path[KVIST_RIG_PATH_BYTES + 16];
    (void)snprintf(path, sizeof(path), "%s/thesis.txt", rig.path);
    FILE *file = fopen(path, "we");
    KVIST_TEST_FATAL(file != NULL);
    (void)fclose(file);
    KVIST_TEST_STATUS(kvist_rig_open(&rig), KVIST_INVALID);
    KVIST_TEST_TRUE(strstr(rig.err.text, "thesis.txt") != NULL);
    KVIST_TEST_EQUAL(remove(path), 0);
    (void)snprintf(path, sizeof(path), "%s/lock", rig.path);
    file = fopen(path, "we");
    KVIST_TEST_FATAL(file != NULL);
    (void)fputs("12345\n", file);
    (void)fclose(file);
    KVIST_TEST_STATUS(kvist_rig_open(&rig), KVIST_INVALID);
    KVIST_TEST_EQUAL(remove(path), 0);
    KVIST_TEST_EQUAL(kvist_rig_du(rig.path) <= 4096, true);
    kvist_rig_start(&rig);
}

static void blocks_of_all_sizes_come_back(void)
{
    static const uint64_t sizes[] = {24, 4095, 4096, 4097, 8192, 131072, 131073, 3 * MIB};
    struct kvist_tier_pool pool = kvist_rig_pool(1, 4 * MIB, 1);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, 1, 1, 4096), KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    uint64_t bytes = 0;
    for (uint32_t round = 0; round < 2; round++) {
        for (uint64_t index = 0; index < sizeof(sizes) / sizeof(sizes[0]); index++) {
            KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, index),
                              round == 0 ? KVIST_NOT_FOUND : KVIST_OK);
            KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, index, 1, sizes[index]), KVIST_OK);
            KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, index), KVIST_OK);
            bytes += round == 0 ? sizes[index] : 0;
        }
    }
    struct kvist_tier_stats stats = kvist_rig_stats(&rig);
    KVIST_TEST_EQUAL(stats.blocks, 8);
    KVIST_TEST_EQUAL(stats.block_bytes, bytes);
    KVIST_TEST_EQUAL(stats.reads_total, 8 + 16);
    KVIST_TEST_EQUAL(stats.in_flight, 0);
    KVIST_TEST_TRUE(stats.write_bytes_total <
                    bytes + 9 * 8192); /* the second round wrote nothing */
    CU_ASSERT_STRING_EQUAL(stats.degraded, "");
    /* Another version of the same key takes its place. */
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, 3, 2, 4097), KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, 3), KVIST_OK);
    KVIST_TEST_EQUAL(rig.memory[8], 2);
    KVIST_TEST_EQUAL(kvist_rig_stats(&rig).blocks, 8);
}

/* What a store could not live with, in an index that checks out. */
static void values_that_cannot_be_are_not_decoded(void)
{
    const struct kvist_tier_pool good = kvist_rig_pool(1, 65536, 1);
    static const uint64_t bad_slot_bytes[] = {0, 2048, 65536 + 512, KVIST_BLOCK_BYTES_MAX + 4096};
    uint8_t key[KVIST_TIER_POOL_KEY_BYTES];
    uint8_t value[KVIST_TIER_POOL_VALUE_BYTES];
    struct kvist_tier_pool pool = good;
    kvist_rig_start(&rig);
    kvist_tier_pool_key(good.pool_id, key);
    kvist_tier_pool_encode(&good, value);
    KVIST_TEST_TRUE(kvist_tier_pool_decode(key, sizeof(key), value, sizeof(value), &pool));
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(bad_slot_bytes); index++) {
        pool.slot_bytes = bad_slot_bytes[index];
        kvist_tier_pool_encode(&pool, value);
        KVIST_TEST_TRUE(!kvist_tier_pool_decode(key, sizeof(key), value, sizeof(value), &pool));
        KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_INVALID);
    }
    static const uint64_t bad_offsets[] = {0, 4096 + 512, UINT64_MAX - 4095};
    struct kvist_tier_record record = {.offset = 8192};
    record.block.block_bytes = 100;
    record.block.extent = 1;
    uint8_t block[KVIST_TIER_BLOCK_VALUE_BYTES];
    kvist_tier_block_encode(&record, block);
    KVIST_TEST_TRUE(
        kvist_tier_block_decode(good.pool_id, good.pool_id, block, sizeof(block), &record));
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(bad_offsets); index++) {
        record.offset = bad_offsets[index];
        kvist_tier_block_encode(&record, block);
        KVIST_TEST_TRUE(!kvist_tier_block_decode(
            good.pool_id, good.pool_id, block, sizeof(block), &record));
    }
}

static void wrong_calls_are_refused(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, 8192, 3);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    struct kvist_tier_block block = kvist_rig_block(&pool, 1, 1, 8192, rig.memory);
    KVIST_TEST_STATUS(kvist_rig_submit_write(&rig, &block, rig.memory + 512), KVIST_INVALID);
    block.block_bytes = 0;
    KVIST_TEST_STATUS(kvist_rig_submit_write(&rig, &block, rig.memory), KVIST_INVALID);
    block.block_bytes = 8193;
    KVIST_TEST_STATUS(kvist_rig_submit_write(&rig, &block, rig.memory), KVIST_INVALID);
    block.block_bytes = 8192;
    block.pool_generation = 2;
    KVIST_TEST_STATUS(kvist_rig_submit_write(&rig, &block, rig.memory), KVIST_STALE);
    KVIST_TEST_STATUS(
        kvist_tier_read(rig.tier, block.pool_id, block.key, 3, rig.memory + 1, 8192, NULL, NULL),
        KVIST_INVALID);
    /* Memory that does not match its checksum is not written. */
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, 1, 1, 8192), KVIST_OK);
    block = kvist_rig_block(&pool, 2, 1, 8192, rig.memory);
    block.checksum ^= 1;
    KVIST_TEST_STATUS(kvist_rig_submit_write(&rig, &block, rig.memory), KVIST_OK);
    while (rig.completed == 0) {
        kvist_rig_turn_for(&rig, 1000);
    }
    KVIST_TEST_EQUAL(rig.completed_ok, 0);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, 2), KVIST_NOT_FOUND);
    /* A slot that is too small, pools that cannot be. */
    struct kvist_tier_pool small = pool;
    small.slot_bytes = 4096;
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &small, 1), KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &small), KVIST_STALE);
    small = kvist_rig_pool(2, 64, 1);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &small), KVIST_INVALID);
    small = kvist_rig_pool(3, 64 * MIB, 1);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &small), KVIST_OK);
    block = kvist_rig_block(&small, 1, 1, 16 * MIB, rig.memory);
    KVIST_TEST_STATUS(kvist_rig_submit_write(&rig, &block, rig.memory), KVIST_NO_SPACE);
}

static void a_restart_reports_every_block_once(void)
{
    struct kvist_tier_pool pools[2] = {kvist_rig_pool(1, 65536, 1), kvist_rig_pool(2, 65536, 7)};
    (void)snprintf(pools[1].tenant, sizeof(pools[1].tenant), "red");
    pools[1].sparse = true;
    kvist_rig_start(&rig);
    KVIST_TEST_EQUAL(rig.pools_loaded, 0);
    for (uint32_t index = 0; index < 2; index++) {
        KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pools[index]), KVIST_OK);
        for (uint64_t number = 0; number < 600; number++) {
            KVIST_TEST_STATUS(kvist_rig_write(&rig, &pools[index], number, 1, 24 + number),
                              KVIST_OK);
        }
    }
    for (uint32_t round = 0; round < 3; round++) {
        kvist_rig_close(&rig);
        kvist_rig_start(&rig);
        KVIST_TEST_EQUAL(rig.pools_loaded, 2);
        KVIST_TEST_EQUAL(rig.loaded_count, 1200);
        KVIST_TEST_EQUAL(memcmp(&rig.last_pool, &pools[1], sizeof(pools[1])), 0);
        static uint8_t seen[2][600];
        memset(seen, 0, sizeof(seen));
        for (size_t index = 0; index < rig.loaded_count; index++) {
            const struct kvist_tier_block *block = &rig.loaded[index];
            KVIST_TEST_FATAL(block->parent_tag < 600 && block->pool_id[0] - 1U < 2);
            KVIST_TEST_EQUAL(block->block_bytes, 24 + block->parent_tag);
            KVIST_TEST_EQUAL(seen[block->pool_id[0] - 1][block->parent_tag]++, 0);
        }
        KVIST_TEST_EQUAL(kvist_rig_stats(&rig).blocks, 1200);
        KVIST_TEST_STATUS(kvist_rig_read(&rig, &pools[round % 2], 599 - round), KVIST_OK);
    }
    kvist_rig_turn_for(&rig, 100000);
    KVIST_TEST_EQUAL(rig.dropped, 0);
    KVIST_TEST_EQUAL(extent_files(), 4); /* cut to what they hold, not multiplied by restarts */
    KVIST_TEST_TRUE(kvist_rig_du(rig.path) < 20 * MIB);
}

/* Blocks written while the index is read back are the writer's, not the loader's. */
static void writes_go_on_while_loading(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, 8192, 1);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    for (uint64_t number = 0; number < 3000; number++) {
        KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, number, 1, 4096), KVIST_OK);
    }
    kvist_rig_close(&rig);
    KVIST_TEST_STATUS(kvist_rig_open(&rig), KVIST_OK);
    uint64_t written = 0;
    for (uint64_t number = 0; number < 40; number++) {
        if (!rig.load_done) {
            written++;
            KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, number * 70, 2, 8192), KVIST_OK);
            KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, number * 70), KVIST_OK);
            KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, number * 70 + 1), KVIST_OK);
        }
    }
    KVIST_TEST_FATAL(kvist_rig_turn_until(&rig, &rig.load_done));
    KVIST_TEST_TRUE(written > 0);
    KVIST_TEST_TRUE(rig.loaded_count >= 3000 - written && rig.loaded_count <= 3000);
    for (size_t index = 0; index < rig.loaded_count; index++) {
        KVIST_TEST_EQUAL(rig.loaded[index].block_bytes, 4096);
    }
    KVIST_TEST_EQUAL(kvist_rig_stats(&rig).blocks, 3000);
    KVIST_TEST_EQUAL(kvist_rig_stats(&rig).block_bytes, 3000 * 4096 + written * 4096);
}

/* The rest of a batch waits: all are told once, but for what is written meanwhile. */
static void what_was_not_taken_is_told_again(void)
{
    enum { BLOCKS = 1200, AT_FIRST = 100 };
    struct kvist_tier_pool pool = kvist_rig_pool(1, 8192, 1);
    uint32_t told[BLOCKS] = {0};
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    for (uint64_t number = 0; number < BLOCKS; number++) {
        KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, number, 1, 4096), KVIST_OK);
    }
    kvist_rig_close(&rig);
    rig.take_left = AT_FIRST;
    KVIST_TEST_STATUS(kvist_rig_open(&rig), KVIST_OK);
    while (rig.take_left > 0) {
        kvist_rig_turn(&rig);
    }
    for (size_t index = 0; index < AT_FIRST; index++) {
        told[rig.loaded[index].parent_tag]++;
    }
    for (uint64_t number = 0; number < BLOCKS; number += 10) {
        KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, number, 2, 8192), KVIST_OK);
        told[number] = 1;
    }
    KVIST_TEST_TRUE(!rig.load_done && rig.loaded_count == AT_FIRST);
    rig.take_left = SIZE_MAX;
    (void)kvist_tier_turn(rig.tier); /* its fd does not tell */
    KVIST_TEST_FATAL(kvist_rig_turn_until(&rig, &rig.load_done));
    for (size_t index = AT_FIRST; index < rig.loaded_count; index++) {
        told[rig.loaded[index].parent_tag]++;
    }
    for (uint64_t number = 0; number < BLOCKS; number++) {
        KVIST_TEST_EQUAL(told[number], 1);
    }
}

/* kvistd notes clears where the tier may be made later. */
static void a_note_of_clears_may_lie_there(void)
{
    static const char *const names[] = {"cleared", "cleared.new"};
    char path[KVIST_RIG_PATH_BYTES + 16];
    for (size_t index = 0; index < sizeof(names) / sizeof(names[0]); index++) {
        (void)snprintf(path, sizeof(path), "%s/%s", rig.path, names[index]);
        int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
        KVIST_TEST_FATAL(fd >= 0);
        (void)close(fd);
    }
    kvist_rig_start(&rig);
    kvist_rig_close(&rig);
    kvist_rig_start(&rig);
}

/* A pool that comes again with slots of another size is another generation, and nothing else. */
static void slots_of_another_size_are_another_generation(void)
{
    struct kvist_tier_pool before = kvist_rig_pool(1, 8192, 5);
    struct kvist_tier_pool after = kvist_rig_pool(1, 4096, 5);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &before), KVIST_OK);
    for (uint64_t number = 0; number < 20; number++) {
        KVIST_TEST_STATUS(kvist_rig_write(&rig, &before, number, 1, 4096), KVIST_OK);
    }
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &after), KVIST_STALE);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &before, 3), KVIST_OK);
    after.generation++;
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &after), KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &after, 3), KVIST_NOT_FOUND);
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &after, 3, 2, 8192), KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &after, 3, 2, 4096), KVIST_OK);
    kvist_rig_close(&rig);
    kvist_rig_start(&rig);
    KVIST_TEST_EQUAL(rig.loaded_count, 1);
    KVIST_TEST_EQUAL(rig.last_pool.slot_bytes, 4096);
    KVIST_TEST_EQUAL(rig.last_pool.generation, 6);
}

static void cleared_blocks_never_come_back(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, 8192, 1);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    for (uint64_t number = 0; number < 700; number++) {
        KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, number, 1, 4096), KVIST_OK);
    }
    struct kvist_tier_pool cleared = pool;
    cleared.generation = 2;
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &cleared), KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_STALE);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &cleared, 5), KVIST_NOT_FOUND);
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, 5, 1, 4096), KVIST_STALE);
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &cleared, 5, 2, 4096), KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, 5), KVIST_NOT_FOUND);
    kvist_rig_turn_for(&rig, 200000);
    KVIST_TEST_EQUAL(kvist_rig_stats(&rig).blocks, 1);
    KVIST_TEST_EQUAL(rig.dropped, 0); /* its owner cleared, and need not be told */
    kvist_rig_close(&rig);
    kvist_rig_start(&rig);
    KVIST_TEST_EQUAL(rig.loaded_count, 1);
    KVIST_TEST_EQUAL(rig.last_pool.generation, 2);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &cleared, 5), KVIST_OK);
    /* A pool without blocks is forgotten at the next start. */
    cleared.generation = 3;
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &cleared), KVIST_OK);
    kvist_rig_close(&rig);
    kvist_rig_start(&rig);
    kvist_rig_close(&rig);
    kvist_rig_start(&rig);
    KVIST_TEST_EQUAL(rig.pools_loaded + rig.loaded_count, 0);
}

/* More pools, one after another, than can be known at a time. */
static void forgotten_pools_make_place(void)
{
    struct kvist_tier_pool kept = kvist_rig_pool(1, 8192, 1);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &kept), KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &kept, 7, 1, 4096), KVIST_OK);
    for (uint32_t number = 2; number < 1302; number++) {
        struct kvist_tier_pool pool = kvist_rig_pool(number, 8192, 1);
        KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
        KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, 7, 1, 4096), KVIST_OK);
        kvist_tier_forget_pool(rig.tier, pool.pool_id);
        KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, 8, 1, 4096), KVIST_STALE);
    }
    for (uint32_t round = 0; kvist_rig_stats(&rig).blocks > 1 && round < 200; round++) {
        (void)kvist_tier_turn(rig.tier); /* starts what is due */
        kvist_rig_turn(&rig);
    }
    KVIST_TEST_EQUAL(kvist_rig_stats(&rig).blocks, 1);
    KVIST_TEST_EQUAL(rig.dropped, 0); /* its owner let go, and need not be told */
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &kept, 7), KVIST_OK);
    struct kvist_tier_pool gone = kvist_rig_pool(2, 8192, 1);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &gone, 7), KVIST_NOT_FOUND);
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &gone, 7, 1, 4096), KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &gone), KVIST_OK); /* as any new one */
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &gone, 7), KVIST_NOT_FOUND);
    kvist_rig_close(&rig);
    kvist_rig_start(&rig);
    KVIST_TEST_EQUAL(rig.pools_loaded, 1);
    KVIST_TEST_EQUAL(rig.loaded_count, 1);
}

/* Put again before it has gone: an empty pool of a later generation, for good. */
static void a_pool_that_is_forgotten_may_come_again(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, 8192, 1);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    for (uint64_t number = 0; number < 700; number++) {
        KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, number, 1, 4096), KVIST_OK);
    }
    kvist_tier_forget_pool(rig.tier, pool.pool_id);
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, 5, 1, 4096), KVIST_STALE);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_STALE);
    pool.generation = 3;
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, 5, 2, 4096), KVIST_OK);
    kvist_rig_turn_for(&rig, 200000);
    KVIST_TEST_EQUAL(kvist_rig_stats(&rig).blocks, 1);
    kvist_rig_close(&rig);
    kvist_rig_start(&rig);
    KVIST_TEST_EQUAL(rig.loaded_count, 1);
    KVIST_TEST_EQUAL(rig.last_pool.generation, 3);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, 5), KVIST_OK);
    /* It ends before anything was removed: what comes back is right. */
    kvist_tier_forget_pool(rig.tier, pool.pool_id);
    kvist_rig_close(&rig);
    kvist_rig_start(&rig);
    if (rig.pools_loaded == 1) {
        KVIST_TEST_EQUAL(rig.last_pool.generation, 3);
        KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, 5), KVIST_OK);
    }
}

static void a_flipped_bit_is_a_miss(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, 8192, 1);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    for (uint64_t number = 0; number < 5; number++) {
        KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, number, 1, 8192), KVIST_OK);
    }
    flip_byte(0, 4096 + 4096 + 17);          /* block 0 */
    flip_byte(0, 4096 + 12288 + 200);        /* header of block 1, in its padding */
    flip_byte(0, 4096 + 2 * 12288 + 40);     /* header of block 2, its key */
    write_zeros(0, 4096 + 3 * 12288, 12288); /* block 3 */
    for (uint64_t number = 0; number < 4; number++) {
        KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, number), KVIST_CORRUPT);
        KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, number), KVIST_NOT_FOUND);
    }
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, 4), KVIST_OK);
    KVIST_TEST_EQUAL(rig.dropped, 4);
    KVIST_TEST_EQUAL(kvist_rig_stats(&rig).corrupt_total, 4);
    KVIST_TEST_EQUAL(kvist_rig_stats(&rig).blocks, 1);
}

/* Three blocks, each in an extent of its own by its tenant. */
static void three_extents(struct kvist_tier_pool pools[3])
{
    static const char *tenants[] = {"a", "b", "c"};
    kvist_rig_start(&rig);
    for (uint32_t index = 0; index < 3; index++) {
        pools[index] = kvist_rig_pool(index + 1, 65536, 1);
        (void)snprintf(pools[index].tenant, sizeof(pools[index].tenant), "%s", tenants[index]);
        KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pools[index]), KVIST_OK);
        KVIST_TEST_STATUS(kvist_rig_write(&rig, &pools[index], 1, 1, 65536), KVIST_OK);
        KVIST_TEST_STATUS(kvist_rig_write(&rig, &pools[index], 2, 1, 65536), KVIST_OK);
    }
    kvist_rig_close(&rig);
    KVIST_TEST_EQUAL(extent_files(), 3);
}

static void files_and_index_are_matched_at_start(void)
{
    struct kvist_tier_pool pools[3];
    char path[2 * KVIST_RIG_PATH_BYTES];
    char copy[2 * KVIST_RIG_PATH_BYTES + 16];
    three_extents(pools);
    KVIST_TEST_TRUE(extent_path(2, path, sizeof(path)));
    KVIST_TEST_EQUAL(truncate(path, 4096 + 69632 + 8192), 0); /* cuts the second block */
    KVIST_TEST_TRUE(extent_path(1, path, sizeof(path)));
    KVIST_TEST_EQUAL(unlink(path), 0);
    flip_byte(0, 100); /* the first file's header */
    (void)snprintf(copy, sizeof(copy), "%s/extents/00000099", rig.path);
    FILE *file = fopen(copy, "we");
    KVIST_TEST_FATAL(file != NULL);
    (void)fputs("torn", file);
    (void)fclose(file);
    kvist_rig_start(&rig);
    KVIST_TEST_EQUAL(rig.loaded_count, 1);
    KVIST_TEST_EQUAL(rig.loaded[0].parent_tag, 1);
    kvist_rig_turn_for(&rig, 50000);
    KVIST_TEST_EQUAL(extent_files(), 1);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &pools[2], 1), KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &pools[2], 2), KVIST_NOT_FOUND);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &pools[1], 1), KVIST_NOT_FOUND);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &pools[0], 1), KVIST_NOT_FOUND);
    KVIST_TEST_EQUAL(kvist_rig_stats(&rig).blocks, 1);
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &pools[2], 3, 1, 4096), KVIST_OK);
    KVIST_TEST_TRUE(access(copy, F_OK) != 0);
}

/* An extent that no entry names holds nothing that can be read: it goes. */
static void an_index_that_is_gone_empties_the_tier(void)
{
    struct kvist_tier_pool pools[3];
    char path[KVIST_RIG_PATH_BYTES + 16];
    three_extents(pools);
    (void)snprintf(path, sizeof(path), "%s/index", rig.path);
    kvist_unit_remove_tree(path);
    kvist_rig_start(&rig);
    KVIST_TEST_EQUAL(rig.loaded_count, 0);
    KVIST_TEST_TRUE(strstr(kvist_rig_stats(&rig).notice, "missing") != NULL);
    CU_ASSERT_STRING_EQUAL(kvist_rig_stats(&rig).degraded, "");
    for (unsigned round = 0; extent_files() > 0 && round < 400; round++) {
        kvist_rig_turn_for(&rig, 50000);
    }
    KVIST_TEST_EQUAL(extent_files(), 0);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pools[0]), KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &pools[0], 1, 1, 4096), KVIST_OK);
}

/* Somebody has moved a part elsewhere: what lies there is not counted, and may be shared. */
static void a_part_that_is_a_link_is_refused(void)
{
    static const char *parts[] = {"index", "extents"};
    struct kvist_tier_pool pools[3];
    char path[KVIST_RIG_PATH_BYTES + 32];
    char elsewhere[KVIST_RIG_PATH_BYTES + 32];
    three_extents(pools);
    (void)snprintf(elsewhere, sizeof(elsewhere), "%s-elsewhere", rig.path);
    for (size_t index = 0; index < sizeof(parts) / sizeof(parts[0]); index++) {
        (void)snprintf(path, sizeof(path), "%s/%s", rig.path, parts[index]);
        KVIST_TEST_FATAL(rename(path, elsewhere) == 0 && symlink(elsewhere, path) == 0);
        KVIST_TEST_STATUS(kvist_rig_open(&rig), KVIST_INVALID);
        KVIST_TEST_TRUE(strstr(rig.err.text, parts[index]) != NULL);
        KVIST_TEST_FATAL(unlink(path) == 0 && rename(elsewhere, path) == 0);
    }
    kvist_rig_start(&rig);
    KVIST_TEST_TRUE(rig.loaded_count > 0);
    CU_ASSERT_STRING_EQUAL(kvist_rig_stats(&rig).notice, "");
}

static void a_damaged_index_starts_empty(void)
{
    struct kvist_tier_pool pools[3];
    char path[KVIST_RIG_PATH_BYTES + 32];
    three_extents(pools);
    (void)snprintf(path, sizeof(path), "%s/index/CURRENT", rig.path);
    FILE *file = fopen(path, "we");
    KVIST_TEST_FATAL(file != NULL);
    (void)fputs("MANIFEST-nonsense\n", file);
    (void)fclose(file);
    enum kvist_status status = kvist_rig_open(&rig);
    KVIST_TEST_STATUS(status, KVIST_OK);
    KVIST_TEST_FATAL(status == KVIST_OK);
    KVIST_TEST_TRUE(kvist_rig_turn_until(&rig, &rig.load_done));
    KVIST_TEST_EQUAL(rig.loaded_count, 0);
    KVIST_TEST_EQUAL(kvist_rig_stats(&rig).corrupt_total, 1);
    KVIST_TEST_TRUE(strstr(kvist_rig_stats(&rig).notice, "damaged") != NULL);
    CU_ASSERT_STRING_EQUAL(kvist_rig_stats(&rig).degraded, "");
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pools[0]), KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &pools[0], 1, 1, 4096), KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &pools[0], 1), KVIST_OK);
}

static void without_direct_io_it_is_slow_and_says_so(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, 65536, 1);
    kvist_fault_arm("tier.direct", 1, true);
    kvist_rig_start(&rig);
    KVIST_TEST_TRUE(!kvist_rig_stats(&rig).direct);
    KVIST_TEST_TRUE(strstr(kvist_rig_stats(&rig).degraded, "direct I/O") != NULL);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    for (uint64_t number = 0; number < 50; number++) {
        KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, number, 1, 50000), KVIST_OK);
        KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, number), KVIST_OK);
    }
    kvist_rig_close(&rig);
    (void)kvist_fault_disarm();
    kvist_rig_start(&rig);
    KVIST_TEST_EQUAL(rig.loaded_count, 50);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, 49), KVIST_OK);
    CU_ASSERT_STRING_EQUAL(kvist_rig_stats(&rig).degraded, "");
}

/* Each point fails once, then for good: an error, degraded, and all well when it is over. */
static void faults_are_errors_and_pass(void)
{
    static const char *points[] = {
        "tier.extent.make", "tier.extent.write", "tier.index.put", "tier.index.get"};
    struct kvist_tier_pool pool = kvist_rig_pool(1, 8192, 1);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    uint64_t number = 1000;
    for (size_t index = 0; index < sizeof(points) / sizeof(points[0]); index++) {
        for (uint32_t forever = 0; forever < 2; forever++) {
            uint64_t errors = kvist_rig_stats(&rig).write_errors_total;
            kvist_fault_arm(points[index], 1, forever == 1);
            enum kvist_status status = kvist_rig_write(&rig, &pool, number, 1, 4096);
            /* The first extent exists after the first fault: then make is not asked again. */
            if (index > 0 || forever == 0) {
                KVIST_TEST_TRUE(status != KVIST_OK || index == 3);
                KVIST_TEST_TRUE(kvist_rig_stats(&rig).degraded[0] != '\0' || index == 3);
                KVIST_TEST_TRUE(kvist_rig_stats(&rig).write_errors_total > errors || index == 3);
            }
            (void)kvist_fault_disarm();
            kvist_rig_turn_for(&rig, 1100000); /* the index is tried again once a second */
            KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, number, 2, 4096), KVIST_OK);
            KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, number), KVIST_OK);
            CU_ASSERT_STRING_EQUAL(kvist_rig_stats(&rig).degraded, "");
            number++;
        }
    }
    KVIST_TEST_EQUAL(kvist_rig_stats(&rig).blocks, number - 1000);
}

static void read_faults_are_misses(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, 8192, 1);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, 1, 1, 8192), KVIST_OK);
    kvist_fault_arm("tier.extent.read", 1, false);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, 1), KVIST_SYSTEM);
    KVIST_TEST_EQUAL(kvist_rig_stats(&rig).read_errors_total, 1);
    KVIST_TEST_TRUE(kvist_rig_stats(&rig).degraded[0] != '\0');
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, 1), KVIST_OK);
    CU_ASSERT_STRING_EQUAL(kvist_rig_stats(&rig).degraded, "");
}

/* The index cannot be opened again for writing: reads go on, writes fail, then all is well. */
static void an_index_that_stays_broken_still_reads(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, 8192, 1);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, 1, 1, 8192), KVIST_OK);
    kvist_fault_arm("tier.index.put", 1, false);
    KVIST_TEST_TRUE(kvist_rig_write(&rig, &pool, 2, 1, 8192) != KVIST_OK);
    kvist_fault_arm("tier.index.open", 1, true);
    KVIST_TEST_TRUE(kvist_rig_write(&rig, &pool, 2, 1, 8192) != KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, 1), KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, 2), KVIST_NOT_FOUND);
    struct kvist_tier_pool cleared = pool;
    cleared.generation = 2;
    KVIST_TEST_TRUE(kvist_rig_put_pool(&rig, &cleared) != KVIST_OK);
    KVIST_TEST_TRUE(kvist_rig_stats(&rig).degraded[0] != '\0');
    (void)kvist_fault_disarm();
    kvist_rig_turn_for(&rig, 1100000);
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &cleared, 2, 1, 8192), KVIST_OK);
    kvist_rig_turn_for(&rig, 100000);
    kvist_rig_close(&rig);
    kvist_rig_start(&rig);
    KVIST_TEST_EQUAL(rig.last_pool.generation, 2); /* the write put the pool again */
    KVIST_TEST_EQUAL(rig.loaded_count, 1);
}

static void a_removed_directory_is_no_crash(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, MIB, 1);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, 0, 1, MIB), KVIST_OK);
    kvist_unit_remove_tree(rig.path);
    uint64_t failures = 0;
    for (uint64_t number = 1; number < 200; number++) {
        failures += kvist_rig_write(&rig, &pool, number, 1, MIB) != KVIST_OK ? 1 : 0;
        (void)kvist_rig_read(&rig, &pool, number);
    }
    KVIST_TEST_TRUE(failures > 100);
    KVIST_TEST_TRUE(kvist_rig_stats(&rig).degraded[0] != '\0');
    kvist_rig_close(&rig);
}

static void requests_are_bounded_and_close_completes_them(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, MIB, 1);
    rig.options.depth_max = 8;
    rig.options.io_threads = 2;
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    uint64_t accepted = 0;
    struct kvist_tier_block block = kvist_rig_block(&pool, 1, 1, MIB, rig.memory);
    while (kvist_rig_submit_write(&rig, &block, rig.memory) == KVIST_OK) {
        accepted++;
    }
    KVIST_TEST_STATUS(kvist_rig_submit_write(&rig, &block, rig.memory), KVIST_BUSY);
    KVIST_TEST_EQUAL(accepted, 8);
    KVIST_TEST_EQUAL(kvist_rig_stats(&rig).in_flight, 8);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK); /* still goes */
    while (kvist_rig_submit_write(&rig, &block, rig.memory) == KVIST_OK) {
        accepted++;
    }
    kvist_rig_close(&rig);
    KVIST_TEST_EQUAL(rig.completed, accepted);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_sync(&rig), KVIST_OK);
    KVIST_TEST_TRUE(rig.loaded_count <= 1);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"open says what is wrong", open_says_what_is_wrong},
        {"a foreign directory is left alone", a_foreign_directory_is_left_alone},
        {"blocks of all sizes come back", blocks_of_all_sizes_come_back},
        {"values that cannot be are not decoded", values_that_cannot_be_are_not_decoded},
        {"wrong calls are refused", wrong_calls_are_refused},
        {"a restart reports every block once", a_restart_reports_every_block_once},
        {"writes go on while loading", writes_go_on_while_loading},
        {"what was not taken is told again", what_was_not_taken_is_told_again},
        {"a note of clears may lie there", a_note_of_clears_may_lie_there},
        {"slots of another size are another generation",
         slots_of_another_size_are_another_generation},
        {"cleared blocks never come back", cleared_blocks_never_come_back},
        {"forgotten pools make place", forgotten_pools_make_place},
        {"a pool that is forgotten may come again", a_pool_that_is_forgotten_may_come_again},
        {"a flipped bit is a miss", a_flipped_bit_is_a_miss},
        {"files and index are matched at start", files_and_index_are_matched_at_start},
        {"an index that is gone empties the tier", an_index_that_is_gone_empties_the_tier},
        {"a part that is a link is refused", a_part_that_is_a_link_is_refused},
        {"a damaged index starts empty", a_damaged_index_starts_empty},
        {"without direct io it is slow and says so", without_direct_io_it_is_slow_and_says_so},
        {"faults are errors and pass", faults_are_errors_and_pass},
        {"read faults are misses", read_faults_are_misses},
        {"an index that stays broken still reads", an_index_that_stays_broken_still_reads},
        {"a removed directory is no crash", a_removed_directory_is_no_crash},
        {"requests are bounded, close completes them",
         requests_are_bounded_and_close_completes_them},
    };
    return kvist_unit_main("tier", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
}
