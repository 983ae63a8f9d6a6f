/* MIN (Belady, 1966): what is needed last goes first; of a request's blocks the last one. */
#include "client/tool/replay_cache.h"

#include <stdlib.h>
#include <string.h>

#define NOT_THERE UINT32_MAX

struct min_cache {
    const uint32_t *next; /* [access_count] the access at which the same block is needed next */
    uint32_t *needs;      /* by block: the next access that needs it */
    uint32_t *places;     /* by block: in the heap */
    uint32_t *heap;       /* blocks, the one needed last on top */
    uint32_t count;
};

static bool is_later(const struct min_cache *cache, uint32_t one, uint32_t other)
{
    return cache->needs[one] > cache->needs[other];
}

static void put(struct min_cache *cache, uint32_t place, uint32_t block)
{
    cache->heap[place] = block;
    cache->places[block] = place;
}

/* A block's need has moved: have it where it belongs. */
static void settle(struct min_cache *cache, uint32_t block)
{
    uint32_t place = cache->places[block];
    while (place > 0 && is_later(cache, block, cache->heap[(place - 1) / 2])) {
        put(cache, place, cache->heap[(place - 1) / 2]);
        place = (place - 1) / 2;
    }
    for (;;) {
        uint32_t child = 2 * place + 1;
        if (child + 1 < cache->count &&
            is_later(cache, cache->heap[child + 1], cache->heap[child])) {
            child++;
        }
        if (child >= cache->count || !is_later(cache, cache->heap[child], block)) {
            break;
        }
        put(cache, place, cache->heap[child]);
        place = child;
    }
    put(cache, place, block);
}

static void need(struct min_cache *cache, uint32_t block, uint32_t access)
{
    cache->needs[block] = cache->next[access];
    if (cache->places[block] == NOT_THERE) {
        cache->places[block] = cache->count;
        cache->heap[cache->count++] = block;
    }
    settle(cache, block);
}

static void evict(struct min_cache *cache)
{
    uint32_t block = cache->heap[0];
    uint32_t last = cache->heap[--cache->count];
    cache->places[block] = NOT_THERE;
    if (last != block) {
        cache->places[last] = 0;
        settle(cache, last);
    }
}

static uint64_t
run(struct min_cache *cache, const struct kvist_replay_trace *trace, uint32_t slot_count)
{
    uint64_t hits = 0;
    uint32_t access = 0;
    for (uint32_t request = 0; request < trace->request_count; request++) {
        bool prefix = true;
        for (; access < trace->ends[request]; access++) {
            prefix = prefix && cache->places[trace->blocks[access]] != NOT_THERE;
            hits += prefix;
            need(cache, trace->blocks[access], access);
        }
        while (cache->count > slot_count) {
            evict(cache);
        }
    }
    return hits;
}

enum kvist_status
kvist_replay_min(const struct kvist_replay_trace *trace, uint32_t slot_count, uint64_t *hits_out)
{
    struct min_cache cache = {.count = 0};
    enum kvist_status status = KVIST_NO_MEMORY;
    uint32_t *next = malloc(trace->access_count * sizeof(next[0]));
    cache.next = next;
    cache.needs = malloc(trace->block_count * sizeof(cache.needs[0]));
    cache.places = malloc(trace->block_count * sizeof(cache.places[0]));
    cache.heap = malloc(trace->block_count * sizeof(cache.heap[0]));
    if (next == NULL || cache.needs == NULL || cache.places == NULL || cache.heap == NULL) {
        goto free_all;
    }
    memset(cache.needs, 0xff, trace->block_count * sizeof(cache.needs[0]));
    memset(cache.places, 0xff, trace->block_count * sizeof(cache.places[0]));
    for (uint32_t access = trace->access_count; access > 0; access--) {
        next[access - 1] = cache.needs[trace->blocks[access - 1]];
        cache.needs[trace->blocks[access - 1]] = access - 1;
    }
    *hits_out = run(&cache, trace, slot_count);
    status = KVIST_OK;

free_all:
    free(cache.heap);
    free(cache.places);
    free(cache.needs);
    free(next);
    return status;
}
