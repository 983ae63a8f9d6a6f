#include "storage/policy/ghosts.h"

#include "proto/base/check.h"

#include <stdlib.h>

#define GHOSTS_MAGIC 0x47484f53U

struct ghost {
    uint32_t tag;
    uint32_t note; /* 0: taken, or never used */
    uint32_t next; /* of its chain: index + 1, 0 at the end */
    uint32_t head; /* of the chain that has this index, whoever is in it */
};
_Static_assert(sizeof(struct ghost) == KVIST_GHOST_BYTES, "a ghost is compact");

struct kvist_ghosts {
    uint32_t magic;
    uint32_t note_max;
    uint32_t ring_size; /* the ring ends here, */
    uint32_t wanted;    /* and here once it is at its end */
    uint32_t at;        /* of the oldest: the next is put there */
    uint32_t chain_count;
    uint32_t mask; /* the least power of two that is not below chain_count, less 1 */
    struct ghost ring[];
};

enum kvist_status kvist_ghosts_create(uint32_t note_max, struct kvist_ghosts **ghosts_out)
{
    struct kvist_ghosts *ghosts =
        calloc(1, sizeof(*ghosts) + (size_t)note_max * sizeof(ghosts->ring[0]));
    if (ghosts == NULL) {
        return KVIST_NO_MEMORY;
    }
    ghosts->magic = GHOSTS_MAGIC;
    ghosts->note_max = note_max;
    ghosts->ring_size = 1;
    ghosts->wanted = 1;
    ghosts->chain_count = 1;
    *ghosts_out = ghosts;
    return KVIST_OK;
}

void kvist_ghosts_destroy(struct kvist_ghosts **ghosts)
{
    if (*ghosts != NULL) {
        KVIST_CHECK((*ghosts)->magic == GHOSTS_MAGIC);
        (*ghosts)->magic = 0;
        free(*ghosts);
        *ghosts = NULL;
    }
}

/* Engines choose their keys, and some number them: spread what they differ in (SplitMix64). */
static uint32_t spread(uint64_t key_tag)
{
    key_tag = (key_tag ^ (key_tag >> 30)) * 0xbf58476d1ce4e5b9ULL;
    key_tag = (key_tag ^ (key_tag >> 27)) * 0x94d049bb133111ebULL;
    return (uint32_t)(key_tag >> 32);
}

static uint32_t *chain_of(struct kvist_ghosts *ghosts, uint32_t tag)
{
    uint32_t chain = tag & ghosts->mask;
    return &ghosts->ring[chain < ghosts->chain_count ? chain : chain & (ghosts->mask >> 1)].head;
}

static void link_ghost(struct kvist_ghosts *ghosts, uint32_t index)
{
    uint32_t *head = chain_of(ghosts, ghosts->ring[index].tag);
    ghosts->ring[index].next = *head;
    *head = index + 1;
}

/* Split the next chain in two. */
static void add_chain(struct kvist_ghosts *ghosts)
{
    uint32_t added = ghosts->chain_count++;
    ghosts->mask = added > ghosts->mask ? ghosts->mask * 2 + 1 : ghosts->mask;
    uint32_t *split = &ghosts->ring[added & (ghosts->mask >> 1)].head;
    uint32_t index = *split;
    *split = 0;
    while (index != 0) {
        uint32_t next = ghosts->ring[index - 1].next;
        link_ghost(ghosts, index - 1);
        index = next;
    }
}

void kvist_ghosts_make_room(struct kvist_ghosts *ghosts, uint32_t notes)
{
    notes = notes < ghosts->note_max ? notes : ghosts->note_max;
    ghosts->wanted = notes > ghosts->wanted ? notes : ghosts->wanted;
    if (ghosts->chain_count < ghosts->wanted) {
        add_chain(ghosts);
    }
}

uint32_t kvist_ghosts_take(struct kvist_ghosts *ghosts, uint64_t key_tag)
{
    uint32_t tag = spread(key_tag);
    uint32_t *link = chain_of(ghosts, tag);
    while (*link != 0 && ghosts->ring[*link - 1].tag != tag) {
        link = &ghosts->ring[*link - 1].next;
    }
    if (*link == 0) {
        return 0;
    }
    struct ghost *ghost = &ghosts->ring[*link - 1];
    uint32_t note = ghost->note;
    *link = ghost->next;
    ghost->note = 0;
    return note;
}

static uint32_t displace(struct kvist_ghosts *ghosts, uint32_t index)
{
    struct ghost *ghost = &ghosts->ring[index];
    uint32_t note = ghost->note;
    if (note != 0) {
        uint32_t *link = chain_of(ghosts, ghost->tag);
        while (*link != index + 1) {
            link = &ghosts->ring[*link - 1].next;
        }
        *link = ghost->next;
        ghost->note = 0;
    }
    return note;
}

uint32_t kvist_ghosts_put(struct kvist_ghosts *ghosts, uint64_t key_tag, uint32_t note)
{
    KVIST_CHECK(note != 0);
    uint32_t index = ghosts->at;
    uint32_t displaced = displace(ghosts, index);
    ghosts->ring[index].tag = spread(key_tag);
    ghosts->ring[index].note = note;
    link_ghost(ghosts, index);
    ghosts->at++;
    if (ghosts->at == ghosts->ring_size) {
        /* Only at its end can the ring grow and what is in it keep its order. */
        ghosts->at = ghosts->wanted > ghosts->ring_size ? ghosts->ring_size : 0;
        ghosts->ring_size = ghosts->wanted;
    }
    return displaced;
}
