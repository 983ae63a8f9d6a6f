#include "cuda/device.h"
#include "proto/base/fault.h"

bool kvist_direct_reaches(struct kvist_lane *lane, const struct kvist_copy_piece *piece)
{
    return lane->owner->kind == KVIST_COPY_DIRECT &&
           kvist_segments_contain(&lane->owner->segments,
                                  piece->slot,
                                  piece->bytes,
                                  lane->direction == KVIST_COPY_STORE);
}

enum kvist_status kvist_direct_flush(struct kvist_lane *lane)
{
    if (lane->batch_count == 0) {
        return KVIST_OK;
    }
    uint64_t bytes = 0;
    for (size_t index = 0; index < lane->batch_count; index++) {
        bytes += lane->batch[index].bytes;
    }
    enum kvist_status status = kvist_lane_copy(lane, lane->batch, lane->batch_count);
    lane->batch_count = 0;
    if (status == KVIST_OK) {
        atomic_fetch_add_explicit(
            &lane->owner->counters->direct_bytes, bytes, memory_order_relaxed);
    }
    return status;
}

enum kvist_status kvist_direct_add(struct kvist_lane *lane, const struct kvist_copy_piece *piece)
{
    lane->batch[lane->batch_count++] = *piece;
    return lane->batch_count == KVIST_RUNTIME_BATCH_MAX ? kvist_direct_flush(lane) : KVIST_OK;
}

void kvist_direct_segment_add(struct kvist_device *device, void *base, uint64_t bytes)
{
    if (device->kind != KVIST_COPY_DIRECT) {
        return;
    }
    const struct kvist_copy_runtime *runtime = device->runtime;
    bool writable = false;
    enum kvist_status status = kvist_fault_point("copy.register")
                                   ? KVIST_SYSTEM
                                   : runtime->host_register(device->device, base, bytes, &writable);
    if (status == KVIST_OK) {
        status = kvist_segments_insert(&device->segments, base, bytes, writable);
        if (status != KVIST_OK) {
            runtime->host_unregister(device->device, base);
        }
    }
    atomic_fetch_add_explicit(status == KVIST_OK ? &device->counters->segments_registered
                                                 : &device->counters->segments_refused,
                              1,
                              memory_order_relaxed);
}

void kvist_direct_segment_remove(struct kvist_device *device, void *base)
{
    if (kvist_segments_take(&device->segments, base)) {
        device->runtime->host_unregister(device->device, base);
        atomic_fetch_sub_explicit(&device->counters->segments_registered, 1, memory_order_relaxed);
    }
}

void kvist_direct_segments_drop(struct kvist_device *device)
{
    void *base = NULL;
    while ((base = kvist_segments_take_any(&device->segments)) != NULL) {
        device->runtime->host_unregister(device->device, base);
    }
}
