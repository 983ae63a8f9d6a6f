#include "client/tool/replay_cache.h"

#include "proto/base/check.h"
#include "proto/shm/layout.h"

#include <stdlib.h>

#define FRESH_MAX 1024U /* as KVIST_FRESH_MAX of storage/ */

struct kvist_replay_cache {
    const struct kvist_policy_ops *ops;
    struct kvist_policy *policy;
    uint32_t slot_count;
    uint32_t free_count;
    uint32_t fresh_count;
    uint32_t *free;            /* stack [slot_count] */
    uint32_t *blocks;          /* by slot */
    uint32_t *slots;           /* by block; KVIST_SLOT_NONE: not there */
    uint32_t *victims;         /* scratch [slot_count] */
    uint32_t fresh[FRESH_MAX]; /* slots */
};

void kvist_replay_cache_destroy(struct kvist_replay_cache **cache)
{
    if (*cache == NULL) {
        return;
    }
    if ((*cache)->policy != NULL) {
        (*cache)->ops->destroy(&(*cache)->policy);
    }
    free((*cache)->victims);
    free((*cache)->slots);
    free((*cache)->blocks);
    free((*cache)->free);
    free(*cache);
    *cache = NULL;
}

enum kvist_status kvist_replay_cache_create(const struct kvist_policy_ops *ops,
                                            uint32_t slot_count,
                                            uint32_t block_max,
                                            struct kvist_replay_cache **cache_out)
{
    struct kvist_replay_cache *cache = calloc(1, sizeof(*cache));
    if (cache == NULL) {
        return KVIST_NO_MEMORY;
    }
    cache->ops = ops;
    cache->slot_count = slot_count;
    cache->free = calloc(slot_count, sizeof(cache->free[0]));
    cache->blocks = calloc(slot_count, sizeof(cache->blocks[0]));
    cache->slots = calloc(block_max, sizeof(cache->slots[0]));
    cache->victims = calloc(slot_count, sizeof(cache->victims[0]));
    if (cache->free == NULL || cache->blocks == NULL || cache->slots == NULL ||
        cache->victims == NULL || ops->create(slot_count, &cache->policy) != KVIST_OK) {
        kvist_replay_cache_destroy(&cache);
        return KVIST_NO_MEMORY;
    }
    memset(cache->slots, 0xff, block_max * sizeof(cache->slots[0]));
    for (uint32_t slot = slot_count; slot > 0; slot--) {
        cache->free[cache->free_count++] = slot - 1;
    }
    *cache_out = cache;
    return KVIST_OK;
}

bool kvist_replay_cache_has(const struct kvist_replay_cache *cache, uint32_t block)
{
    return cache->slots[block] != KVIST_SLOT_NONE;
}

uint32_t kvist_replay_cache_free(const struct kvist_replay_cache *cache)
{
    return cache->free_count;
}

uint32_t
kvist_replay_cache_find(struct kvist_replay_cache *cache, const uint32_t *blocks, uint32_t count)
{
    uint32_t hits = 0;
    while (hits < count && kvist_replay_cache_has(cache, blocks[hits])) {
        hits++;
    }
    for (uint32_t left = count; left > 0; left--) {
        if (kvist_replay_cache_has(cache, blocks[left - 1])) {
            cache->ops->touch(cache->policy, cache->slots[blocks[left - 1]]);
        }
    }
    return hits;
}

void kvist_replay_cache_turn(struct kvist_replay_cache *cache)
{
    while (cache->fresh_count > 0) {
        uint32_t slot = cache->fresh[--cache->fresh_count];
        if (cache->slots[cache->blocks[slot]] == slot) {
            cache->ops->renew(cache->policy, slot);
        }
    }
}

bool kvist_replay_cache_store(struct kvist_replay_cache *cache, uint32_t block)
{
    if (cache->free_count == 0 || kvist_replay_cache_has(cache, block)) {
        return false;
    }
    uint32_t slot = cache->free[--cache->free_count];
    cache->slots[block] = slot;
    cache->blocks[slot] = block;
    cache->ops->insert(cache->policy, slot, block);
    if (cache->fresh_count == FRESH_MAX) {
        kvist_replay_cache_turn(cache);
    }
    cache->fresh[cache->fresh_count++] = slot;
    return true;
}

uint32_t kvist_replay_cache_evict(struct kvist_replay_cache *cache, uint32_t want)
{
    uint32_t count = 0;
    /* As kvist_evict_blocks() of storage/, which looks one further than it takes. */
    for (uint32_t slot = cache->ops->victim(cache->policy, KVIST_SLOT_NONE);
         slot != KVIST_SLOT_NONE && count < want;
         slot = cache->ops->victim(cache->policy, slot)) {
        cache->victims[count++] = slot;
    }
    for (uint32_t index = 0; index < count; index++) {
        uint32_t slot = cache->victims[index];
        uint32_t block = cache->blocks[slot];
        cache->ops->remove(cache->policy, slot, block, true);
        cache->slots[block] = KVIST_SLOT_NONE;
        cache->free[cache->free_count++] = slot;
    }
    return count;
}

/* What kvist_evict_turn() of storage/ does for a pool that cannot grow. */
static void keep_headroom(struct kvist_replay_cache *cache)
{
    uint32_t sixteenth = cache->slot_count / 16;
    uint32_t low = sixteenth > 4 ? sixteenth : 4;
    low = low < cache->slot_count / 4 ? low : cache->slot_count / 4;
    if (cache->free_count < low) {
        kvist_replay_cache_turn(cache);
        uint32_t batch = sixteenth < 1024 ? sixteenth + 1 : 1024;
        (void)kvist_replay_cache_evict(cache, low - cache->free_count + batch);
    }
}

uint32_t kvist_replay_cache_request(struct kvist_replay_cache *cache,
                                    const uint32_t *blocks,
                                    uint32_t count,
                                    bool headroom)
{
    uint32_t hits = kvist_replay_cache_find(cache, blocks, count);
    for (uint32_t index = hits; index < count; index++) {
        if (kvist_replay_cache_has(cache, blocks[index])) {
            continue; /* its prefix is gone, so it was no hit */
        }
        if (cache->free_count == 0) {
            (void)kvist_replay_cache_evict(cache, 1);
        }
        (void)kvist_replay_cache_store(cache, blocks[index]);
        if (headroom) {
            keep_headroom(cache);
        }
    }
    kvist_replay_cache_turn(cache);
    return hits;
}
