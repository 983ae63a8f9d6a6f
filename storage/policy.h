/*
 * policy - which block goes first.
 *
 * Role        orders the READY slots of one pool for eviction. Knows slots by number, nothing else.
 * Threads     the loop thread
 * Limits      slot_max slots, allocated at creation: no call allocates
 * Invariants  a slot is in the policy exactly while it is READY
 * Source      LRU; the interface also fits S3-FIFO and ARC-like policies: they see inserts,
 * touches, removals with the key's tag for ghost lists, and propose victims
 */
#ifndef KVIST_STORAGE_POLICY_H
#define KVIST_STORAGE_POLICY_H

#include <kvist/status.h>

#include <stdint.h>

struct kvist_policy;

struct kvist_policy_ops {
    const char *name;
    enum kvist_status (*create)(uint32_t slot_max, struct kvist_policy **policy_out);
    void (*destroy)(struct kvist_policy **policy);
    /* A block was published in slot; key_tag names it in ghost lists. */
    void (*insert)(struct kvist_policy *policy, uint32_t slot, uint64_t key_tag);
    /* It was used. A chain is touched from its tail, so that its root is the most recent. */
    void (*touch)(struct kvist_policy *policy, uint32_t slot);
    /* It is no longer READY; evicted: by the policy's own proposal. */
    void (*remove)(struct kvist_policy *policy, uint32_t slot, uint64_t key_tag, int evicted);
    /* The next victim after `after` (KVIST_SLOT_NONE: the first), KVIST_SLOT_NONE: no more. */
    uint32_t (*victim)(struct kvist_policy *policy, uint32_t after);
    /* The most recently used slots first, for saving the hot set; as victim(). */
    uint32_t (*hottest)(struct kvist_policy *policy, uint32_t after);
};

extern const struct kvist_policy_ops kvist_policy_lru;

#endif
