/*
 * save - the hot set to NVMe: for `kvist save`, and before an orderly stop.
 *
 * Role        writes what is hot and in DRAM alone, hottest first, then syncs. Counts what could not
 *             be written, and says why.
 * Limits      no more than stays on NVMe: later writes would push out what was saved before
 * Errors      a block that was not written gets another turn after a wait; when several waits in a
 *             row have not helped, all that is left counts as unsaved
 */
#include "storage/internal.h"

#include <stdio.h>
#include <stdlib.h>

#define GIVE_UP_WAIT_US 1600000U /* the waits before this one add up to 3 s */

static size_t count_ready(const struct kvist_store *store)
{
    size_t count = 0;
    for (uint32_t index = 0; index < store->pool_high; index++) {
        count += store->pools[index] != NULL ? store->pools[index]->counts[KVIST_SLOT_READY] : 0;
    }
    return count;
}

static uint64_t list_pool(struct kvist_save *save, struct kvist_store_pool *pool, uint64_t bytes)
{
    for (uint32_t slot = pool->ops->hottest(pool->policy, KVIST_SLOT_NONE);
         slot != KVIST_SLOT_NONE && bytes > 0;
         slot = pool->ops->hottest(pool->policy, slot)) {
        if (!kvist_spill_has_copy(pool, slot)) {
            uint64_t block_bytes = kvist_slot_block_bytes(pool, slot);
            bytes -= block_bytes < bytes ? block_bytes : bytes;
            save->names[save->name_count++] = kvist_slot_name_of(pool, slot);
        }
    }
    return bytes;
}

enum kvist_status kvist_store_save(struct kvist_store *store, kvist_store_saved_fn *done, void *ctx)
{
    KVIST_CHECK(store->magic == STORE_MAGIC);
    if (store->options.tier == NULL) {
        return KVIST_UNSUPPORTED;
    }
    if (store->save.running) {
        return KVIST_BUSY;
    }
    struct kvist_save save = {.running = true, .done = done, .ctx = ctx};
    save.names = malloc((count_ready(store) + 1) * sizeof(save.names[0]));
    if (save.names == NULL) {
        return KVIST_NO_MEMORY;
    }
    uint64_t bytes = store->options.tier->bytes_max / 4 * 3;
    for (uint32_t index = 0; index < store->pool_high; index++) {
        if (store->pools[index] != NULL) {
            bytes = list_pool(&save, store->pools[index], bytes);
        }
    }
    store->save = save;
    store->spill_after_us = 0; /* whoever asks has reason to think that it works now */
    store->spill_wait_us = 0;
    return KVIST_OK;
}

static void end(struct kvist_store *store, enum kvist_status status)
{
    struct kvist_save ended = store->save;
    struct kvist_store_stats stats;
    kvist_store_stats(store, &stats);
    if (ended.saved.unsaved_blocks > 0) {
        status = ended.saved.status;
    }
    ended.saved.status = status;
    if (status != KVIST_OK) {
        (void)snprintf(ended.saved.why,
                       sizeof(ended.saved.why),
                       "%s",
                       stats.tier.degraded[0] != '\0' ? stats.tier.degraded
                                                      : kvist_status_text(status));
    }
    store->save = (struct kvist_save){.running = false};
    free(ended.names);
    ended.done(ended.ctx, &ended.saved);
}

static void synced(void *ctx, enum kvist_status status, const struct kvist_tier_block *block)
{
    (void)block;
    end(ctx, status);
}

void kvist_save_again(struct kvist_store *store,
                      const struct kvist_slot_name *name,
                      enum kvist_status why)
{
    struct kvist_save *save = &store->save;
    if (save->running) { /* else the store is being closed */
        KVIST_CHECK(save->name_next > 0);
        save->names[--save->name_next] = *name;
        save->saved.status = why;
    }
}

/* The next one is not written any more. */
static void skip(struct kvist_store *store, enum kvist_status why)
{
    struct kvist_save *save = &store->save;
    const struct kvist_slot_name *name = &save->names[save->name_next++];
    const struct kvist_store_pool *pool = kvist_slot_resolve(store, name);
    if (pool != NULL && !kvist_spill_has_copy(pool, name->slot)) {
        save->saved.status = why;
        save->saved.unsaved_blocks++;
        save->saved.unsaved_bytes += kvist_slot_block_bytes(pool, name->slot);
    }
}

/* Begin to write the next one. @return false: not now */
static bool begin(struct kvist_store *store)
{
    struct kvist_save *save = &store->save;
    const struct kvist_slot_name *name = &save->names[save->name_next];
    struct kvist_store_pool *pool = kvist_slot_resolve(store, name);
    uint8_t flags = pool != NULL ? pool->slots[name->slot].flags : 0;
    if (pool == NULL || (flags & KVIST_FLAG_UNSPILLABLE) != 0 ||
        kvist_spill_has_copy(pool, name->slot)) {
        skip(store, KVIST_NO_SPACE);
        return true;
    }
    if ((flags & KVIST_FLAG_SPILLING) != 0) {
        return false; /* how that ends will be seen */
    }
    enum kvist_status status = kvist_spill_start(pool, name->slot, true);
    if (status == KVIST_OK) {
        save->name_next++;
    } else if (status != KVIST_BUSY) {
        kvist_spill_wait(store);
    }
    return status == KVIST_OK;
}

static bool tier_is_settling(const struct kvist_store *store)
{
    if (!store->tier_loaded) {
        return true;
    }
    for (uint32_t index = 0; index < store->pool_high; index++) {
        const struct kvist_store_pool *pool = store->pools[index];
        if (pool != NULL && kvist_pool_is_settling(pool)) {
            return true;
        }
    }
    return false;
}

void kvist_save_turn(struct kvist_store *store)
{
    struct kvist_save *save = &store->save;
    if (!save->running || save->syncing) {
        return;
    }
    if (store->closing) {
        end(store, KVIST_CLOSED);
        return;
    }
    if (store->tier == NULL) {
        while (save->name_next < save->name_count) {
            skip(store, KVIST_UNAVAILABLE);
        }
        end(store, KVIST_OK);
        return;
    }
    if (tier_is_settling(store)) {
        return;
    }
    while (store->spill_wait_us > GIVE_UP_WAIT_US && save->name_next < save->name_count) {
        skip(store, save->saved.status != KVIST_OK ? save->saved.status : KVIST_UNAVAILABLE);
    }
    while (save->name_next < save->name_count && !kvist_spill_waits(store) && begin(store)) {
    }
    if (save->name_next < save->name_count || save->in_flight > 0) {
        return;
    }
    enum kvist_status status = kvist_tier_sync(store->tier, synced, store);
    if (status == KVIST_OK) {
        save->syncing = true;
    } else if (status != KVIST_BUSY) {
        end(store, status);
    }
}
