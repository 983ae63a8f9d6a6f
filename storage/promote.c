/*
 * promote - blocks on their way from NVMe, and what the tier tells.
 *
 * Role        a prefetch queues promotions; each gets a slot that its session has mapped, the tier
 *             reads into it and verifies, and the block is published and held for the session.
 *             The tier's events keep the index right.
 * Limits      KVIST_LOADS_MAX waiting or in flight, KVIST_LOADS_ACTIVE_MAX in flight; promotions
 *             and holds of a session within its share of its pool; without a slot for a second a
 *             promotion is refused
 * States      entry NVME -> LOADING [prefetch] -> READY | gone [loaded] | NVME [refused]
 */
#include "storage/internal.h"

#define SHARE_FLOOR       4U
#define BLOCKS_PER_GROWTH 128U /* read back between two steps of growing the index */

/* --- Ending a promotion ---------------------------------------------------------------------- */

static struct kvist_attachment *attachment_of(const struct kvist_load *load)
{
    return kvist_session_attachment(
        load->store, load->session_index, load->ordinal, load->attachment_serial);
}

/* held: its place in the session's share is kept until the hold ends. */
static void end_load(struct kvist_load *load, bool held)
{
    struct kvist_attachment *attachment = attachment_of(load);
    if (attachment != NULL) {
        attachment->promoted_count++;
        attachment->waiting_count -= !held;
    }
    load->next = load->store->load_free;
    load->store->load_free = load;
}

/* The index entry of a promotion that still waits for a slot; KVIST_ENTRY_NONE: cleared. */
static uint32_t waiting_entry(const struct kvist_load *load, struct kvist_entry_copy *entry_out)
{
    uint32_t position = kvist_map_find(&load->pool->map, load->key, entry_out);
    bool ours = position != KVIST_ENTRY_NONE && load->epoch == load->pool->epoch &&
                entry_out->state == KVIST_ENTRY_LOADING && entry_out->slot == KVIST_SLOT_NONE;
    return ours ? position : KVIST_ENTRY_NONE;
}

/* A promotion that never got a slot: the block stays where it is. */
static void refuse(struct kvist_load *load)
{
    struct kvist_store_pool *pool = load->pool;
    struct kvist_entry_copy entry;
    uint32_t position = waiting_entry(load, &entry);
    if (position != KVIST_ENTRY_NONE && entry.extent != 0) {
        entry.state = KVIST_ENTRY_NVME;
        kvist_map_write(&pool->map, position, &entry);
    } else if (position != KVIST_ENTRY_NONE) {
        kvist_map_remove(&pool->map, position);
    }
    load->store->stats.promote_refused_total++;
    end_load(load, false);
}

static bool hold(struct kvist_load *load)
{
    struct kvist_store *store = load->store;
    if (attachment_of(load) == NULL || store->hold_tail - store->hold_head == KVIST_HOLDS_MAX) {
        return false;
    }
    struct kvist_slot *info = &load->pool->slots[load->slot];
    info->flags |= KVIST_FLAG_HELD;
    info->session = (uint16_t)load->session_index;
    store->holds[store->hold_tail++ % KVIST_HOLDS_MAX] = (struct kvist_hold){
        .name = kvist_slot_name_of(load->pool, load->slot),
        .until_us = store->now_us + store->options.hold_us,
        .session_index = load->session_index,
        .ordinal = load->ordinal,
        .attachment_serial = load->attachment_serial,
    };
    return true;
}

static bool publish(struct kvist_load *load, const struct kvist_tier_block *block)
{
    struct kvist_store_pool *pool = load->pool;
    uint32_t position = pool->slots[load->slot].entry;
    if (load->epoch != pool->epoch || position == KVIST_ENTRY_NONE || block->block_bytes == 0 ||
        block->block_bytes > pool->about.slot_bytes) {
        return false;
    }
    struct kvist_entry_copy entry;
    kvist_map_read(&pool->map, position, &entry);
    KVIST_CHECK(entry.state == KVIST_ENTRY_LOADING && entry.slot == load->slot);
    kvist_slot_prepare(pool, load->slot, block->block_bytes);
    struct kvist_slot_entry *slot = &pool->map.slots[load->slot];
    atomic_store_explicit(&slot->checksum, block->checksum, memory_order_relaxed);
    atomic_store_explicit(&slot->flags, KVIST_SLOT_CHECKSUMMED, memory_order_release);
    entry.state = KVIST_ENTRY_READY;
    entry.generation = kvist_slot_generation(pool, load->slot);
    kvist_slot_publish(pool, load->slot, position, &entry);
    return true;
}

static void drop(struct kvist_load *load)
{
    struct kvist_store_pool *pool = load->pool;
    uint32_t position = pool->slots[load->slot].entry;
    if (load->epoch == pool->epoch && position != KVIST_ENTRY_NONE) {
        struct kvist_entry_copy entry;
        kvist_map_read(&pool->map, position, &entry);
        pool->nvme_blocks -= entry.extent != 0;
        kvist_map_remove(&pool->map, position);
    }
    kvist_slot_drop(pool, load->slot);
}

static void loaded(void *ctx, enum kvist_status status, const struct kvist_tier_block *block)
{
    struct kvist_load *load = ctx;
    struct kvist_store *store = load->store;
    store->loads_active--;
    kvist_slot_unpin(load->pool, load->slot);
    if (status == KVIST_OK && publish(load, block)) {
        store->stats.promotes_total++;
        store->stats.promote_bytes_total += block->block_bytes;
        end_load(load, hold(load));
        return;
    }
    store->stats.promote_failures_total += load->epoch == load->pool->epoch;
    drop(load);
    end_load(load, false);
}

/* --- Starting them --------------------------------------------------------------------------- */

/* @return false: the tier has no place now */
static bool submit(struct kvist_load *load, uint32_t position, struct kvist_entry_copy *entry)
{
    struct kvist_store_pool *pool = load->pool;
    entry->slot = load->slot;
    kvist_map_write(&pool->map, position, entry);
    pool->slots[load->slot].entry = position;
    kvist_slot_pin(pool, load->slot);
    enum kvist_status status = kvist_tier_read(load->store->tier,
                                               pool->about.pool_id,
                                               load->key,
                                               pool->about.generation,
                                               kvist_slot_bytes_of(pool, load->slot),
                                               pool->about.slot_bytes,
                                               loaded,
                                               load);
    if (status == KVIST_OK) {
        load->store->loads_active++;
        return true;
    }
    kvist_slot_unpin(pool, load->slot);
    entry->slot = KVIST_SLOT_NONE;
    kvist_map_write(&pool->map, position, entry);
    kvist_slot_drop(pool, load->slot);
    load->slot = KVIST_SLOT_NONE;
    return false;
}

enum step {
    STEP_TAKEN, /* off the queue */
    STEP_WAITS, /* no slot now */
    STEP_FULL,  /* the tier has no place now */
};

static enum step start_load(struct kvist_load *load)
{
    struct kvist_store *store = load->store;
    bool given_up =
        attachment_of(load) == NULL || store->now_us - load->since_us > KVIST_LOAD_WAIT_US;
    if (load->pool->usable_free == 0 && !given_up) {
        return STEP_WAITS;
    }
    struct kvist_entry_copy entry;
    uint32_t position = waiting_entry(load, &entry);
    if (position == KVIST_ENTRY_NONE) {
        end_load(load, false);
        return STEP_TAKEN;
    }
    if (given_up) {
        refuse(load);
        return STEP_TAKEN;
    }
    load->slot = kvist_session_take_slot(
        store->sessions[load->session_index], load->ordinal, KVIST_SLOT_LOADING);
    if (load->slot == KVIST_SLOT_NONE) {
        return STEP_WAITS;
    }
    return submit(load, position, &entry) ? STEP_TAKEN : STEP_FULL;
}

static void start_loads(struct kvist_store *store)
{
    struct kvist_load *before = NULL;
    struct kvist_load *load = store->load_first;
    while (load != NULL && store->loads_active < KVIST_LOADS_ACTIVE_MAX) {
        struct kvist_load *next = load->next;
        enum step step = start_load(load);
        if (step == STEP_FULL) {
            return;
        }
        if (step == STEP_WAITS) {
            before = load;
        } else {
            *(before == NULL ? &store->load_first : &before->next) = next;
            store->load_last = next == NULL ? before : store->load_last;
        }
        load = next;
    }
}

static void end_hold(struct kvist_store *store, struct kvist_hold *held)
{
    struct kvist_attachment *attachment = kvist_session_attachment(
        store, held->session_index, held->ordinal, held->attachment_serial);
    struct kvist_store_pool *pool = kvist_slot_resolve(store, &held->name);
    if (pool != NULL) {
        pool->slots[held->name.slot].flags &= (uint8_t)~KVIST_FLAG_HELD;
    }
    if (attachment != NULL) {
        attachment->waiting_count--;
    }
    held->attachment_serial = 0;
    held->name.pool_serial = 0;
}

void kvist_promote_turn(struct kvist_store *store)
{
    if (store->tier == NULL) {
        return;
    }
    while (store->hold_head != store->hold_tail) {
        struct kvist_hold *held = &store->holds[store->hold_head % KVIST_HOLDS_MAX];
        if (held->attachment_serial != 0 && held->until_us > store->now_us) {
            break;
        }
        if (held->attachment_serial != 0) {
            end_hold(store, held);
        }
        store->hold_head++;
    }
    start_loads(store);
}

void kvist_promote_forget_holds(struct kvist_store *store, uint32_t attachment_serial)
{
    for (uint32_t at = store->hold_head; at != store->hold_tail; at++) {
        struct kvist_hold *held = &store->holds[at % KVIST_HOLDS_MAX];
        if (held->attachment_serial == attachment_serial) {
            end_hold(store, held);
        }
    }
}

void kvist_promote_forget_loads(struct kvist_store *store, const struct kvist_store_pool *pool)
{
    struct kvist_load **link = &store->load_first;
    store->load_last = NULL;
    while (*link != NULL) {
        struct kvist_load *load = *link;
        if (load->pool == pool) {
            *link = load->next;
            refuse(load);
        } else {
            store->load_last = load;
            link = &load->next;
        }
    }
}

/* --- Prefetch -------------------------------------------------------------------------------- */

/* Its session leases it, or has leased and released it: every lease comes with a touch. */
static bool has_served(const struct kvist_store_pool *pool, uint32_t slot)
{
    return ((pool->leased_seen[slot / 8] >> (slot % 8)) & 1) != 0 ||
           (pool->slots[slot].flags & KVIST_FLAG_HELD) == 0;
}

static void end_leased_holds(struct kvist_store_session *session, uint32_t ordinal)
{
    struct kvist_store *store = session->store;
    kvist_session_drain_touches(session);
    (void)kvist_evict_count_leases(store, session);
    for (uint32_t at = store->hold_head; at != store->hold_tail; at++) {
        struct kvist_hold *held = &store->holds[at % KVIST_HOLDS_MAX];
        if (held->attachment_serial != session->attachments[ordinal].serial) {
            continue;
        }
        const struct kvist_store_pool *pool = kvist_slot_resolve(store, &held->name);
        if (pool == NULL || has_served(pool, held->name.slot)) {
            end_hold(store, held);
        }
    }
}

static uint32_t share_of(const struct kvist_attachment *attachment)
{
    uint32_t share = attachment->pool->slot_max / (2 * attachment->pool->session_count);
    share = share < SHARE_FLOOR ? SHARE_FLOOR : share;
    return share < KVIST_PREFETCHES_MAX ? share : KVIST_PREFETCHES_MAX;
}

static void queue_load(struct kvist_store_session *session,
                       uint32_t ordinal,
                       uint32_t position,
                       struct kvist_entry_copy *entry)
{
    struct kvist_store *store = session->store;
    struct kvist_attachment *attachment = &session->attachments[ordinal];
    struct kvist_load *load = store->load_free;
    store->load_free = load->next;
    *load = (struct kvist_load){
        .store = store,
        .pool = attachment->pool,
        .epoch = attachment->pool->epoch,
        .slot = KVIST_SLOT_NONE,
        .since_us = store->now_us,
        .session_index = session->index,
        .ordinal = ordinal,
        .attachment_serial = attachment->serial,
    };
    memcpy(load->key, entry->key, sizeof(load->key));
    entry->state = KVIST_ENTRY_LOADING;
    entry->slot = KVIST_SLOT_NONE;
    kvist_map_write(&attachment->pool->map, position, entry);
    *(store->load_first == NULL ? &store->load_first : &store->load_last->next) = load;
    store->load_last = load;
    attachment->waiting_count++;
}

enum kvist_status kvist_store_prefetch(struct kvist_store_session *session,
                                       uint32_t ordinal,
                                       const uint8_t (*keys)[KVIST_KEY_BYTES],
                                       size_t key_count)
{
    struct kvist_store *store = session->store;
    KVIST_CHECK(session->magic == SESSION_MAGIC);
    if (kvist_session_pool(session, ordinal) == NULL || key_count > KVIST_KEYS_MAX) {
        return KVIST_INVALID;
    }
    struct kvist_attachment *attachment = &session->attachments[ordinal];
    uint32_t share = share_of(attachment);
    if (attachment->waiting_count + key_count > share && attachment->waiting_count > 0) {
        end_leased_holds(session, ordinal);
    }
    for (size_t index = 0; index < key_count; index++) {
        struct kvist_entry_copy entry;
        uint32_t position = kvist_map_find(&attachment->pool->map, keys[index], &entry);
        if (store->tier == NULL || position == KVIST_ENTRY_NONE ||
            entry.state != KVIST_ENTRY_NVME) {
            attachment->promoted_count++;
        } else if (attachment->waiting_count >= share || store->load_free == NULL) {
            attachment->promoted_count++;
            store->stats.promote_refused_total++;
        } else {
            queue_load(session, ordinal, position, &entry);
        }
    }
    return KVIST_OK;
}

/* --- What the tier tells --------------------------------------------------------------------- */

/* Too little memory for one: its blocks stay unknown, and for good if they were cleared. */
static void
create_loaded(struct kvist_store *store, const struct kvist_tier_pool *about, bool cleared)
{
    struct kvist_store_pool *pool = NULL;
    if (kvist_pool_create(store, about, &pool, NULL) != KVIST_OK) {
        if (cleared) {
            kvist_tier_forget_pool(store->tier, about->pool_id);
            store->rest_left = true;
        }
        return;
    }
    pool->put_wanted = cleared;
    pool->tier_knows = !cleared;
    if (cleared) {
        kvist_pool_set_generation(pool, about->generation + 1);
    }
}

static void pool_loaded(void *ctx, const struct kvist_tier_pool *about)
{
    struct kvist_store *store = ctx;
    struct kvist_store_pool *pool = kvist_store_pool_lookup(store, about->pool_id);
    bool cleared = pool == NULL && kvist_roster_rest_cleared(store, about->tenant);
    if (pool == NULL && !kvist_pool_fits(store)) {
        kvist_tier_forget_pool(store->tier, about->pool_id);
        store->rest_left = store->rest_left || cleared;
        return;
    }
    if (pool == NULL) {
        create_loaded(store, about, cleared);
        return;
    }
    if (pool->about.slot_bytes != about->slot_bytes) {
        /* What was opened counts; being remembered it drops the blocks of the other size. */
        pool->adopted = false;
        if (pool->about.generation <= about->generation) {
            kvist_pool_set_generation(pool, about->generation + 1);
        }
        store->stats.pools_resized_total++;
        return;
    }
    if (pool->adopted) {
        kvist_adopt_settle(pool, about);
    } else if (pool->epoch == 0 && !kvist_roster_is_cleared(pool)) {
        kvist_pool_set_generation(pool, about->generation);
        pool->put_wanted = false;
        pool->tier_knows = true;
    } else if (pool->about.generation <= about->generation) {
        kvist_pool_set_generation(pool,
                                  about->generation + 1); /* cleared before it was known here */
    }
}

static struct kvist_store_pool *pool_of(struct kvist_store *store,
                                        const struct kvist_tier_block *block,
                                        struct kvist_store_pool *last)
{
    if (last == NULL || memcmp(last->about.pool_id, block->pool_id, KVIST_KEY_BYTES) != 0) {
        last = kvist_store_pool_lookup(store, block->pool_id);
    }
    return last;
}

/* False: it has no place, and may have one when the index has grown. */
static bool add_block(struct kvist_store_pool *pool, const struct kvist_tier_block *block)
{
    struct kvist_entry_copy entry;
    uint32_t position = kvist_map_find(&pool->map, block->key, &entry);
    if (position != KVIST_ENTRY_NONE) {
        if (entry.extent == 0) {
            kvist_map_note_extent(&pool->map, position, block->extent);
            pool->nvme_blocks++;
        }
        return true;
    }
    entry = (struct kvist_entry_copy){
        .state = KVIST_ENTRY_NVME,
        .slot = KVIST_SLOT_NONE,
        .extent = block->extent,
        .parent_tag = block->parent_tag,
    };
    memcpy(entry.key, block->key, sizeof(entry.key));
    if (kvist_map_insert(&pool->map, &entry) != KVIST_ENTRY_NONE) {
        pool->nvme_blocks++;
        return true;
    }
    if (kvist_pool_growth_waits(pool)) {
        return false; /* its probe sequence is full, which may be long before the index is */
    }
    pool->store->stats.index_full_total++;
    return true;
}

static size_t blocks_loaded(void *ctx, const struct kvist_tier_block *blocks, size_t count)
{
    struct kvist_store_pool *pool = NULL;
    size_t index = 0;
    for (; index < count; index++) {
        pool = pool_of(ctx, &blocks[index], pool);
        if (pool == NULL || blocks[index].extent == 0 ||
            blocks[index].pool_generation != pool->about.generation) {
            continue;
        }
        bool is_filling = kvist_map_is_filling(&pool->map);
        if (is_filling || index % BLOCKS_PER_GROWTH == 0) {
            kvist_pool_grow_map(pool);
        }
        if ((is_filling && kvist_pool_growth_waits(pool)) || !add_block(pool, &blocks[index])) {
            break;
        }
    }
    return index;
}

static void load_done(void *ctx, enum kvist_status status)
{
    /* What could not be read back is a miss; the tier says why it is degraded. */
    struct kvist_store *store = ctx;
    store->tier_loaded = true;
    if (status == KVIST_OK && !store->rest_left) {
        kvist_roster_rest_known(store);
    }
}

static void drop_copy(struct kvist_store_pool *pool, const struct kvist_tier_block *block)
{
    struct kvist_entry_copy entry;
    uint32_t position = kvist_map_find(&pool->map, block->key, &entry);
    if (position == KVIST_ENTRY_NONE || entry.extent == 0 || entry.extent != block->extent) {
        return;
    }
    pool->nvme_blocks--;
    if (entry.state == KVIST_ENTRY_NVME) {
        kvist_map_remove(&pool->map, position);
    } else {
        kvist_map_note_extent(&pool->map, position, 0);
    }
}

static void blocks_dropped(void *ctx, const struct kvist_tier_block *blocks, size_t count)
{
    struct kvist_store_pool *pool = NULL;
    for (size_t index = 0; index < count; index++) {
        pool = pool_of(ctx, &blocks[index], pool);
        if (pool != NULL) {
            drop_copy(pool, &blocks[index]);
        }
    }
}

static void block_moved(void *ctx, const struct kvist_tier_block *block, uint32_t extent_before)
{
    struct kvist_store_pool *pool = pool_of(ctx, block, NULL);
    struct kvist_entry_copy entry;
    uint32_t position =
        pool == NULL ? KVIST_ENTRY_NONE : kvist_map_find(&pool->map, block->key, &entry);
    if (position != KVIST_ENTRY_NONE && entry.extent == extent_before && extent_before != 0) {
        kvist_map_note_extent(&pool->map, position, block->extent);
    }
}

const struct kvist_tier_events kvist_promote_events = {
    .pool_loaded = pool_loaded,
    .blocks_loaded = blocks_loaded,
    .load_done = load_done,
    .blocks_dropped = blocks_dropped,
    .block_moved = block_moved,
};
