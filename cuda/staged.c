#include "cuda/device.h"
#include "proto/base/fault.h"

/* Settle one chunk of a STORE with its job. */
static void chunk_settle(struct kvist_lane *lane, struct kvist_copy_job *job, bool failed)
{
    struct kvist_device *device = lane->owner;
    (void)pthread_mutex_lock(&device->mutex);
    if (failed) {
        job->status = KVIST_SYSTEM;
    }
    job->chunks_pending--;
    if (job->issued && job->chunks_pending == 0) {
        (void)pthread_cond_broadcast(&device->progress);
    }
    (void)pthread_mutex_unlock(&device->mutex);
}

enum kvist_status kvist_staged_drain(struct kvist_lane *lane)
{
    struct kvist_device *device = lane->owner;
    struct kvist_ring_chunk *chunk = kvist_ring_oldest(&lane->ring);
    enum kvist_status status =
        kvist_fault_point("copy.chunk_wait")
            ? KVIST_SYSTEM
            : device->runtime->event_synchronize(device->device, chunk->event);
    if (status != KVIST_OK) {
        /* The chunk is used again: nothing may still be on its way into or out of it. */
        kvist_lane_synchronize(lane);
    }
    struct kvist_copy_job *job = chunk->job;
    if (job != NULL) {
        if (status == KVIST_OK) {
            kvist_ring_scatter(chunk);
        }
        chunk_settle(lane, job, status != KVIST_OK);
    }
    bool current = chunk->ticket == lane->ticket;
    kvist_ring_pop(&lane->ring);
    return current ? status : KVIST_OK;
}

/* Hand the filled chunk to the device, with an event behind it. */
static enum kvist_status
chunk_issue(struct kvist_lane *lane, struct kvist_ring_chunk *chunk, uint64_t *bytes_out)
{
    struct kvist_device *device = lane->owner;
    struct kvist_copy_piece pieces[KVIST_RING_PARTS_MAX];
    uint64_t bytes = 0;
    for (size_t index = 0; index < chunk->part_count; index++) {
        const struct kvist_ring_part *part = &chunk->parts[index];
        pieces[index] = part->piece;
        pieces[index].slot = chunk->memory + part->offset;
        bytes += part->piece.bytes;
    }
    enum kvist_status status = kvist_lane_copy(lane, pieces, chunk->part_count);
    if (status != KVIST_OK) {
        return status;
    }
    *bytes_out = bytes;
    if (kvist_fault_point("copy.chunk_record")) {
        return KVIST_SYSTEM;
    }
    return device->runtime->event_record(device->device, chunk->event, lane->stream, NULL);
}

enum kvist_status kvist_staged_flush(struct kvist_lane *lane, struct kvist_copy_job *job)
{
    struct kvist_device *device = lane->owner;
    struct kvist_ring_chunk *chunk = kvist_ring_filling(&lane->ring);
    if (chunk == NULL || chunk->part_count == 0) {
        return KVIST_OK;
    }
    if (lane->direction == KVIST_COPY_LOAD) {
        kvist_ring_gather(chunk);
    }
    uint64_t bytes = 0;
    enum kvist_status status = chunk_issue(lane, chunk, &bytes);
    if (status != KVIST_OK) {
        return status;
    }
    if (lane->direction == KVIST_COPY_STORE) {
        /* A LOAD's job may be gone before its chunk is free: only a STORE's is looked at again. */
        chunk->job = job;
        (void)pthread_mutex_lock(&device->mutex);
        job->chunks_pending++;
        (void)pthread_mutex_unlock(&device->mutex);
    }
    chunk->ticket = lane->ticket;
    kvist_ring_push(&lane->ring);
    atomic_fetch_add_explicit(&device->counters->staged_bytes, bytes, memory_order_relaxed);
    return KVIST_OK;
}

enum kvist_status kvist_staged_add(struct kvist_lane *lane,
                                   struct kvist_copy_job *job,
                                   const struct kvist_copy_piece *piece)
{
    for (size_t offset = 0; offset < piece->bytes;) {
        enum kvist_status status = KVIST_OK;
        size_t packed = kvist_ring_pack(&lane->ring, piece, offset);
        if (packed == 0) {
            status = kvist_ring_filling(&lane->ring) == NULL ? kvist_staged_drain(lane)
                                                             : kvist_staged_flush(lane, job);
        }
        if (status != KVIST_OK) {
            return status;
        }
        offset += packed;
    }
    return KVIST_OK;
}
