/* policy: the LRU, case by case and against a list. */
#include "proto/shm/layout.h"
#include "storage/policy/policy.h"
#include "tests/support/unit.h"

#include <stdbool.h>
#include <stdlib.h>

#define SLOTS 64U

static const struct kvist_policy_ops *const ops = &kvist_policy_lru;
static struct kvist_policy *policy;

static void setup(void)
{
    KVIST_TEST_FATAL(ops->create(SLOTS, &policy) == KVIST_OK);
}

static void teardown(void)
{
    ops->destroy(&policy);
    KVIST_TEST_TRUE(policy == NULL);
    ops->destroy(&policy);
}

/* Whether the policy proposes exactly these, coldest first, and the reverse for the hottest. */
static void expect(const uint32_t *slots, uint32_t count)
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
    KVIST_TEST_EQUAL(ops->hottest(policy, at), KVIST_SLOT_NONE);
}

static void an_empty_one_has_no_victim(void)
{
    expect(NULL, 0);
}

static void the_oldest_goes_first(void)
{
    ops->insert(policy, 5, 0);
    expect((uint32_t[]){5}, 1);
    ops->insert(policy, 0, 0);
    ops->insert(policy, SLOTS - 1, 0);
    expect((uint32_t[]){5, 0, SLOTS - 1}, 3);
}

static void a_touch_makes_the_most_recent(void)
{
    for (uint32_t slot = 0; slot < 4; slot++) {
        ops->insert(policy, slot, 0);
    }
    ops->touch(policy, 0);
    ops->touch(policy, 2);
    ops->touch(policy, 2);
    expect((uint32_t[]){1, 3, 0, 2}, 4);
}

static void a_chain_touched_from_its_tail_loses_leaves_first(void)
{
    for (uint32_t slot = 0; slot < 4; slot++) {
        ops->insert(policy, slot, 0);
    }
    for (uint32_t left = 4; left > 0; left--) {
        ops->touch(policy, left - 1);
    }
    expect((uint32_t[]){3, 2, 1, 0}, 4);
}

static void first_middle_and_last_can_be_removed(void)
{
    for (uint32_t slot = 0; slot < 5; slot++) {
        ops->insert(policy, slot, 0);
    }
    ops->remove(policy, 0, 0, 1);
    ops->remove(policy, 2, 0, 0);
    ops->remove(policy, 4, 0, 1);
    expect((uint32_t[]){1, 3}, 2);
    ops->remove(policy, 1, 0, 1);
    ops->remove(policy, 3, 0, 1);
    expect(NULL, 0);
    ops->insert(policy, 3, 0);
    expect((uint32_t[]){3}, 1);
}

static void list_remove(uint32_t *list, uint32_t *count, uint32_t slot)
{
    uint32_t kept = 0;
    for (uint32_t index = 0; index < *count; index++) {
        if (list[index] != slot) {
            list[kept++] = list[index];
        }
    }
    *count = kept;
}

static void it_agrees_with_a_list(void)
{
    uint32_t list[SLOTS];
    uint32_t count = 0;
    bool member[SLOTS] = {false};
    srand(7);
    for (unsigned step = 0; step < 5000; step++) {
        uint32_t slot = (uint32_t)rand() % SLOTS;
        if (!member[slot]) {
            ops->insert(policy, slot, slot);
            list[count++] = slot;
            member[slot] = true;
        } else if (rand() % 3 == 0) {
            ops->remove(policy, slot, slot, 0);
            list_remove(list, &count, slot);
            member[slot] = false;
        } else {
            ops->touch(policy, slot);
            list_remove(list, &count, slot);
            list[count++] = slot;
        }
        if (step % 50 == 0) {
            expect(list, count);
        }
    }
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"an empty one has no victim", an_empty_one_has_no_victim},
        {"the oldest goes first", the_oldest_goes_first},
        {"a touch makes the most recent", a_touch_makes_the_most_recent},
        {"a chain touched from its tail loses leaves first",
         a_chain_touched_from_its_tail_loses_leaves_first},
        {"first, middle and last can be removed", first_middle_and_last_can_be_removed},
        {"it agrees with a list", it_agrees_with_a_list},
    };
    return kvist_unit_main("policy", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
}
