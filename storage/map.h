/*
 * map - a pool map, as its one writer sees it.
 *
 * Role        index insert, update and removal with tombstones that are cleaned, the slot and
 *             segment tables, and growth into a new memfd. Knows nothing of sessions or policy.
 * Ownership   the map owns its fds and its mapping
 * Threads     loop
 * Growth      a new memfd is filled a few entries at a time, while the old one is still written and
 *             read; what changes among those that were carried over already is changed in both, for
 *             as long as the owner likes: it moves when the new one outlives a kill. Then the old map
 *             says `moved`, and the new one takes its place.
 * Limits      KVIST_INDEX_PROBE_MAX entries are looked at by an insert; growth begins when 6 of 10
 *             entries are in use, tombstones included, or when there are to be more segments
 * Invariants  no EMPTY entry lies between the home of a live key and the key;
 *             live + tombstones <= capacity; the next map holds exactly the live entries below
 *             `carried` (kvist_map_check)
 * Source      proto/shm/layout.h
 */
#ifndef KVIST_STORAGE_MAP_H
#define KVIST_STORAGE_MAP_H

#include "proto/shm/layout.h"

#include <kvist/error.h>

struct kvist_map {
    uint64_t arena; /* this and the serial are the memfd's name */
    uint32_t serial;
    int fd;           /* read-write; the daemon's own */
    int read_only_fd; /* what peers are sent */
    uint64_t bytes;
    void *base;
    struct kvist_map_header *header;
    struct kvist_segment_entry *segments;
    struct kvist_slot_entry *slots;
    struct kvist_index_entry *index;
    uint32_t capacity;
    uint32_t segment_max;
    uint32_t segment_goal; /* of the next map; growth begins at once when this one has fewer */
    uint32_t slot_max;
    uint32_t live;       /* entries that hold a key */
    uint32_t tombstones; /* entries that held one */
    uint64_t seed;
    struct kvist_map *next; /* while growing, else NULL */
    uint32_t carried;       /* entries before this position are in it too */
};

struct kvist_map_shape {
    uint64_t arena; /* its instance */
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

/**
 * Map a memfd that an earlier writer has left. The header is checked; entries are as they were,
 * live and tombstones are not counted yet.
 *
 * @param fd  taken over on OK
 * @return OK; CORRUPT: it is no pool map of this layout
 */
KVIST_MUST_USE enum kvist_status kvist_map_adopt(
    int fd, uint64_t arena, uint32_t serial, struct kvist_map *map_out, struct kvist_error *err);

/**
 * Go through an adopted index and count it: entries that were being written, or that `keep` does
 * not want, become tombstones. So does a key that stands a second time. None of the others has an
 * extent after that.
 *
 * @return how many were dropped without asking `keep`
 */
typedef bool kvist_map_keep_fn(void *ctx, uint32_t position, const struct kvist_entry_copy *entry);
uint32_t kvist_map_sift(struct kvist_map *map, kvist_map_keep_fn *keep, void *ctx);

/** From here on the map is a private copy: readers see no change any more. */
KVIST_MUST_USE enum kvist_status kvist_map_leave(struct kvist_map *map, struct kvist_error *err);

/** @return position, or KVIST_ENTRY_NONE */
static inline uint32_t kvist_map_find(const struct kvist_map *map,
                                      const uint8_t key[KVIST_KEY_BYTES],
                                      struct kvist_entry_copy *copy_out)
{
    return kvist_index_find(map->index, map->capacity, map->seed, key, copy_out);
}

/**
 * Where a key that is not there is to be written.
 *
 * @return position, or KVIST_ENTRY_NONE when the probe sequence is full: grow, or do without
 */
uint32_t kvist_map_place(const struct kvist_map *map, const uint64_t key[4]);

/** Insert a key that is not there. @return as of kvist_map_place() */
uint32_t kvist_map_insert(struct kvist_map *map, const struct kvist_entry_copy *entry);

/** The entry at a position of this map. */
void kvist_map_read(const struct kvist_map *map,
                    uint32_t position,
                    struct kvist_entry_copy *copy_out);

/** Write the entry at a position: one that is placed there, or that keeps its key. TOMBSTONE hides
    it, and may be undone. Meanwhile it is a miss, and lost when the writer is killed. */
void kvist_map_write(struct kvist_map *map,
                     uint32_t position,
                     const struct kvist_entry_copy *entry);

/** Note where on NVMe the block of a live entry is, 0: nowhere. It is found all the time. */
void kvist_map_note_extent(struct kvist_map *map, uint32_t position, uint32_t extent);

/** Free a hidden entry for good: hiding can no longer be undone here or at an earlier position. */
void kvist_map_settle(struct kvist_map *map, uint32_t position);

/** Hide and settle. */
void kvist_map_remove(struct kvist_map *map, uint32_t position);

/** Drop every entry, and a growth under way. @return how many keys there were */
uint32_t kvist_map_clear(struct kvist_map *map);

static inline bool kvist_map_wants_growth(const struct kvist_map *map)
{
    return map->next != NULL || map->segment_goal > map->segment_max ||
           (uint64_t)(map->live + map->tombstones) * 10 > (uint64_t)map->capacity * 6;
}

/* A growth should have come to its end by now. */
static inline bool kvist_map_is_filling(const struct kvist_map *map)
{
    return (uint64_t)(map->live + map->tombstones) * 4 > (uint64_t)map->capacity * 3;
}

/**
 * Begin to grow: `next` is a new memfd, with twice the index when it is more than 30 % live, else
 * with one of the same size without tombstones. None may be under way.
 *
 * @return OK; else the map is as before
 */
KVIST_MUST_USE enum kvist_status
kvist_map_begin_growth(struct kvist_map *map, uint32_t serial, struct kvist_error *err);

/**
 * Carry entries over to the next map.
 *
 * @return OK; NO_SPACE: too many keys share one place there, the growth is given up
 */
KVIST_MUST_USE enum kvist_status
kvist_map_carry(struct kvist_map *map, uint32_t step_max, struct kvist_error *err);

static inline bool kvist_map_can_move(const struct kvist_map *map)
{
    return map->next != NULL && map->carried == map->capacity;
}

/* Every entry has its position in the next map, which is about to take the place of this one. */
typedef void kvist_map_moving_fn(void *ctx, const struct kvist_map *map, struct kvist_map *next);

/** Move to the next map: kvist_map_can_move(). */
void kvist_map_move(struct kvist_map *map, kvist_map_moving_fn *moving, void *ctx);

/** Go on without the next map. Nothing when there is none. */
void kvist_map_give_up_growth(struct kvist_map *map);

/** @return the first broken invariant, or NULL. O(capacity) */
const char *kvist_map_check(const struct kvist_map *map);

#endif
