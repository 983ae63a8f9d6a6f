/*
 * Fuzz target: headers of shared memory, and what is read by them.
 *
 * Input: which header; edits of a good one; then what the rest of the memory holds, over and over.
 * A header that passes leads nowhere outside of its memory, and what a reader of the index comes
 * upon there stays inside too. The memory is the heap's, so that a sanitizer sees a byte too far.
 */
#include "proto/shm/layout.h"
#include "tests/fuzz/fuzz.h"

#define EDITS_MAX        12U
#define MEMORY_BYTES_MAX (256U << 10)
#define PATTERN_MAX      64U
#define KEYS             4U

/* Overwrite some words: most of what the fields of a header can be is near. */
static void edit(struct kvist_fuzz_input *input, void *header, size_t used_bytes)
{
    unsigned edits = kvist_fuzz_u8(input) % (EDITS_MAX + 1);
    for (unsigned count = 0; count < edits; count++) {
        size_t at = (size_t)(kvist_fuzz_u8(input) % (used_bytes / 4)) * 4;
        uint64_t value = kvist_fuzz_number(input);
        unsigned shift = kvist_fuzz_u8(input) % 64;
        uint32_t word = (uint32_t)(value << shift);
        memcpy((char *)header + at, &word, sizeof(word));
    }
}

static char *make_memory(struct kvist_fuzz_input *input, const void *header, uint64_t bytes)
{
    char *memory = NULL;
    uint8_t pattern[PATTERN_MAX];
    KVIST_FUZZ_REQUIRE(posix_memalign((void **)&memory, 4096, bytes) == 0);
    size_t pattern_bytes = input->left < sizeof(pattern) ? input->left : sizeof(pattern);
    kvist_fuzz_take(input, pattern, pattern_bytes);
    memset(memory, 0, bytes);
    for (uint64_t at = KVIST_HEADER_BYTES; at + PATTERN_MAX <= bytes; at += PATTERN_MAX) {
        memcpy(memory + at, pattern, pattern_bytes);
    }
    memcpy(memory, header, KVIST_HEADER_BYTES);
    return memory;
}

/* --- Pool map -------------------------------------------------------------------------------- */

static void check_table(uint64_t offset, uint64_t count, uint64_t entry_bytes, uint64_t bytes)
{
    KVIST_FUZZ_REQUIRE(offset >= KVIST_HEADER_BYTES && offset <= bytes && offset % 64 == 0);
    KVIST_FUZZ_REQUIRE(count <= (bytes - offset) / entry_bytes);
}

static void read_map(struct kvist_fuzz_input *input, const struct kvist_map_header *header)
{
    uint8_t key[KVIST_KEY_BYTES];
    char *memory = make_memory(input, header, header->map_bytes);
    const struct kvist_index_entry *index = (const void *)(memory + header->index_offset);
    const struct kvist_slot_entry *slots = (const void *)(memory + header->slot_table_offset);
    const struct kvist_segment_entry *segments =
        (const void *)(memory + header->segment_table_offset);
    memcpy(key, index[0].key, sizeof(key));
    for (unsigned count = 0; count < KEYS; count++) {
        struct kvist_entry_copy found;
        uint32_t position =
            kvist_index_find(index, header->index_capacity, header->index_seed, key, &found);
        if (position != KVIST_ENTRY_NONE) {
            KVIST_FUZZ_REQUIRE(position < header->index_capacity);
            KVIST_FUZZ_REQUIRE(kvist_entry_read(&index[position], &found));
            if (found.slot < header->slot_max) { /* as every reader asks first */
                (void)atomic_load(&slots[found.slot].block_bytes);
                (void)atomic_load(&segments[found.slot / header->slots_per_segment].serial);
            }
        }
        kvist_fuzz_take(input, key, sizeof(key));
    }
    free(memory);
}

static void map_target(struct kvist_fuzz_input *input)
{
    struct kvist_map_header header = {
        .magic = KVIST_MAP_MAGIC,
        .layout_version = KVIST_LAYOUT_VERSION,
        .header_bytes = KVIST_HEADER_BYTES,
        .slot_bytes = 65536,
        .slots_per_segment = 1 + kvist_fuzz_u8(input) % 16,
        .segment_max = 1 + kvist_fuzz_u8(input) % 16,
        .index_capacity = 1U << kvist_fuzz_u8(input) % 10,
    };
    header.slot_max = header.slots_per_segment * header.segment_max;
    kvist_map_lay_out(&header);
    uint64_t memfd_bytes = header.map_bytes;
    edit(input, &header, 128);
    if ((kvist_fuzz_u8(input) & 1U) != 0) { /* sizes that are consistent, however large */
        kvist_map_lay_out(&header);
        memfd_bytes = header.map_bytes;
    }
    if (!kvist_map_header_check(&header, memfd_bytes)) {
        return;
    }
    KVIST_FUZZ_REQUIRE(header.map_bytes == memfd_bytes);
    check_table(header.segment_table_offset,
                header.segment_max,
                sizeof(struct kvist_segment_entry),
                memfd_bytes);
    check_table(
        header.slot_table_offset, header.slot_max, sizeof(struct kvist_slot_entry), memfd_bytes);
    check_table(
        header.index_offset, header.index_capacity, sizeof(struct kvist_index_entry), memfd_bytes);
    KVIST_FUZZ_REQUIRE(header.segment_max <= KVIST_SEGMENTS_MAX);
    KVIST_FUZZ_REQUIRE((header.slot_max - 1) / header.slots_per_segment < header.segment_max);
    KVIST_FUZZ_REQUIRE(header.slots_per_segment * header.slot_bytes <= KVIST_SEGMENT_BYTES_MAX);
    if (header.map_bytes <= MEMORY_BYTES_MAX) {
        read_map(input, &header);
    }
}

/* --- Session page ---------------------------------------------------------------------------- */

static void page_target(struct kvist_fuzz_input *input)
{
    struct kvist_page_header header = {
        .magic = KVIST_PAGE_MAGIC,
        .layout_version = KVIST_LAYOUT_VERSION,
        .header_bytes = KVIST_HEADER_BYTES,
        .lease_max = 1 + kvist_fuzz_u8(input),
        .ticket_max = 1 + kvist_fuzz_u8(input),
        .rank_count = 1 + kvist_fuzz_u8(input) % 4,
        .pool_max = KVIST_SESSION_POOLS_MAX,
        .segment_max = KVIST_SEGMENTS_MAX,
        .touch_count = KVIST_TOUCH_RING_COUNT,
    };
    kvist_page_lay_out(&header);
    uint64_t memfd_bytes = header.page_bytes;
    edit(input, &header, 112);
    if ((kvist_fuzz_u8(input) & 1U) != 0) {
        kvist_page_lay_out(&header);
        memfd_bytes = header.page_bytes;
    }
    if (!kvist_page_header_check(&header, memfd_bytes)) {
        return;
    }
    uint64_t ends[] = {
        header.lease_offset + (uint64_t)header.lease_max * sizeof(struct kvist_lease_record),
        header.mark_offset + (uint64_t)header.rank_count * header.ticket_max * sizeof(uint64_t),
        header.mapped_offset +
            (uint64_t)header.rank_count * header.pool_max * header.segment_max * sizeof(uint32_t),
        header.touch_offset + (uint64_t)header.touch_count * sizeof(uint64_t),
    };
    const uint64_t starts[] = {
        header.mark_offset, header.mapped_offset, header.touch_offset, memfd_bytes};
    KVIST_FUZZ_REQUIRE(header.lease_offset >= KVIST_HEADER_BYTES);
    for (unsigned part = 0; part < 4; part++) {
        KVIST_FUZZ_REQUIRE(ends[part] <= starts[part] && starts[part] % 8 == 0);
    }
    KVIST_FUZZ_REQUIRE(header.lease_max <= KVIST_LEASES_MAX &&
                       header.ticket_max <= KVIST_GRANTS_MAX &&
                       header.rank_count <= KVIST_RANKS_MAX);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvist_fuzz_input input = {data, size};
    if ((kvist_fuzz_u8(&input) & 1U) == 0) {
        map_target(&input);
    } else {
        page_target(&input);
    }
    return 0;
}

void kvist_fuzz_seeds(kvist_fuzz_emit_fn *emit, void *ctx)
{
    /* A map without edits: its every entry READY, key all zero, slot 3; then keys to look for. */
    uint8_t map_seed[6 + PATTERN_MAX + 2 * KVIST_KEY_BYTES] = {0, 3, 3, 6, 0, 0};
    const uint32_t entry[] = {2, KVIST_ENTRY_READY, 3, 0};
    memcpy(map_seed + 6, entry, sizeof(entry));
    emit(ctx, map_seed, sizeof(map_seed));
    map_seed[6] = 1; /* always busy */
    emit(ctx, map_seed, sizeof(map_seed));
    /* index_capacity (word 20) = 1 << 31, laid out again */
    static const uint8_t large[] = {0, 3, 3, 6, 1, 20, 1, 31, 1};
    /* slots_per_segment (16), segment_max (17), slot_max (18) */
    static const uint8_t many[] = {0, 3, 3, 6, 3, 16, 1, 19, 17, 1, 9, 18, 1, 28, 1};
    static const uint8_t page_seed[] = {1, 9, 9, 1, 0, 0};
    static const uint8_t page_large[] = {1, 9, 9, 1, 2, 10, 1, 15, 12, 16, 0, 1};
    emit(ctx, large, sizeof(large));
    emit(ctx, many, sizeof(many));
    emit(ctx, page_seed, sizeof(page_seed));
    emit(ctx, page_large, sizeof(page_large));
}
