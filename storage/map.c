#include "storage/map.h"

#include "proto/base/check.h"
#include "proto/shm/memfd.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <unistd.h>

static void set_pointers(struct kvist_map *map, const struct kvist_map_header *geometry)
{
    char *base = map->base;
    map->header = map->base;
    map->segments = (void *)(base + geometry->segment_table_offset);
    map->slots = (void *)(base + geometry->slot_table_offset);
    map->index = (void *)(base + geometry->index_offset);
}

static struct kvist_map_header make_header(const struct kvist_map_shape *shape, uint64_t seed)
{
    struct kvist_map_header header = {
        .magic = KVIST_MAP_MAGIC,
        .layout_version = KVIST_LAYOUT_VERSION,
        .header_bytes = KVIST_HEADER_BYTES,
        .slot_bytes = shape->slot_bytes,
        .slots_per_segment = shape->slots_per_segment,
        .segment_max = shape->segment_max,
        .slot_max = shape->slots_per_segment * shape->segment_max,
        .index_capacity = shape->index_capacity,
        .index_seed = seed,
        .generation = shape->generation,
    };
    memcpy(header.pool_id, shape->pool_id, KVIST_KEY_BYTES);
    kvist_map_lay_out(&header);
    return header;
}

enum kvist_status kvist_map_init(const struct kvist_map_shape *shape,
                                 uint32_t serial,
                                 struct kvist_map *map_out,
                                 struct kvist_error *err)
{
    uint64_t seed = 0;
    if (getrandom(&seed, sizeof(seed), 0) != (ssize_t)sizeof(seed)) {
        return kvist_error_set_errno(err, errno, "getrandom", "no randomness for a pool map");
    }
    const struct kvist_map_header header = make_header(shape, seed);
    KVIST_CHECK(kvist_map_header_check(&header, header.map_bytes));
    struct kvist_map map = {
        .arena = shape->arena,
        .serial = serial,
        .fd = -1,
        .read_only_fd = -1,
        .bytes = header.map_bytes,
        .capacity = header.index_capacity,
        .segment_max = header.segment_max,
        .segment_goal = header.segment_max,
        .slot_max = header.slot_max,
        .seed = seed,
    };
    char name[KVIST_MEMFD_NAME_BYTES + 1];
    kvist_memfd_name('m', serial, shape->arena, name);
    enum kvist_status status = kvist_memfd_create(name, map.bytes, &map.fd, err);
    if (status != KVIST_OK) {
        return status;
    }
    status = kvist_memfd_reopen_read_only(map.fd, &map.read_only_fd, err);
    if (status != KVIST_OK) {
        goto close_fd;
    }
    status = kvist_memfd_map(map.fd, map.bytes, KVIST_MEMFD_WRITE, &map.base, err);
    if (status != KVIST_OK) {
        goto close_read_only_fd;
    }
    memcpy(map.base, &header, sizeof(header));
    set_pointers(&map, &header);
    *map_out = map;
    return KVIST_OK;

close_read_only_fd:
    (void)close(map.read_only_fd);
close_fd:
    (void)close(map.fd);
    return status;
}

enum kvist_status kvist_map_adopt(
    int fd, uint64_t arena, uint32_t serial, struct kvist_map *map_out, struct kvist_error *err)
{
    uint64_t bytes = 0;
    enum kvist_status status = kvist_memfd_check(fd, &bytes, err);
    if (status != KVIST_OK) {
        return status;
    }
    if (bytes < KVIST_HEADER_BYTES) {
        return kvist_error_set(err, KVIST_CORRUPT, 0, "map", "too small for a pool map");
    }
    struct kvist_map map = {.arena = arena, .serial = serial, .fd = fd, .bytes = bytes};
    status = kvist_memfd_map(fd, bytes, KVIST_MEMFD_WRITE, &map.base, err);
    if (status != KVIST_OK) {
        return status;
    }
    struct kvist_map_header header;
    memcpy(&header, map.base, sizeof(header));
    status = kvist_map_header_check(&header, bytes)
                 ? kvist_memfd_check_own(fd, bytes, err)
                 : kvist_error_set(err, KVIST_CORRUPT, 0, "map", "no pool map of this layout");
    if (status == KVIST_OK) {
        status = kvist_memfd_reopen_read_only(fd, &map.read_only_fd, err);
    }
    if (status != KVIST_OK) {
        kvist_memfd_unmap(&map.base, bytes);
        return status;
    }
    map.capacity = header.index_capacity;
    map.segment_max = header.segment_max;
    map.segment_goal = header.segment_max;
    map.slot_max = header.slot_max;
    map.seed = header.index_seed;
    set_pointers(&map, &header);
    *map_out = map;
    return KVIST_OK;
}

void kvist_map_give_up_growth(struct kvist_map *map)
{
    if (map->next != NULL) {
        kvist_map_fini(map->next);
        free(map->next);
        map->next = NULL;
    }
}

void kvist_map_fini(struct kvist_map *map)
{
    kvist_map_give_up_growth(map);
    if (map->base != NULL) {
        kvist_memfd_unmap(&map->base, map->bytes);
        (void)close(map->read_only_fd);
        (void)close(map->fd);
    }
}

static uint32_t state_of(const struct kvist_map *map, uint32_t position)
{
    return atomic_load_explicit(&map->index[position].state, memory_order_relaxed);
}

void kvist_map_read(const struct kvist_map *map,
                    uint32_t position,
                    struct kvist_entry_copy *copy_out)
{
    KVIST_CHECK(position < map->capacity);
    /* The writer's own thread: no entry is busy. */
    bool consistent = kvist_entry_read(&map->index[position], copy_out);
    KVIST_CHECK(consistent);
}

static void
write_here(struct kvist_map *map, uint32_t position, const struct kvist_entry_copy *entry)
{
    uint32_t before = state_of(map, position);
    if (before == KVIST_ENTRY_TOMBSTONE) {
        map->tombstones--;
    } else if (before != KVIST_ENTRY_EMPTY) {
        map->live--;
    }
    kvist_entry_write(&map->index[position], entry);
    if (entry->state == KVIST_ENTRY_TOMBSTONE) {
        map->tombstones++;
    } else {
        map->live++;
    }
}

/* Have the next map say the same of a key as this one. */
static void mirror(struct kvist_map *map, const struct kvist_entry_copy *entry)
{
    struct kvist_map *next = map->next;
    struct kvist_entry_copy found;
    uint8_t key[KVIST_KEY_BYTES];
    memcpy(key, entry->key, sizeof(key));
    uint32_t position = kvist_map_find(next, key, &found);
    if (entry->state == KVIST_ENTRY_TOMBSTONE) {
        if (position != KVIST_ENTRY_NONE) {
            kvist_map_remove(next, position);
        }
    } else if (position != KVIST_ENTRY_NONE) {
        write_here(next, position, entry);
    } else if (kvist_map_insert(next, entry) == KVIST_ENTRY_NONE) {
        kvist_map_give_up_growth(map); /* begun again, with another seed */
    }
}

void kvist_map_write(struct kvist_map *map, uint32_t position, const struct kvist_entry_copy *entry)
{
    KVIST_CHECK(position < map->capacity && entry->state != KVIST_ENTRY_EMPTY);
    write_here(map, position, entry);
    if (map->next != NULL && position < map->carried) {
        mirror(map, entry);
    }
}

static void note_here(struct kvist_map *map, uint32_t position, uint32_t extent)
{
    atomic_store_explicit(&map->index[position].extent, extent, memory_order_relaxed);
}

void kvist_map_note_extent(struct kvist_map *map, uint32_t position, uint32_t extent)
{
    KVIST_CHECK(position < map->capacity && state_of(map, position) >= KVIST_ENTRY_READY);
    note_here(map, position, extent);
    if (map->next != NULL && position < map->carried) {
        struct kvist_entry_copy entry;
        uint8_t key[KVIST_KEY_BYTES];
        kvist_map_read(map, position, &entry);
        memcpy(key, entry.key, sizeof(key));
        position = kvist_map_find(map->next, key, &entry);
        KVIST_CHECK(position != KVIST_ENTRY_NONE);
        note_here(map->next, position, extent);
    }
}

uint32_t kvist_map_place(const struct kvist_map *map, const uint64_t key[4])
{
    uint32_t position = kvist_index_home(key, map->seed, map->capacity);
    for (unsigned probe = 0; probe < KVIST_INDEX_PROBE_MAX; probe++) {
        if (state_of(map, position) <= KVIST_ENTRY_TOMBSTONE) {
            return position;
        }
        position = (position + 1) & (map->capacity - 1);
    }
    return KVIST_ENTRY_NONE;
}

uint32_t kvist_map_insert(struct kvist_map *map, const struct kvist_entry_copy *entry)
{
    uint32_t position = kvist_map_place(map, entry->key);
    if (position != KVIST_ENTRY_NONE) {
        kvist_map_write(map, position, entry);
    }
    return position;
}

static void make_empty(struct kvist_map *map, uint32_t position)
{
    static const struct kvist_entry_copy empty = {.state = KVIST_ENTRY_EMPTY};
    kvist_entry_write(&map->index[position], &empty);
    map->tombstones--;
}

void kvist_map_settle(struct kvist_map *map, uint32_t position)
{
    const uint32_t mask = map->capacity - 1;
    if (state_of(map, (position + 1) & mask) != KVIST_ENTRY_EMPTY) {
        return;
    }
    /* No probe goes beyond this entry: it, and the tombstones before it, end one as well. */
    while (state_of(map, position) == KVIST_ENTRY_TOMBSTONE) {
        make_empty(map, position);
        position = (position - 1) & mask;
    }
}

void kvist_map_remove(struct kvist_map *map, uint32_t position)
{
    struct kvist_entry_copy entry;
    kvist_map_read(map, position, &entry);
    entry.state = KVIST_ENTRY_TOMBSTONE;
    kvist_map_write(map, position, &entry);
    kvist_map_settle(map, position);
}

uint32_t kvist_map_clear(struct kvist_map *map)
{
    static const struct kvist_entry_copy empty = {.state = KVIST_ENTRY_EMPTY};
    uint32_t live = map->live;
    kvist_map_give_up_growth(map);
    for (uint32_t position = 0; position < map->capacity; position++) {
        if (state_of(map, position) != KVIST_ENTRY_EMPTY) {
            kvist_entry_write(&map->index[position], &empty);
        }
    }
    map->live = 0;
    map->tombstones = 0;
    return live;
}

static bool
stands_once(const struct kvist_map *map, uint32_t position, const struct kvist_entry_copy *entry)
{
    struct kvist_entry_copy found;
    uint8_t key[KVIST_KEY_BYTES];
    memcpy(key, entry->key, sizeof(key));
    return kvist_map_find(map, key, &found) == position;
}

uint32_t kvist_map_sift(struct kvist_map *map, kvist_map_keep_fn *keep, void *ctx)
{
    static const struct kvist_entry_copy tombstone = {.state = KVIST_ENTRY_TOMBSTONE};
    uint32_t broken = 0;
    map->live = 0;
    map->tombstones = 0;
    for (uint32_t position = 0; position < map->capacity; position++) {
        struct kvist_index_entry *shared = &map->index[position];
        bool whole = (atomic_load_explicit(&shared->sequence, memory_order_relaxed) & 1U) == 0;
        if (whole && state_of(map, position) == KVIST_ENTRY_EMPTY) {
            continue;
        }
        struct kvist_entry_copy entry = tombstone;
        whole = whole && kvist_entry_read(shared, &entry) && entry.state <= KVIST_ENTRY_LOADING &&
                (entry.state == KVIST_ENTRY_TOMBSTONE || stands_once(map, position, &entry));
        broken += !whole;
        if (!whole || entry.state == KVIST_ENTRY_TOMBSTONE || !keep(ctx, position, &entry)) {
            if (!whole || entry.state != KVIST_ENTRY_TOMBSTONE) {
                kvist_entry_write(shared, &tombstone);
            }
            map->tombstones++;
            continue;
        }
        note_here(map, position, 0);
        map->live++;
    }
    return broken;
}

enum kvist_status kvist_map_leave(struct kvist_map *map, struct kvist_error *err)
{
    kvist_map_give_up_growth(map);
    return kvist_memfd_make_private(map->fd, map->base, map->bytes, err);
}

/* Copy the tables up to the last segment that was ever in use: the rest stays untouched zeros. */
static void copy_tables(const struct kvist_map *source, struct kvist_map *target)
{
    const struct kvist_map_header *header = source->header;
    uint32_t slots_per_segment = header->slots_per_segment;
    for (uint32_t segment = 0; segment < header->segment_max; segment++) {
        const struct kvist_segment_entry *entry = &source->segments[segment];
        if (atomic_load_explicit(&entry->bytes, memory_order_relaxed) == 0) {
            continue; /* bytes stay when a segment goes: its slots' generations are kept */
        }
        memcpy(&target->segments[segment], entry, sizeof(*entry));
        size_t first = (size_t)segment * slots_per_segment;
        memcpy(&target->slots[first],
               &source->slots[first],
               (size_t)slots_per_segment * sizeof(source->slots[0]));
    }
}

enum kvist_status
kvist_map_begin_growth(struct kvist_map *map, uint32_t serial, struct kvist_error *err)
{
    KVIST_CHECK(map->next == NULL);
    bool twice = (uint64_t)map->live * 10 > (uint64_t)map->capacity * 3;
    if (twice && map->capacity > UINT32_MAX / 4) {
        return kvist_error_set(err, KVIST_NO_SPACE, 0, "map", "a pool map cannot grow any further");
    }
    const struct kvist_map_shape shape = {
        .arena = map->arena,
        .pool_id = map->header->pool_id,
        .slot_bytes = map->header->slot_bytes,
        .slots_per_segment = map->header->slots_per_segment,
        .segment_max =
            map->segment_goal > map->segment_max ? map->segment_goal : map->segment_max,
        .index_capacity = twice ? map->capacity * 2 : map->capacity,
    };
    struct kvist_map *next = malloc(sizeof(*next));
    if (next == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "map", "no memory for a pool map");
    }
    enum kvist_status status = kvist_map_init(&shape, serial, next, err);
    if (status != KVIST_OK) {
        free(next);
        return status;
    }
    map->next = next;
    map->carried = 0;
    return KVIST_OK;
}

enum kvist_status kvist_map_carry(struct kvist_map *map, uint32_t step_max, struct kvist_error *err)
{
    for (uint32_t step = 0; step < step_max && map->carried < map->capacity; step++) {
        uint32_t position = map->carried++;
        if (state_of(map, position) < KVIST_ENTRY_READY) {
            continue;
        }
        struct kvist_entry_copy entry;
        kvist_map_read(map, position, &entry);
        if (kvist_map_insert(map->next, &entry) == KVIST_ENTRY_NONE) {
            kvist_map_give_up_growth(map);
            return kvist_error_set(err, KVIST_NO_SPACE, 0, "map", "too many keys share one place");
        }
    }
    return KVIST_OK;
}

void kvist_map_move(struct kvist_map *map, kvist_map_moving_fn *moving, void *ctx)
{
    KVIST_CHECK(kvist_map_can_move(map));
    struct kvist_map *next = map->next;
    copy_tables(map, next);
    atomic_store_explicit(&next->header->generation,
                          atomic_load_explicit(&map->header->generation, memory_order_relaxed),
                          memory_order_relaxed);
    moving(ctx, map, next);
    /* From here on readers of the old map find `moved` when they look again after a lease. */
    atomic_store_explicit(&map->header->moved, 1, memory_order_release);
    map->next = NULL;
    kvist_map_fini(map);
    *map = *next;
    free(next);
}

static const char *check_carried(const struct kvist_map *map, uint32_t position)
{
    struct kvist_entry_copy entry;
    struct kvist_entry_copy found;
    uint8_t key[KVIST_KEY_BYTES];
    kvist_map_read(map, position, &entry);
    memcpy(key, entry.key, sizeof(key));
    if (kvist_map_find(map->next, key, &found) == KVIST_ENTRY_NONE || found.state != entry.state ||
        found.slot != entry.slot || found.extent != entry.extent ||
        found.generation != entry.generation) {
        return "an entry that was carried over is not the same in the next map";
    }
    return NULL;
}

const char *kvist_map_check(const struct kvist_map *map)
{
    uint32_t live = 0;
    uint32_t tombstones = 0;
    uint32_t carried = 0;
    for (uint32_t position = 0; position < map->capacity; position++) {
        uint32_t state = state_of(map, position);
        tombstones += state == KVIST_ENTRY_TOMBSTONE;
        if (state < KVIST_ENTRY_READY) {
            continue;
        }
        live++;
        struct kvist_entry_copy entry;
        struct kvist_entry_copy found;
        kvist_map_read(map, position, &entry);
        uint8_t key[KVIST_KEY_BYTES];
        memcpy(key, entry.key, sizeof(key));
        if (kvist_map_find(map, key, &found) != position) {
            return "an index entry is not where its key is found";
        }
        if (map->next != NULL && position < map->carried) {
            const char *broken = check_carried(map, position);
            if (broken != NULL) {
                return broken;
            }
            carried++;
        }
    }
    if (live != map->live || tombstones != map->tombstones) {
        return "the index does not hold as many entries as were counted";
    }
    return map->next != NULL && map->next->live != carried
               ? "the next map holds other entries than were carried over"
               : NULL;
}
