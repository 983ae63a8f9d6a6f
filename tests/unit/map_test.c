/* map: the index against a model, tombstones, growth, a second mapping as readers have it. */
#include "proto/base/fault.h"
#include "proto/shm/memfd.h"
#include "storage/map.h"
#include "tests/support/unit.h"

#include <stdlib.h>
#include <unistd.h>

#define CAPACITY 1024U
#define KEYS     3000U
#define SLOT_MAX 4096U
#define CHANGES  100U

static struct kvist_map map;

static void setup(void)
{
    static const uint8_t pool_id[KVIST_KEY_BYTES] = {1};
    const struct kvist_map_shape shape = {
        .pool_id = pool_id,
        .slot_bytes = 65536,
        .generation = 3,
        .slots_per_segment = 64,
        .segment_max = SLOT_MAX / 64,
        .index_capacity = CAPACITY,
    };
    KVIST_TEST_FATAL(kvist_map_init(&shape, 1, &map, NULL) == KVIST_OK);
}

static void teardown(void)
{
    const char *broken = kvist_map_check(&map);
    KVIST_TEST_TRUE(broken == NULL);
    kvist_map_fini(&map);
    kvist_map_fini(&map);
}

static struct kvist_entry_copy entry_of(uint64_t number)
{
    struct kvist_entry_copy entry = {
        .state = KVIST_ENTRY_READY,
        .slot = (uint32_t)number % SLOT_MAX,
        .generation = number,
        .key = {number * 0x9e3779b97f4a7c15ULL, number, 1, 2},
    };
    return entry;
}

static uint32_t find(uint64_t number)
{
    struct kvist_entry_copy entry = entry_of(number);
    struct kvist_entry_copy found;
    uint8_t key[KVIST_KEY_BYTES];
    memcpy(key, entry.key, sizeof(key));
    uint32_t position = kvist_map_find(&map, key, &found);
    KVIST_TEST_TRUE(position == KVIST_ENTRY_NONE || found.generation == number);
    return position;
}

/* Numbers whose keys have the same home. */
static void find_neighbours(uint64_t *numbers_out, uint32_t count)
{
    struct kvist_entry_copy first = entry_of(1);
    uint32_t home = kvist_index_home(first.key, map.seed, map.capacity);
    uint32_t found = 0;
    for (uint64_t number = 1; found < count; number++) {
        struct kvist_entry_copy entry = entry_of(number);
        if (kvist_index_home(entry.key, map.seed, map.capacity) == home) {
            numbers_out[found++] = number;
        }
    }
}

static uint32_t insert(uint64_t number)
{
    struct kvist_entry_copy entry = entry_of(number);
    return kvist_map_insert(&map, &entry);
}

static void its_header_is_valid_and_readers_cannot_write(void)
{
    struct kvist_map_header header;
    memcpy(&header, map.base, sizeof(header));
    KVIST_TEST_TRUE(kvist_map_header_check(&header, map.bytes));
    KVIST_TEST_EQUAL(header.generation, 3);
    void *peer = NULL;
    KVIST_TEST_TRUE(kvist_memfd_map(map.read_only_fd, map.bytes, KVIST_MEMFD_WRITE, &peer, NULL) !=
                    KVIST_OK);
}

static void tombstones_go_when_nothing_lies_behind(void)
{
    uint64_t numbers[4];
    find_neighbours(numbers, 4);
    uint32_t positions[4];
    for (unsigned index = 0; index < 4; index++) {
        positions[index] = insert(numbers[index]);
        KVIST_TEST_TRUE(index == 0 || positions[index] == (positions[0] + index) % CAPACITY);
    }
    kvist_map_remove(&map, positions[1]);
    kvist_map_remove(&map, positions[2]);
    KVIST_TEST_EQUAL(map.tombstones, 2);
    KVIST_TEST_EQUAL(find(numbers[3]), positions[3]);
    kvist_map_remove(&map, positions[3]); /* the last of the run takes the two with it */
    KVIST_TEST_EQUAL(map.tombstones, 0);
    KVIST_TEST_EQUAL(map.live, 1);
    KVIST_TEST_EQUAL(find(numbers[0]), positions[0]);
    KVIST_TEST_EQUAL(insert(numbers[2]), positions[1]);
}

static void hiding_can_be_undone(void)
{
    uint64_t numbers[3];
    find_neighbours(numbers, 3);
    uint32_t positions[3];
    for (unsigned index = 0; index < 3; index++) {
        positions[index] = insert(numbers[index]);
    }
    struct kvist_entry_copy hidden[3];
    for (unsigned index = 0; index < 3; index++) {
        kvist_map_read(&map, positions[index], &hidden[index]);
        struct kvist_entry_copy tombstone = hidden[index];
        tombstone.state = KVIST_ENTRY_TOMBSTONE;
        kvist_map_write(&map, positions[index], &tombstone);
        KVIST_TEST_EQUAL(find(numbers[index]), KVIST_ENTRY_NONE);
    }
    kvist_map_write(&map, positions[1], &hidden[1]);
    kvist_map_settle(&map, positions[0]);
    kvist_map_settle(&map, positions[2]);
    KVIST_TEST_EQUAL(find(numbers[1]), positions[1]);
    KVIST_TEST_EQUAL(map.live, 1);
    KVIST_TEST_EQUAL(map.tombstones, 1); /* before a live entry of its run it has to stay */
}

static void a_full_run_refuses(void)
{
    static uint64_t numbers[KVIST_INDEX_PROBE_MAX + 1];
    find_neighbours(numbers, KVIST_INDEX_PROBE_MAX + 1);
    for (unsigned index = 0; index < KVIST_INDEX_PROBE_MAX; index++) {
        KVIST_TEST_TRUE(insert(numbers[index]) != KVIST_ENTRY_NONE);
    }
    KVIST_TEST_EQUAL(insert(numbers[KVIST_INDEX_PROBE_MAX]), KVIST_ENTRY_NONE);
    KVIST_TEST_EQUAL(find(numbers[KVIST_INDEX_PROBE_MAX]), KVIST_ENTRY_NONE);
    KVIST_TEST_EQUAL(map.live, KVIST_INDEX_PROBE_MAX);
}

static uint32_t find_in(const struct kvist_map *which, uint64_t number)
{
    struct kvist_entry_copy entry = entry_of(number);
    struct kvist_entry_copy found;
    uint8_t key[KVIST_KEY_BYTES];
    memcpy(key, entry.key, sizeof(key));
    return kvist_map_find(which, key, &found);
}

static uint32_t positions_told[SLOT_MAX];
static uint32_t moving_count;

static void note_positions(void *ctx, const struct kvist_map *from, struct kvist_map *next)
{
    KVIST_TEST_TRUE(ctx == &map && from == &map);
    for (uint32_t number = 0; number < SLOT_MAX; number++) {
        positions_told[number] = find_in(next, number);
    }
    moving_count++;
}

static void growth_keeps_all_and_says_moved(void)
{
    for (uint64_t number = 0; number < 700; number++) {
        KVIST_TEST_TRUE(insert(number) != KVIST_ENTRY_NONE);
    }
    KVIST_TEST_TRUE(kvist_map_wants_growth(&map));
    atomic_store(&map.slots[70].generation, 99);
    atomic_store(&map.segments[1].bytes, 64 * 65536);
    atomic_store(&map.segments[1].serial, 5);
    void *old = NULL;
    uint64_t old_bytes = map.bytes;
    KVIST_TEST_FATAL(kvist_memfd_map(map.read_only_fd, map.bytes, KVIST_MEMFD_READ, &old, NULL) ==
                     KVIST_OK);

    kvist_fault_arm("memfd.create", 1, false);
    moving_count = 0;
    KVIST_TEST_TRUE(kvist_map_begin_growth(&map, 2, NULL) != KVIST_OK);
    (void)kvist_fault_disarm();
    KVIST_TEST_TRUE(map.next == NULL);
    const struct kvist_map_header *old_header = old;
    KVIST_TEST_STATUS(kvist_map_begin_growth(&map, 2, NULL), KVIST_OK);
    KVIST_TEST_STATUS(kvist_map_carry(&map, 600, NULL), KVIST_OK);
    KVIST_TEST_TRUE(!kvist_map_can_move(&map));
    KVIST_TEST_STATUS(kvist_map_carry(&map, 600, NULL), KVIST_OK);
    KVIST_TEST_TRUE(kvist_map_can_move(&map));
    KVIST_TEST_EQUAL(moving_count + old_header->moved, 0);
    KVIST_TEST_EQUAL(map.capacity, CAPACITY);
    kvist_map_move(&map, note_positions, &map);
    KVIST_TEST_EQUAL(map.capacity, 2 * CAPACITY);
    KVIST_TEST_EQUAL(old_header->moved, 1);
    KVIST_TEST_EQUAL(moving_count, 1);
    for (uint64_t number = 0; number < 700; number++) {
        KVIST_TEST_EQUAL(find(number), positions_told[number]);
    }
    KVIST_TEST_EQUAL(map.slots[70].generation, 99);
    KVIST_TEST_EQUAL(map.segments[1].serial, 5);
    KVIST_TEST_EQUAL(map.header->generation, 3);
    kvist_memfd_unmap(&old, old_bytes);
}

static void change_some(uint64_t part)
{
    for (uint64_t number = part * CHANGES; number < (part + 1) * CHANGES; number++) {
        kvist_map_remove(&map, find(number));
        KVIST_TEST_TRUE(insert(1000 + number) != KVIST_ENTRY_NONE);
        kvist_map_note_extent(&map, find(200 + number), (uint32_t)number + 1);
        KVIST_TEST_TRUE(kvist_map_check(&map) == NULL);
    }
}

static void what_changes_while_it_grows_changes_in_both(void)
{
    for (uint64_t number = 0; number < 640; number++) {
        KVIST_TEST_TRUE(insert(number) != KVIST_ENTRY_NONE);
    }
    KVIST_TEST_STATUS(kvist_map_begin_growth(&map, 2, NULL), KVIST_OK);
    KVIST_TEST_STATUS(kvist_map_carry(&map, CAPACITY / 2, NULL), KVIST_OK);
    change_some(0);
    KVIST_TEST_STATUS(kvist_map_carry(&map, CAPACITY / 2, NULL), KVIST_OK);
    change_some(1); /* also when all has been carried over */
    kvist_map_move(&map, note_positions, &map);
    KVIST_TEST_EQUAL(map.live, 640);
    for (uint64_t number = 0; number < 2 * CHANGES; number++) {
        struct kvist_entry_copy entry;
        KVIST_TEST_EQUAL(find(number), KVIST_ENTRY_NONE);
        KVIST_TEST_TRUE(find(1000 + number) != KVIST_ENTRY_NONE);
        kvist_map_read(&map, find(200 + number), &entry);
        KVIST_TEST_EQUAL(entry.extent, number + 1);
    }
    /* A clear ends a growth that is under way. */
    KVIST_TEST_STATUS(kvist_map_begin_growth(&map, 3, NULL), KVIST_OK);
    KVIST_TEST_STATUS(kvist_map_carry(&map, 10, NULL), KVIST_OK);
    KVIST_TEST_TRUE(map.next != NULL);
    KVIST_TEST_EQUAL(kvist_map_clear(&map), 640);
    KVIST_TEST_TRUE(map.next == NULL);
}

static void it_agrees_with_a_model(void)
{
    static bool present[KEYS];
    memset(present, 0, sizeof(present));
    unsigned growths = 0;
    srand(11);
    for (unsigned step = 0; step < 60000; step++) {
        /* The set of keys grows, then shrinks, then changes at a constant size. */
        uint64_t number = (uint64_t)rand() % KEYS;
        int bias = step < 20000 ? 3 : (step < 40000 ? 1 : 2);
        if (map.next != NULL) {
            KVIST_TEST_STATUS(kvist_map_carry(&map, 7, NULL), KVIST_OK);
        } else if (kvist_map_wants_growth(&map)) {
            KVIST_TEST_STATUS(kvist_map_begin_growth(&map, step, NULL), KVIST_OK);
        }
        if (kvist_map_can_move(&map) && rand() % 8 == 0) {
            kvist_map_move(&map, note_positions, &map);
            growths++;
        }
        if (!present[number] && rand() % 4 < bias) {
            present[number] = insert(number) != KVIST_ENTRY_NONE;
            KVIST_TEST_TRUE(present[number]);
        } else if (present[number] && rand() % 4 >= bias) {
            uint32_t position = find(number);
            KVIST_TEST_FATAL(position != KVIST_ENTRY_NONE);
            kvist_map_remove(&map, position);
            present[number] = false;
        }
        if (step % 2000 == 0) {
            KVIST_TEST_TRUE(kvist_map_check(&map) == NULL);
            for (uint64_t key = 0; key < KEYS; key++) {
                KVIST_TEST_EQUAL(find(key) != KVIST_ENTRY_NONE, present[key]);
            }
        }
    }
    KVIST_TEST_TRUE(growths >= 2);
    KVIST_TEST_TRUE(kvist_map_clear(&map) > 0);
    KVIST_TEST_EQUAL(map.live + map.tombstones, 0);
    KVIST_TEST_EQUAL(find(5), KVIST_ENTRY_NONE);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"its header is valid, readers cannot write", its_header_is_valid_and_readers_cannot_write},
        {"tombstones go when nothing lies behind", tombstones_go_when_nothing_lies_behind},
        {"hiding can be undone", hiding_can_be_undone},
        {"a full run refuses", a_full_run_refuses},
        {"growth keeps all and says moved", growth_keeps_all_and_says_moved},
        {"what changes while it grows changes in both",
         what_changes_while_it_grows_changes_in_both},
        {"it agrees with a model", it_agrees_with_a_model},
    };
    return kvist_unit_main("map", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
}
