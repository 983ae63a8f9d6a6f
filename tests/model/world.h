/*
 * world - one pool with two slots, the session page of one engine, and both sides of them.
 *
 * Role        what the scenarios of protocol_test.c are made of. daemon.c calls the functions of
 *             storage/, engine.c those of client/, compiled for the machine, on the same memory.
 * Threads     each side's private memory is set up anew by its _begin(), which is what each body of
 *             a thread has to call first; one thread of a program is the daemon, and each engine
 *             process has a number.
 * Blocks      a block is a number. Its key is made from it; its bytes are one datum a slot, which
 *             holds that number; its length is the number as well, so that a reader that takes one
 *             block's for another's is seen.
 */
#ifndef KVIST_TESTS_MODEL_WORLD_H
#define KVIST_TESTS_MODEL_WORLD_H

#include "proto/shm/layout.h"
#include "tests/model/machine.h"

#include <kvist/status.h>

#define KVIST_WORLD_SLOTS    2U
#define KVIST_WORLD_CAPACITY 8U /* of the index */
#define KVIST_WORLD_SERIAL   7U /* of the segment */
#define KVIST_WORLD_TICKET   3U
#define KVIST_WORLD_GRANT    55U /* reservation */
#define KVIST_WORLD_ENGINES  3U

struct kvist_world {
    struct kvist_map_header *map;      /* with all that follows it */
    struct kvist_page_header *page;    /* of the session whose ranks are the engines */
    uint64_t bytes[KVIST_WORLD_SLOTS]; /* data, known to the machine by address */
    uint64_t mapping;                  /* data: 1 while a rank has the segment mapped */
};

/** Make both sides and the memory between them; SLOTS blocks are there: 1, and 3. */
void kvist_world_open(void);
void kvist_world_close(void);
const struct kvist_world *kvist_world_get(void);

/** The key of a block; those of 1 and 2 have the same place in the index, that of 3 another. */
void kvist_world_key(uint32_t block, uint8_t key_out[KVIST_KEY_BYTES]);

/** Whether the ranks have the segment mapped when a program starts. */
void kvist_world_set_mapped(bool mapped);

uint64_t kvist_world_segment_bytes(void);

/** Times that an entry is read until it counts as busy: KVIST_INDEX_READ_MAX of what is explored.
 */
void kvist_world_set_reads(uint32_t read_max);

/* --- daemon.c ------------------------------------------------------------------------------------
 */

void kvist_daemon_open(void);
void kvist_daemon_close(void);

void kvist_daemon_begin(void);

/** Evict a slot. @return whether it is free; else it was leased */
bool kvist_daemon_evict(uint32_t slot);

/** Clear the pool. @return whether the slot is free now */
bool kvist_daemon_clear(uint32_t slot);

/** Take the slot, as the only one that is free, for a grant or a promotion. */
void kvist_daemon_grant(uint32_t slot);

/** Publish a block in a slot that the daemon itself has filled. */
void kvist_daemon_publish(uint32_t slot, uint32_t block);

/** Commit what a grant was filled with. @return whether it was published */
bool kvist_daemon_commit(uint32_t slot, uint32_t block);

/** Finish a growth of the map: from here on the daemon writes another one. */
void kvist_daemon_grow(void);

/** Give the only segment up, when both slots are free. */
void kvist_daemon_revoke(void);

/** Take the checksum of the block in a slot, and write it down. */
void kvist_daemon_sum(uint32_t slot);

/** Take the next touch; UINT64_MAX: none. */
uint64_t kvist_daemon_touch(void);

/* --- engine.c ------------------------------------------------------------------------------------
 */

void kvist_engine_open(void);
void kvist_engine_close(void);
void kvist_engine_begin(uint32_t engine);

/** Lease a block. @return its slot, or KVIST_SLOT_NONE: a miss */
uint32_t kvist_engine_acquire(uint32_t engine, uint32_t block, uint64_t *block_bytes_out);
void kvist_engine_release(uint32_t engine);

/** Set this rank's fill mark of the ticket. */
void kvist_engine_mark(uint32_t engine);

/** Compare the bytes of the leased block with its checksum. @return OK, NOT_FOUND: none, CORRUPT */
enum kvist_status kvist_engine_verify(uint32_t engine, uint32_t block);

/** Write a touch of a block that is there. */
void kvist_engine_touch(uint32_t engine, uint32_t block);

/** Do as a Segment message says, and as a Revoke says. */
void kvist_engine_map(uint32_t engine);
void kvist_engine_unmap(uint32_t engine);

/** Leave the arena, as a process does whose daemon has been away for long: unmaps when it may. */
void kvist_engine_leave(uint32_t engine);

#endif
