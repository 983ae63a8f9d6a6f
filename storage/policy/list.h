/*
 * list - doubly linked lists of slots, through one array that is indexed by slot.
 *
 * Role        what the policies keep their orders in. Beyond the slots the array holds one sentinel
 *             a list, so that a slot leaves its list without knowing which one it is.
 * Invariants  links hold an index + 1: zero pages of the array mean "not a member"
 */
#ifndef KVIST_STORAGE_POLICY_LIST_H
#define KVIST_STORAGE_POLICY_LIST_H

#include "proto/base/check.h"

#include <stdbool.h>
#include <stdint.h>

struct kvist_list_link {
    uint32_t colder; /* of a sentinel: the hottest */
    uint32_t hotter; /* of a sentinel: the coldest */
};

static inline void kvist_list_init(struct kvist_list_link *links, uint32_t sentinel)
{
    links[sentinel] = (struct kvist_list_link){.colder = sentinel + 1, .hotter = sentinel + 1};
}

static inline bool kvist_list_has(const struct kvist_list_link *links, uint32_t slot)
{
    return links[slot].colder != 0;
}

/* The neighbours; a sentinel's index at the ends. */
static inline uint32_t kvist_list_hotter(const struct kvist_list_link *links, uint32_t index)
{
    return links[index].hotter - 1;
}

static inline uint32_t kvist_list_colder(const struct kvist_list_link *links, uint32_t index)
{
    return links[index].colder - 1;
}

/* At the hot end. */
static inline void kvist_list_push(struct kvist_list_link *links, uint32_t sentinel, uint32_t slot)
{
    KVIST_CHECK(!kvist_list_has(links, slot));
    uint32_t hottest = kvist_list_colder(links, sentinel);
    links[slot] = (struct kvist_list_link){.colder = hottest + 1, .hotter = sentinel + 1};
    links[hottest].hotter = slot + 1;
    links[sentinel].colder = slot + 1;
}

static inline void kvist_list_remove(struct kvist_list_link *links, uint32_t slot)
{
    KVIST_CHECK(kvist_list_has(links, slot));
    links[links[slot].colder - 1].hotter = links[slot].hotter;
    links[links[slot].hotter - 1].colder = links[slot].colder;
    links[slot] = (struct kvist_list_link){.colder = 0, .hotter = 0};
}

/* Put all of `colder` before what is in `list`; it is empty then. */
static inline void kvist_list_join(struct kvist_list_link *links, uint32_t list, uint32_t colder)
{
    uint32_t first = kvist_list_hotter(links, colder);
    uint32_t last = kvist_list_colder(links, colder);
    if (first == colder) {
        return;
    }
    uint32_t coldest = kvist_list_hotter(links, list);
    links[first].colder = list + 1;
    links[list].hotter = first + 1;
    links[last].hotter = coldest + 1;
    links[coldest].colder = last + 1;
    kvist_list_init(links, colder);
}

#endif
