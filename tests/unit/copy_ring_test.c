/*
 * copy_ring: what the device ways stand on: the staging ring's bookkeeping, registered segments.
 */
#include "cuda/ring.h"
#include "cuda/segments.h"
#include "proto/base/check.h"
#include "tests/support/unit.h"

#include <stdlib.h>
#include <string.h>

#define CHUNK_BYTES 4096U
#define CHUNKS      3U

static unsigned char memory[CHUNKS * CHUNK_BYTES];
static unsigned char tensor[4 * CHUNK_BYTES];
static unsigned char slot[4 * CHUNK_BYTES];
static struct kvist_ring ring;

static void ring_open(void)
{
    KVIST_TEST_FATAL(kvist_ring_init(&ring, memory, CHUNK_BYTES, CHUNKS) == KVIST_OK);
}

static struct kvist_copy_piece piece_of(size_t offset, size_t bytes)
{
    return (struct kvist_copy_piece){
        .tensor = tensor + offset, .slot = slot + offset, .bytes = bytes};
}

static void chunks_go_round_in_order(void)
{
    ring_open();
    KVIST_TEST_TRUE(kvist_ring_oldest(&ring) == NULL);
    struct kvist_copy_piece piece = piece_of(0, 100);
    struct kvist_ring_chunk *filled[CHUNKS];
    for (size_t index = 0; index < CHUNKS; index++) {
        KVIST_TEST_EQUAL(kvist_ring_pack(&ring, &piece, 0), 100);
        filled[index] = kvist_ring_filling(&ring);
        KVIST_TEST_TRUE(filled[index]->memory == memory + index * CHUNK_BYTES);
        kvist_ring_push(&ring);
        KVIST_TEST_TRUE(kvist_ring_oldest(&ring) == filled[0]);
    }
    KVIST_TEST_TRUE(kvist_ring_filling(&ring) == NULL);
    KVIST_TEST_EQUAL(kvist_ring_pack(&ring, &piece, 0), 0);
    kvist_ring_reset(&ring);
    KVIST_TEST_EQUAL(filled[0]->part_count, 1);
    for (size_t index = 0; index < 2U * CHUNKS; index++) {
        KVIST_TEST_TRUE(kvist_ring_oldest(&ring) == filled[index % CHUNKS]);
        kvist_ring_pop(&ring);
        KVIST_TEST_TRUE(kvist_ring_filling(&ring) == filled[index % CHUNKS]);
        KVIST_TEST_EQUAL(kvist_ring_filling(&ring)->part_count, 0);
        KVIST_TEST_EQUAL(kvist_ring_pack(&ring, &piece, 0), 100);
        kvist_ring_push(&ring);
    }
    kvist_ring_fini(&ring);
    KVIST_TEST_TRUE(ring.chunks == NULL);
    kvist_ring_fini(&ring);
}

static void pieces_are_cut_and_aligned(void)
{
    ring_open();
    struct kvist_copy_piece small = piece_of(0, 65);
    struct kvist_copy_piece large = piece_of(512, 2 * CHUNK_BYTES);
    KVIST_TEST_EQUAL(kvist_ring_pack(&ring, &small, 0), 65);
    size_t packed = kvist_ring_pack(&ring, &large, 0);
    KVIST_TEST_EQUAL(packed, CHUNK_BYTES - 128);
    KVIST_TEST_EQUAL(kvist_ring_pack(&ring, &large, packed), 0);
    const struct kvist_ring_chunk *chunk = kvist_ring_filling(&ring);
    KVIST_TEST_EQUAL(chunk->part_count, 2);
    KVIST_TEST_EQUAL(chunk->used_bytes, CHUNK_BYTES);
    KVIST_TEST_EQUAL(chunk->parts[1].offset, 128);
    KVIST_TEST_TRUE(chunk->parts[1].piece.slot == large.slot);
    kvist_ring_push(&ring);
    KVIST_TEST_EQUAL(kvist_ring_pack(&ring, &large, packed), CHUNK_BYTES);
    KVIST_TEST_TRUE(kvist_ring_filling(&ring)->parts[0].piece.tensor == large.tensor + packed);
    kvist_ring_push(&ring);
    KVIST_TEST_EQUAL(kvist_ring_pack(&ring, &large, packed + CHUNK_BYTES), 128);
    kvist_ring_reset(&ring);
    KVIST_TEST_EQUAL(kvist_ring_filling(&ring)->part_count, 0);
    KVIST_TEST_EQUAL(kvist_ring_filling(&ring)->used_bytes, 0);
    kvist_ring_fini(&ring);
}

static void parts_are_bounded(void)
{
    unsigned char *large = calloc(KVIST_RING_PARTS_MAX + 1, KVIST_RING_ALIGN_BYTES);
    KVIST_TEST_FATAL(large != NULL);
    KVIST_TEST_FATAL(
        kvist_ring_init(&ring, large, (KVIST_RING_PARTS_MAX + 1UL) * KVIST_RING_ALIGN_BYTES, 1) ==
        KVIST_OK);
    struct kvist_copy_piece piece = piece_of(0, 1);
    for (size_t index = 0; index < KVIST_RING_PARTS_MAX; index++) {
        KVIST_TEST_EQUAL(kvist_ring_pack(&ring, &piece, 0), 1);
    }
    KVIST_TEST_EQUAL(kvist_ring_pack(&ring, &piece, 0), 0);
    kvist_ring_fini(&ring);
    free(large);
}

static void bytes_go_through(void)
{
    ring_open();
    for (size_t at = 0; at < sizeof(slot); at++) {
        slot[at] = (unsigned char)(at * 7U >> 2);
    }
    unsigned char before[sizeof(slot)];
    memcpy(before, slot, sizeof(slot));
    static const size_t sizes[] = {1, 63, 64, 65, 700};
    size_t offset = 3;
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(sizes); index++) {
        struct kvist_copy_piece piece = piece_of(offset, sizes[index]);
        KVIST_TEST_EQUAL(kvist_ring_pack(&ring, &piece, 0), sizes[index]);
        offset += sizes[index] + 5;
    }
    const struct kvist_ring_chunk *chunk = kvist_ring_filling(&ring);
    kvist_ring_gather(chunk);
    memset(slot, 0, sizeof(slot));
    kvist_ring_scatter(chunk);
    for (size_t index = 0; index < chunk->part_count; index++) {
        const struct kvist_ring_part *part = &chunk->parts[index];
        KVIST_TEST_TRUE(
            memcmp(part->piece.slot, before + (part->piece.slot - slot), part->piece.bytes) == 0);
        KVIST_TEST_EQUAL(part->piece.slot[part->piece.bytes], 0);
    }
    kvist_ring_fini(&ring);
}

static void segments_hold_what_they_hold(void)
{
    struct kvist_segments segments;
    kvist_segments_init(&segments);
    KVIST_TEST_TRUE(!kvist_segments_contain(&segments, slot, 1, false));
    KVIST_TEST_STATUS(kvist_segments_insert(&segments, slot + 100, 50, true), KVIST_OK);
    KVIST_TEST_STATUS(kvist_segments_insert(&segments, slot, 100, false), KVIST_OK);
    KVIST_TEST_STATUS(kvist_segments_insert(&segments, slot + 149, 10, true), KVIST_EXISTS);
    KVIST_TEST_STATUS(kvist_segments_insert(&segments, slot + 100, 50, true), KVIST_EXISTS);
    KVIST_TEST_STATUS(kvist_segments_insert(&segments, slot + 50, 1, true), KVIST_EXISTS);
    KVIST_TEST_STATUS(kvist_segments_insert(&segments, slot + 150, 10, true), KVIST_OK);

    KVIST_TEST_TRUE(kvist_segments_contain(&segments, slot + 100, 50, true));
    KVIST_TEST_TRUE(!kvist_segments_contain(&segments, slot + 100, 51, false)); /* two of them */
    KVIST_TEST_TRUE(!kvist_segments_contain(&segments, slot + 99, 2, false));
    KVIST_TEST_TRUE(kvist_segments_contain(&segments, slot, 100, false));
    KVIST_TEST_TRUE(!kvist_segments_contain(&segments, slot, 100, true)); /* read-only */
    KVIST_TEST_TRUE(!kvist_segments_contain(&segments, slot + 150, UINT64_MAX, false));
    KVIST_TEST_TRUE(!kvist_segments_contain(&segments, slot + 160, 1, false));

    KVIST_TEST_TRUE(!kvist_segments_take(&segments, slot + 101));
    KVIST_TEST_TRUE(kvist_segments_take(&segments, slot + 100));
    KVIST_TEST_TRUE(!kvist_segments_contain(&segments, slot + 100, 1, false));
    KVIST_TEST_TRUE(kvist_segments_take_any(&segments) == slot + 150);
    KVIST_TEST_TRUE(kvist_segments_take_any(&segments) == slot);
    KVIST_TEST_TRUE(kvist_segments_take_any(&segments) == NULL);
    kvist_segments_fini(&segments);
}

static void segments_grow(void)
{
    struct kvist_segments segments;
    kvist_segments_init(&segments);
    for (size_t index = 0; index < 500; index++) {
        size_t at = index * 7919 % 500; /* each once, in disorder */
        KVIST_TEST_STATUS(kvist_segments_insert(&segments, slot + at * 16, 16, true), KVIST_OK);
    }
    for (size_t index = 0; index < 500; index++) {
        KVIST_TEST_TRUE(kvist_segments_contain(&segments, slot + index * 16 + 5, 11, true));
        KVIST_TEST_TRUE(kvist_segments_take(&segments, slot + index * 16));
    }
    KVIST_TEST_EQUAL(segments.count, 0);
    kvist_segments_fini(&segments);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"chunks go round in order", chunks_go_round_in_order},
        {"pieces are cut and aligned", pieces_are_cut_and_aligned},
        {"parts are bounded", parts_are_bounded},
        {"bytes go through", bytes_go_through},
        {"segments hold what they hold", segments_hold_what_they_hold},
        {"segments grow", segments_grow},
    };
    return kvist_unit_main("copy_ring", cases, KVIST_ARRAY_COUNT(cases), NULL, NULL);
}
