/*
 * map - a pool map, as its one writer sees it.
 *
 * Role        index insert, update and removal with tombstones that are cleaned, the slot and
 *             segment tables, and growth into a new memfd. Knows nothing of sessions or policy.
 * Ownership   the map owns its fds and its mapping
 * Threads     loop
 * Limits      KVIST_INDEX_PROBE_MAX entries are looked at by an insert; the index is grown or swept
 *             before more than 7 of 10 entries are in use
 * Invariants  no EMPTY entry lies between the home of a live key and the key;
 *             live + tombstones <= capacity (kvist_map_check)
 * Source      proto/shm/layout.h
 */
#ifndef KVIST_STORAGE_MAP_H
#define KVIST_STORAGE_MAP_H

#include "proto/shm/layout.h"

#include <kvist/error.h>

struct kvist_map {
    int fd;           /* read-write; the daemon's own */
    int read_only_fd; /* what peers are sent */
    uint64_t bytes;
    void *base;
    struct kvist_map_header *header;
    struct kvist_segment_entry *segments;
    struct kvist_slot_entry *slots;
    struct kvist_index_entry *index;
    uint32_t capacity;
    uint32_t slot_max;
    uint32_t live;       /* entries that hold a key */
    uint32_t tombstones; /* entries that held one */
    uint64_t seed;
};

struct kvist_map_shape {
    const uint8_t *pool_id;
    uint64_t slot_bytes;
    uint64_t generation;
    uint32_t slots_per_segment;
    uint32_t segment_max;
    uint32_t index_capacity; /* a power of two */
};

KVIST_MUST_USE enum kvist_status kvist_map_init(const struct kvist_map_shape *shape,
                                                uint32_t serial,
                                                struct kvist_map *map_out,
                                                struct kvist_error *err);

void kvist_map_fini(struct kvist_map *map);

/** @return position, or KVIST_ENTRY_NONE */
static inline uint32_t kvist_map_find(const struct kvist_map *map,
                                      const uint8_t key[KVIST_KEY_BYTES],
                                      struct kvist_entry_copy *copy_out)
{
    return kvist_index_find(map->index, map->capacity, map->seed, key, copy_out);
}

/**
 * Insert a key that is not there.
 *
 * @return position, or KVIST_ENTRY_NONE when the probe sequence is full: grow, or do without
 */
uint32_t kvist_map_insert(struct kvist_map *map, const struct kvist_entry_copy *entry);

/** The entry at a position of this map. */
void kvist_map_read(const struct kvist_map *map,
                    uint32_t position,
                    struct kvist_entry_copy *copy_out);

/** Overwrite the entry at a position; it keeps its key. TOMBSTONE hides it, and may be undone. */
void kvist_map_write(struct kvist_map *map,
                     uint32_t position,
                     const struct kvist_entry_copy *entry);

/** Free a hidden entry for good: hiding can no longer be undone here or at an earlier position. */
void kvist_map_settle(struct kvist_map *map, uint32_t position);

/** Hide and settle. */
void kvist_map_remove(struct kvist_map *map, uint32_t position);

/** Drop every entry. @return how many keys there were */
uint32_t kvist_map_clear(struct kvist_map *map);

static inline bool kvist_map_wants_growth(const struct kvist_map *map)
{
    return (uint64_t)(map->live + map->tombstones) * 10 > (uint64_t)map->capacity * 7;
}

/* Where an entry lies in the new map. */
typedef void kvist_map_moved_fn(void *ctx, const struct kvist_entry_copy *entry, uint32_t position);

/**
 * Move to a new memfd: twice the index when it is more than 35 % live, else the same size without
 * tombstones. The old map says `moved` and is closed. On failure the map is as before.
 */
KVIST_MUST_USE enum kvist_status kvist_map_grow(struct kvist_map *map,
                                                uint32_t serial,
                                                kvist_map_moved_fn *moved,
                                                void *ctx,
                                                struct kvist_error *err);

/** @return the first broken invariant, or NULL. O(capacity) */
const char *kvist_map_check(const struct kvist_map *map);

#endif
