/*
 * lru - the least recently used block goes first.
 */
#include "proto/shm/layout.h"
#include "storage/policy/list.h"
#include "storage/policy/policy.h"

#include <stdlib.h>

#define LRU_MAGIC 0x4b4c5255U

struct kvist_policy {
    uint32_t magic;
    uint32_t slot_max; /* also the list's sentinel */
    struct kvist_list_link links[];
};

static enum kvist_status lru_create(uint32_t slot_max, struct kvist_policy **policy_out)
{
    /* calloc: a large block is zero pages that are not resident until a slot is used. */
    struct kvist_policy *policy =
        calloc(1, sizeof(*policy) + ((size_t)slot_max + 1) * sizeof(policy->links[0]));
    if (policy == NULL) {
        return KVIST_NO_MEMORY;
    }
    policy->magic = LRU_MAGIC;
    policy->slot_max = slot_max;
    kvist_list_init(policy->links, slot_max);
    *policy_out = policy;
    return KVIST_OK;
}

static void lru_destroy(struct kvist_policy **policy)
{
    if (*policy != NULL) {
        KVIST_CHECK((*policy)->magic == LRU_MAGIC);
        (*policy)->magic = 0;
        free(*policy);
        *policy = NULL;
    }
}

static void lru_insert(struct kvist_policy *policy, uint32_t slot, uint64_t key_tag)
{
    (void)key_tag;
    KVIST_CHECK(slot < policy->slot_max);
    kvist_list_push(policy->links, policy->slot_max, slot);
}

static void lru_remove(struct kvist_policy *policy, uint32_t slot, uint64_t key_tag, bool evicted)
{
    (void)key_tag;
    (void)evicted;
    KVIST_CHECK(slot < policy->slot_max);
    kvist_list_remove(policy->links, slot);
}

static void lru_touch(struct kvist_policy *policy, uint32_t slot)
{
    KVIST_CHECK(slot < policy->slot_max);
    kvist_list_remove(policy->links, slot);
    kvist_list_push(policy->links, policy->slot_max, slot);
}

static uint32_t lru_victim(struct kvist_policy *policy, uint32_t after)
{
    uint32_t next =
        kvist_list_hotter(policy->links, after == KVIST_SLOT_NONE ? policy->slot_max : after);
    return next == policy->slot_max ? KVIST_SLOT_NONE : next;
}

static uint32_t lru_hottest(const struct kvist_policy *policy, uint32_t after)
{
    uint32_t next =
        kvist_list_colder(policy->links, after == KVIST_SLOT_NONE ? policy->slot_max : after);
    return next == policy->slot_max ? KVIST_SLOT_NONE : next;
}

const struct kvist_policy_ops kvist_policy_lru = {
    .name = "lru",
    .create = lru_create,
    .destroy = lru_destroy,
    .insert = lru_insert,
    .touch = lru_touch,
    .renew = lru_touch,
    .remove = lru_remove,
    .victim = lru_victim,
    .hottest = lru_hottest,
};
