/*
 * The tier under the load of turnover.h.
 *
 * How much is carried over is the tier's rule, not an option of it: to vary it here, the linker puts
 * the functions below in place of those that the tier calls (--wrap). They also take the time from
 * the choice of an extent until its file is gone.
 */
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "storage/extent.h"
#include "storage/record.h"
#include "tests/bench/quantile.h"
#include "tests/bench/turnover.h"
#include "tests/support/tier_rig.h"

#include <stdatomic.h>
#include <stdio.h>

#define DROPS_MAX          65536U
#define HIT_PLACES         (1U << 20) /* a power of two, many times the records */
#define CARRY_PERCENT_TIER 10U        /* what the tier's rule gives */

const char turnover_store_name[] = "tier";

static struct {
    struct turnover_options options;
    struct kvist_tier *tier;
    struct kvist_tier_pool pool;
    bool loaded;
    struct kvist_tier_stats before;
} store;

/* Of extents that go: chosen on the main thread, gone on a worker, one at a time. */
static struct {
    _Atomic uint64_t start_ns;
    uint64_t took_ns[DROPS_MAX];
    _Atomic size_t count;
} drops;

static _Atomic uint8_t hit_counts[HIT_PLACES];
static _Atomic uint64_t wanted; /* blocks that the rule would carry over, if there is room */

/* --- In place of the tier's ------------------------------------------------------------------ */

enum kvist_status __real_kvist_extents_drain(struct kvist_extents *extents, uint32_t number);
enum kvist_status __wrap_kvist_extents_drain(struct kvist_extents *extents, uint32_t number);
void __real_kvist_extents_retire(struct kvist_extents *extents, uint32_t number, bool keep);
void __wrap_kvist_extents_retire(struct kvist_extents *extents, uint32_t number, bool keep);
uint64_t __real_kvist_extent_filled_bytes(struct kvist_extents *extents,
                                          const struct kvist_extent *extent);
uint64_t __wrap_kvist_extent_filled_bytes(struct kvist_extents *extents,
                                          const struct kvist_extent *extent);
void __real_kvist_extent_hit(struct kvist_extent *extent, uint64_t offset);
void __wrap_kvist_extent_hit(struct kvist_extent *extent, uint64_t offset);
bool __real_kvist_extent_was_hit(const struct kvist_extent *extent, uint64_t offset);
bool __wrap_kvist_extent_was_hit(const struct kvist_extent *extent, uint64_t offset);

enum kvist_status __wrap_kvist_extents_drain(struct kvist_extents *extents, uint32_t number)
{
    drops.start_ns = kvist_clock_now_ns();
    return __real_kvist_extents_drain(extents, number);
}

void __wrap_kvist_extents_retire(struct kvist_extents *extents, uint32_t number, bool keep)
{
    __real_kvist_extents_retire(extents, number, keep);
    size_t count = drops.count;
    if (count < DROPS_MAX) {
        drops.took_ns[count] = kvist_clock_now_ns() - drops.start_ns;
        drops.count = count + 1;
    }
}

/* The tier carries a tenth of it. */
uint64_t __wrap_kvist_extent_filled_bytes(struct kvist_extents *extents,
                                          const struct kvist_extent *extent)
{
    return __real_kvist_extent_filled_bytes(extents, extent) * store.options.carry_percent /
           CARRY_PERCENT_TIER;
}

static _Atomic uint8_t *hits_of(const struct kvist_extent *extent, uint64_t offset)
{
    uint64_t place = kvist_extent_number(extent) * 0x9e3779b97f4a7c15ULL;
    place = (place ^ offset / KVIST_EXTENT_HIT_BYTES) * 0xbf58476d1ce4e5b9ULL;
    return &hit_counts[(place >> 32) & (HIT_PLACES - 1)];
}

void __wrap_kvist_extent_hit(struct kvist_extent *extent, uint64_t offset)
{
    _Atomic uint8_t *hits = hits_of(extent, offset);
    *hits += *hits < UINT8_MAX;
    __real_kvist_extent_hit(extent, offset);
}

bool __wrap_kvist_extent_was_hit(const struct kvist_extent *extent, uint64_t offset)
{
    bool hit = __real_kvist_extent_was_hit(extent, offset) &&
               *hits_of(extent, offset) >= store.options.carry_hits;
    wanted += hit;
    return hit;
}

/* --- Events --------------------------------------------------------------------------------- */

static void pool_loaded(void *ctx, const struct kvist_tier_pool *pool)
{
    (void)ctx;
    (void)pool;
}

static size_t blocks_loaded(void *ctx, const struct kvist_tier_block *blocks, size_t count)
{
    (void)ctx;
    (void)blocks;
    return count;
}

static void load_done(void *ctx, enum kvist_status status)
{
    (void)ctx;
    store.loaded = status == KVIST_OK;
}

static void blocks_dropped(void *ctx, const struct kvist_tier_block *blocks, size_t count)
{
    (void)ctx;
    for (size_t index = 0; index < count; index++) {
        turnover_gone(blocks[index].parent_tag);
    }
}

static void block_moved(void *ctx, const struct kvist_tier_block *block, uint32_t extent_before)
{
    (void)ctx;
    (void)block;
    (void)extent_before;
}

/* --- The store ------------------------------------------------------------------------------ */

enum kvist_status turnover_store_open(const struct turnover_options *options,
                                      struct kvist_error *err)
{
    struct kvist_tier_options made = {
        .path = options->path,
        .bytes_max = options->cap_bytes,
        .extent_bytes = options->extent_bytes,
        .io_threads = (uint32_t)options->thread_count,
        .depth_max = (uint32_t)(options->read_depth + options->write_depth),
        .events = {.pool_loaded = pool_loaded,
                   .blocks_loaded = blocks_loaded,
                   .load_done = load_done,
                   .blocks_dropped = blocks_dropped,
                   .block_moved = block_moved},
    };
    store.options = *options;
    store.pool = kvist_rig_pool(1, options->block_bytes, 1);
    enum kvist_status status = kvist_tier_open(&made, &store.tier, err);
    while (status == KVIST_OK && !store.loaded) {
        turnover_store_turn();
    }
    if (status == KVIST_OK) {
        status = kvist_tier_put_pool(store.tier, &store.pool, NULL, NULL);
    }
    return status;
}

void turnover_store_close(void)
{
    kvist_tier_close(&store.tier);
}

static void done(void *ctx, enum kvist_status status, const struct kvist_tier_block *block)
{
    (void)block;
    turnover_done(ctx, status);
}

/* The checksum is kvistd's to take before it writes: it counts here, too. */
void turnover_store_submit(struct turnover_flight *flight)
{
    uint64_t bytes = store.options.block_bytes;
    struct kvist_tier_block block = kvist_rig_block(&store.pool, flight->number, 0, bytes, NULL);
    enum kvist_status status = KVIST_OK;
    if (flight->write) {
        block.checksum = kvist_record_checksum(&block, flight->memory);
        status = kvist_tier_write(store.tier, &block, flight->memory, done, flight);
    } else {
        status = kvist_tier_read(
            store.tier, block.pool_id, block.key, 1, flight->memory, bytes, done, flight);
    }
    if (status != KVIST_OK) {
        turnover_done(flight, status);
    }
}

void turnover_store_turn(void)
{
    turnover_wait(kvist_tier_fd(store.tier));
    while (kvist_tier_turn(store.tier)) {
    }
}

void turnover_store_begin(void)
{
    kvist_tier_stats(store.tier, &store.before);
    drops.count = 0;
    wanted = 0;
}

void turnover_store_print(void)
{
    struct kvist_tier_stats stats;
    kvist_tier_stats(store.tier, &stats);
    uint64_t carried = stats.carried_blocks_total - store.before.carried_blocks_total;
    uint64_t writes = stats.writes_total - store.before.writes_total;
    size_t count = drops.count;
    (void)printf(" held=%.3f wanted=%.4f carried=%.4f drops=%zu drop_p50_ms=%.2f drop_max_ms=%.2f",
                 (double)stats.block_bytes / (double)store.options.cap_bytes,
                 writes > 0 ? (double)wanted / (double)writes : 0,
                 writes > 0 ? (double)carried / (double)writes : 0,
                 count,
                 (double)bench_quantile(drops.took_ns, count, 0.5) / 1e6,
                 (double)bench_quantile(drops.took_ns, count, 1) / 1e6);
}
