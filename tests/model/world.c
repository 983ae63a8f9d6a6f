#include "tests/model/world.h"

#include "tests/support/unit.h"

#include <stdlib.h>

static struct kvist_world world;
uint32_t kvist_world_reads = 1;

const struct kvist_world *kvist_world_get(void)
{
    return &world;
}

void kvist_world_set_reads(uint32_t read_max)
{
    kvist_world_reads = read_max;
}

static void open_map(void)
{
    struct kvist_map_header geometry = {
        .magic = KVIST_MAP_MAGIC,
        .layout_version = KVIST_LAYOUT_VERSION,
        .header_bytes = KVIST_HEADER_BYTES,
        .slot_bytes = KVIST_BLOCK_BYTES_MIN,
        .slots_per_segment = KVIST_WORLD_SLOTS,
        .segment_max = 1,
        .slot_max = KVIST_WORLD_SLOTS,
        .index_capacity = KVIST_WORLD_CAPACITY,
        .generation = 1,
    };
    kvist_map_lay_out(&geometry);
    world.map = calloc(1, geometry.map_bytes);
    KVIST_TEST_FATAL(world.map != NULL);
    memcpy(world.map, &geometry, sizeof(geometry));
    struct kvist_segment_entry *segment = (void *)(world.map + 1);
    segment->serial = KVIST_WORLD_SERIAL;
    segment->state = KVIST_SEGMENT_LIVE;
    segment->bytes = KVIST_WORLD_SLOTS * KVIST_BLOCK_BYTES_MIN;
}

static void open_page(uint32_t rank_count)
{
    struct kvist_page_header geometry = {
        .magic = KVIST_PAGE_MAGIC,
        .layout_version = KVIST_LAYOUT_VERSION,
        .header_bytes = KVIST_HEADER_BYTES,
        .lease_max = KVIST_LEASES_MAX,
        .ticket_max = KVIST_GRANTS_MAX,
        .rank_count = rank_count,
        .pool_max = KVIST_SESSION_POOLS_MAX,
        .segment_max = KVIST_SEGMENTS_MAX,
        .touch_count = KVIST_TOUCH_RING_COUNT,
    };
    kvist_page_lay_out(&geometry);
    world.page = calloc(1, geometry.page_bytes);
    KVIST_TEST_FATAL(world.page != NULL);
    memcpy(world.page, &geometry, sizeof(geometry));
}

void kvist_world_set_mapped(bool mapped)
{
    _Atomic uint32_t *record = (void *)((char *)world.page + world.page->mapped_offset);
    world.mapping = mapped ? 1 : 0;
    record[0] = KVIST_WORLD_SERIAL;
    record[(size_t)KVIST_SESSION_POOLS_MAX * KVIST_SEGMENTS_MAX] = mapped ? KVIST_WORLD_SERIAL : 0;
}

uint64_t kvist_world_segment_bytes(void)
{
    return KVIST_WORLD_SLOTS * KVIST_BLOCK_BYTES_MIN;
}

void kvist_world_key(uint32_t block, uint8_t key_out[KVIST_KEY_BYTES])
{
    uint64_t key[4] = {0, 0, 0, block};
    uint32_t home = block == 3 ? 5 : 1;
    while (kvist_index_home(key, 0, KVIST_WORLD_CAPACITY) != home) {
        key[0]++;
    }
    memcpy(key_out, key, KVIST_KEY_BYTES);
}

static void put(uint32_t slot, uint32_t block)
{
    char *base = (char *)world.map;
    struct kvist_slot_entry *slots = (void *)(base + world.map->slot_table_offset);
    struct kvist_index_entry *index = (void *)(base + world.map->index_offset);
    uint64_t key[4];
    uint8_t bytes[KVIST_KEY_BYTES];
    kvist_world_key(block, bytes);
    memcpy(key, bytes, sizeof(key));
    uint32_t position = kvist_index_home(key, 0, KVIST_WORLD_CAPACITY);
    while (index[position].state != KVIST_ENTRY_EMPTY) {
        position++;
    }
    for (uint32_t word = 0; word < 4; word++) {
        index[position].key[word] = key[word];
    }
    index[position].sequence = 2;
    index[position].state = KVIST_ENTRY_READY;
    index[position].slot = slot;
    index[position].generation = 1;
    slots[slot].state = KVIST_SLOT_READY;
    slots[slot].generation = 1;
    slots[slot].block_bytes = block;
    slots[slot].entry = position;
    world.bytes[slot] = block;
}

void kvist_world_open(void)
{
    open_map();
    open_page(2);
    put(0, 1);
    put(1, 3);
    kvist_world_set_mapped(true);
    kvist_daemon_open();
    kvist_engine_open();
}

void kvist_world_close(void)
{
    kvist_engine_close();
    kvist_daemon_close();
    free(world.map);
    free(world.page);
    world = (struct kvist_world){.map = NULL};
}
