#include "tests/support/tier_rig.h"

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "storage/record.h"
#include "tests/support/unit.h"

#include <ftw.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WAIT_US      20000000U
#define QUIET_MS     5
#define MEMORY_BYTES ((size_t)16 << 20)

static void pool_loaded(void *ctx, const struct kvist_tier_pool *pool)
{
    struct kvist_rig *rig = ctx;
    KVIST_CHECK(rig->loaded_count == 0);
    rig->pools_loaded++;
    rig->last_pool = *pool;
}

static size_t blocks_loaded(void *ctx, const struct kvist_tier_block *blocks, size_t count)
{
    struct kvist_rig *rig = ctx;
    KVIST_CHECK(!rig->load_done && count > 0);
    count = count < rig->take_left ? count : rig->take_left;
    rig->take_left -= count;
    while (rig->loaded_count + count > rig->loaded_capacity) {
        rig->loaded_capacity = rig->loaded_capacity == 0 ? 1024 : 2 * rig->loaded_capacity;
        rig->loaded = realloc(rig->loaded, rig->loaded_capacity * sizeof(rig->loaded[0]));
        KVIST_CHECK(rig->loaded != NULL);
    }
    memcpy(&rig->loaded[rig->loaded_count], blocks, count * sizeof(blocks[0]));
    rig->loaded_count += count;
    return count;
}

static void load_done(void *ctx, enum kvist_status status)
{
    struct kvist_rig *rig = ctx;
    KVIST_CHECK(!rig->load_done);
    rig->load_done = true;
    rig->load_status = status;
}

static void blocks_dropped(void *ctx, const struct kvist_tier_block *blocks, size_t count)
{
    struct kvist_rig *rig = ctx;
    KVIST_CHECK(blocks[0].extent != 0);
    rig->dropped += count;
}

static void block_moved(void *ctx, const struct kvist_tier_block *block, uint32_t extent_before)
{
    struct kvist_rig *rig = ctx;
    KVIST_CHECK(block->extent != extent_before);
    rig->moved++;
}

void kvist_rig_init(struct kvist_rig *rig, uint64_t bytes_max)
{
    memset(rig, 0, sizeof(*rig));
    char work[KVIST_RIG_PATH_BYTES - 32];
    KVIST_CHECK(getcwd(work, sizeof(work)) != NULL);
    (void)snprintf(rig->path, sizeof(rig->path), "%s/tier-XXXXXX", work);
    KVIST_CHECK(mkdtemp(rig->path) != NULL);
    rig->take_left = SIZE_MAX;
    rig->options.path = rig->path;
    rig->options.bytes_max = bytes_max;
    rig->options.ctx = rig;
    rig->options.events = (struct kvist_tier_events){
        .pool_loaded = pool_loaded,
        .blocks_loaded = blocks_loaded,
        .load_done = load_done,
        .blocks_dropped = blocks_dropped,
        .block_moved = block_moved,
    };
    rig->memory = aligned_alloc(4096, MEMORY_BYTES);
    KVIST_CHECK(rig->memory != NULL);
}

void kvist_rig_fini(struct kvist_rig *rig)
{
    kvist_rig_close(rig);
    kvist_unit_remove_tree(rig->path);
    free(rig->loaded);
    free(rig->memory);
}

enum kvist_status kvist_rig_open(struct kvist_rig *rig)
{
    rig->pools_loaded = 0;
    rig->loaded_count = 0;
    rig->load_done = false;
    return kvist_tier_open(&rig->options, &rig->tier, &rig->err);
}

void kvist_rig_close(struct kvist_rig *rig)
{
    kvist_tier_close(&rig->tier);
}

void kvist_rig_start(struct kvist_rig *rig)
{
    enum kvist_status status = kvist_rig_open(rig);
    if (status != KVIST_OK) {
        (void)fprintf(stderr, "tier: %s\n", rig->err.text);
    }
    KVIST_CHECK(status == KVIST_OK);
    KVIST_CHECK(kvist_rig_turn_until(rig, &rig->load_done));
    KVIST_CHECK(rig->load_status == KVIST_OK);
}

/* @return whether there was something to do */
static bool turn(struct kvist_rig *rig, int wait_ms)
{
    struct pollfd waited = {.fd = kvist_tier_fd(rig->tier), .events = POLLIN};
    if (poll(&waited, 1, wait_ms) <= 0) {
        return false;
    }
    while (kvist_tier_turn(rig->tier)) {
    }
    return true;
}

void kvist_rig_turn(struct kvist_rig *rig)
{
    (void)turn(rig, 100);
}

bool kvist_rig_turn_until(struct kvist_rig *rig, const bool *flag)
{
    uint64_t start_us = kvist_clock_now_us();
    while (!*flag && kvist_clock_now_us() - start_us < WAIT_US) {
        (void)turn(rig, 100);
    }
    return *flag;
}

void kvist_rig_turn_for(struct kvist_rig *rig, uint64_t us)
{
    uint64_t start_us = kvist_clock_now_us();
    /* Waits are counted, not time: on a busy machine they are longer, as the tier's work is. */
    for (uint64_t quiet_us = 0; quiet_us < us && kvist_clock_now_us() - start_us < WAIT_US;) {
        quiet_us = turn(rig, QUIET_MS) ? 0 : quiet_us + QUIET_MS * 1000;
    }
}

struct kvist_tier_pool kvist_rig_pool(uint32_t number, uint64_t slot_bytes, uint64_t generation)
{
    struct kvist_tier_pool pool = {.slot_bytes = slot_bytes, .generation = generation};
    memset(pool.pool_id, 0x70, sizeof(pool.pool_id));
    memcpy(pool.pool_id, &number, sizeof(number));
    (void)snprintf(pool.description, sizeof(pool.description), "pool %u", number);
    return pool;
}

/* splitmix64, so that every word of a block depends on what the block is. */
static uint64_t mix(uint64_t value)
{
    value += 0x9e3779b97f4a7c15ULL;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
    return value ^ (value >> 31);
}

static void
fill(uint8_t *bytes, uint64_t block_bytes, uint32_t pool, uint64_t number, uint64_t version)
{
    uint64_t seed = mix(mix(pool) ^ number) ^ mix(version);
    uint64_t head[3] = {number, version, pool};
    for (uint64_t at = 0; at < block_bytes; at += sizeof(seed)) {
        uint64_t word = at < sizeof(head) ? head[at / sizeof(seed)] : seed + at * 0x9e3779b9U;
        uint64_t left = block_bytes - at;
        memcpy(bytes + at, &word, left < sizeof(word) ? left : sizeof(word));
    }
}

struct kvist_tier_block kvist_rig_block(const struct kvist_tier_pool *pool,
                                        uint64_t number,
                                        uint64_t version,
                                        uint64_t block_bytes,
                                        void *bytes)
{
    struct kvist_tier_block block = {
        .block_bytes = block_bytes,
        .pool_generation = pool->generation,
        .parent_tag = number,
    };
    uint32_t pool_number = 0;
    uint64_t key = mix(number);
    memcpy(&pool_number, pool->pool_id, sizeof(pool_number));
    memcpy(block.pool_id, pool->pool_id, sizeof(block.pool_id));
    memcpy(block.key, &key, sizeof(key));
    memcpy(block.key + 8, &number, sizeof(number));
    if (bytes != NULL) {
        fill(bytes, block_bytes, pool_number, number, version);
        block.checksum = kvist_record_checksum(&block, bytes);
    }
    return block;
}

bool kvist_rig_is(const void *bytes, uint64_t block_bytes, uint32_t pool, uint64_t number)
{
    uint64_t version = 0;
    memcpy(&version, (const uint8_t *)bytes + 8, sizeof(version));
    uint8_t *expected = malloc(block_bytes);
    KVIST_CHECK(expected != NULL);
    fill(expected, block_bytes, pool, number, version);
    bool same = memcmp(expected, bytes, block_bytes) == 0;
    free(expected);
    return same;
}

struct outcome {
    bool done;
    enum kvist_status status;
    struct kvist_tier_block block;
};

static void outcome_done(void *ctx, enum kvist_status status, const struct kvist_tier_block *block)
{
    struct outcome *outcome = ctx;
    KVIST_CHECK(!outcome->done);
    *outcome = (struct outcome){true, status, *block};
}

static enum kvist_status
outcome_wait(struct kvist_rig *rig, enum kvist_status submitted, struct outcome *outcome)
{
    if (submitted != KVIST_OK) {
        return submitted;
    }
    KVIST_CHECK(kvist_rig_turn_until(rig, &outcome->done));
    return outcome->status;
}

enum kvist_status kvist_rig_put_pool(struct kvist_rig *rig, const struct kvist_tier_pool *pool)
{
    struct outcome outcome = {.done = false};
    return outcome_wait(
        rig, kvist_tier_put_pool(rig->tier, pool, outcome_done, &outcome), &outcome);
}

enum kvist_status kvist_rig_write(struct kvist_rig *rig,
                                  const struct kvist_tier_pool *pool,
                                  uint64_t number,
                                  uint64_t version,
                                  uint64_t block_bytes)
{
    struct outcome outcome = {.done = false};
    struct kvist_tier_block block =
        kvist_rig_block(pool, number, version, block_bytes, rig->memory);
    return outcome_wait(
        rig, kvist_tier_write(rig->tier, &block, rig->memory, outcome_done, &outcome), &outcome);
}

enum kvist_status kvist_rig_sync(struct kvist_rig *rig)
{
    struct outcome outcome = {.done = false};
    return outcome_wait(rig, kvist_tier_sync(rig->tier, outcome_done, &outcome), &outcome);
}

enum kvist_status
kvist_rig_read(struct kvist_rig *rig, const struct kvist_tier_pool *pool, uint64_t number)
{
    struct outcome outcome = {.done = false};
    struct kvist_tier_block asked = kvist_rig_block(pool, number, 0, 0, NULL);
    memset(rig->memory, 0xa5, 4096);
    enum kvist_status status = kvist_tier_read(rig->tier,
                                               asked.pool_id,
                                               asked.key,
                                               pool->generation,
                                               rig->memory,
                                               pool->slot_bytes,
                                               outcome_done,
                                               &outcome);
    status = outcome_wait(rig, status, &outcome);
    if (status == KVIST_OK) {
        uint32_t pool_number = 0;
        memcpy(&pool_number, pool->pool_id, sizeof(pool_number));
        KVIST_CHECK(memcmp(outcome.block.key, asked.key, sizeof(asked.key)) == 0);
        KVIST_CHECK(outcome.block.parent_tag == number);
        KVIST_CHECK(kvist_rig_is(rig->memory, outcome.block.block_bytes, pool_number, number));
    }
    return status;
}

static void count_done(void *ctx, enum kvist_status status, const struct kvist_tier_block *block)
{
    struct kvist_rig *rig = ctx;
    (void)block;
    rig->completed++;
    rig->completed_ok += status == KVIST_OK ? 1 : 0;
}

enum kvist_status kvist_rig_submit_write(struct kvist_rig *rig,
                                         const struct kvist_tier_block *block,
                                         const void *bytes)
{
    return kvist_tier_write(rig->tier, block, bytes, count_done, rig);
}

struct kvist_tier_stats kvist_rig_stats(const struct kvist_rig *rig)
{
    struct kvist_tier_stats stats;
    kvist_tier_stats(rig->tier, &stats);
    return stats;
}

static _Thread_local uint64_t du_bytes;

static int du_entry(const char *path, const struct stat *state, int flag, struct FTW *walk)
{
    (void)path;
    (void)walk;
    if (flag != FTW_NS) {
        du_bytes += (uint64_t)state->st_blocks * 512;
    }
    return 0;
}

uint64_t kvist_rig_du(const char *path)
{
    du_bytes = 0;
    (void)nftw(path, du_entry, 8, FTW_PHYS);
    return du_bytes;
}
