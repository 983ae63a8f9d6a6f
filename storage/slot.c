/*
 * slot - every transition of a slot, and nothing else.
 *
 * Invariants  counts[] and free lists agree with states[]; FREE: entry and reservation are unset
 */
#include "storage/internal.h"

static void set_state(struct kvist_store_pool *pool, uint32_t slot, enum kvist_slot_state state)
{
    struct kvist_segment *segment = kvist_slot_segment(pool, slot);
    pool->counts[pool->states[slot]]--;
    segment->counts[pool->states[slot]]--;
    pool->states[slot] = (uint8_t)state;
    pool->counts[state]++;
    segment->counts[state]++;
    atomic_store_explicit(&pool->map.slots[slot].state, (uint32_t)state, memory_order_release);
}

static void push_free(struct kvist_store_pool *pool, uint32_t slot)
{
    struct kvist_segment *segment = kvist_slot_segment(pool, slot);
    pool->slots[slot].next = segment->free_head;
    segment->free_head = slot;
    segment->free_count++;
    if (segment->life == KVIST_LIFE_LIVE) {
        pool->usable_free++;
    }
}

static void make_free(struct kvist_store_pool *pool, uint32_t slot)
{
    struct kvist_slot *info = &pool->slots[slot];
    KVIST_CHECK(info->pins == 0 && info->entry == KVIST_ENTRY_NONE);
    info->reservation = 0;
    info->flags = 0;
    struct kvist_slot_entry *entry = &pool->map.slots[slot];
    atomic_store_explicit(&entry->flags, 0, memory_order_relaxed);
    atomic_store_explicit(&entry->reservation, 0, memory_order_relaxed);
    atomic_store_explicit(&entry->entry, KVIST_ENTRY_NONE, memory_order_relaxed);
    set_state(pool, slot, KVIST_SLOT_FREE);
    push_free(pool, slot);
}

void kvist_slot_add_segment(struct kvist_store_pool *pool, struct kvist_segment *segment)
{
    KVIST_CHECK(segment->life == KVIST_LIFE_LIVE);
    segment->free_head = KVIST_SLOT_NONE;
    segment->free_count = 0;
    uint32_t first = segment->index * pool->slots_per_segment;
    pool->counts[KVIST_SLOT_FREE] += pool->slots_per_segment;
    memset(segment->counts, 0, sizeof(segment->counts));
    segment->counts[KVIST_SLOT_FREE] = pool->slots_per_segment;
    /* From the last to the first, so that slots are handed out in the order of their addresses. */
    for (uint32_t left = pool->slots_per_segment; left > 0; left--) {
        uint32_t slot = first + left - 1;
        pool->states[slot] = KVIST_SLOT_FREE;
        pool->slots[slot] = (struct kvist_slot){.entry = KVIST_ENTRY_NONE};
        push_free(pool, slot);
    }
}

void kvist_slot_adopt(struct kvist_store_pool *pool, uint32_t slot, enum kvist_slot_state state)
{
    struct kvist_segment *segment = kvist_slot_segment(pool, slot);
    struct kvist_slot *info = &pool->slots[slot];
    struct kvist_slot_entry *entry = &pool->map.slots[slot];
    if (state == KVIST_SLOT_FREE) {
        atomic_store_explicit(&entry->flags, 0, memory_order_relaxed);
    }
    if (state != KVIST_SLOT_GRANTED) {
        atomic_store_explicit(&entry->reservation, 0, memory_order_relaxed);
    }
    atomic_store_explicit(&entry->entry, info->entry, memory_order_relaxed);
    pool->states[slot] = (uint8_t)state;
    pool->counts[state]++;
    segment->counts[state]++;
    atomic_store_explicit(&entry->state, (uint32_t)state, memory_order_release);
    if (state == KVIST_SLOT_FREE) {
        push_free(pool, slot);
    } else if (state == KVIST_SLOT_READY) {
        pool->block_bytes_ready += kvist_slot_block_bytes(pool, slot);
    } else if (state == KVIST_SLOT_RETIRED) {
        info->next = pool->retired_head;
        pool->retired_head = slot;
    }
}

void kvist_slot_remove_segment(struct kvist_store_pool *pool, struct kvist_segment *segment)
{
    KVIST_CHECK(segment->life == KVIST_LIFE_DRAINING);
    KVIST_CHECK(segment->free_count == pool->slots_per_segment);
    pool->counts[KVIST_SLOT_FREE] -= pool->slots_per_segment;
    segment->counts[KVIST_SLOT_FREE] = 0;
    segment->free_head = KVIST_SLOT_NONE;
    segment->free_count = 0;
}

void kvist_slot_set_draining(struct kvist_store_pool *pool,
                             struct kvist_segment *segment,
                             bool draining)
{
    KVIST_CHECK(segment->life == (draining ? KVIST_LIFE_LIVE : KVIST_LIFE_DRAINING));
    if (draining) {
        segment->life = KVIST_LIFE_DRAINING;
        pool->usable_free -= segment->free_count;
        pool->draining_count++;
        pool->store->draining_bytes += segment->bytes;
    } else {
        segment->life = KVIST_LIFE_LIVE;
        pool->usable_free += segment->free_count;
        pool->draining_count--;
        pool->store->draining_bytes -= segment->bytes;
    }
}

uint32_t kvist_slot_take(struct kvist_store_pool *pool,
                         struct kvist_segment *segment,
                         enum kvist_slot_state state)
{
    if (segment->life != KVIST_LIFE_LIVE || segment->free_count == 0) {
        return KVIST_SLOT_NONE;
    }
    uint32_t slot = segment->free_head;
    struct kvist_slot *info = &pool->slots[slot];
    segment->free_head = info->next;
    segment->free_count--;
    pool->usable_free--;
    info->next = KVIST_SLOT_NONE;
    info->epoch = pool->epoch;
    struct kvist_slot_entry *entry = &pool->map.slots[slot];
    uint64_t generation = kvist_slot_generation(pool, slot) + 1;
    atomic_store_explicit(&entry->generation, generation, memory_order_relaxed);
    atomic_store_explicit(&entry->pool_generation, pool->about.generation, memory_order_relaxed);
    set_state(pool, slot, state);
    return slot;
}

void kvist_slot_prepare(struct kvist_store_pool *pool, uint32_t slot, uint64_t block_bytes)
{
    atomic_store_explicit(&pool->map.slots[slot].block_bytes, block_bytes, memory_order_relaxed);
}

void kvist_slot_publish(struct kvist_store_pool *pool,
                        uint32_t slot,
                        uint32_t position,
                        const struct kvist_entry_copy *entry)
{
    pool->slots[slot].entry = position;
    struct kvist_slot_entry *shared = &pool->map.slots[slot];
    atomic_store_explicit(&shared->entry, position, memory_order_relaxed);
    atomic_store_explicit(&shared->reservation, 0, memory_order_relaxed);
    set_state(pool, slot, KVIST_SLOT_READY);
    /* Last: what was found is a block to the next daemon, too, when this one is killed. */
    kvist_map_write(&pool->map, position, entry);
    pool->block_bytes_ready += kvist_slot_block_bytes(pool, slot);
    pool->ops->insert(pool->policy, slot, entry->key[0]);
}

void kvist_slot_retire(struct kvist_store_pool *pool, uint32_t slot)
{
    KVIST_CHECK(kvist_slot_state_of(pool, slot) == KVIST_SLOT_READY);
    uint32_t position = pool->slots[slot].entry;
    struct kvist_entry_copy entry;
    kvist_map_read(&pool->map, position, &entry);
    KVIST_CHECK(entry.state == KVIST_ENTRY_READY && entry.slot == slot);
    entry.state = entry.extent != 0 ? KVIST_ENTRY_NVME : KVIST_ENTRY_TOMBSTONE;
    kvist_map_write(&pool->map, position, &entry);
    set_state(pool, slot, KVIST_SLOT_RETIRED);
    pool->block_bytes_ready -= kvist_slot_block_bytes(pool, slot);
}

void kvist_slot_restore(struct kvist_store_pool *pool, uint32_t slot)
{
    KVIST_CHECK(kvist_slot_state_of(pool, slot) == KVIST_SLOT_RETIRED);
    uint32_t position = pool->slots[slot].entry;
    struct kvist_entry_copy entry;
    kvist_map_read(&pool->map, position, &entry);
    entry.state = KVIST_ENTRY_READY;
    entry.slot = slot;
    entry.generation = kvist_slot_generation(pool, slot);
    set_state(pool, slot, KVIST_SLOT_READY);
    kvist_map_write(&pool->map, position, &entry);
    pool->block_bytes_ready += kvist_slot_block_bytes(pool, slot);
}

void kvist_slot_forget(struct kvist_store_pool *pool, uint32_t slot, bool evicted)
{
    KVIST_CHECK(kvist_slot_state_of(pool, slot) == KVIST_SLOT_RETIRED);
    struct kvist_entry_copy entry;
    kvist_map_read(&pool->map, pool->slots[slot].entry, &entry);
    KVIST_CHECK(entry.state != KVIST_ENTRY_EMPTY);
    pool->ops->remove(pool->policy, slot, entry.key[0], evicted);
}

void kvist_slot_settle(struct kvist_store_pool *pool, uint32_t slot)
{
    KVIST_CHECK(kvist_slot_state_of(pool, slot) == KVIST_SLOT_RETIRED);
    struct kvist_slot *info = &pool->slots[slot];
    struct kvist_entry_copy entry;
    kvist_map_read(&pool->map, info->entry, &entry);
    if (entry.state == KVIST_ENTRY_TOMBSTONE) {
        kvist_map_settle(&pool->map, info->entry);
    }
    info->entry = KVIST_ENTRY_NONE;
    make_free(pool, slot);
}

void kvist_slot_discard(struct kvist_store_pool *pool, uint32_t slot, uint64_t key_tag)
{
    KVIST_CHECK(kvist_slot_state_of(pool, slot) == KVIST_SLOT_READY);
    struct kvist_slot *info = &pool->slots[slot];
    pool->ops->remove(pool->policy, slot, key_tag, false);
    pool->block_bytes_ready -= kvist_slot_block_bytes(pool, slot);
    info->entry = KVIST_ENTRY_NONE;
    info->next = pool->retired_head;
    pool->retired_head = slot;
    set_state(pool, slot, KVIST_SLOT_RETIRED);
}

void kvist_slot_sweep_retired(struct kvist_store_pool *pool)
{
    uint32_t slot = pool->retired_head;
    pool->retired_head = KVIST_SLOT_NONE;
    while (slot != KVIST_SLOT_NONE) {
        struct kvist_slot *info = &pool->slots[slot];
        uint32_t next = info->next;
        if (info->pins > 0 || (info->flags & KVIST_FLAG_LEASED) != 0) {
            info->flags &= (uint8_t)~KVIST_FLAG_LEASED;
            info->next = pool->retired_head;
            pool->retired_head = slot;
        } else {
            make_free(pool, slot);
        }
        slot = next;
    }
}

void kvist_slot_drop(struct kvist_store_pool *pool, uint32_t slot)
{
    enum kvist_slot_state state = kvist_slot_state_of(pool, slot);
    KVIST_CHECK(state == KVIST_SLOT_GRANTED || state == KVIST_SLOT_LOADING);
    pool->slots[slot].entry = KVIST_ENTRY_NONE;
    make_free(pool, slot);
}

struct kvist_slot_name kvist_slot_name_of(const struct kvist_store_pool *pool, uint32_t slot)
{
    return (struct kvist_slot_name){
        .pool_index = pool->index,
        .pool_serial = pool->serial,
        .slot = slot,
        .generation = kvist_slot_generation(pool, slot),
    };
}

struct kvist_store_pool *kvist_slot_resolve(const struct kvist_store *store,
                                            const struct kvist_slot_name *name)
{
    struct kvist_store_pool *pool = store->pools[name->pool_index];
    bool same = pool != NULL && pool->serial == name->pool_serial && name->slot < pool->slot_max &&
                kvist_slot_state_of(pool, name->slot) == KVIST_SLOT_READY &&
                kvist_slot_generation(pool, name->slot) == name->generation;
    return same ? pool : NULL;
}
