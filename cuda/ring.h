/*
 * ring - bookkeeping of a ring of pinned staging chunks.
 *
 * Role        cuts one piece of pinned memory into chunks, packs pieces of a plan into the chunk
 *             that is being filled, and keeps the chunks that are in flight in order. Knows no
 *             device: who uses it records and waits for the chunks' events.
 * Shapes      chunk: parts side by side, each at a multiple of KVIST_RING_ALIGN_BYTES
 * Ownership   the memory is the caller's and outlives the ring; events are the caller's
 * Threads     one at a time
 * Invariants  in_flight <= chunk_count; the chunk that is filled is not in flight
 * States      FREE -> FILLING [kvist_ring_pack] -> IN FLIGHT [kvist_ring_push] -> FREE
 *             [kvist_ring_pop, oldest first]
 */
#ifndef KVIST_RING_H
#define KVIST_RING_H

#include "cuda/copy_internal.h"

#define KVIST_RING_ALIGN_BYTES 64U
#define KVIST_RING_PARTS_MAX   1024U /* at most what the runtime takes at once */

/* A piece of the plan, or a part of one, and where it is in the chunk. */
struct kvist_ring_part {
    struct kvist_copy_piece piece;
    size_t offset;
};

struct kvist_ring_chunk {
    unsigned char *memory;         /* [chunk_bytes] */
    void *event;                   /* the caller's */
    struct kvist_copy_job *job;    /* the caller's */
    uint64_t ticket;               /* the caller's */
    struct kvist_ring_part *parts; /* [KVIST_RING_PARTS_MAX] */
    size_t part_count;
    size_t used_bytes; /* with the gaps of the alignment */
};

struct kvist_ring {
    struct kvist_ring_chunk *chunks; /* [chunk_count] */
    struct kvist_ring_part *parts;   /* of all chunks */
    size_t chunk_count;
    size_t chunk_bytes;
    size_t first; /* the oldest in flight */
    size_t in_flight;
};

/** Over memory of chunk_count * chunk_bytes; chunk_bytes is a multiple of the alignment. */
KVIST_MUST_USE enum kvist_status
kvist_ring_init(struct kvist_ring *ring, void *memory, size_t chunk_bytes, size_t chunk_count);

/** A zeroed ring is fine. */
void kvist_ring_fini(struct kvist_ring *ring);

/** The chunk to fill; NULL while all are in flight. */
struct kvist_ring_chunk *kvist_ring_filling(struct kvist_ring *ring);

/**
 * Add as much of a piece, from offset on, as the chunk that is being filled takes.
 *
 * @return bytes added; 0 when the chunk is full, or all are in flight
 */
size_t
kvist_ring_pack(struct kvist_ring *ring, const struct kvist_copy_piece *piece, size_t offset);

/** The filled chunk goes in flight. */
void kvist_ring_push(struct kvist_ring *ring);

/** Forget what was packed into the chunk that is being filled. */
void kvist_ring_reset(struct kvist_ring *ring);

/** The chunk that went in flight first; NULL when none is. */
struct kvist_ring_chunk *kvist_ring_oldest(struct kvist_ring *ring);

/** The oldest chunk is free again. */
void kvist_ring_pop(struct kvist_ring *ring);

/** Copy the slots' bytes of all parts into the chunk. */
void kvist_ring_gather(const struct kvist_ring_chunk *chunk);

/** Copy all parts from the chunk to the slots. */
void kvist_ring_scatter(const struct kvist_ring_chunk *chunk);

#endif
