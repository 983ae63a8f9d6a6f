/* policies: what all of them promise, what each is for, and the ghosts that two of them keep. */
#include "proto/base/check.h"
#include "proto/shm/layout.h"
#include "storage/policy/ghosts.h"
#include "storage/policy/policy.h"
#include "tests/support/unit.h"

#include <string.h>

#define SLOTS 64U
#define STEPS 20000U

static uint32_t random_state;

static uint32_t below(uint32_t limit)
{
    random_state = random_state * 1664525U + 1013904223U;
    return (uint32_t)((uint64_t)random_state * limit >> 32);
}

/* --- All of them ----------------------------------------------------------------------------- */

/* Whether both walks meet exactly these slots, each once. */
static bool walks_meet(const struct kvist_policy_ops *ops,
                       struct kvist_policy *policy,
                       const bool members[SLOTS])
{
    uint32_t met[2][SLOTS] = {{0}};
    uint32_t at = KVIST_SLOT_NONE;
    while ((at = ops->hottest(policy, at)) != KVIST_SLOT_NONE && met[0][at] == 0) {
        met[0][at]++;
    }
    at = KVIST_SLOT_NONE;
    while ((at = ops->victim(policy, at)) != KVIST_SLOT_NONE && met[1][at] == 0) {
        met[1][at]++;
    }
    bool same = true;
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        same = same && met[0][slot] == members[slot] && met[1][slot] == members[slot];
    }
    return same && at == KVIST_SLOT_NONE;
}

static void every_slot_is_met_once(void)
{
    for (uint32_t index = 0; index < KVIST_EVICTIONS; index++) {
        const struct kvist_policy_ops *ops = kvist_policies[index];
        struct kvist_policy *policy = NULL;
        bool members[SLOTS] = {false};
        uint64_t tags[SLOTS] = {0};
        KVIST_TEST_FATAL(ops->create(SLOTS, &policy) == KVIST_OK);
        random_state = 7;
        for (uint32_t step = 0; step < STEPS; step++) {
            /* Segments come and go: for a while only half of the slots are used. */
            uint32_t slot = below(step / 4000 % 2 == 0 ? SLOTS : SLOTS / 2);
            uint32_t what = below(8);
            if (!members[slot]) {
                tags[slot] = below(4 * SLOTS);
                ops->insert(policy, slot, tags[slot]);
                members[slot] = true;
            } else if (what < 2) {
                uint32_t victim = what == 0 ? ops->victim(policy, KVIST_SLOT_NONE) : slot;
                ops->remove(policy, victim, tags[victim], what == 0);
                members[victim] = false;
            } else if (what == 2) {
                ops->renew(policy, slot);
            } else {
                ops->touch(policy, slot);
            }
            KVIST_TEST_FATAL(step % 64 != 0 || walks_meet(ops, policy, members));
        }
        ops->destroy(&policy);
        KVIST_TEST_TRUE(policy == NULL);
        ops->destroy(&policy);
    }
}

static void expect(const struct kvist_policy_ops *ops,
                   struct kvist_policy *policy,
                   const uint32_t *slots,
                   uint32_t count)
{
    uint32_t at = KVIST_SLOT_NONE;
    for (uint32_t index = 0; index < count; index++) {
        at = ops->victim(policy, at);
        KVIST_TEST_EQUAL(at, slots[index]);
    }
    KVIST_TEST_EQUAL(ops->victim(policy, at), KVIST_SLOT_NONE);
    at = KVIST_SLOT_NONE;
    for (uint32_t index = count; index > 0; index--) {
        at = ops->hottest(policy, at);
        KVIST_TEST_EQUAL(at, slots[index - 1]);
    }
}

static void new_blocks_keep_their_order(void)
{
    for (uint32_t index = 0; index < KVIST_EVICTIONS; index++) {
        const struct kvist_policy_ops *ops = kvist_policies[index];
        struct kvist_policy *policy = NULL;
        KVIST_TEST_FATAL(ops->create(SLOTS, &policy) == KVIST_OK);
        for (uint32_t slot = 0; slot < 4; slot++) {
            ops->insert(policy, slot, slot);
        }
        expect(ops, policy, (uint32_t[]){0, 1, 2, 3}, 4);
        /* A chain that was committed root first: leaves go before the root. */
        for (uint32_t left = 4; left > 1; left--) {
            ops->renew(policy, left - 1);
        }
        ops->renew(policy, 0);
        expect(ops, policy, (uint32_t[]){3, 2, 1, 0}, 4);
        /* A victim that turned out to be leased. */
        ops->renew(policy, 3);
        expect(ops, policy, (uint32_t[]){2, 1, 0, 3}, 4);
        ops->destroy(&policy);
    }
}

static void what_was_used_outlives_what_was_not(void)
{
    for (uint32_t index = 0; index < KVIST_EVICTIONS; index++) {
        const struct kvist_policy_ops *ops = kvist_policies[index];
        struct kvist_policy *policy = NULL;
        KVIST_TEST_FATAL(ops->create(SLOTS, &policy) == KVIST_OK);
        for (uint32_t slot = 0; slot < SLOTS; slot++) {
            ops->insert(policy, slot, slot);
        }
        ops->touch(policy, 3);
        ops->touch(policy, 0);
        for (uint32_t gone = 0; gone < SLOTS - 2; gone++) {
            uint32_t slot = ops->victim(policy, KVIST_SLOT_NONE);
            KVIST_TEST_TRUE(slot != 0 && slot != 3);
            ops->remove(policy, slot, slot, true);
        }
        ops->remove(policy, 0, 0, true);
        expect(ops, policy, (uint32_t[]){3}, 1);
        ops->destroy(&policy);
    }
}

/* --- Each ------------------------------------------------------------------------------------ */

/* Evict one block, and store one of that tag in its slot. */
static uint32_t replace(const struct kvist_policy_ops *ops,
                        struct kvist_policy *policy,
                        uint64_t *tags,
                        uint64_t tag)
{
    uint32_t slot = ops->victim(policy, KVIST_SLOT_NONE);
    ops->remove(policy, slot, tags[slot], true);
    tags[slot] = tag;
    ops->insert(policy, slot, tag);
    return slot;
}

/* What comes back soon after its eviction is worth more than what comes for the first time. */
static void a_ghost_that_returns_stays(void)
{
    static const uint32_t indexes[] = {KVIST_EVICTION_S3FIFO, KVIST_EVICTION_REUSE};
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(indexes); index++) {
        const struct kvist_policy_ops *ops = kvist_policies[indexes[index]];
        struct kvist_policy *policy = NULL;
        uint64_t tags[SLOTS];
        KVIST_TEST_FATAL(ops->create(SLOTS, &policy) == KVIST_OK);
        for (uint32_t slot = 0; slot < SLOTS; slot++) {
            tags[slot] = slot;
            ops->insert(policy, slot, slot);
        }
        uint64_t evicted = tags[ops->victim(policy, KVIST_SLOT_NONE)];
        (void)replace(ops, policy, tags, 1000);
        uint32_t back = replace(ops, policy, tags, evicted);
        for (uint64_t tag = 2000; tag < 2000 + SLOTS - 1; tag++) {
            KVIST_TEST_TRUE(replace(ops, policy, tags, tag) != back);
        }
        ops->destroy(&policy);
    }
}

/* Whoever waits for a block that was just committed gets to see it, even where nothing that was
   stored has ever been used. */
static void what_is_new_is_no_victim(void)
{
    enum { MANY = 4096 };
    static uint64_t tags[MANY];
    static uint64_t since[MANY];
    for (uint32_t index = 0; index < KVIST_EVICTIONS; index++) {
        struct kvist_policy *policy = NULL;
        uint64_t youngest = UINT64_MAX;
        KVIST_TEST_FATAL(kvist_policies[index]->create(MANY, &policy) == KVIST_OK);
        for (uint32_t slot = 0; slot < MANY; slot++) {
            tags[slot] = slot;
            since[slot] = slot;
            kvist_policies[index]->insert(policy, slot, slot);
        }
        for (uint64_t tag = MANY; tag < 20 * MANY; tag++) {
            uint32_t slot = replace(kvist_policies[index], policy, tags, tag);
            youngest = tag - since[slot] < youngest ? tag - since[slot] : youngest;
            since[slot] = tag;
        }
        KVIST_TEST_TRUE(youngest >= MANY / 32);
        kvist_policies[index]->destroy(&policy);
    }
}

/* Uses of blocks 0..count-1 in turn, `rounds` times. @return hits of the last round */
static uint32_t run_loop(const struct kvist_policy_ops *ops, uint32_t count, uint32_t rounds)
{
    struct kvist_policy *policy = NULL;
    uint64_t tags[SLOTS];
    uint32_t slots[4 * SLOTS];
    uint32_t hits = 0;
    memset(slots, 0xff, sizeof(slots));
    KVIST_TEST_FATAL(count <= KVIST_ARRAY_COUNT(slots) && ops->create(SLOTS, &policy) == KVIST_OK);
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        tags[slot] = slot;
        slots[slot] = slot;
        ops->insert(policy, slot, slot);
    }
    for (uint32_t step = 0; step < rounds * count; step++) {
        uint32_t block = step % count;
        hits = block == 0 ? 0 : hits;
        if (slots[block] != KVIST_SLOT_NONE) {
            ops->touch(policy, slots[block]);
            hits++;
        } else {
            uint64_t old = tags[ops->victim(policy, KVIST_SLOT_NONE)];
            slots[block] = replace(ops, policy, tags, block);
            slots[old] = KVIST_SLOT_NONE;
        }
    }
    ops->destroy(&policy);
    return hits;
}

static void reuse_keeps_a_part_of_a_loop(void)
{
    KVIST_TEST_EQUAL(run_loop(&kvist_policy_lru, SLOTS * 2, 50), 0);
    KVIST_TEST_TRUE(run_loop(&kvist_policy_reuse, SLOTS * 2, 50) >= SLOTS / 2);
    KVIST_TEST_EQUAL(run_loop(&kvist_policy_reuse, SLOTS, 50), SLOTS);
}

/* --- Ghosts ---------------------------------------------------------------------------------- */

#define NOTES 500U

static void the_oldest_ghost_is_displaced(void)
{
    struct kvist_ghosts *ghosts = NULL;
    KVIST_TEST_FATAL(kvist_ghosts_create(NOTES, &ghosts) == KVIST_OK);
    for (uint32_t room = 1; room <= NOTES + 10; room++) {
        kvist_ghosts_make_room(ghosts, room);
    }
    KVIST_TEST_EQUAL(kvist_ghosts_put(ghosts, 0, 1), 0); /* the ring grows at its end */
    for (uint32_t tag = 1; tag < 4 * NOTES; tag++) {
        uint32_t displaced = kvist_ghosts_put(ghosts, tag, tag + 1);
        KVIST_TEST_EQUAL(displaced, tag < NOTES ? 0 : tag + 1 - NOTES);
    }
    KVIST_TEST_EQUAL(kvist_ghosts_take(ghosts, 3 * NOTES - 1), 0);
    for (uint32_t tag = 3 * NOTES; tag < 4 * NOTES; tag++) {
        KVIST_TEST_EQUAL(kvist_ghosts_take(ghosts, tag), tag + 1);
        KVIST_TEST_EQUAL(kvist_ghosts_take(ghosts, tag), 0);
    }
    kvist_ghosts_destroy(&ghosts);
    KVIST_TEST_TRUE(ghosts == NULL);
    kvist_ghosts_destroy(&ghosts);
}

static void ghosts_agree_with_a_table_while_they_grow(void)
{
    struct kvist_ghosts *ghosts = NULL;
    uint32_t notes[2 * NOTES] = {0}; /* by tag */
    KVIST_TEST_FATAL(kvist_ghosts_create(NOTES, &ghosts) == KVIST_OK);
    random_state = 3;
    for (uint32_t step = 1; step < STEPS; step++) {
        uint32_t tag = below(2 * NOTES);
        kvist_ghosts_make_room(ghosts, step / 16);
        if (notes[tag] != 0 || below(4) == 0) {
            KVIST_TEST_EQUAL(kvist_ghosts_take(ghosts, tag), notes[tag]);
            notes[tag] = 0;
            continue;
        }
        uint32_t displaced = kvist_ghosts_put(ghosts, tag, step);
        notes[tag] = step;
        for (uint32_t other = 0; displaced != 0; other++) {
            KVIST_TEST_FATAL(other < 2 * NOTES);
            if (notes[other] == displaced) {
                notes[other] = 0;
                break;
            }
        }
    }
    kvist_ghosts_destroy(&ghosts);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"every slot is met once", every_slot_is_met_once},
        {"new blocks keep their order", new_blocks_keep_their_order},
        {"what was used outlives what was not", what_was_used_outlives_what_was_not},
        {"what is new is no victim", what_is_new_is_no_victim},
        {"a ghost that returns stays", a_ghost_that_returns_stays},
        {"reuse keeps a part of a loop", reuse_keeps_a_part_of_a_loop},
        {"the oldest ghost is displaced", the_oldest_ghost_is_displaced},
        {"ghosts agree with a table while they grow", ghosts_agree_with_a_table_while_they_grow},
    };
    return kvist_unit_main("policies", cases, KVIST_ARRAY_COUNT(cases), NULL, NULL);
}
