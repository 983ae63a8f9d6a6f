/*
 * ghosts - what is remembered of blocks that were evicted.
 *
 * Role        a note for each of the last evicted blocks, by the tag of its key; the oldest is
 *             forgotten first. Strictly so: the blocks of a chain are remembered or forgotten
 *             together. (Buckets that each forget on their own leave chains with holes, and cost
 *             up to 3 points of hits.)
 *             Tags are cut to 32 bits: a note may be taken for another block's, about once in
 *             four billion times the number of ghosts.
 * Limits      note_max, KVIST_GHOST_BYTES each, allocated at creation; no more of it is touched
 *             than was asked for by kvist_ghosts_make_room()
 * Source      linear hashing (Litwin, 1980), which grows by one chain at a time
 */
#ifndef KVIST_STORAGE_POLICY_GHOSTS_H
#define KVIST_STORAGE_POLICY_GHOSTS_H

#include <kvist/status.h>

#include <stdint.h>

#define KVIST_GHOST_BYTES 16U

struct kvist_ghosts;

KVIST_MUST_USE enum kvist_status kvist_ghosts_create(uint32_t note_max,
                                                     struct kvist_ghosts **ghosts_out);
void kvist_ghosts_destroy(struct kvist_ghosts **ghosts);

/** Remember so many from now on, or as many as before when they were more. To be called for each
 *  note that it grows by. */
void kvist_ghosts_make_room(struct kvist_ghosts *ghosts, uint32_t notes);

/** Remember a note that is not 0. @return the note that it displaces, 0: none */
uint32_t kvist_ghosts_put(struct kvist_ghosts *ghosts, uint64_t key_tag, uint32_t note);

/** Forget a block. @return its note, 0: it is not known */
uint32_t kvist_ghosts_take(struct kvist_ghosts *ghosts, uint64_t key_tag);

#endif
