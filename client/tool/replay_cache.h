/*
 * replay_cache - a pool of slots without bytes, whose evictions a real policy chooses.
 *
 * Role        calls a policy as storage/ does: what a request finds is touched from its tail, as
 *             libkvist does; what it lacks is inserted root first, and renewed from its tail at the
 *             end of a turn. And MIN, which knows the future, as a bound.
 * Units       blocks are numbers below block_max; a hit is a block of the longest prefix that is
 *             there when the request comes
 */
#ifndef KVIST_TOOL_REPLAY_CACHE_H
#define KVIST_TOOL_REPLAY_CACHE_H

#include "client/tool/replay_trace.h"
#include "storage/policy/policy.h"

struct kvist_replay_cache;

KVIST_MUST_USE enum kvist_status kvist_replay_cache_create(const struct kvist_policy_ops *ops,
                                                           uint32_t slot_count,
                                                           uint32_t block_max,
                                                           struct kvist_replay_cache **cache_out);
void kvist_replay_cache_destroy(struct kvist_replay_cache **cache);

/** Blocks of the request's prefix that are there; they are touched. */
uint32_t
kvist_replay_cache_find(struct kvist_replay_cache *cache, const uint32_t *blocks, uint32_t count);

/** Store a block that is not there. @return false: there is no free slot, or it is there */
bool kvist_replay_cache_store(struct kvist_replay_cache *cache, uint32_t block);

/** End a turn: put what was stored in order. */
void kvist_replay_cache_turn(struct kvist_replay_cache *cache);

/** Evict up to `want` blocks. @return how many went */
uint32_t kvist_replay_cache_evict(struct kvist_replay_cache *cache, uint32_t want);

bool kvist_replay_cache_has(const struct kvist_replay_cache *cache, uint32_t block);
uint32_t kvist_replay_cache_free(const struct kvist_replay_cache *cache);

/**
 * Find, then store what was not found.
 *
 * @param headroom  false: a block is evicted when a slot is needed; true: as kvistd does, a
 *                  sixteenth of the slots is kept free, and as many more are freed at a time
 * @return hits
 */
uint32_t kvist_replay_cache_request(struct kvist_replay_cache *cache,
                                    const uint32_t *blocks,
                                    uint32_t count,
                                    bool headroom);

/** Hits of a cache of that size that evicts what is needed last. NO_MEMORY. */
KVIST_MUST_USE enum kvist_status
kvist_replay_min(const struct kvist_replay_trace *trace, uint32_t slot_count, uint64_t *hits_out);

#endif
