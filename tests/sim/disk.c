/*
 * disk - storage/tier.h in memory: a tier whose every completion comes when it is told to.
 *
 * Role        keeps to the contract of tier.h, at its worst: late, in any order, failing, dropping
 *             extents, carrying blocks over, rotting bytes. What was not durable when a kill came
 *             is gone. The disk outlives the store.
 */
#include "proto/key/checksum.h"
#include "proto/key/key.h"
#include "tests/sim/sim.h"

#define POOLS_MAX    8U
#define BLOCKS_MAX   512U
#define REQUESTS_MAX 16U
#define NOTES_MAX    4096U
#define EXTENTS_MAX  3U
#define CARRY_PART   30U /* percent of an extent that goes */

enum what { PUT, WRITE, READ, SYNC };

struct request {
    enum what what;
    struct kvist_tier_pool pool;
    struct kvist_tier_block block;
    const void *source;
    void *target;
    uint64_t target_bytes;
    kvist_tier_done_fn *done;
    void *ctx;
};

enum kind { DONE, POOL_LOADED, BLOCK_LOADED, LOAD_DONE, DROPPED, MOVED };

struct note {
    enum kind kind;
    enum kvist_status status;
    struct kvist_tier_pool pool;
    struct kvist_tier_block block;
    uint32_t extent_before;
    kvist_tier_done_fn *done;
    void *ctx;
};

struct record {
    struct kvist_tier_block block; /* block_bytes 0: none */
    uint8_t *bytes;
    bool fresh; /* written since this tier was opened */
};

struct known_pool {
    struct kvist_tier_pool about; /* slot_bytes 0: none */
    uint64_t durable_generation;
};

struct kvist_tier {
    struct kvist_tier_options options;
    struct request requests[REQUESTS_MAX];
    uint32_t request_count;
    struct note notes[NOTES_MAX];
    uint32_t head;
    uint32_t tail;
};

static struct {
    struct known_pool pools[POOLS_MAX];
    struct record records[BLOCKS_MAX];
    uint32_t extent; /* written now */
    uint32_t faults; /* percent */
    bool killed;
    struct kvist_tier *tier;
} disk;

void kvist_sim_disk_init(void)
{
    memset(&disk, 0, sizeof(disk));
    disk.extent = 1;
}

void kvist_sim_disk_fini(void)
{
    for (uint32_t place = 0; place < BLOCKS_MAX; place++) {
        free(disk.records[place].bytes);
        disk.records[place].bytes = NULL;
    }
}

void kvist_sim_disk_kill(void)
{
    disk.killed = true;
}

void kvist_sim_disk_set_faults(uint32_t percent)
{
    disk.faults = percent;
}

/* --- What is on it --------------------------------------------------------------------------- */

static struct known_pool *find_pool(const uint8_t *id)
{
    for (uint32_t place = 0; place < POOLS_MAX; place++) {
        if (disk.pools[place].about.slot_bytes != 0 &&
            memcmp(disk.pools[place].about.pool_id, id, KVIST_KEY_BYTES) == 0) {
            return &disk.pools[place];
        }
    }
    return NULL;
}

static bool is_record_of(const struct record *record, const uint8_t *pool_id, const uint8_t *key)
{
    return record->block.block_bytes != 0 && memcmp(record->block.key, key, KVIST_KEY_BYTES) == 0 &&
           memcmp(record->block.pool_id, pool_id, KVIST_KEY_BYTES) == 0;
}

static struct record *find_record(const uint8_t *pool_id, const uint8_t *key)
{
    for (uint32_t place = 0; place < BLOCKS_MAX; place++) {
        if (is_record_of(&disk.records[place], pool_id, key)) {
            return &disk.records[place];
        }
    }
    return NULL;
}

static struct record *free_record(void)
{
    for (uint32_t place = 0; place < BLOCKS_MAX; place++) {
        if (disk.records[place].block.block_bytes == 0) {
            return &disk.records[place];
        }
    }
    return NULL;
}

static void remove_record(struct record *record)
{
    free(record->bytes);
    *record = (struct record){.bytes = NULL};
}

bool kvist_sim_disk_has(const uint8_t *pool_id, const uint8_t *key)
{
    return find_record(pool_id, key) != NULL;
}

static bool is_current(const struct record *record)
{
    const struct known_pool *pool = find_pool(record->block.pool_id);
    return pool != NULL && pool->about.generation == record->block.pool_generation;
}

/* --- What is told ---------------------------------------------------------------------------- */

static struct note *tell(struct kvist_tier *tier, enum kind kind)
{
    KVIST_SIM_REQUIRE(tier->tail - tier->head < NOTES_MAX);
    struct note *note = &tier->notes[tier->tail++ % NOTES_MAX];
    *note = (struct note){.kind = kind};
    return note;
}

static void tell_done(struct kvist_tier *tier,
                      const struct request *request,
                      enum kvist_status status,
                      const struct kvist_tier_block *block)
{
    struct note *note = tell(tier, DONE);
    note->status = status;
    note->block = *block;
    note->done = request->done;
    note->ctx = request->ctx;
}

static void tell_dropped(struct kvist_tier *tier, const struct record *record)
{
    if (is_current(record)) {
        tell(tier, DROPPED)->block = record->block;
    }
}

/* @return false: it is to be delivered again */
static bool deliver(struct kvist_tier *tier, const struct note *note)
{
    const struct kvist_tier_events *events = &tier->options.events;
    void *ctx = tier->options.ctx;
    const struct record *record = find_record(note->block.pool_id, note->block.key);
    static const char *const names[] = {"done", "pool", "block", "loaded", "dropped", "moved"};
    kvist_sim_trace("  disk: %s extent %u status %s",
                    names[note->kind],
                    note->block.extent,
                    kvist_status_name(note->status));
    switch (note->kind) {
    case DONE:
        note->done(note->ctx, note->status, &note->block);
        break;
    case POOL_LOADED:
        events->pool_loaded(ctx, &note->pool);
        break;
    case BLOCK_LOADED:
        if (record != NULL && !record->fresh && record->block.extent == note->block.extent) {
            return events->blocks_loaded(ctx, &note->block, 1) == 1;
        }
        break;
    case LOAD_DONE:
        events->load_done(ctx, KVIST_OK);
        break;
    case DROPPED:
        events->blocks_dropped(ctx, &note->block, 1);
        break;
    case MOVED:
        events->block_moved(ctx, &note->block, note->extent_before);
        break;
    }
    return true;
}

/* --- What is done ---------------------------------------------------------------------------- */

static void do_put(struct kvist_tier *tier, const struct request *request)
{
    struct known_pool *pool = find_pool(request->pool.pool_id);
    bool fails = kvist_sim_chance(disk.faults);
    if (pool != NULL && !fails && request->pool.generation > pool->durable_generation) {
        pool->durable_generation = request->pool.generation;
        for (uint32_t place = 0; place < BLOCKS_MAX; place++) {
            struct record *record = &disk.records[place];
            if (record->block.block_bytes != 0 &&
                memcmp(record->block.pool_id, pool->about.pool_id, KVIST_KEY_BYTES) == 0 &&
                record->block.pool_generation < pool->durable_generation) {
                remove_record(record);
            }
        }
    }
    tell_done(tier, request, fails ? KVIST_SYSTEM : KVIST_OK, &request->block);
}

/* Too many: the oldest extent goes, with its blocks, but for some that are carried over. */
static void next_extent(struct kvist_tier *tier)
{
    disk.extent++;
    for (uint32_t place = 0; place < BLOCKS_MAX; place++) {
        struct record *record = &disk.records[place];
        if (record->block.block_bytes == 0 || record->block.extent + EXTENTS_MAX > disk.extent) {
            continue;
        }
        if (kvist_sim_chance(CARRY_PART) && is_current(record)) {
            uint32_t before = record->block.extent;
            record->block.extent = disk.extent;
            struct note *note = tell(tier, MOVED);
            note->block = record->block;
            note->extent_before = before;
        } else {
            tell_dropped(tier, record);
            remove_record(record);
        }
    }
}

static enum kvist_status
write_record(struct kvist_tier *tier, const struct request *request, struct kvist_tier_block *block)
{
    const struct known_pool *pool = find_pool(block->pool_id);
    uint64_t seed = kvist_key_checksum_seed(block->key, block->pool_id);
    if (kvist_sim_chance(disk.faults)) {
        return kvist_sim_chance(50) ? KVIST_SYSTEM : KVIST_NO_SPACE;
    }
    if (kvist_checksum(request->source, block->block_bytes, seed) != block->checksum) {
        return KVIST_CORRUPT;
    }
    if (pool == NULL || pool->about.generation != block->pool_generation) {
        return KVIST_STALE;
    }
    struct record *record = find_record(block->pool_id, block->key);
    if (record != NULL && record->block.pool_generation == block->pool_generation &&
        record->block.checksum == block->checksum) {
        block->extent = record->block.extent;
        record->fresh = true;
        return KVIST_OK;
    }
    if (record != NULL) {
        remove_record(record);
    }
    record = free_record();
    if (record == NULL) {
        next_extent(tier);
        return KVIST_NO_SPACE;
    }
    block->extent = disk.extent;
    uint8_t *bytes = malloc(block->block_bytes);
    KVIST_SIM_REQUIRE(bytes != NULL);
    memcpy(bytes, request->source, block->block_bytes);
    *record = (struct record){.block = *block, .bytes = bytes, .fresh = true};
    return KVIST_OK;
}

static void do_write(struct kvist_tier *tier, const struct request *request)
{
    struct kvist_tier_block block = request->block;
    enum kvist_status status = write_record(tier, request, &block);
    tell_done(tier, request, status, status == KVIST_OK ? &block : &request->block);
}

static void do_read(struct kvist_tier *tier, const struct request *request)
{
    struct record *record = find_record(request->block.pool_id, request->block.key);
    const struct kvist_tier_block *wanted = &request->block;
    if (record == NULL || !is_current(record) ||
        record->block.pool_generation != wanted->pool_generation) {
        memset(request->target, 0xdd, 64);
        tell_done(tier, request, KVIST_NOT_FOUND, wanted);
        return;
    }
    if (kvist_sim_chance(disk.faults)) {
        memset(request->target, 0xdd, 64);
        tell_done(tier, request, KVIST_SYSTEM, wanted);
        return;
    }
    KVIST_SIM_REQUIRE(record->block.block_bytes <= request->target_bytes);
    memcpy(request->target, record->bytes, record->block.block_bytes);
    uint64_t seed = kvist_key_checksum_seed(record->block.key, record->block.pool_id);
    if (kvist_checksum(request->target, record->block.block_bytes, seed) !=
        record->block.checksum) {
        tell_done(tier, request, KVIST_CORRUPT, wanted);
        tell_dropped(tier, record);
        remove_record(record);
        return;
    }
    tell_done(tier, request, KVIST_OK, &record->block);
}

static void do_one(struct kvist_tier *tier)
{
    uint32_t place = kvist_sim_below(tier->request_count);
    struct request request = tier->requests[place];
    tier->requests[place] = tier->requests[--tier->request_count];
    switch (request.what) {
    case PUT:
        do_put(tier, &request);
        break;
    case WRITE:
        do_write(tier, &request);
        break;
    case READ:
        do_read(tier, &request);
        break;
    case SYNC:
        tell_done(tier,
                  &request,
                  kvist_sim_chance(disk.faults) ? KVIST_SYSTEM : KVIST_OK,
                  &request.block);
        break;
    }
}

static void rot(void)
{
    struct record *record = &disk.records[kvist_sim_below(BLOCKS_MAX)];
    if (record->block.block_bytes != 0) {
        record->bytes[kvist_sim_below((uint32_t)record->block.block_bytes)] ^= 1;
    }
}

bool kvist_sim_disk_step(void)
{
    struct kvist_tier *tier = disk.tier;
    if (tier == NULL) {
        return false;
    }
    if (kvist_sim_chance(5)) {
        next_extent(tier);
    }
    if (kvist_sim_chance(disk.faults)) {
        rot();
    }
    if (tier->request_count == 0) {
        return false;
    }
    do_one(tier);
    return true;
}

/* --- tier.h ---------------------------------------------------------------------------------- */

enum kvist_status kvist_tier_open(const struct kvist_tier_options *options,
                                  struct kvist_tier **tier_out,
                                  struct kvist_error *err)
{
    struct kvist_tier *tier = calloc(1, sizeof(*tier));
    if (tier == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "tier", "no memory");
    }
    tier->options = *options;
    disk.killed = false;
    disk.tier = tier;
    for (uint32_t place = 0; place < POOLS_MAX; place++) {
        struct known_pool *pool = &disk.pools[place];
        pool->about.generation = pool->durable_generation;
        if (pool->about.slot_bytes != 0 && pool->durable_generation == 0) {
            *pool = (struct known_pool){.durable_generation = 0}; /* never was */
        } else if (pool->about.slot_bytes != 0) {
            tell(tier, POOL_LOADED)->pool = pool->about;
        }
    }
    for (uint32_t place = 0; place < BLOCKS_MAX; place++) {
        struct record *record = &disk.records[place];
        record->fresh = false;
        if (record->block.block_bytes != 0 && is_current(record)) {
            tell(tier, BLOCK_LOADED)->block = record->block;
        } else if (record->block.block_bytes != 0) {
            remove_record(record);
        }
    }
    (void)tell(tier, LOAD_DONE);
    *tier_out = tier;
    return KVIST_OK;
}

void kvist_tier_close(struct kvist_tier **tier_inout)
{
    struct kvist_tier *tier = *tier_inout;
    if (tier == NULL) {
        return;
    }
    while (!disk.killed && tier->request_count > 0) {
        do_one(tier);
    }
    for (uint32_t place = 0; place < tier->request_count; place++) {
        tell_done(tier, &tier->requests[place], KVIST_CLOSED, &tier->requests[place].block);
    }
    for (; tier->head != tier->tail; tier->head++) {
        const struct note note = tier->notes[tier->head % NOTES_MAX];
        if (note.kind == DONE) {
            (void)deliver(tier, &note);
        }
    }
    disk.tier = NULL;
    free(tier);
    *tier_inout = NULL;
}

int kvist_tier_fd(const struct kvist_tier *tier)
{
    (void)tier;
    return -1;
}

bool kvist_tier_turn(struct kvist_tier *tier)
{
    for (uint32_t left = kvist_sim_below(16); left > 0 && tier->head != tier->tail; left--) {
        const struct note note = tier->notes[tier->head % NOTES_MAX];
        if (!deliver(tier, &note)) {
            return false;
        }
        tier->head++;
    }
    return tier->head != tier->tail;
}

static enum kvist_status submit(struct kvist_tier *tier, const struct request *request)
{
    if (tier->request_count == REQUESTS_MAX || kvist_sim_chance(disk.faults)) {
        return KVIST_BUSY;
    }
    tier->requests[tier->request_count++] = *request;
    return KVIST_OK;
}

enum kvist_status kvist_tier_put_pool(struct kvist_tier *tier,
                                      const struct kvist_tier_pool *pool,
                                      kvist_tier_done_fn *done,
                                      void *ctx)
{
    struct known_pool *known = find_pool(pool->pool_id);
    if (known != NULL && pool->generation < known->about.generation) {
        return KVIST_STALE;
    }
    struct request request = {.what = PUT, .pool = *pool, .done = done, .ctx = ctx};
    memcpy(request.block.pool_id, pool->pool_id, sizeof(request.block.pool_id));
    enum kvist_status status = submit(tier, &request);
    for (uint32_t place = 0; status == KVIST_OK && known == NULL; place++) {
        KVIST_SIM_REQUIRE(place < POOLS_MAX);
        known = disk.pools[place].about.slot_bytes == 0 ? &disk.pools[place] : NULL;
    }
    if (status == KVIST_OK) {
        known->about = *pool;
    }
    return status;
}

void kvist_tier_forget_pool(struct kvist_tier *tier, const uint8_t pool_id[KVIST_KEY_BYTES])
{
    (void)tier;
    (void)pool_id;
    KVIST_SIM_REQUIRE(false); /* there are few pools */
}

enum kvist_status kvist_tier_write(struct kvist_tier *tier,
                                   const struct kvist_tier_block *block,
                                   const void *source,
                                   kvist_tier_done_fn *done,
                                   void *ctx)
{
    const struct known_pool *known = find_pool(block->pool_id);
    if (known == NULL) {
        return KVIST_INVALID;
    }
    if (known->about.generation != block->pool_generation) {
        return KVIST_STALE;
    }
    const struct request request = {
        .what = WRITE, .block = *block, .source = source, .done = done, .ctx = ctx};
    return submit(tier, &request);
}

enum kvist_status kvist_tier_read(struct kvist_tier *tier,
                                  const uint8_t pool_id[KVIST_KEY_BYTES],
                                  const uint8_t key[KVIST_KEY_BYTES],
                                  uint64_t pool_generation,
                                  void *target,
                                  uint64_t target_bytes,
                                  kvist_tier_done_fn *done,
                                  void *ctx)
{
    struct request request = {
        .what = READ, .target = target, .target_bytes = target_bytes, .done = done, .ctx = ctx};
    memcpy(request.block.pool_id, pool_id, sizeof(request.block.pool_id));
    memcpy(request.block.key, key, sizeof(request.block.key));
    request.block.pool_generation = pool_generation;
    return submit(tier, &request);
}

enum kvist_status kvist_tier_sync(struct kvist_tier *tier, kvist_tier_done_fn *done, void *ctx)
{
    const struct request request = {.what = SYNC, .done = done, .ctx = ctx};
    return submit(tier, &request);
}

void kvist_tier_stats(const struct kvist_tier *tier, struct kvist_tier_stats *stats_out)
{
    *stats_out = (struct kvist_tier_stats){.in_flight = tier->request_count};
}

/* All pools are of one tenant, whose only bound is the disk's. */
void kvist_tier_set_tenant(struct kvist_tier *tier,
                           const char *tenant,
                           uint64_t bytes_max,
                           uint32_t weight)
{
    (void)tier;
    (void)tenant;
    (void)bytes_max;
    (void)weight;
}

uint64_t kvist_tier_tenant_bytes(struct kvist_tier *tier, const char *tenant)
{
    struct kvist_tier_stats stats;
    (void)tenant;
    kvist_tier_stats(tier, &stats);
    return stats.disk_bytes;
}
