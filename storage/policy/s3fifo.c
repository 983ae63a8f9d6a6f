/*
 * s3fifo - new blocks pass through a small queue, and only those used there stay.
 *
 * Role        two queues in order of arrival. What leaves the small one (a tenth of the blocks)
 *             unused is evicted and remembered; what was used there, or is remembered, goes
 *             to the main one, where each use buys another round, up to three.
 * Source      Yang et al., "FIFO queues are all you need for cache eviction", SOSP '23
 */
#include "proto/shm/layout.h"
#include "storage/policy/ghosts.h"
#include "storage/policy/list.h"
#include "storage/policy/policy.h"

#include <stdlib.h>

#define S3FIFO_MAGIC   0x53334649U
#define SMALL_OF_SLOTS 10U
#define USES_MAX       3U

enum queue {
    QUEUE_SMALL,
    QUEUE_MAIN,
    QUEUES,
};

struct s3_note {
    uint8_t queue;
    uint8_t uses; /* since it came into the queue, less rounds */
};

struct kvist_policy {
    uint32_t magic;
    uint32_t slot_max; /* sentinels: slot_max + queue */
    uint32_t counts[QUEUES];
    uint32_t hands[QUEUES]; /* of the walk: the next to look at */
    uint32_t small_left;    /* of the small queue, ahead of its hand */
    struct kvist_ghosts *ghosts;
    struct s3_note *notes; /* [slot_max] */
    struct kvist_list_link links[];
};

static void s3_destroy(struct kvist_policy **policy)
{
    if (*policy != NULL) {
        KVIST_CHECK((*policy)->magic == S3FIFO_MAGIC);
        (*policy)->magic = 0;
        kvist_ghosts_destroy(&(*policy)->ghosts);
        free((*policy)->notes);
        free(*policy);
        *policy = NULL;
    }
}

static enum kvist_status s3_create(uint32_t slot_max, struct kvist_policy **policy_out)
{
    struct kvist_policy *policy =
        calloc(1, sizeof(*policy) + ((size_t)slot_max + QUEUES) * sizeof(policy->links[0]));
    if (policy == NULL) {
        return KVIST_NO_MEMORY;
    }
    policy->magic = S3FIFO_MAGIC;
    policy->slot_max = slot_max;
    policy->notes = calloc(slot_max, sizeof(policy->notes[0]));
    enum kvist_status status = policy->notes == NULL ? KVIST_NO_MEMORY : KVIST_OK;
    if (status == KVIST_OK) {
        status = kvist_ghosts_create(slot_max, &policy->ghosts);
    }
    if (status != KVIST_OK) {
        s3_destroy(&policy);
        return status;
    }
    for (uint32_t queue = 0; queue < QUEUES; queue++) {
        kvist_list_init(policy->links, slot_max + queue);
    }
    *policy_out = policy;
    return KVIST_OK;
}

static void push(struct kvist_policy *policy, uint32_t slot, enum queue queue)
{
    policy->notes[slot].queue = (uint8_t)queue;
    policy->counts[queue]++;
    kvist_list_push(policy->links, policy->slot_max + queue, slot);
}

static void take_out(struct kvist_policy *policy, uint32_t slot)
{
    policy->counts[policy->notes[slot].queue]--;
    kvist_list_remove(policy->links, slot);
}

static uint32_t member_count(const struct kvist_policy *policy)
{
    return policy->counts[QUEUE_SMALL] + policy->counts[QUEUE_MAIN];
}

static void s3_insert(struct kvist_policy *policy, uint32_t slot, uint64_t key_tag)
{
    KVIST_CHECK(slot < policy->slot_max);
    bool lately = kvist_ghosts_take(policy->ghosts, key_tag) != 0;
    policy->notes[slot].uses = 0;
    push(policy, slot, lately ? QUEUE_MAIN : QUEUE_SMALL);
    kvist_ghosts_make_room(policy->ghosts, member_count(policy));
}

static void s3_touch(struct kvist_policy *policy, uint32_t slot)
{
    KVIST_CHECK(slot < policy->slot_max && kvist_list_has(policy->links, slot));
    if (policy->notes[slot].uses < USES_MAX) {
        policy->notes[slot].uses++;
    }
}

static void s3_renew(struct kvist_policy *policy, uint32_t slot)
{
    KVIST_CHECK(slot < policy->slot_max);
    take_out(policy, slot);
    push(policy, slot, (enum queue)policy->notes[slot].queue);
}

static void s3_remove(struct kvist_policy *policy, uint32_t slot, uint64_t key_tag, bool evicted)
{
    KVIST_CHECK(slot < policy->slot_max);
    take_out(policy, slot);
    if (evicted && policy->notes[slot].queue == QUEUE_SMALL) {
        (void)kvist_ghosts_put(policy->ghosts, key_tag, 1);
    }
}

/* Look at the next slot of a queue. @return it, when it may go; else it was given another round */
static uint32_t step(struct kvist_policy *policy, enum queue queue)
{
    uint32_t slot = policy->hands[queue];
    policy->hands[queue] = kvist_list_hotter(policy->links, slot);
    policy->small_left -= queue == QUEUE_SMALL;
    if (policy->notes[slot].uses == 0) {
        return slot;
    }
    take_out(policy, slot);
    if (queue == QUEUE_SMALL) {
        policy->notes[slot].uses = 0;
    } else {
        policy->notes[slot].uses--;
    }
    push(policy, slot, QUEUE_MAIN);
    if (policy->hands[QUEUE_MAIN] == policy->slot_max + QUEUE_MAIN) {
        policy->hands[QUEUE_MAIN] = slot; /* the hand stood at the end, which has moved on */
    }
    return KVIST_SLOT_NONE;
}

static uint32_t s3_victim(struct kvist_policy *policy, uint32_t after)
{
    const uint32_t *hands = policy->hands;
    if (after == KVIST_SLOT_NONE) {
        for (uint32_t queue = 0; queue < QUEUES; queue++) {
            policy->hands[queue] = kvist_list_hotter(policy->links, policy->slot_max + queue);
        }
        policy->small_left = policy->counts[QUEUE_SMALL];
    }
    uint32_t small = member_count(policy) / SMALL_OF_SLOTS;
    uint32_t slot = KVIST_SLOT_NONE;
    while (slot == KVIST_SLOT_NONE) {
        bool small_ended = hands[QUEUE_SMALL] == policy->slot_max + QUEUE_SMALL;
        bool main_ended = hands[QUEUE_MAIN] == policy->slot_max + QUEUE_MAIN;
        if (small_ended && main_ended) {
            break;
        }
        bool from_small = !small_ended && (main_ended || policy->small_left >= small);
        slot = step(policy, from_small ? QUEUE_SMALL : QUEUE_MAIN);
    }
    return slot;
}

static uint32_t s3_hottest(const struct kvist_policy *policy, uint32_t after)
{
    uint32_t next = kvist_list_colder(
        policy->links, after == KVIST_SLOT_NONE ? policy->slot_max + QUEUE_MAIN : after);
    if (next == policy->slot_max + QUEUE_MAIN) {
        next = kvist_list_colder(policy->links, policy->slot_max + QUEUE_SMALL);
    }
    return next >= policy->slot_max ? KVIST_SLOT_NONE : next;
}

const struct kvist_policy_ops kvist_policy_s3fifo = {
    .name = "s3fifo",
    .create = s3_create,
    .destroy = s3_destroy,
    .insert = s3_insert,
    .touch = s3_touch,
    .renew = s3_renew,
    .remove = s3_remove,
    .victim = s3_victim,
    .hottest = s3_hottest,
};
