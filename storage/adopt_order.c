/*
 * adopt_order - in which order adopted blocks will be evicted.
 *
 * Role        nothing says when a block was last used; but the deeper it is in its chain, the sooner
 *             it goes, so that leaves go before the prefix that they stand on. Touches do the rest.
 */
#include "storage/internal.h"

#include <stdlib.h>

struct chain_link {
    uint64_t tag;
    uint64_t parent_tag;
    uint32_t slot;
    uint32_t depth; /* 0: not known yet */
    uint32_t next;  /* of the same place in the table, + 1 */
};

static uint32_t place_of(uint64_t tag, uint32_t mask)
{
    return (uint32_t)(tag * 0x9e3779b97f4a7c15ULL >> 32) & mask;
}

static uint32_t
link_of(const struct chain_link *links, const uint32_t *table, uint32_t mask, uint64_t tag)
{
    uint32_t at = table[place_of(tag, mask)];
    while (at != 0 && links[at - 1].tag != tag) {
        at = links[at - 1].next;
    }
    return at;
}

/* Depth of every block below its root, or below the first ancestor that is not in DRAM. A circle of
   parents, which nobody but a faulty engine makes, is cut where it is met. */
static void measure_depths(struct chain_link *links,
                           uint32_t count,
                           const uint32_t *table,
                           uint32_t mask,
                           uint32_t *path)
{
    for (uint32_t index = 0; index < count; index++) {
        uint32_t length = 0;
        uint32_t at = index + 1;
        while (at != 0 && links[at - 1].depth == 0) {
            links[at - 1].depth = UINT32_MAX;
            path[length++] = at - 1;
            at = links[at - 1].parent_tag != 0
                     ? link_of(links, table, mask, links[at - 1].parent_tag)
                     : 0;
        }
        uint32_t depth = at != 0 && links[at - 1].depth != UINT32_MAX ? links[at - 1].depth : 0;
        while (length > 0) {
            links[path[--length]].depth = ++depth;
        }
    }
}

static int deeper_first(const void *one, const void *other)
{
    const struct chain_link *left = one;
    const struct chain_link *right = other;
    if (left->depth != right->depth) {
        return left->depth > right->depth ? -1 : 1;
    }
    return left->slot < right->slot ? -1 : left->slot > right->slot;
}

enum kvist_status kvist_adopt_order(struct kvist_store_pool *pool)
{
    uint32_t count = pool->counts[KVIST_SLOT_READY];
    uint32_t mask = 1;
    while (mask < count && mask < 1U << 30) {
        mask *= 2;
    }
    struct chain_link *links = calloc((size_t)count + 1, sizeof(links[0]));
    uint32_t *table = calloc(mask, sizeof(table[0]));
    uint32_t *path = calloc((size_t)count + 1, sizeof(path[0]));
    if (links == NULL || table == NULL || path == NULL) {
        free(links);
        free(table);
        free(path);
        return KVIST_NO_MEMORY;
    }
    mask--;
    uint32_t filled = 0;
    for (uint32_t slot = 0; slot < pool->slot_max && filled < count; slot++) {
        if (kvist_slot_state_of(pool, slot) != KVIST_SLOT_READY) {
            continue;
        }
        struct kvist_entry_copy entry;
        kvist_map_read(&pool->map, pool->slots[slot].entry, &entry);
        uint32_t *place = &table[place_of(entry.key[0], mask)];
        links[filled] = (struct chain_link){
            .tag = entry.key[0], .parent_tag = entry.parent_tag, .slot = slot, .next = *place};
        *place = ++filled;
    }
    measure_depths(links, count, table, mask, path);
    qsort(links, count, sizeof(links[0]), deeper_first);
    for (uint32_t index = 0; index < count; index++) {
        pool->ops->insert(pool->policy, links[index].slot, links[index].tag);
        uint32_t flags = atomic_load_explicit(&pool->map.slots[links[index].slot].flags,
                                              memory_order_relaxed);
        if ((flags & KVIST_SLOT_CHECKSUMMED) == 0) {
            kvist_spill_queue_sum(pool, links[index].slot);
        }
    }
    free(links);
    free(table);
    free(path);
    return KVIST_OK;
}
