/*
 * policy - which block goes first.
 *
 * Role        orders the READY slots of one pool for eviction. Knows slots by number and keys by
 *             their tags, nothing else. Its own library, which needs proto/ alone: `kvist replay`
 *             runs the same objects over a trace.
 * Threads     the loop thread
 * Limits      slot_max slots, allocated at creation as zero pages that become resident as slots are
 *             used: no call allocates. Bytes a slot: lru 8, s3fifo 26, reuse 76, ghosts included.
 * Cost        O(1) a call; s3fifo's victim() amortised over touches
 * Invariants  a slot is in the policy exactly while it is READY, or RETIRED and not settled yet.
 *             To rebuild one: insert() its slots from the coldest to the hottest.
 */
#ifndef KVIST_STORAGE_POLICY_POLICY_H
#define KVIST_STORAGE_POLICY_POLICY_H

#include <kvist/status.h>

#include <stdbool.h>
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
    /* As if it had been inserted just now, which is no use of it: a chain that was committed root
       first is renewed from its tail, and so is what cannot go because it is leased. */
    void (*renew)(struct kvist_policy *policy, uint32_t slot);
    /* It is no longer READY; evicted: by the policy's own proposal. */
    void (*remove)(struct kvist_policy *policy, uint32_t slot, uint64_t key_tag, bool evicted);
    /* The next victim after `after`, the one that the last call gave (KVIST_SLOT_NONE: the first);
       KVIST_SLOT_NONE: no more. Nothing else is called between the calls of a walk. */
    uint32_t (*victim)(struct kvist_policy *policy, uint32_t after);
    /* The slots from the last to go to the first, for saving the hot set. Changes nothing. */
    uint32_t (*hottest)(const struct kvist_policy *policy, uint32_t after);
};

extern const struct kvist_policy_ops kvist_policy_lru;
extern const struct kvist_policy_ops kvist_policy_s3fifo;
extern const struct kvist_policy_ops kvist_policy_reuse;

/* By kvist_store_options.eviction; the first is the default. */
enum kvist_eviction {
    KVIST_EVICTION_REUSE,
    KVIST_EVICTION_LRU,
    KVIST_EVICTION_S3FIFO,
    KVIST_EVICTIONS,
};

extern const struct kvist_policy_ops *const kvist_policies[KVIST_EVICTIONS];

#endif
