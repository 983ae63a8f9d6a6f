#include "cuda/ring.h"

#include <stdlib.h>

enum kvist_status
kvist_ring_init(struct kvist_ring *ring, void *memory, size_t chunk_bytes, size_t chunk_count)
{
    struct kvist_ring_chunk *chunks = calloc(chunk_count, sizeof(*chunks));
    struct kvist_ring_part *parts = calloc(chunk_count * KVIST_RING_PARTS_MAX, sizeof(*parts));
    if (chunks == NULL || parts == NULL) {
        free(chunks);
        free(parts);
        return KVIST_NO_MEMORY;
    }
    for (size_t index = 0; index < chunk_count; index++) {
        chunks[index].memory = (unsigned char *)memory + index * chunk_bytes;
        chunks[index].parts = parts + index * KVIST_RING_PARTS_MAX;
    }
    *ring = (struct kvist_ring){
        .chunks = chunks,
        .parts = parts,
        .chunk_count = chunk_count,
        .chunk_bytes = chunk_bytes,
    };
    return KVIST_OK;
}

void kvist_ring_fini(struct kvist_ring *ring)
{
    free(ring->chunks);
    free(ring->parts);
    *ring = (struct kvist_ring){0};
}

struct kvist_ring_chunk *kvist_ring_filling(struct kvist_ring *ring)
{
    if (ring->in_flight == ring->chunk_count) {
        return NULL;
    }
    return &ring->chunks[(ring->first + ring->in_flight) % ring->chunk_count];
}

size_t kvist_ring_pack(struct kvist_ring *ring, const struct kvist_copy_piece *piece, size_t offset)
{
    struct kvist_ring_chunk *chunk = kvist_ring_filling(ring);
    if (chunk == NULL || chunk->part_count == KVIST_RING_PARTS_MAX ||
        chunk->used_bytes == ring->chunk_bytes) {
        return 0;
    }
    size_t room = ring->chunk_bytes - chunk->used_bytes;
    size_t bytes = piece->bytes - offset < room ? piece->bytes - offset : room;
    chunk->parts[chunk->part_count++] = (struct kvist_ring_part){
        .piece = {.tensor = piece->tensor + offset, .slot = piece->slot + offset, .bytes = bytes},
        .offset = chunk->used_bytes,
    };
    size_t gap = -bytes & (KVIST_RING_ALIGN_BYTES - 1);
    chunk->used_bytes += bytes + gap;
    return bytes;
}

void kvist_ring_push(struct kvist_ring *ring)
{
    ring->in_flight++;
}

static void chunk_clear(struct kvist_ring_chunk *chunk)
{
    chunk->job = NULL;
    chunk->part_count = 0;
    chunk->used_bytes = 0;
}

void kvist_ring_reset(struct kvist_ring *ring)
{
    struct kvist_ring_chunk *chunk = kvist_ring_filling(ring);
    if (chunk != NULL) {
        chunk_clear(chunk);
    }
}

struct kvist_ring_chunk *kvist_ring_oldest(struct kvist_ring *ring)
{
    return ring->in_flight == 0 ? NULL : &ring->chunks[ring->first];
}

void kvist_ring_pop(struct kvist_ring *ring)
{
    chunk_clear(&ring->chunks[ring->first]);
    ring->first = (ring->first + 1) % ring->chunk_count;
    ring->in_flight--;
}

void kvist_ring_gather(const struct kvist_ring_chunk *chunk)
{
    for (size_t index = 0; index < chunk->part_count; index++) {
        const struct kvist_ring_part *part = &chunk->parts[index];
        kvist_copy_bytes(chunk->memory + part->offset, part->piece.slot, part->piece.bytes);
    }
}

void kvist_ring_scatter(const struct kvist_ring_chunk *chunk)
{
    for (size_t index = 0; index < chunk->part_count; index++) {
        const struct kvist_ring_part *part = &chunk->parts[index];
        kvist_copy_bytes(part->piece.slot, chunk->memory + part->offset, part->piece.bytes);
    }
}
