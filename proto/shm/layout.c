#include "proto/shm/layout.h"

static bool is_power_of_two(uint32_t value)
{
    return value != 0 && (value & (value - 1)) == 0;
}

bool kvist_map_header_check(const struct kvist_map_header *copy, uint64_t memfd_bytes)
{
    if (copy->magic != KVIST_MAP_MAGIC || copy->layout_version != KVIST_LAYOUT_VERSION ||
        copy->header_bytes != KVIST_HEADER_BYTES) {
        return false;
    }
    if (copy->slot_bytes < KVIST_BLOCK_BYTES_MIN || copy->slot_bytes > KVIST_BLOCK_BYTES_MAX ||
        copy->slot_bytes % KVIST_SLOT_ALIGN_BYTES != 0) {
        return false;
    }
    if (copy->segment_max == 0 || copy->segment_max > KVIST_SEGMENTS_MAX ||
        copy->slots_per_segment == 0 ||
        copy->slots_per_segment > KVIST_SEGMENT_BYTES_MAX / copy->slot_bytes ||
        copy->slot_max != (uint64_t)copy->slots_per_segment * copy->segment_max ||
        !is_power_of_two(copy->index_capacity)) {
        return false;
    }
    struct kvist_map_header expected = {
        .segment_max = copy->segment_max,
        .slot_max = copy->slot_max,
        .index_capacity = copy->index_capacity,
    };
    kvist_map_lay_out(&expected);
    return copy->segment_table_offset == expected.segment_table_offset &&
           copy->slot_table_offset == expected.slot_table_offset &&
           copy->index_offset == expected.index_offset && copy->map_bytes == expected.map_bytes &&
           copy->map_bytes == memfd_bytes;
}

bool kvist_page_header_check(const struct kvist_page_header *copy, uint64_t memfd_bytes)
{
    if (copy->magic != KVIST_PAGE_MAGIC || copy->layout_version != KVIST_LAYOUT_VERSION ||
        copy->header_bytes != KVIST_HEADER_BYTES) {
        return false;
    }
    if (copy->lease_max == 0 || copy->lease_max > KVIST_LEASES_MAX || copy->ticket_max == 0 ||
        copy->ticket_max > KVIST_GRANTS_MAX || copy->rank_count == 0 ||
        copy->rank_count > KVIST_RANKS_MAX || copy->pool_max != KVIST_SESSION_POOLS_MAX ||
        copy->segment_max != KVIST_SEGMENTS_MAX || copy->touch_count != KVIST_TOUCH_RING_COUNT) {
        return false;
    }
    struct kvist_page_header expected = {
        .lease_max = copy->lease_max,
        .ticket_max = copy->ticket_max,
        .rank_count = copy->rank_count,
        .pool_max = copy->pool_max,
        .segment_max = copy->segment_max,
        .touch_count = copy->touch_count,
    };
    kvist_page_lay_out(&expected);
    return copy->lease_offset == expected.lease_offset &&
           copy->mark_offset == expected.mark_offset &&
           copy->mapped_offset == expected.mapped_offset &&
           copy->touch_offset == expected.touch_offset && copy->page_bytes == expected.page_bytes &&
           copy->page_bytes == memfd_bytes;
}
