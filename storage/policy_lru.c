/*
 * policy_lru - the least recently used block goes first.
 *
 * Role        a doubly linked list through arrays that are indexed by slot
 * Invariants  links hold slot + 1, so that untouched (zero) pages of the arrays mean "not a member"
 */
#include "proto/base/check.h"
#include "proto/shm/layout.h"
#include "storage/policy.h"

#include <stdlib.h>

#define LRU_MAGIC 0x4b4c5255U

struct lru_link {
    uint32_t colder; /* slot + 1, END at the coldest, 0: not a member */
    uint32_t hotter;
};

#define LRU_END UINT32_MAX

struct kvist_policy {
    uint32_t magic;
    uint32_t slot_max;
    uint32_t coldest; /* slot + 1 or LRU_END */
    uint32_t hottest;
    struct lru_link links[];
};

static enum kvist_status lru_create(uint32_t slot_max, struct kvist_policy **policy_out)
{
    /* calloc: a large block is zero pages that are not resident until a slot is used. */
    struct kvist_policy *policy =
        calloc(1, sizeof(*policy) + (size_t)slot_max * sizeof(policy->links[0]));
    if (policy == NULL) {
        return KVIST_NO_MEMORY;
    }
    policy->magic = LRU_MAGIC;
    policy->slot_max = slot_max;
    policy->coldest = LRU_END;
    policy->hottest = LRU_END;
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
    struct lru_link *link = &policy->links[slot];
    KVIST_CHECK(link->colder == 0);
    link->colder = policy->hottest;
    link->hotter = LRU_END;
    if (policy->hottest == LRU_END) {
        policy->coldest = slot + 1;
    } else {
        policy->links[policy->hottest - 1].hotter = slot + 1;
    }
    policy->hottest = slot + 1;
}

static void lru_remove(struct kvist_policy *policy, uint32_t slot, uint64_t key_tag, int evicted)
{
    (void)key_tag;
    (void)evicted;
    KVIST_CHECK(slot < policy->slot_max);
    struct lru_link *link = &policy->links[slot];
    KVIST_CHECK(link->colder != 0);
    if (link->colder == LRU_END) {
        policy->coldest = link->hotter;
    } else {
        policy->links[link->colder - 1].hotter = link->hotter;
    }
    if (link->hotter == LRU_END) {
        policy->hottest = link->colder;
    } else {
        policy->links[link->hotter - 1].colder = link->colder;
    }
    link->colder = 0;
    link->hotter = 0;
}

static void lru_touch(struct kvist_policy *policy, uint32_t slot)
{
    if (policy->hottest != slot + 1) {
        lru_remove(policy, slot, 0, 0);
        lru_insert(policy, slot, 0);
    }
}

static uint32_t lru_victim(struct kvist_policy *policy, uint32_t after)
{
    uint32_t next = after == KVIST_SLOT_NONE ? policy->coldest : policy->links[after].hotter;
    return next == LRU_END || next == 0 ? KVIST_SLOT_NONE : next - 1;
}

static uint32_t lru_hottest(struct kvist_policy *policy, uint32_t after)
{
    uint32_t next = after == KVIST_SLOT_NONE ? policy->hottest : policy->links[after].colder;
    return next == LRU_END || next == 0 ? KVIST_SLOT_NONE : next - 1;
}

const struct kvist_policy_ops kvist_policy_lru = {
    .name = "lru",
    .create = lru_create,
    .destroy = lru_destroy,
    .insert = lru_insert,
    .touch = lru_touch,
    .remove = lru_remove,
    .victim = lru_victim,
    .hottest = lru_hottest,
};
