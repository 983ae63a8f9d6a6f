/*
 * pool - all blocks of one identity.
 *
 * Role        makes, finds and drops pools; sizes their segments; grows their maps; has the tier
 *             remember them.
 * Growing     a pool's next map is kept when it is begun, and moved to when it is complete and safe:
 *             until then a kill leaves the old one, which is written on. What finds no place in it
 *             meanwhile is not stored
 * Limits      KVIST_POOLS_MAX: beyond, a pool that nobody has open makes place, an empty one first,
 *             else the longest idle one of the tenant that has most pools. Segment: arena / 256, at
 *             least KVIST_SEGMENT_SLOTS_MIN slots and 1 MiB, at most KVIST_SEGMENT_BYTES_MAX
 */
#include "proto/base/log.h"
#include "storage/internal.h"

#include <stdlib.h>

#define SEGMENT_BYTES_LEAST (1ULL << 20)
#define SEGMENTS_OF_ARENA   256U
#define INDEX_START         1024U
#define GROW_STEP           4096U     /* index entries carried over by one call */
#define GROW_PATIENCE_US    10000000U /* the tier's index is not read on meanwhile */

uint64_t kvist_pool_segment_bytes_least(uint64_t arena_bytes)
{
    uint64_t bytes = arena_bytes / SEGMENTS_OF_ARENA;
    bytes = bytes > SEGMENT_BYTES_LEAST ? bytes : SEGMENT_BYTES_LEAST;
    return bytes < KVIST_SEGMENT_BYTES_MAX ? bytes : KVIST_SEGMENT_BYTES_MAX;
}

uint64_t kvist_store_segments_max(uint64_t arena_bytes)
{
    uint64_t bytes = kvist_pool_segment_bytes_least(arena_bytes);
    /* Slots do not always fill the largest segment. */
    bytes = bytes < KVIST_SEGMENT_BYTES_MAX / 4 * 3 ? bytes : KVIST_SEGMENT_BYTES_MAX / 4 * 3;
    return arena_bytes / bytes;
}

uint64_t kvist_pool_segment_bytes(const struct kvist_store *store, uint64_t slot_bytes)
{
    uint64_t bytes = kvist_pool_segment_bytes_least(store->options.arena_bytes);
    if (bytes < slot_bytes * KVIST_SEGMENT_SLOTS_MIN) {
        bytes = slot_bytes * KVIST_SEGMENT_SLOTS_MIN;
    }
    bytes = kvist_align_up(bytes, slot_bytes);
    if (bytes > KVIST_SEGMENT_BYTES_MAX) {
        bytes = KVIST_SEGMENT_BYTES_MAX / slot_bytes * slot_bytes;
    }
    return bytes;
}

static uint32_t index_capacity_for(uint32_t slot_max)
{
    uint32_t wanted = slot_max / 8;
    uint32_t capacity = INDEX_START;
    while (capacity < wanted) {
        capacity *= 2;
    }
    return capacity;
}

static enum kvist_status allocate_tables(struct kvist_store_pool *pool)
{
    uint32_t slots = pool->segment_room * pool->slots_per_segment;
    pool->segments = calloc(pool->segment_room, sizeof(pool->segments[0]));
    pool->states = calloc(slots, sizeof(pool->states[0]));
    pool->slots = calloc(slots, sizeof(pool->slots[0]));
    pool->leased_seen = calloc(slots / 8 + 1, 1);
    if (pool->segments == NULL || pool->states == NULL || pool->slots == NULL ||
        pool->leased_seen == NULL) {
        return KVIST_NO_MEMORY;
    }
    for (uint32_t index = 0; index < pool->segment_room; index++) {
        pool->segments[index].fd = -1;
    }
    return pool->ops->create(slots, &pool->policy);
}

static void free_pool(struct kvist_store_pool *pool)
{
    if (pool->policy != NULL) {
        pool->ops->destroy(&pool->policy);
    }
    kvist_map_fini(&pool->map);
    free(pool->leased_seen);
    free(pool->slots);
    free(pool->states);
    free(pool->segments);
    pool->magic = 0;
    free(pool);
}

static bool has_members(const struct kvist_store_pool *pool)
{
    for (uint32_t index = 0; index < pool->segment_max; index++) {
        if (pool->segments[index].life != KVIST_LIFE_NONE && pool->segments[index].lent_count > 0) {
            return true;
        }
    }
    return false;
}

/* Whether nobody uses a pool, nor waits for something of it. */
static bool is_idle(const struct kvist_store_pool *pool)
{
    return pool->session_count == 0 && pool->populating_count == 0 && !pool->put_pending &&
           pool->counts[KVIST_SLOT_LOADING] == 0 && pool->pin_count == 0 && !has_members(pool) &&
           pool->clears_waiting == 0;
}

static uint32_t count_of_tenant(const struct kvist_store *store, const struct kvist_tenant *tenant)
{
    uint32_t count = 0;
    for (uint32_t index = 0; index < store->pool_high; index++) {
        const struct kvist_store_pool *pool = store->pools[index];
        count += pool != NULL && pool->tenant == tenant;
    }
    return count;
}

/* The pool that another one may take the place of. NULL: all are in use. */
static struct kvist_store_pool *find_idle(const struct kvist_store *store)
{
    struct kvist_store_pool *best = NULL;
    uint32_t best_count = 0;
    bool all_known = store->options.tier == NULL || store->tier_loaded;
    for (uint32_t index = 0; index < store->pool_high; index++) {
        struct kvist_store_pool *pool = store->pools[index];
        if (pool == NULL || !is_idle(pool)) {
            continue;
        }
        if (pool->map.live == 0 && all_known) {
            return pool;
        }
        uint32_t count = count_of_tenant(store, pool->tenant);
        if (best == NULL || count > best_count ||
            (count == best_count && pool->last_used_us < best->last_used_us)) {
            best = pool;
            best_count = count;
        }
    }
    return best;
}

static uint32_t free_place(const struct kvist_store *store)
{
    uint32_t index = 0;
    while (index < KVIST_POOLS_MAX && store->pools[index] != NULL) {
        index++;
    }
    return index;
}

bool kvist_pool_fits(const struct kvist_store *store)
{
    return free_place(store) < KVIST_POOLS_MAX;
}

static enum kvist_status find_place(struct kvist_store *store, uint32_t *index_out)
{
    *index_out = free_place(store);
    if (*index_out < KVIST_POOLS_MAX) {
        return KVIST_OK;
    }
    struct kvist_store_pool *idle = find_idle(store);
    if (idle == NULL) {
        return KVIST_BUSY;
    }
    *index_out = idle->index;
    if (store->tier != NULL) {
        kvist_tier_forget_pool(store->tier, idle->about.pool_id);
    } else if (kvist_roster_is_cleared(idle)) {
        kvist_roster_clear_rest(store, idle->about.tenant);
    }
    kvist_pool_destroy(&store->pools[idle->index]);
    store->stats.pools_dropped_total++;
    return KVIST_OK;
}

/* Segments that the pool fills the arena with, as far as one pool may have so many. */
static uint32_t segments_for(const struct kvist_store_pool *pool)
{
    uint64_t count = pool->store->options.arena_bytes / pool->segment_bytes;
    return count < KVIST_SEGMENTS_MAX ? (uint32_t)count : KVIST_SEGMENTS_MAX;
}

static enum kvist_status size_pool(struct kvist_store_pool *pool, struct kvist_error *err)
{
    uint64_t slot_bytes = pool->about.slot_bytes;
    uint64_t arena_bytes = pool->store->options.arena_bytes;
    pool->segment_bytes = kvist_pool_segment_bytes(pool->store, slot_bytes);
    if (pool->segment_bytes > arena_bytes) {
        return kvist_error_set(err,
                               KVIST_NO_SPACE,
                               0,
                               "pool",
                               "blocks of %llu bytes need an arena of at least %llu bytes; raise "
                               "the daemon's memory",
                               (unsigned long long)slot_bytes,
                               (unsigned long long)pool->segment_bytes);
    }
    pool->segment_max = segments_for(pool);
    pool->segment_room = pool->segment_max;
    pool->slots_per_segment = (uint32_t)(pool->segment_bytes / slot_bytes);
    pool->slot_max = pool->slots_per_segment * pool->segment_max;
    return KVIST_OK;
}

static struct kvist_store_pool *make_pool(struct kvist_store *store,
                                          const struct kvist_tier_pool *about,
                                          uint32_t index,
                                          uint32_t serial)
{
    struct kvist_store_pool *pool = calloc(1, sizeof(*pool));
    if (pool != NULL) {
        pool->magic = POOL_MAGIC;
        pool->index = index;
        pool->serial = serial;
        pool->store = store;
        pool->about = *about;
        pool->tenant = kvist_tenant_find(store, about->tenant);
        pool->ops = kvist_policies[store->options.eviction];
        pool->retired_head = KVIST_SLOT_NONE;
        pool->last_used_us = store->now_us;
        pool->put_wanted = store->options.tier != NULL;
    }
    return pool;
}

static void place_pool(struct kvist_store_pool *pool)
{
    struct kvist_store *store = pool->store;
    store->pools[pool->index] = pool;
    if (pool->index >= store->pool_high) {
        store->pool_high = pool->index + 1;
    }
}

enum kvist_status kvist_pool_create(struct kvist_store *store,
                                    const struct kvist_tier_pool *about,
                                    struct kvist_store_pool **pool_out,
                                    struct kvist_error *err)
{
    uint32_t index = 0;
    if (find_place(store, &index) != KVIST_OK) {
        return kvist_error_set(
            err, KVIST_BUSY, 0, "pool", "the daemon has %u pools in use", KVIST_POOLS_MAX);
    }
    struct kvist_store_pool *pool = make_pool(store, about, index, kvist_roster_serial(store));
    if (pool == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "pool", "no memory for a pool");
    }
    enum kvist_status status = size_pool(pool, err);
    if (status != KVIST_OK) {
        goto free_pool;
    }
    status = allocate_tables(pool);
    if (status != KVIST_OK) {
        (void)kvist_error_set(err, status, 0, "pool", "no memory for a pool's tables");
        goto free_pool;
    }
    const struct kvist_map_shape shape = {
        .arena = store->roster->instance,
        .pool_id = pool->about.pool_id,
        .slot_bytes = pool->about.slot_bytes,
        .generation = pool->about.generation,
        .slots_per_segment = pool->slots_per_segment,
        .segment_max = pool->segment_max,
        .index_capacity = index_capacity_for(pool->slot_max),
    };
    status = kvist_map_init(&shape, kvist_roster_serial(store), &pool->map, err);
    if (status != KVIST_OK) {
        goto free_pool;
    }
    if (kvist_roster_keep(store, KVIST_KEPT_MAP, pool->map.serial, pool->map.fd) != KVIST_OK) {
        status = kvist_error_set(err, KVIST_BUSY, 0, "pool", "no more fds can be kept");
        goto free_pool;
    }
    place_pool(pool);
    kvist_roster_put_pool(pool);
    *pool_out = pool;
    return KVIST_OK;

free_pool:
    free_pool(pool);
    return status;
}

enum kvist_status kvist_pool_adopt(struct kvist_store *store,
                                   const struct kvist_tier_pool *about,
                                   uint32_t index,
                                   uint32_t serial,
                                   const struct kvist_map *map)
{
    struct kvist_store_pool *pool = make_pool(store, about, index, serial);
    if (pool == NULL) {
        return KVIST_NO_MEMORY;
    }
    pool->segment_max = map->segment_max;
    pool->slots_per_segment = map->slot_max / map->segment_max;
    pool->slot_max = map->slot_max;
    pool->segment_bytes = pool->slots_per_segment * about->slot_bytes;
    /* Where the arena has become larger, the next map has room for it. */
    pool->segment_room = segments_for(pool);
    pool->segment_room =
        pool->segment_room > map->segment_max ? pool->segment_room : map->segment_max;
    enum kvist_status status = allocate_tables(pool);
    if (status != KVIST_OK) {
        free_pool(pool);
        return status;
    }
    pool->map = *map;
    pool->map.segment_goal = pool->segment_room;
    place_pool(pool);
    return KVIST_OK;
}

/* A growth that was given up leaves a map that was kept. */
static void forget_next(struct kvist_store_pool *pool)
{
    if (pool->next_map_serial != 0 &&
        (pool->map.next == NULL || pool->map.next->serial != pool->next_map_serial)) {
        kvist_roster_forget(pool->store, KVIST_KEPT_MAP, pool->next_map_serial);
        pool->next_map_serial = 0;
    }
}

void kvist_pool_destroy(struct kvist_store_pool **pool)
{
    if (*pool == NULL) {
        return;
    }
    struct kvist_store_pool *old = *pool;
    KVIST_CHECK(old->magic == POOL_MAGIC && old->session_count == 0);
    kvist_roster_drop_pool(old);
    kvist_promote_forget_loads(old->store, old);
    kvist_arena_free_all(old);
    kvist_roster_forget(old->store, KVIST_KEPT_MAP, old->map.serial);
    kvist_map_give_up_growth(&old->map);
    forget_next(old);
    old->store->pools[old->index] = NULL;
    free_pool(old);
    *pool = NULL;
}

/* Slots name their entries by position, which is another one in the next map. */
static void write_positions(void *ctx, const struct kvist_map *map, struct kvist_map *next)
{
    struct kvist_store_pool *pool = ctx;
    kvist_roster_next_map(pool, next->serial);
    for (uint32_t slot = 0; slot < pool->slot_max; slot++) {
        enum kvist_slot_state state = kvist_slot_state_of(pool, slot);
        struct kvist_slot *info = &pool->slots[slot];
        if ((state != KVIST_SLOT_READY && state != KVIST_SLOT_LOADING) ||
            info->entry == KVIST_ENTRY_NONE) {
            continue;
        }
        struct kvist_entry_copy entry;
        uint8_t key[KVIST_KEY_BYTES];
        kvist_map_read(map, info->entry, &entry);
        memcpy(key, entry.key, sizeof(key));
        info->entry = kvist_map_find(next, key, &entry);
        KVIST_CHECK(info->entry != KVIST_ENTRY_NONE && entry.slot == slot);
        atomic_store_explicit(&next->slots[slot].entry, info->entry, memory_order_relaxed);
    }
}

static enum kvist_status begin_growth(struct kvist_store_pool *pool)
{
    struct kvist_store *store = pool->store;
    enum kvist_status status = kvist_map_begin_growth(&pool->map, kvist_roster_serial(store), NULL);
    if (status != KVIST_OK) {
        return status;
    }
    const struct kvist_map *next = pool->map.next;
    status = kvist_roster_keep(store, KVIST_KEPT_MAP, next->serial, next->fd);
    if (status != KVIST_OK) {
        kvist_map_give_up_growth(&pool->map);
        return status;
    }
    pool->next_map_serial = next->serial;
    pool->next_map_keep_number = store->keep_count;
    pool->next_map_since_us = store->now_us;
    return KVIST_OK;
}

static bool next_is_safe(const struct kvist_store_pool *pool)
{
    return pool->next_map_keep_number <= pool->store->kept_count;
}

bool kvist_pool_growth_waits(const struct kvist_store_pool *pool)
{
    return pool->map.next != NULL && !next_is_safe(pool) &&
           pool->store->now_us - pool->next_map_since_us < GROW_PATIENCE_US;
}

static void move(struct kvist_store_pool *pool)
{
    uint32_t serial = pool->map.serial;
    pool->next_map_serial = 0; /* it is the map from here on */
    kvist_map_move(&pool->map, write_positions, pool);
    pool->segment_max = pool->map.segment_max;
    pool->slot_max = pool->map.slot_max;
    kvist_roster_moved(pool);
    kvist_roster_forget(pool->store, KVIST_KEPT_MAP, serial);
    pool->map_replaced = true;
    pool->lend_wanted = true;
}

void kvist_pool_grow_map(struct kvist_store_pool *pool)
{
    struct kvist_store *store = pool->store;
    forget_next(pool);
    if (!kvist_map_wants_growth(&pool->map) || store->now_us < pool->grow_after_us) {
        return;
    }
    enum kvist_status status = pool->map.next == NULL ? begin_growth(pool) : KVIST_OK;
    if (status == KVIST_OK) {
        status = kvist_map_carry(&pool->map, GROW_STEP, NULL);
    }
    if (status != KVIST_OK) {
        kvist_log(KVIST_LOG_DEBUG,
                  "cannot grow a pool map status=%s action=retried",
                  kvist_status_name(status));
        pool->grow_after_us = store->now_us + KVIST_POPULATE_RETRY_US;
    } else if (kvist_map_can_move(&pool->map) && next_is_safe(pool)) {
        move(pool);
    }
}

static void put_done(void *ctx, enum kvist_status status, const struct kvist_tier_block *block)
{
    (void)block;
    struct kvist_store_pool *pool = ctx;
    pool->put_pending = false;
    bool current = pool->put_generation == pool->about.generation;
    pool->tier_knows = status == KVIST_OK && current;
    if (pool->tier_knows) {
        kvist_roster_set_cleared(pool, false);
    }
    pool->put_wanted = !pool->tier_knows && !pool->store->closing;
    pool->put_after_us = status == KVIST_OK ? 0 : pool->store->now_us + KVIST_POPULATE_RETRY_US;
    kvist_block_pool_durable(pool, status);
}

void kvist_pool_set_generation(struct kvist_store_pool *pool, uint64_t generation)
{
    /* The slots first: in no moment are they of an earlier generation than the pool. But for those
       from before a clear: they stay what they were. */
    for (uint32_t slot = 0; slot < pool->slot_max; slot++) {
        if (kvist_slot_state_of(pool, slot) != KVIST_SLOT_FREE &&
            pool->slots[slot].epoch == pool->epoch) {
            atomic_store_explicit(
                &pool->map.slots[slot].pool_generation, generation, memory_order_relaxed);
        }
    }
    pool->about.generation = generation;
    atomic_store_explicit(&pool->map.header->generation, generation, memory_order_release);
}

bool kvist_pool_is_settling(const struct kvist_store_pool *pool)
{
    return !pool->tier_knows && pool->put_after_us == 0 && pool->store->tier != NULL &&
           (pool->put_pending || pool->put_wanted);
}

void kvist_pool_put(struct kvist_store_pool *pool)
{
    struct kvist_store *store = pool->store;
    if (!pool->put_wanted || pool->put_pending || store->tier == NULL || !store->tier_loaded ||
        store->now_us < pool->put_after_us) {
        return;
    }
    pool->put_generation = pool->about.generation;
    enum kvist_status status = kvist_tier_put_pool(store->tier, &pool->about, put_done, pool);
    if (status == KVIST_OK) {
        pool->put_pending = true;
        pool->put_wanted = false;
    } else if (status == KVIST_STALE) {
        /* The tier knows a later generation, of a pool that was dropped here since, or slots of
           another size: overtake it. */
        kvist_pool_set_generation(pool, pool->about.generation * 2 + 1);
    } else if (status != KVIST_BUSY) {
        pool->put_after_us = store->now_us + KVIST_POPULATE_RETRY_US;
        kvist_block_pool_durable(pool, status);
    }
}

enum kvist_status kvist_store_pool_open(struct kvist_store *store,
                                        const struct kvist_tier_pool *about,
                                        struct kvist_store_pool **pool_out,
                                        struct kvist_error *err)
{
    KVIST_CHECK(store->magic == STORE_MAGIC);
    if (about->slot_bytes < KVIST_BLOCK_BYTES_MIN || about->slot_bytes > KVIST_BLOCK_BYTES_MAX ||
        about->slot_bytes % KVIST_SLOT_ALIGN_BYTES != 0) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "pool",
                               "slot_bytes %llu is not a multiple of %llu from %llu to %llu",
                               (unsigned long long)about->slot_bytes,
                               KVIST_SLOT_ALIGN_BYTES,
                               KVIST_BLOCK_BYTES_MIN,
                               KVIST_BLOCK_BYTES_MAX);
    }
    struct kvist_store_pool *pool = kvist_store_pool_lookup(store, about->pool_id);
    if (pool != NULL) {
        if (pool->about.slot_bytes != about->slot_bytes) {
            return kvist_error_set(err,
                                   KVIST_INVALID,
                                   0,
                                   "pool",
                                   "the pool exists with slots of %llu bytes, not %llu",
                                   (unsigned long long)pool->about.slot_bytes,
                                   (unsigned long long)about->slot_bytes);
        }
        *pool_out = pool;
        return KVIST_OK;
    }
    struct kvist_tier_pool first = *about;
    first.generation = 1;
    return kvist_pool_create(store, &first, pool_out, err);
}

struct kvist_store_pool *kvist_store_pool_lookup(struct kvist_store *store,
                                                 const uint8_t pool_id[KVIST_KEY_BYTES])
{
    for (uint32_t index = 0; index < store->pool_high; index++) {
        struct kvist_store_pool *pool = store->pools[index];
        if (pool != NULL && memcmp(pool->about.pool_id, pool_id, KVIST_KEY_BYTES) == 0) {
            return pool;
        }
    }
    return NULL;
}

int kvist_store_pool_map_fd(const struct kvist_store_pool *pool)
{
    return pool->map.read_only_fd;
}

uint64_t kvist_store_pool_map_bytes(const struct kvist_store_pool *pool)
{
    return pool->map.bytes;
}

const uint8_t *kvist_store_pool_id(const struct kvist_store_pool *pool)
{
    return pool->about.pool_id;
}

uint32_t kvist_store_pool_index(const struct kvist_store_pool *pool)
{
    return pool->index;
}

const char *kvist_store_pool_tenant(const struct kvist_store_pool *pool)
{
    return pool->about.tenant;
}

uint64_t kvist_store_pool_slot_bytes(const struct kvist_store_pool *pool)
{
    return pool->about.slot_bytes;
}

uint32_t kvist_store_pool_slots_per_segment(const struct kvist_store_pool *pool)
{
    return pool->slots_per_segment;
}
