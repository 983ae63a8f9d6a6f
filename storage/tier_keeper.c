/*
 * The tier's housekeeping. Two keepers, each with one step of bounded work on a worker at a time:
 * the loader reads the index back at start; the other makes extents, empties old ones ahead of
 * need, removes blocks of earlier generations, measures the directory, and after a failure looks
 * from time to time whether the disk is well again.
 *
 * An extent is emptied in steps: carry over or drop a batch, tell the loop, and so on to its end;
 * then its file goes, or takes the next extent. Index first, file then: a crash between leaves a file
 * without entries, which the next start removes. Before a file is written over, the index is durable
 * without what was in it: else, after a power failure, entries could lead to other bytes (corrupt).
 */
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "storage/disk.h"
#include "storage/tier_internal.h"

#include <stdlib.h>
#include <string.h>

#define SAMPLE_US         1000000U
#define PROBE_US_MIN      1000000U  /* from a failure to a look at the disk */
#define PROBE_US_MAX      30000000U /* doubled up to this */
#define CARRY_SHARE       10U       /* at most a tenth of an extent is carried over */
#define EXTENTS_SPARE     64U       /* below KVIST_EXTENTS_MAX the oldest go */
#define INDEX_ENTRY_BYTES 512U /* of a live block: beyond, the index is mostly what was removed */

static void step_run(struct kvist_job *job);
static void step_done(struct kvist_job *job);

enum kvist_status kvist_tier_keeper_create(struct kvist_tier *tier,
                                           struct kvist_tier_keeper **keeper_out)
{
    struct kvist_tier_keeper *keeper = calloc(1, sizeof(*keeper));
    size_t pages_bytes = (size_t)KVIST_RECORD_PAGES * KVIST_RECORD_PAGE_BYTES;
    if (keeper == NULL || (keeper->pages = kvist_record_memory(pages_bytes)) == NULL) {
        free(keeper);
        return KVIST_NO_MEMORY;
    }
    keeper->tier = tier;
    keeper->job.run = step_run;
    keeper->job.done = step_done;
    *keeper_out = keeper;
    return KVIST_OK;
}

void kvist_tier_keeper_destroy(struct kvist_tier_keeper **keeper_inout)
{
    struct kvist_tier_keeper *keeper = *keeper_inout;
    if (keeper != NULL) {
        free(keeper->buffer);
        free(keeper->pages);
        free(keeper);
        *keeper_inout = NULL;
    }
}

static void step_submit(struct kvist_tier_keeper *keeper)
{
    keeper->status = KVIST_OK;
    keeper->end = false;
    keeper->corrupt = 0;
    keeper->count = 0;
    keeper->moved_count = 0;
    keeper->moved_bytes = 0;
    keeper->busy = kvist_workers_submit(keeper->tier->workers, &keeper->job) == KVIST_OK;
}

static void account_dropped(struct kvist_tier *tier, const struct kvist_tier_record *record)
{
    kvist_extents_account(
        tier->extents, record->block.extent, -1, -(int64_t)record->block.block_bytes);
}

/* Whether a record's generation is its pool's. Any thread. */
static bool is_current(struct kvist_tier *tier, const struct kvist_tier_block *block)
{
    const _Atomic uint64_t *generation = kvist_tier_pool_generation(tier, block->pool_id);
    return generation != NULL && atomic_load(generation) == block->pool_generation;
}

/* -- loading -------------------------------------------------------------------------------- */

void kvist_tier_load_start(struct kvist_tier *tier)
{
    tier->loading = true;
    kvist_tier_index_load_begin(tier->index, tier->extent_first);
    tier->loader->step = KVIST_TIER_STEP_LOAD;
    step_submit(tier->loader);
}

/* Files give the room at their end back; those without a live block go when loading is over. */
static void load_end_run(struct kvist_tier *tier)
{
    uint32_t *numbers = calloc(KVIST_EXTENTS_MAX, sizeof(numbers[0]));
    if (numbers == NULL) {
        return; /* they stay as they are, and go when room is needed */
    }
    size_t count =
        kvist_extents_list(tier->extents, tier->extent_first, numbers, KVIST_EXTENTS_MAX);
    for (size_t index = 0; index < count; index++) {
        kvist_extents_trim(tier->extents, numbers[index]);
    }
    free(numbers);
}

/* Count what a batch found; remove what leads nowhere or is of an earlier generation. */
static void load_run(struct kvist_tier_keeper *keeper)
{
    struct kvist_tier *tier = keeper->tier;
    struct kvist_tier_record *bad = keeper->walk.records;
    size_t bad_count = 0;
    bool removed[KVIST_TIER_BATCH];
    keeper->status = kvist_tier_index_load(tier->index, &keeper->walk, &keeper->err);
    keeper->end = keeper->status != KVIST_OK || keeper->walk.end;
    if (keeper->status != KVIST_OK) {
        return;
    }
    for (size_t index = 0; index < keeper->walk.count; index++) {
        struct kvist_tier_record record = keeper->walk.records[index];
        kvist_extents_account(
            tier->extents, record.block.extent, 1, (int64_t)record.block.block_bytes);
        if (is_current(tier, &record.block) && kvist_extents_holds(tier->extents, &record)) {
            keeper->blocks[keeper->count++] = record.block;
        } else {
            bad[bad_count++] = record; /* never ahead of index */
        }
    }
    enum kvist_status status =
        kvist_tier_index_remove(tier->index, bad, bad_count, removed, &keeper->err);
    for (size_t index = 0; status == KVIST_OK && index < bad_count; index++) {
        if (removed[index]) {
            account_dropped(tier, &bad[index]);
        }
    }
    if (keeper->end) {
        load_end_run(tier);
    }
}

static bool is_since(const struct kvist_tier *tier, const struct kvist_tier_block *block)
{
    uint64_t key_part = 0;
    uint64_t pool_part = 0;
    memcpy(&key_part, block->key, sizeof(key_part));
    memcpy(&pool_part, block->pool_id, sizeof(pool_part));
    for (size_t index = 0; index < tier->since_count; index++) {
        if (tier->since[index] == (key_part ^ pool_part)) {
            return true;
        }
    }
    return false;
}

static void report_pools(struct kvist_tier *tier)
{
    for (uint32_t index = 0; index < tier->pool_high; index++) {
        struct kvist_tier_known_pool *known = tier->pools[index];
        if (known != NULL && known->loaded && !known->forgotten) {
            struct kvist_tier_pool pool = known->pool;
            pool.generation = atomic_load(&known->generation);
            tier->events.pool_loaded(tier->ctx, &pool);
        }
    }
}

/* Tell of what a batch found, and of the rest in a later turn; then comes the next batch. */
static void load_done(struct kvist_tier_keeper *keeper)
{
    struct kvist_tier *tier = keeper->tier;
    size_t kept = 0;
    size_t taken = 0;
    if (!tier->pools_reported) {
        tier->pools_reported = true;
        report_pools(tier);
    }
    for (size_t index = 0; index < keeper->count && !tier->since_lost; index++) {
        const struct kvist_tier_block *block = &keeper->blocks[index];
        if (is_current(tier, block) && !is_since(tier, block)) {
            keeper->blocks[kept++] = *block;
        }
    }
    tier->since_count = 0; /* what waits has been compared with all of them */
    tier->since_lost = false;
    if (kept > 0) {
        taken = tier->events.blocks_loaded(tier->ctx, keeper->blocks, kept);
        KVIST_CHECK(taken <= kept);
    }
    keeper->count = kept - taken;
    memmove(keeper->blocks, keeper->blocks + taken, keeper->count * sizeof(keeper->blocks[0]));
    tier->load_waits = keeper->count > 0;
    if (tier->load_waits) {
        return;
    }
    if (!keeper->end) {
        step_submit(keeper);
        return;
    }
    tier->loading = false;
    tier->load_failed = keeper->status != KVIST_OK;
    if (tier->load_failed) {
        kvist_tier_text_set(tier->base_text, &keeper->err);
    }
    free(tier->since);
    tier->since = NULL;
    tier->since_capacity = 0;
    tier->events.load_done(tier->ctx, keeper->status);
}

/* -- emptying an extent --------------------------------------------------------------------- */

static bool buffer_fit(struct kvist_tier_keeper *keeper, uint64_t block_bytes)
{
    uint64_t bytes = kvist_record_bytes(block_bytes);
    if (keeper->buffer_bytes >= bytes) {
        return true;
    }
    free(keeper->buffer);
    keeper->buffer_bytes = 0;
    keeper->buffer = kvist_record_memory(bytes);
    if (keeper->buffer != NULL) {
        keeper->buffer_bytes = bytes;
    }
    return keeper->buffer != NULL;
}

/* Room for a carried record, from a new extent if what was free allows one. */
static enum kvist_status carry_reserve(struct kvist_tier_keeper *keeper,
                                       uint32_t tenant,
                                       uint64_t record_bytes,
                                       struct kvist_extent **extent_out,
                                       uint64_t *offset_out)
{
    struct kvist_extents *extents = keeper->tier->extents;
    enum kvist_status status =
        kvist_extents_reserve(extents, tenant, record_bytes, extent_out, offset_out);
    uint64_t file_bytes = kvist_extent_file_bytes(keeper->tier->extent_bytes, record_bytes);
    if (status == KVIST_OK || file_bytes > keeper->room_bytes) {
        return status;
    }
    uint32_t sealed = 0;
    status = kvist_extents_make(extents, tenant, file_bytes, &sealed, &keeper->err);
    if (status == KVIST_OK) {
        kvist_extents_trim(extents, sealed);
        keeper->room_bytes -= file_bytes;
        status = kvist_extents_reserve(extents, tenant, record_bytes, extent_out, offset_out);
    }
    return status;
}

/* Copy one record, of a known pool, to the tenant's open extent. False: it goes with its extent. */
static bool carry(struct kvist_tier_keeper *keeper,
                  const struct kvist_tier_record *record,
                  struct kvist_extent *victim)
{
    struct kvist_tier *tier = keeper->tier;
    uint64_t record_bytes = kvist_record_bytes(record->block.block_bytes);
    struct kvist_tier_record moved = *record;
    struct kvist_tier_record old;
    struct kvist_extent *target = NULL;
    bool replaced = false;
    if (record_bytes > keeper->carry_bytes || !buffer_fit(keeper, record->block.block_bytes)) {
        return false;
    }
    enum kvist_status status =
        kvist_extent_read(victim, record, keeper->buffer, keeper->pages, &keeper->err);
    if (status != KVIST_OK) {
        if (status == KVIST_CORRUPT) {
            keeper->corrupt++;
            memcpy(keeper->corrupt_pool, record->block.pool_id, KVIST_KEY_BYTES);
        }
        return false;
    }
    if (carry_reserve(keeper, kvist_extent_tenant(victim), record_bytes, &target, &moved.offset) !=
        KVIST_OK) {
        return false;
    }
    moved.block.extent = kvist_extent_number(target);
    status = kvist_extent_write(target, &moved, keeper->buffer, keeper->pages, &keeper->err);
    if (status == KVIST_OK) {
        status = kvist_tier_index_put(tier->index,
                                      &moved,
                                      kvist_tier_pool_generation(tier, moved.block.pool_id),
                                      record,
                                      &old,
                                      &replaced,
                                      &keeper->err);
    }
    if (status == KVIST_OK) {
        kvist_extents_account(
            tier->extents, moved.block.extent, 1, (int64_t)moved.block.block_bytes);
        account_dropped(tier, record);
        keeper->moved[keeper->moved_count++] = moved.block;
        keeper->moved_bytes += record_bytes;
        keeper->carry_bytes -= record_bytes;
    } else {
        kvist_extents_unreserve(tier->extents, target, moved.offset, record_bytes);
    }
    kvist_extents_release_reserved(tier->extents, &target);
    return status == KVIST_OK;
}

/* One batch of the victim's records: carried over, or removed from the index. */
static enum kvist_status reclaim_batch(struct kvist_tier_keeper *keeper,
                                       struct kvist_extent *victim)
{
    struct kvist_tier *tier = keeper->tier;
    bool removed[KVIST_TIER_BATCH];
    size_t going = 0;
    for (size_t index = 0; index < keeper->walk.count; index++) {
        const struct kvist_tier_record record = keeper->walk.records[index];
        if (!kvist_extent_was_hit(victim, record.offset) || !is_current(tier, &record.block) ||
            !carry(keeper, &record, victim)) {
            keeper->walk.records[going++] = record;
        }
    }
    enum kvist_status status =
        kvist_tier_index_remove(tier->index, keeper->walk.records, going, removed, &keeper->err);
    for (size_t index = 0; status == KVIST_OK && index < going; index++) {
        if (removed[index]) {
            account_dropped(tier, &keeper->walk.records[index]);
            if (is_current(tier, &keeper->walk.records[index].block)) {
                keeper->blocks[keeper->count++] = keeper->walk.records[index].block;
            }
        }
    }
    return status;
}

static void reclaim_run(struct kvist_tier_keeper *keeper)
{
    struct kvist_tier *tier = keeper->tier;
    struct kvist_extent *victim = NULL;
    keeper->status = kvist_extents_acquire(tier->extents, keeper->extent, &victim);
    if (keeper->status != KVIST_OK) {
        return;
    }
    if (!keeper->walk.started) {
        keeper->carry_bytes = kvist_extent_filled_bytes(tier->extents, victim) / CARRY_SHARE;
    }
    keeper->status = kvist_tier_index_ready(tier->index, KVIST_TIER_INDEX_LAST_BYTES, &keeper->err);
    if (keeper->status == KVIST_OK) {
        keeper->status =
            kvist_tier_index_walk_extent(tier->index, keeper->extent, &keeper->walk, &keeper->err);
    }
    if (keeper->status == KVIST_OK) {
        keeper->status = reclaim_batch(keeper, victim);
    }
    if (keeper->status == KVIST_OK && keeper->walk.end) {
        keeper->status = kvist_tier_index_forget_extent(tier->index, keeper->extent, &keeper->err);
    }
    kvist_extents_release(tier->extents, &victim);
    if (keeper->status != KVIST_OK) {
        kvist_extents_undrain(tier->extents, keeper->extent);
    } else if (keeper->walk.end) {
        bool keep = keeper->keep && !kvist_extents_has_spare(tier->extents) &&
                    kvist_tier_disk_sync(tier, NULL) == KVIST_OK;
        kvist_extents_retire(tier->extents, keeper->extent, keep);
        keeper->end = true;
    }
}

static void reclaim_done(struct kvist_tier_keeper *keeper)
{
    struct kvist_tier *tier = keeper->tier;
    for (size_t index = 0; index < keeper->moved_count; index++) {
        tier->events.block_moved(tier->ctx, &keeper->moved[index], keeper->extent);
    }
    if (keeper->count > 0) {
        tier->events.blocks_dropped(tier->ctx, keeper->blocks, keeper->count);
    }
    tier->records_since += keeper->moved_count;
    tier->counters.carried_blocks_total += keeper->moved_count;
    tier->counters.write_bytes_total += keeper->moved_bytes;
    tier->counters.dropped_blocks_total += keeper->count;
    if (keeper->corrupt > 0) {
        tier->counters.corrupt_total += keeper->corrupt;
        memcpy(tier->counters.corrupt_pool, keeper->corrupt_pool, KVIST_KEY_BYTES);
    }
    if (keeper->status != KVIST_OK || keeper->end) {
        keeper->extent = 0;
        free(keeper->buffer);
        keeper->buffer = NULL;
        keeper->buffer_bytes = 0;
    }
    if (keeper->status != KVIST_OK) {
        kvist_tier_text_set(tier->write_text, &keeper->err);
        kvist_tier_waiting_fail(tier, keeper->status);
    }
}

static bool reclaim_start(struct kvist_tier *tier, uint32_t number, bool keep)
{
    struct kvist_tier_keeper *keeper = tier->keeper;
    struct kvist_extents_totals totals;
    if (kvist_extents_drain(tier->extents, number) != KVIST_OK) {
        return false;
    }
    keeper->step = KVIST_TIER_STEP_RECLAIM;
    keeper->extent = number;
    keeper->keep = keep;
    kvist_extents_totals(tier->extents, &totals);
    int64_t room = kvist_tier_room(tier, &totals);
    keeper->room_bytes = room > 0 ? (uint64_t)room : 0;
    memset(&keeper->walk, 0, sizeof(keeper->walk));
    step_submit(keeper);
    return true;
}

/* -- clearing ------------------------------------------------------------------------------- */

/* One batch of a pool's records: those of earlier generations go. */
static void purge_run(struct kvist_tier_keeper *keeper)
{
    struct kvist_tier *tier = keeper->tier;
    bool removed[KVIST_TIER_BATCH];
    size_t going = 0;
    keeper->status = kvist_tier_index_walk_pool(
        tier->index, keeper->pool->pool.pool_id, &keeper->walk, &keeper->err);
    if (keeper->status != KVIST_OK) {
        keeper->end = true;
        return;
    }
    for (size_t index = 0; index < keeper->walk.count; index++) {
        if (!is_current(tier, &keeper->walk.records[index].block)) {
            keeper->walk.records[going++] = keeper->walk.records[index];
        }
    }
    keeper->status =
        kvist_tier_index_remove(tier->index, keeper->walk.records, going, removed, &keeper->err);
    for (size_t index = 0; keeper->status == KVIST_OK && index < going; index++) {
        if (removed[index]) {
            account_dropped(tier, &keeper->walk.records[index]);
            keeper->count++;
        }
    }
    if (keeper->status == KVIST_OK && keeper->walk.end) {
        keeper->status =
            kvist_tier_pool_erase(tier, keeper->pool, &keeper->pool_gone, &keeper->err);
    }
    keeper->end = keeper->status != KVIST_OK || keeper->walk.end;
}

static void purge_done(struct kvist_tier_keeper *keeper)
{
    keeper->tier->counters.dropped_blocks_total += keeper->count;
    if (!keeper->end && !keeper->tier->closing) {
        step_submit(keeper);
    } else {
        if (keeper->pool_gone) {
            kvist_tier_pool_remove(keeper->tier, keeper->pool);
        }
        keeper->pool = NULL; /* what a failure left is never served, and goes at the next start */
    }
}

static bool purge_start(struct kvist_tier *tier)
{
    for (uint32_t index = 0; index < tier->pool_high; index++) {
        struct kvist_tier_known_pool *known = tier->pools[index];
        /* Not before a clear is durable: until then a crash brings all of it back, or none. */
        if (known != NULL && known->purge && known->puts_in_flight == 0 &&
            (!known->unsaved || known->forgotten)) {
            known->purge = false;
            tier->keeper->step = KVIST_TIER_STEP_PURGE;
            tier->keeper->pool = known;
            tier->keeper->pool_gone = false;
            memset(&tier->keeper->walk, 0, sizeof(tier->keeper->walk));
            step_submit(tier->keeper);
            return true;
        }
    }
    return false;
}

/* -- after a failure ------------------------------------------------------------------------- */

/* Whether an extent could be made, written to, and named in the index. */
static void probe_run(struct kvist_tier_keeper *keeper)
{
    const struct kvist_tier *tier = keeper->tier;
    uint64_t free_bytes = tier->extent_bytes + KVIST_EXTENT_SPARE_BYTES;
    keeper->status = kvist_disk_probe(tier->path, free_bytes, &keeper->err);
    if (keeper->status == KVIST_OK) {
        keeper->status =
            kvist_tier_index_ready(tier->index, KVIST_TIER_INDEX_FREE_BYTES, &keeper->err);
    }
}

static void probe_done(struct kvist_tier_keeper *keeper)
{
    struct kvist_tier *tier = keeper->tier;
    tier->probe_after_us = 0;
    if (keeper->status == KVIST_OK) {
        tier->write_text[0] = '\0';
        tier->read_text[0] = '\0';
    } else {
        kvist_tier_text_set(tier->write_text, &keeper->err);
    }
}

static bool probe_start(struct kvist_tier *tier)
{
    uint64_t now_us = kvist_clock_now_us();
    if (tier->write_text[0] == '\0' && tier->read_text[0] == '\0') {
        tier->probe_after_us = 0;
        return false;
    }
    if (tier->probe_after_us == 0) {
        uint64_t wait_us = 2 * tier->probe_wait_us;
        wait_us = wait_us < PROBE_US_MIN ? PROBE_US_MIN : wait_us;
        tier->probe_wait_us = wait_us < PROBE_US_MAX ? wait_us : PROBE_US_MAX;
        tier->probe_after_us = now_us + tier->probe_wait_us;
    }
    if (now_us < tier->probe_after_us) {
        return false;
    }
    tier->keeper->step = KVIST_TIER_STEP_PROBE;
    step_submit(tier->keeper);
    return true;
}

static void make_run(struct kvist_tier_keeper *keeper)
{
    const struct kvist_tier *tier = keeper->tier;
    uint64_t free_bytes = keeper->file_bytes + KVIST_EXTENT_SPARE_BYTES;
    keeper->status = kvist_extents_make(
        tier->extents, keeper->tenant, keeper->file_bytes, &keeper->sealed, &keeper->err);
    if (keeper->status == KVIST_NO_SPACE) {
        enum kvist_status said = kvist_disk_check(tier->path, free_bytes, &keeper->err);
        (void)said; /* with a better sentence, when it is the disk */
    }
}

/* -- steps ---------------------------------------------------------------------------------- */

static void step_run(struct kvist_job *job)
{
    struct kvist_tier_keeper *keeper = (struct kvist_tier_keeper *)job;
    struct kvist_tier *tier = keeper->tier;
    switch (keeper->step) {
    case KVIST_TIER_STEP_LOAD:
        load_run(keeper);
        break;
    case KVIST_TIER_STEP_MAKE:
        make_run(keeper);
        break;
    case KVIST_TIER_STEP_TRIM:
        kvist_extents_trim(tier->extents, keeper->sealed);
        break;
    case KVIST_TIER_STEP_RECLAIM:
        reclaim_run(keeper);
        break;
    case KVIST_TIER_STEP_PURGE:
        purge_run(keeper);
        break;
    case KVIST_TIER_STEP_SAMPLE:
        keeper->status =
            kvist_tier_disk_sample(tier, &keeper->other_bytes, &keeper->index_bytes, &keeper->err);
        break;
    case KVIST_TIER_STEP_COMPACT:
        kvist_tier_index_compact(tier->index);
        break;
    case KVIST_TIER_STEP_PROBE:
        probe_run(keeper);
        break;
    case KVIST_TIER_STEP_DROP:
        kvist_extents_drop_spare(tier->extents);
        break;
    }
}

/* Writes that wait go first: to trim is to wait for those in the extent before. */
static void make_done(struct kvist_tier_keeper *keeper)
{
    struct kvist_tier *tier = keeper->tier;
    if (keeper->status == KVIST_OK) {
        kvist_tier_waiting_resubmit(tier);
        keeper->step = KVIST_TIER_STEP_TRIM;
        step_submit(keeper);
        return;
    }
    kvist_tier_text_set(tier->write_text, &keeper->err);
    kvist_tier_waiting_fail(tier, keeper->status == KVIST_NO_SPACE ? KVIST_NO_SPACE : KVIST_SYSTEM);
}

static void sample_done(struct kvist_tier_keeper *keeper)
{
    struct kvist_tier *tier = keeper->tier;
    if (keeper->status == KVIST_OK) {
        tier->other_bytes = keeper->other_bytes;
        tier->index_bytes = keeper->index_bytes;
        tier->disk_text[0] = '\0';
    } else {
        kvist_tier_text_set(tier->disk_text, &keeper->err);
    }
}

static void step_done(struct kvist_job *job)
{
    struct kvist_tier_keeper *keeper = (struct kvist_tier_keeper *)job;
    struct kvist_tier *tier = keeper->tier;
    keeper->busy = false;
    if (keeper->step == KVIST_TIER_STEP_LOAD && tier->closing) {
        return;
    }
    switch (keeper->step) {
    case KVIST_TIER_STEP_LOAD:
        load_done(keeper);
        break;
    case KVIST_TIER_STEP_MAKE:
        if (!tier->closing) {
            make_done(keeper);
        }
        break;
    case KVIST_TIER_STEP_RECLAIM:
        reclaim_done(keeper);
        break;
    case KVIST_TIER_STEP_PURGE:
        purge_done(keeper);
        break;
    case KVIST_TIER_STEP_SAMPLE:
        sample_done(keeper);
        break;
    case KVIST_TIER_STEP_TRIM:
    case KVIST_TIER_STEP_COMPACT:
    case KVIST_TIER_STEP_DROP:
        break;
    case KVIST_TIER_STEP_PROBE:
        probe_done(keeper);
        break;
    }
}

/* -- what is due ---------------------------------------------------------------------------- */

/* Empty an extent, for its file or for its room. False: none can go. */
static bool reclaim(struct kvist_tier *tier, uint32_t tenant, uint64_t bytes, bool keep)
{
    uint32_t number = 0;
    return kvist_extents_victim(tier->extents, tenant, bytes, false, &number) == KVIST_OK &&
           reclaim_start(tier, number, keep);
}

/* Remove an extent without blocks. False: there is none. */
static bool reclaim_empty(struct kvist_tier *tier)
{
    const uint32_t nobody = KVIST_EXTENT_TENANT_NONE;
    uint32_t number = 0;
    return kvist_extents_victim(tier->extents, nobody, 0, true, &number) == KVIST_OK &&
           reclaim_start(tier, number, false);
}

static void spare_drop_start(struct kvist_tier *tier)
{
    tier->keeper->step = KVIST_TIER_STEP_DROP;
    step_submit(tier->keeper);
}

/* Writes that wait leave room for an extent that takes what is carried over: else, while they come
 * faster than extents are emptied, nothing would be. False: there is, or nothing can go for it. */
static bool carry_room_first(struct kvist_tier *tier, int64_t room, uint64_t more_bytes)
{
    uint64_t wanted = more_bytes + tier->extent_bytes;
    return !tier->loading && room < (int64_t)wanted &&
           reclaim(tier, tier->waiting->pool->tenant, more_bytes, true);
}

/* Serve the first waiting write: an extent for its tenant, or room for one. */
static void
keep_waiting(struct kvist_tier *tier, int64_t room, const struct kvist_extents_totals *totals)
{
    const struct kvist_tier_request *request = tier->waiting;
    struct kvist_tier_keeper *keeper = tier->keeper;
    uint64_t record_bytes = kvist_record_bytes(request->record.block.block_bytes);
    uint64_t file_bytes = kvist_extent_file_bytes(tier->extent_bytes, record_bytes);
    if (file_bytes > tier->file_bytes_max) {
        tier->file_bytes_max = file_bytes;
    }
    /* Of its quota a tenant keeps room for an extent that takes what is carried over. */
    uint32_t tenant = request->pool->tenant;
    if (kvist_extents_fits(tier->extents, tenant, record_bytes)) {
        kvist_tier_waiting_resubmit(tier); /* carrying over has made an extent meanwhile */
        return;
    }
    uint64_t quota = 0;
    uint64_t own = kvist_extents_tenant_bytes(tier->extents, tenant, &quota);
    uint64_t spare_bytes = totals->spare_tenant == tenant ? totals->spare_bytes : 0;
    uint64_t more_bytes = spare_bytes < file_bytes ? file_bytes - spare_bytes : 0;
    bool over = quota != 0 && own + file_bytes + more_bytes > quota;
    int64_t to_come = room + (int64_t)totals->retired_bytes;
    if (!over && totals->spare_bytes > spare_bytes &&
        to_come < (int64_t)(more_bytes + tier->extent_bytes)) {
        spare_drop_start(tier); /* another tenant's goes before anybody's blocks */
        return;
    }
    if (room >= (int64_t)more_bytes && !over) {
        if (carry_room_first(tier, to_come, more_bytes)) {
            return;
        }
        keeper->step = KVIST_TIER_STEP_MAKE;
        keeper->tenant = tenant;
        keeper->file_bytes = file_bytes;
        step_submit(keeper);
        return;
    }
    if (tier->loading || (!over && to_come >= (int64_t)more_bytes)) {
        return; /* room comes when the index is read, or when reads of removed files end */
    }
    if (!reclaim(tier, tenant, over ? 2 * file_bytes : file_bytes, true) &&
        kvist_workers_pending(tier->workers) == 0) {
        struct kvist_error err;
        (void)kvist_error_set(&err, KVIST_NO_SPACE, 0, "tier", "no extent can be given up");
        kvist_tier_text_set(tier->write_text, &err);
        kvist_tier_waiting_fail(tier, KVIST_NO_SPACE);
    }
}

/* The index is much larger than its live entries: rewrite it. */
static bool compact_due(const struct kvist_tier *tier, const struct kvist_extents_totals *totals)
{
    return tier->index_bytes > tier->bytes_max / 16 &&
           tier->index_bytes > 8 * tier->memtable_bytes + totals->blocks * INDEX_ENTRY_BYTES;
}

static bool sample_start(struct kvist_tier *tier)
{
    uint64_t now_us = kvist_clock_now_us();
    if (now_us - tier->sampled_us < SAMPLE_US) {
        return false;
    }
    tier->sampled_us = now_us;
    tier->records_since = 0;
    tier->keeper->step = KVIST_TIER_STEP_SAMPLE;
    step_submit(tier->keeper);
    return true;
}

/* Ahead of need: room for the next extent, which the spare may give, and for one that takes what is
 * carried over. And a tenant's quota, which may have been lowered. False: nothing is due. */
static bool
keep_room(struct kvist_tier *tier, int64_t room, const struct kvist_extents_totals *totals)
{
    const uint32_t nobody = KVIST_EXTENT_TENANT_NONE;
    int64_t wanted = 2 * (int64_t)tier->file_bytes_max - (int64_t)totals->retired_bytes;
    bool low = room + (int64_t)totals->spare_bytes < wanted ||
               totals->extents > KVIST_EXTENTS_MAX - EXTENTS_SPARE;
    if (low && reclaim(tier, nobody, 0, true)) {
        return true;
    }
    uint32_t over = kvist_extents_over(tier->extents);
    if (totals->spare_bytes > 0 && (room >= wanted || over == totals->spare_tenant)) {
        spare_drop_start(tier);
        return true;
    }
    return over != nobody && reclaim(tier, over, 0, false);
}

void kvist_tier_keep(struct kvist_tier *tier)
{
    struct kvist_tier_keeper *keeper = tier->keeper;
    struct kvist_extents_totals totals;
    if (tier->load_waits && !tier->closing) {
        load_done(tier->loader);
    }
    if (keeper->busy || tier->closing) {
        return;
    }
    if (keeper->extent != 0) {
        step_submit(keeper); /* the next batch of the extent that is being emptied */
        return;
    }
    kvist_extents_totals(tier->extents, &totals);
    int64_t room = kvist_tier_room(tier, &totals);
    if (tier->waiting != NULL) {
        keep_waiting(tier, room, &totals);
        if (keeper->busy) {
            return;
        }
    }
    if (probe_start(tier)) {
        return;
    }
    if (tier->loading) {
        (void)sample_start(tier);
        return;
    }
    if (keep_room(tier, room, &totals) || (!tier->load_failed && reclaim_empty(tier))) {
        return;
    }
    if (purge_start(tier)) {
        return;
    }
    if (compact_due(tier, &totals)) {
        keeper->step = KVIST_TIER_STEP_COMPACT;
        step_submit(keeper);
        tier->index_bytes = 0; /* until it is measured again */
        return;
    }
    (void)sample_start(tier);
}
