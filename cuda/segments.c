#include "cuda/segments.h"

#include <stdlib.h>
#include <string.h>

#define SEGMENTS_ROOM_MIN 64

void kvist_segments_init(struct kvist_segments *segments)
{
    *segments = (struct kvist_segments){0};
    (void)pthread_mutex_init(&segments->mutex, NULL);
}

void kvist_segments_fini(struct kvist_segments *segments)
{
    (void)pthread_mutex_destroy(&segments->mutex);
    free(segments->items);
}

/* Index of the first segment whose base is above an address. */
static size_t above_locked(const struct kvist_segments *segments, uintptr_t address)
{
    size_t low = 0;
    size_t high = segments->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (segments->items[middle].base <= address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static bool grow_locked(struct kvist_segments *segments)
{
    if (segments->count < segments->room) {
        return true;
    }
    size_t room = segments->room == 0 ? SEGMENTS_ROOM_MIN : 2 * segments->room;
    struct kvist_segment *items = realloc(segments->items, room * sizeof(*items));
    if (items == NULL) {
        return false;
    }
    segments->items = items;
    segments->room = room;
    return true;
}

static enum kvist_status
insert_locked(struct kvist_segments *segments, uintptr_t base, uint64_t bytes, bool writable)
{
    size_t at = above_locked(segments, base);
    if (at > 0 && base - segments->items[at - 1].base < segments->items[at - 1].bytes) {
        return KVIST_EXISTS;
    }
    if (at < segments->count && segments->items[at].base - base < bytes) {
        return KVIST_EXISTS;
    }
    if (!grow_locked(segments)) {
        return KVIST_NO_MEMORY;
    }
    struct kvist_segment *item = &segments->items[at];
    memmove(item + 1, item, (segments->count - at) * sizeof(*item));
    *item = (struct kvist_segment){.base = base, .bytes = bytes, .writable = writable};
    segments->count++;
    return KVIST_OK;
}

enum kvist_status kvist_segments_insert(struct kvist_segments *segments,
                                        const void *base,
                                        uint64_t bytes,
                                        bool writable)
{
    (void)pthread_mutex_lock(&segments->mutex);
    enum kvist_status status = insert_locked(segments, (uintptr_t)base, bytes, writable);
    (void)pthread_mutex_unlock(&segments->mutex);
    return status;
}

bool kvist_segments_take(struct kvist_segments *segments, const void *base)
{
    (void)pthread_mutex_lock(&segments->mutex);
    size_t above = above_locked(segments, (uintptr_t)base);
    bool found = above > 0 && segments->items[above - 1].base == (uintptr_t)base;
    if (found) {
        struct kvist_segment *item = &segments->items[above - 1];
        memmove(item, item + 1, (segments->count - above) * sizeof(*item));
        segments->count--;
    }
    (void)pthread_mutex_unlock(&segments->mutex);
    return found;
}

void *kvist_segments_take_any(struct kvist_segments *segments)
{
    (void)pthread_mutex_lock(&segments->mutex);
    uintptr_t base = segments->count == 0 ? 0 : segments->items[--segments->count].base;
    (void)pthread_mutex_unlock(&segments->mutex);
    return (void *)base;
}

bool kvist_segments_contain(struct kvist_segments *segments,
                            const void *base,
                            uint64_t bytes,
                            bool writable)
{
    uintptr_t address = (uintptr_t)base;
    (void)pthread_mutex_lock(&segments->mutex);
    size_t above = above_locked(segments, address);
    bool found = false;
    if (above > 0) {
        const struct kvist_segment *item = &segments->items[above - 1];
        uint64_t offset = address - item->base;
        found =
            offset <= item->bytes && bytes <= item->bytes - offset && (item->writable || !writable);
    }
    (void)pthread_mutex_unlock(&segments->mutex);
    return found;
}
