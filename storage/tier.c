/*
 * The tier's front: opening, pools, and the requests for blocks. What a request does runs on a
 * worker (*_run) and ends on the loop (*_done); what it needs of extents and index locks itself.
 */
#include "proto/base/check.h"
#include "storage/tier_internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BYTES_MIN          (64ULL << 20)
#define EXTENT_BYTES_MIN   (4ULL << 20)
#define EXTENT_BYTES_MAX   (1ULL << 30)
#define EXTENTS_WANTED     64U   /* of the default size */
#define EXTENTS_WANTED_MAX 1024U /* of the smallest size: each has a descriptor */
#define MEMTABLE_BYTES_MIN (512ULL << 10)
#define MEMTABLE_BYTES_MAX (8ULL << 20)
#define MEMTABLE_SHARE     128U
#define IO_THREADS_DEFAULT 8U
#define DEPTH_DEFAULT      64U
#define DEPTH_LIMIT        4096U
#define CONTROL_REQUESTS   16U /* put_pool and sync go on when blocks are at their limit */
#define TURN_JOBS_MAX      64U
#define READ_TRIES         3U /* a block may be carried to another extent while it is looked for */

static uint64_t clamp(uint64_t value, uint64_t low, uint64_t high)
{
    if (value < low) {
        return low;
    }
    return value > high ? high : value;
}

void kvist_tier_text_set(char text[KVIST_ERROR_TEXT_BYTES], const struct kvist_error *err)
{
    (void)snprintf(text, KVIST_ERROR_TEXT_BYTES, "%s", err->text);
}

/* -- requests ------------------------------------------------------------------------------- */

struct kvist_tier_request *kvist_tier_request_take(struct kvist_tier *tier,
                                                   enum kvist_tier_request_kind kind,
                                                   kvist_tier_done_fn *done,
                                                   void *ctx)
{
    bool control = kind == KVIST_TIER_PUT_POOL || kind == KVIST_TIER_SYNC;
    struct kvist_tier_request *request = tier->free;
    if (request == NULL || tier->closing || (!control && tier->in_flight >= tier->depth_max)) {
        return NULL;
    }
    tier->free = request->next;
    tier->in_flight++;
    uint8_t *pages = request->pages;
    memset(request, 0, sizeof(*request));
    request->tier = tier;
    request->pages = pages;
    request->kind = kind;
    request->done = done;
    request->ctx = ctx;
    return request;
}

/* End a request: it is free again before its owner hears, who may ask for the next thing. */
void kvist_tier_request_finish(struct kvist_tier_request *request)
{
    struct kvist_tier *tier = request->tier;
    struct kvist_tier_block block = request->record.block;
    kvist_tier_done_fn *done = request->done;
    void *ctx = request->ctx;
    enum kvist_status status = request->status;
    request->next = tier->free;
    tier->free = request;
    tier->in_flight--;
    if (done != NULL) {
        done(ctx, status, &block);
    }
}

/* The queue has a place for every request, so this only fails when the tier is being closed. */
static void request_submit(struct kvist_tier_request *request)
{
    if (kvist_workers_submit(request->tier->workers, &request->job) != KVIST_OK) {
        request->status = KVIST_CLOSED;
        kvist_tier_request_finish(request);
    }
}

static void waiting_push(struct kvist_tier_request *request)
{
    struct kvist_tier *tier = request->tier;
    request->next = NULL;
    *tier->waiting_last = request;
    tier->waiting_last = &request->next;
}

static struct kvist_tier_request *waiting_take_all(struct kvist_tier *tier)
{
    struct kvist_tier_request *list = tier->waiting;
    tier->waiting = NULL;
    tier->waiting_last = &tier->waiting;
    return list;
}

void kvist_tier_waiting_resubmit(struct kvist_tier *tier)
{
    struct kvist_tier_request *list = waiting_take_all(tier);
    while (list != NULL) {
        struct kvist_tier_request *request = list;
        list = request->next;
        request->needs_room = false;
        request_submit(request);
    }
}

void kvist_tier_waiting_fail(struct kvist_tier *tier, enum kvist_status status)
{
    struct kvist_tier_request *list = waiting_take_all(tier);
    while (list != NULL) {
        struct kvist_tier_request *request = list;
        list = request->next;
        request->status = status;
        request->record.block.extent = 0;
        tier->counters.write_errors_total++;
        kvist_tier_request_finish(request);
    }
}

/* Remember for the loader that this block's entry is newer than the batch it is about to report. */
static void since_add(struct kvist_tier *tier, const struct kvist_tier_block *block)
{
    uint64_t key_part = 0;
    uint64_t pool_part = 0;
    if (!tier->loading) {
        return;
    }
    if (tier->since_count == tier->since_capacity) {
        size_t capacity = tier->since_capacity == 0 ? 256 : 2 * tier->since_capacity;
        uint64_t *grown = realloc(tier->since, capacity * sizeof(grown[0]));
        if (grown == NULL) {
            tier->since_lost = true; /* the batch goes unreported: misses, nothing worse */
            return;
        }
        tier->since = grown;
        tier->since_capacity = capacity;
    }
    memcpy(&key_part, block->key, sizeof(key_part));
    memcpy(&pool_part, block->pool_id, sizeof(pool_part));
    tier->since[tier->since_count++] = key_part ^ pool_part;
}

/* -- writing -------------------------------------------------------------------------------- */

/* Whether the very same block is on disk, in an extent that stays. */
static bool already_there(struct kvist_tier *tier, struct kvist_tier_request *request)
{
    struct kvist_tier_record old;
    struct kvist_extent *extent = NULL;
    const struct kvist_tier_block *block = &request->record.block;
    if (kvist_tier_index_get(tier->index, block->pool_id, block->key, &old, NULL) != KVIST_OK ||
        old.block.pool_generation != block->pool_generation ||
        old.block.block_bytes != block->block_bytes || old.block.checksum != block->checksum ||
        kvist_extents_acquire(tier->extents, old.block.extent, &extent) != KVIST_OK) {
        return false;
    }
    bool stays = !kvist_extent_draining(tier->extents, extent);
    kvist_extents_release(tier->extents, &extent);
    if (stays) {
        request->record = old;
    }
    return stays;
}

static void write_account(struct kvist_tier *tier,
                          const struct kvist_tier_record *record,
                          const struct kvist_tier_record *old)
{
    kvist_extents_account(
        tier->extents, record->block.extent, 1, (int64_t)record->block.block_bytes);
    if (old != NULL) {
        kvist_extents_account(
            tier->extents, old->block.extent, -1, -(int64_t)old->block.block_bytes);
    }
}

static enum kvist_status write_record(struct kvist_tier *tier, struct kvist_tier_request *request)
{
    struct kvist_extent *extent = NULL;
    struct kvist_tier_record record = request->record;
    struct kvist_tier_record old;
    bool replaced = false;
    uint64_t record_bytes = kvist_record_bytes(record.block.block_bytes);
    enum kvist_status status = kvist_extents_reserve(
        tier->extents, request->pool->tenant, record_bytes, &extent, &record.offset);
    if (status != KVIST_OK) {
        request->needs_room = true;
        return status;
    }
    record.block.extent = kvist_extent_number(extent);
    status = kvist_extent_write(extent, &record, request->source, request->pages, &request->err);
    if (status == KVIST_OK) {
        request->stored = true;
        status = kvist_tier_index_put(
            tier->index, &record, &request->pool->generation, NULL, &old, &replaced, &request->err);
    }
    if (status == KVIST_OK) {
        write_account(tier, &record, replaced ? &old : NULL);
        request->record = record;
    } else {
        kvist_extents_unreserve(tier->extents, extent, record.offset, record_bytes);
    }
    kvist_extents_release_reserved(tier->extents, &extent);
    return status;
}

static void write_run(struct kvist_job *job)
{
    struct kvist_tier_request *request = (struct kvist_tier_request *)job;
    struct kvist_tier *tier = request->tier;
    const struct kvist_tier_block *block = &request->record.block;
    if (!request->verified && kvist_record_checksum(block, request->source) != block->checksum) {
        request->status = kvist_error_set(
            &request->err, KVIST_CORRUPT, 0, "tier", "a block changed before it was written");
        return;
    }
    request->verified = true;
    request->status =
        kvist_tier_index_ready(tier->index, KVIST_TIER_INDEX_FREE_BYTES, &request->err);
    if (request->status == KVIST_OK && !already_there(tier, request)) {
        request->status = write_record(tier, request);
    }
}

static void write_done(struct kvist_job *job)
{
    struct kvist_tier_request *request = (struct kvist_tier_request *)job;
    struct kvist_tier *tier = request->tier;
    if (request->needs_room) {
        waiting_push(request); /* closing: failed by kvist_tier_close() */
        return;
    }
    if (request->status == KVIST_OK) {
        tier->counters.writes_total++;
        tier->write_text[0] = '\0';
        tier->probe_wait_us = 0;
        since_add(tier, &request->record.block);
    } else if (request->status != KVIST_STALE && request->status != KVIST_CORRUPT) {
        tier->counters.write_errors_total++;
        if (request->status != KVIST_UNAVAILABLE || tier->write_text[0] == '\0') {
            kvist_tier_text_set(tier->write_text, &request->err); /* else the cause stays */
        }
    }
    if (request->stored) {
        tier->records_since++;
        tier->counters.write_bytes_total += kvist_record_bytes(request->record.block.block_bytes);
    }
    kvist_tier_request_finish(request);
}

enum kvist_status kvist_tier_write(struct kvist_tier *tier,
                                   const struct kvist_tier_block *block,
                                   const void *source,
                                   kvist_tier_done_fn *done,
                                   void *ctx)
{
    KVIST_CHECK(tier->magic == KVIST_TIER_MAGIC);
    struct kvist_tier_known_pool *pool = kvist_tier_pool_find(tier, block->pool_id);
    if (pool == NULL || block->block_bytes == 0 || block->block_bytes > pool->pool.slot_bytes ||
        (uintptr_t)source % KVIST_RECORD_PAGE_BYTES != 0) {
        return KVIST_INVALID;
    }
    if (block->pool_generation != atomic_load(&pool->generation)) {
        return KVIST_STALE;
    }
    if (kvist_record_bytes(block->block_bytes) > kvist_tier_record_bytes_max(tier)) {
        return KVIST_NO_SPACE;
    }
    kvist_tier_pool_save(tier, pool);
    struct kvist_tier_request *request = kvist_tier_request_take(tier, KVIST_TIER_WRITE, done, ctx);
    if (request == NULL) {
        return KVIST_BUSY;
    }
    request->pool = pool;
    request->record.block = *block;
    request->record.block.extent = 0;
    request->source = source;
    request->job.run = write_run;
    request->job.done = write_done;
    request_submit(request);
    return KVIST_OK;
}

/* -- reading -------------------------------------------------------------------------------- */

/* Drop an entry that leads nowhere, or to a broken record. */
static bool entry_drop(struct kvist_tier *tier, const struct kvist_tier_record *record)
{
    bool removed = false;
    enum kvist_status status = kvist_tier_index_remove(tier->index, record, 1, &removed, NULL);
    if (status == KVIST_OK && removed) {
        kvist_extents_account(
            tier->extents, record->block.extent, -1, -(int64_t)record->block.block_bytes);
    }
    return status == KVIST_OK;
}

static enum kvist_status read_record(struct kvist_tier *tier,
                                     struct kvist_tier_request *request,
                                     const struct kvist_tier_record *record,
                                     struct kvist_extent *extent)
{
    enum kvist_status status =
        kvist_extent_read(extent, record, request->target, request->pages, &request->err);
    if (status == KVIST_OK) {
        kvist_extent_hit(extent, record->offset);
        request->record = *record;
    } else if (status == KVIST_CORRUPT) {
        request->record = *record;
        request->dropped = entry_drop(tier, record);
    }
    return status;
}

static void read_run(struct kvist_job *job)
{
    struct kvist_tier_request *request = (struct kvist_tier_request *)job;
    struct kvist_tier *tier = request->tier;
    const struct kvist_tier_block *asked = &request->record.block;
    struct kvist_tier_record record = {.offset = 0};
    for (uint32_t attempt = 0; attempt < READ_TRIES; attempt++) {
        struct kvist_extent *extent = NULL;
        request->status =
            kvist_tier_index_get(tier->index, asked->pool_id, asked->key, &record, &request->err);
        if (request->status == KVIST_UNAVAILABLE &&
            kvist_tier_index_ready(tier->index, KVIST_TIER_INDEX_FREE_BYTES, &request->err) ==
                KVIST_OK) {
            continue;
        }
        if (request->status != KVIST_OK) {
            return;
        }
        request->status = KVIST_NOT_FOUND;
        if (record.block.pool_generation != asked->pool_generation) {
            return;
        }
        if (record.block.block_bytes > request->target_bytes) {
            request->status = kvist_error_set(
                &request->err, KVIST_INVALID, 0, "tier", "a block is larger than its slot");
            return;
        }
        if (kvist_extents_acquire(tier->extents, record.block.extent, &extent) == KVIST_OK) {
            request->status = read_record(tier, request, &record, extent);
            kvist_extents_release(tier->extents, &extent);
            return;
        }
    }
    if (request->status == KVIST_NOT_FOUND) {
        (void)entry_drop(tier, &record);
    }
}

static void read_done(struct kvist_job *job)
{
    struct kvist_tier_request *request = (struct kvist_tier_request *)job;
    struct kvist_tier *tier = request->tier;
    if (request->status == KVIST_OK) {
        tier->counters.reads_total++;
        tier->counters.read_bytes_total += request->record.block.block_bytes;
        tier->read_text[0] = '\0';
    } else if (request->status == KVIST_CORRUPT) {
        tier->counters.corrupt_total++;
        memcpy(tier->counters.corrupt_pool, request->record.block.pool_id, KVIST_KEY_BYTES);
    } else if (request->status != KVIST_NOT_FOUND) {
        tier->counters.read_errors_total++;
        kvist_tier_text_set(tier->read_text, &request->err);
    }
    if (request->dropped) {
        since_add(tier, &request->record.block);
        tier->counters.dropped_blocks_total++;
        tier->events.blocks_dropped(tier->ctx, &request->record.block, 1);
    }
    kvist_tier_request_finish(request);
}

/* NOLINTNEXTLINE(readability-function-size): the parameters are the contract of tier.h */
enum kvist_status kvist_tier_read(struct kvist_tier *tier,
                                  const uint8_t pool_id[KVIST_KEY_BYTES],
                                  const uint8_t key[KVIST_KEY_BYTES],
                                  uint64_t pool_generation,
                                  void *target,
                                  uint64_t target_bytes,
                                  kvist_tier_done_fn *done,
                                  void *ctx)
{
    KVIST_CHECK(tier->magic == KVIST_TIER_MAGIC);
    if ((uintptr_t)target % KVIST_RECORD_PAGE_BYTES != 0) {
        return KVIST_INVALID;
    }
    struct kvist_tier_request *request = kvist_tier_request_take(tier, KVIST_TIER_READ, done, ctx);
    if (request == NULL) {
        return KVIST_BUSY;
    }
    memcpy(request->record.block.pool_id, pool_id, KVIST_KEY_BYTES);
    memcpy(request->record.block.key, key, KVIST_KEY_BYTES);
    request->record.block.pool_generation = pool_generation;
    request->target = target;
    request->target_bytes = target_bytes;
    request->job.run = read_run;
    request->job.done = read_done;
    request_submit(request);
    return KVIST_OK;
}

/* -- sync ---------------------------------------------------------------------------------------
 */

static void sync_run(struct kvist_job *job)
{
    struct kvist_tier_request *request = (struct kvist_tier_request *)job;
    request->status = kvist_tier_disk_sync(request->tier, &request->err);
}

static void sync_done(struct kvist_job *job)
{
    struct kvist_tier_request *request = (struct kvist_tier_request *)job;
    if (request->status != KVIST_OK) {
        request->tier->counters.write_errors_total++;
        kvist_tier_text_set(request->tier->write_text, &request->err);
    }
    kvist_tier_request_finish(request);
}

enum kvist_status kvist_tier_sync(struct kvist_tier *tier, kvist_tier_done_fn *done, void *ctx)
{
    KVIST_CHECK(tier->magic == KVIST_TIER_MAGIC);
    struct kvist_tier_request *request = kvist_tier_request_take(tier, KVIST_TIER_SYNC, done, ctx);
    if (request == NULL) {
        return KVIST_BUSY;
    }
    request->job.run = sync_run;
    request->job.done = sync_done;
    request_submit(request);
    return KVIST_OK;
}

/* -- open, close, turn ---------------------------------------------------------------------- */

static enum kvist_status requests_make(struct kvist_tier *tier, struct kvist_error *err)
{
    uint32_t count = tier->depth_max + CONTROL_REQUESTS;
    size_t pages_bytes = (size_t)KVIST_RECORD_PAGES * KVIST_RECORD_PAGE_BYTES;
    tier->requests = calloc(count, sizeof(tier->requests[0]));
    tier->request_pages = kvist_record_memory(count * pages_bytes);
    if (tier->requests == NULL || tier->request_pages == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "tier", "no memory for %u requests", count);
    }
    for (uint32_t index = 0; index < count; index++) {
        tier->requests[index].pages = tier->request_pages + index * pages_bytes;
        tier->requests[index].next = tier->free;
        tier->free = &tier->requests[index];
    }
    if (kvist_tier_keeper_create(tier, &tier->loader) != KVIST_OK ||
        kvist_tier_keeper_create(tier, &tier->keeper) != KVIST_OK) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "tier", "no memory for housekeeping");
    }
    return KVIST_OK;
}

static void note_index(struct kvist_tier *tier, const char *state)
{
    tier->counters.corrupt_total++;
    (void)snprintf(tier->counters.notice,
                   sizeof(tier->counters.notice),
                   "the index in %.100s was %s: its blocks are dropped, the tier starts empty",
                   tier->path,
                   state);
}

static enum kvist_status open_index(struct kvist_tier *tier, struct kvist_error *err)
{
    char path[4096];
    bool damaged = false;
    int length = snprintf(path, sizeof(path), "%s/index", tier->path);
    if (length < 0 || (size_t)length >= sizeof(path) - 16) {
        return kvist_error_set(err, KVIST_INVALID, 0, "tier", "the tier's path is too long");
    }
    enum kvist_status status =
        kvist_tier_index_open(path, tier->memtable_bytes, &tier->index, &damaged, err);
    if (status == KVIST_OK && damaged) {
        note_index(tier, "damaged");
    }
    return status;
}

static enum kvist_status open_extents(struct kvist_tier *tier, struct kvist_error *err)
{
    char path[4096];
    struct kvist_error why = KVIST_ERROR_INIT;
    uint32_t extent_last = 0;
    (void)snprintf(path, sizeof(path), "%s/extents", tier->path);
    tier->counters.direct = kvist_record_probe_direct(tier->directory_fd, &why) == KVIST_OK;
    if (!tier->counters.direct && tier->base_text[0] == '\0') {
        (void)snprintf(tier->base_text, sizeof(tier->base_text), "slow: %.200s", why.text);
    }
    enum kvist_status status = kvist_tier_index_extent_last(tier->index, &extent_last, err);
    if (status == KVIST_OK) {
        status = kvist_extents_open(path, tier->counters.direct, extent_last, &tier->extents, err);
    }
    if (status == KVIST_OK) {
        struct kvist_extents_totals totals;
        kvist_extents_totals(tier->extents, &totals);
        tier->extent_first = kvist_extents_number_last(tier->extents);
        if (tier->index_is_new && totals.extents > 0 && tier->counters.notice[0] == '\0') {
            note_index(tier, "missing");
        }
    }
    return status;
}

static void sizes_choose(struct kvist_tier *tier, const struct kvist_tier_options *options)
{
    uint64_t wanted =
        options->extent_bytes != 0 ? options->extent_bytes : options->bytes_max / EXTENTS_WANTED;
    uint64_t low = options->bytes_max / EXTENTS_WANTED_MAX;
    uint64_t high = options->bytes_max / KVIST_TIER_EXTENTS_MIN;
    low = low < EXTENT_BYTES_MIN ? EXTENT_BYTES_MIN : low;
    wanted = clamp(wanted, low, high < EXTENT_BYTES_MAX ? high : EXTENT_BYTES_MAX);
    wanted = wanted < low ? low : wanted;
    tier->bytes_max = options->bytes_max;
    tier->extent_bytes = wanted / KVIST_RECORD_PAGE_BYTES * KVIST_RECORD_PAGE_BYTES;
    tier->file_bytes_max = tier->extent_bytes;
    tier->memtable_bytes =
        clamp(options->bytes_max / MEMTABLE_SHARE, MEMTABLE_BYTES_MIN, MEMTABLE_BYTES_MAX);
}

static void tier_free(struct kvist_tier **tier_inout)
{
    struct kvist_tier *tier = *tier_inout;
    kvist_workers_destroy(&tier->workers);
    kvist_tier_keeper_destroy(&tier->loader);
    kvist_tier_keeper_destroy(&tier->keeper);
    kvist_extents_close(&tier->extents);
    kvist_tier_index_close(&tier->index);
    kvist_tier_disk_close(tier);
    for (uint32_t index = 0; index < tier->pool_high; index++) {
        free(tier->pools[index]);
    }
    (void)pthread_mutex_destroy(&tier->table_lock);
    (void)pthread_mutex_destroy(&tier->pool_lock);
    free(tier->since);
    free(tier->request_pages);
    free(tier->requests);
    free(tier->path);
    tier->magic = 0;
    free(tier);
    *tier_inout = NULL;
}

enum kvist_status kvist_tier_open(const struct kvist_tier_options *options,
                                  struct kvist_tier **tier_out,
                                  struct kvist_error *err)
{
    struct kvist_error why = KVIST_ERROR_INIT;
    err = err != NULL ? err : &why;
    if (options->path == NULL || options->path[0] == '\0') {
        return kvist_error_set(err, KVIST_INVALID, 0, "tier", "the tier needs a directory");
    }
    if (options->bytes_max < BYTES_MIN || options->depth_max > DEPTH_LIMIT) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "tier",
                               "the tier needs at least %llu MiB, and at most %u requests at once",
                               BYTES_MIN >> 20,
                               DEPTH_LIMIT);
    }
    struct kvist_tier *tier = calloc(1, sizeof(*tier));
    if (tier == NULL || (tier->path = strdup(options->path)) == NULL) {
        free(tier);
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "tier", "no memory for the tier");
    }
    tier->magic = KVIST_TIER_MAGIC;
    tier->directory_fd = -1;
    tier->lock_fd = -1;
    tier->waiting_last = &tier->waiting;
    tier->events = options->events;
    tier->ctx = options->ctx;
    tier->depth_max = options->depth_max != 0 ? options->depth_max : DEPTH_DEFAULT;
    (void)pthread_mutex_init(&tier->table_lock, NULL);
    (void)pthread_mutex_init(&tier->pool_lock, NULL);
    sizes_choose(tier, options);
    uint32_t threads = options->io_threads != 0 ? options->io_threads : IO_THREADS_DEFAULT;
    enum kvist_status status = kvist_tier_disk_open(tier, err);
    if (status == KVIST_OK) {
        status = requests_make(tier, err);
    }
    if (status == KVIST_OK) {
        status = open_index(tier, err);
    }
    if (status == KVIST_OK) {
        status = open_extents(tier, err);
    }
    if (status == KVIST_OK) {
        status = kvist_tier_pools_open(tier, err);
    }
    if (status == KVIST_OK) {
        status = kvist_tier_disk_sample(tier, &tier->other_bytes, &tier->index_bytes, err);
    }
    if (status == KVIST_OK) {
        /* One thread more, for housekeeping. */
        status = kvist_workers_create("kvist-tier",
                                      threads + 1,
                                      false,
                                      tier->depth_max + CONTROL_REQUESTS + 2,
                                      &tier->workers,
                                      err);
    }
    if (status != KVIST_OK) {
        /* RocksDB tells of some errors of the disk without a number. */
        int code = err->code == 0 && status == KVIST_SYSTEM ? EIO : err->code;
        if (kvist_tier_may_pass(tier->path, code)) {
            status = err->status = KVIST_UNAVAILABLE;
        }
        tier_free(&tier);
        return status;
    }
    kvist_tier_load_start(tier);
    *tier_out = tier;
    return KVIST_OK;
}

void kvist_tier_close(struct kvist_tier **tier_inout)
{
    struct kvist_tier *tier = *tier_inout;
    if (tier == NULL) {
        return;
    }
    KVIST_CHECK(tier->magic == KVIST_TIER_MAGIC);
    tier->closing = true;
    kvist_workers_destroy(&tier->workers);
    kvist_tier_waiting_fail(tier, KVIST_CLOSED);
    KVIST_CHECK(tier->in_flight == 0);
    /* What is not durable now is a miss after a power failure; there is no one left to tell. */
    enum kvist_status status = kvist_tier_disk_sync(tier, NULL);
    (void)status;
    tier_free(tier_inout);
}

int kvist_tier_fd(const struct kvist_tier *tier)
{
    return kvist_workers_fd(tier->workers);
}

bool kvist_tier_turn(struct kvist_tier *tier)
{
    KVIST_CHECK(tier->magic == KVIST_TIER_MAGIC);
    uint32_t done = kvist_workers_turn(tier->workers, TURN_JOBS_MAX);
    kvist_tier_keep(tier);
    return done == TURN_JOBS_MAX;
}

void kvist_tier_stats(const struct kvist_tier *tier, struct kvist_tier_stats *stats_out)
{
    struct kvist_extents_totals totals;
    kvist_extents_totals(tier->extents, &totals);
    *stats_out = tier->counters;
    stats_out->blocks = totals.blocks;
    stats_out->block_bytes = totals.block_bytes;
    stats_out->disk_bytes = totals.disk_bytes + tier->other_bytes;
    stats_out->disk_bytes_max = tier->bytes_max;
    stats_out->extents = totals.extents;
    stats_out->in_flight = tier->in_flight;
    stats_out->loading = tier->loading;
    const char *texts[] = {tier->disk_text, tier->write_text, tier->read_text, tier->base_text};
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(texts); index++) {
        if (texts[index][0] != '\0') {
            (void)snprintf(stats_out->degraded, sizeof(stats_out->degraded), "%s", texts[index]);
            break;
        }
    }
}
