/*
 * segments - which memory is registered with the device.
 *
 * Role        a sorted table of disjoint address ranges; does no registering itself.
 * Threads     any
 * Errors      EXISTS: overlaps another; NO_MEMORY
 */
#ifndef KVIST_SEGMENTS_H
#define KVIST_SEGMENTS_H

#include "cuda/copy_internal.h"

struct kvist_segment {
    uintptr_t base;
    uint64_t bytes;
    bool writable; /* by the device */
};

struct kvist_segments {
    pthread_mutex_t mutex;
    struct kvist_segment *items; /* [count], by base */
    size_t count;
    size_t room;
};

void kvist_segments_init(struct kvist_segments *segments);
void kvist_segments_fini(struct kvist_segments *segments);

KVIST_MUST_USE enum kvist_status kvist_segments_insert(struct kvist_segments *segments,
                                                       const void *base,
                                                       uint64_t bytes,
                                                       bool writable);

/** Take out the segment at base; false when there is none. */
bool kvist_segments_take(struct kvist_segments *segments, const void *base);

/** Take out any segment: for teardown. NULL when there is none. */
void *kvist_segments_take_any(struct kvist_segments *segments);

/** Whether one segment, a writable one if asked for, holds all of a range. */
bool kvist_segments_contain(struct kvist_segments *segments,
                            const void *base,
                            uint64_t bytes,
                            bool writable);

#endif
