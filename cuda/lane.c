#include "cuda/device.h"
#include "proto/base/fault.h"

#include <stdlib.h>

#define CHUNK_BYTES_MIN (64UL << 10)
#define CHUNK_BYTES_MAX (2UL << 20)
#define CHUNKS_WANTED   16UL

enum kvist_status
kvist_lane_copy(struct kvist_lane *lane, const struct kvist_copy_piece *pieces, size_t piece_count)
{
    struct kvist_device *device = lane->owner;
    if (kvist_fault_point("copy.batch")) {
        return KVIST_SYSTEM;
    }
    return device->runtime->copy_batch(
        device->device, lane->stream, lane->direction, pieces, piece_count);
}

void kvist_lane_synchronize(struct kvist_lane *lane)
{
    struct kvist_device *device = lane->owner;
    if (device->runtime->stream_synchronize(device->device, lane->stream) != KVIST_OK) {
        (void)pthread_mutex_lock(&device->mutex);
        lane->failures++;
        (void)pthread_mutex_unlock(&device->mutex);
    }
}

/* Hand over one layer's pieces, and put its event behind them. */
static enum kvist_status
layer_issue(struct kvist_lane *lane, struct kvist_copy_job *job, size_t layer, size_t piece)
{
    struct kvist_device *device = lane->owner;
    enum kvist_status status = KVIST_OK;
    for (; status == KVIST_OK && piece < job->layers[layer].piece_end; piece++) {
        status = kvist_direct_reaches(lane, &job->pieces[piece])
                     ? kvist_direct_add(lane, &job->pieces[piece])
                     : kvist_staged_add(lane, job, &job->pieces[piece]);
    }
    if (status == KVIST_OK) {
        status = kvist_direct_flush(lane);
    }
    if (status == KVIST_OK) {
        status = kvist_staged_flush(lane, job);
    }
    if (status != KVIST_OK) {
        return status;
    }
    if (kvist_fault_point("copy.layer_record")) {
        return KVIST_SYSTEM;
    }
    return device->runtime->event_record(
        device->device, job->layers[layer].event, lane->stream, NULL);
}

static enum kvist_status layers_issue(struct kvist_lane *lane, struct kvist_copy_job *job)
{
    struct kvist_device *device = lane->owner;
    if (kvist_fault_point("copy.stream_wait")) {
        return KVIST_SYSTEM;
    }
    enum kvist_status status =
        device->runtime->stream_wait(device->device, lane->stream, job->begin_event, NULL);
    size_t piece = 0;
    for (size_t layer = 0; status == KVIST_OK && layer < job->layer_count; layer++) {
        status = layer_issue(lane, job, layer, piece);
        piece = job->layers[layer].piece_end;
        if (status == KVIST_OK) {
            (void)pthread_mutex_lock(&device->mutex);
            job->layers_issued = layer + 1;
            (void)pthread_cond_broadcast(&device->progress);
            (void)pthread_mutex_unlock(&device->mutex);
        }
    }
    return status;
}

static void job_issue(struct kvist_lane *lane, struct kvist_copy_job *job)
{
    struct kvist_device *device = lane->owner;
    lane->ticket++;
    enum kvist_status status = layers_issue(lane, job);
    if (status != KVIST_OK) {
        kvist_lane_synchronize(lane);
        lane->batch_count = 0;
        kvist_ring_reset(&lane->ring);
    }
    (void)pthread_mutex_lock(&device->mutex);
    if (status != KVIST_OK) {
        job->status = KVIST_SYSTEM;
    }
    job->issued = true;
    (void)pthread_cond_broadcast(&device->progress);
    (void)pthread_mutex_unlock(&device->mutex);
}

static bool chunks_wait(const struct kvist_lane *lane)
{
    /* The chunks of a LOAD are freed when their room is needed, or at the end. */
    return lane->ring.in_flight > 0 &&
           (lane->direction == KVIST_COPY_STORE || lane->owner->stopping);
}

static void *lane_thread(void *ctx)
{
    struct kvist_lane *lane = ctx;
    struct kvist_device *device = lane->owner;
    device->runtime->thread_enter(device->device);
    for (;;) {
        (void)pthread_mutex_lock(&device->mutex);
        while (lane->head == NULL && !device->stopping && !chunks_wait(lane)) {
            (void)pthread_cond_wait(&lane->work, &device->mutex);
        }
        struct kvist_copy_job *job = lane->head;
        if (job != NULL) {
            lane->head = job->next;
            lane->tail = lane->head == NULL ? NULL : lane->tail;
            job->failures = lane->failures;
        }
        bool drains = chunks_wait(lane);
        (void)pthread_mutex_unlock(&device->mutex);
        if (job != NULL) {
            job_issue(lane, job);
        } else if (drains) {
            (void)kvist_staged_drain(lane);
        } else {
            return NULL;
        }
    }
}

void kvist_lane_submit(struct kvist_lane *lane, struct kvist_copy_job *job)
{
    struct kvist_device *device = lane->owner;
    (void)pthread_mutex_lock(&device->mutex);
    if (lane->tail == NULL) {
        lane->head = job;
    } else {
        lane->tail->next = job;
    }
    lane->tail = job;
    (void)pthread_cond_signal(&lane->work);
    (void)pthread_mutex_unlock(&device->mutex);
}

static enum kvist_status
ring_create(struct kvist_lane *lane, uint64_t staging_bytes, struct kvist_error *err)
{
    struct kvist_device *device = lane->owner;
    size_t chunk_bytes = staging_bytes / CHUNKS_WANTED;
    chunk_bytes = chunk_bytes < CHUNK_BYTES_MIN ? CHUNK_BYTES_MIN : chunk_bytes;
    chunk_bytes = chunk_bytes > CHUNK_BYTES_MAX ? CHUNK_BYTES_MAX : chunk_bytes;
    chunk_bytes -= chunk_bytes % KVIST_RING_ALIGN_BYTES;
    size_t chunk_count = staging_bytes / chunk_bytes;
    if (kvist_fault_point("copy.pinned_alloc")) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "copy", "no pinned memory");
    }
    enum kvist_status status = device->runtime->pinned_alloc(
        device->device, chunk_bytes * chunk_count, &lane->pinned, err);
    if (status != KVIST_OK) {
        return status;
    }
    status = kvist_ring_init(&lane->ring, lane->pinned, chunk_bytes, chunk_count);
    if (status != KVIST_OK) {
        return kvist_error_set(err, status, 0, "copy", "no memory for a staging ring");
    }
    for (size_t index = 0; status == KVIST_OK && index < chunk_count; index++) {
        status =
            device->runtime->event_create(device->device, &lane->ring.chunks[index].event, err);
    }
    return status;
}

enum kvist_status kvist_lane_init(struct kvist_lane *lane,
                                  struct kvist_device *owner,
                                  enum kvist_copy_direction direction,
                                  uint64_t staging_bytes,
                                  struct kvist_error *err)
{
    lane->owner = owner;
    lane->direction = direction;
    (void)pthread_cond_init(&lane->work, NULL);
    lane->batch = calloc(KVIST_RUNTIME_BATCH_MAX, sizeof(*lane->batch));
    if (lane->batch == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "copy", "no memory for a copy lane");
    }
    enum kvist_status status = owner->runtime->stream_create(owner->device, &lane->stream, err);
    if (status == KVIST_OK) {
        status = ring_create(lane, staging_bytes, err);
    }
    if (status != KVIST_OK) {
        return status;
    }
    int error = kvist_copy_thread_start(&lane->thread,
                                        direction == KVIST_COPY_LOAD ? "kvist-load" : "kvist-store",
                                        lane_thread,
                                        lane);
    if (error != 0) {
        return kvist_error_set_errno(err, error, "pthread_create", "cannot start a copy thread");
    }
    lane->started = true;
    return KVIST_OK;
}

void kvist_lane_fini(struct kvist_lane *lane)
{
    if (lane->owner == NULL) {
        return;
    }
    const struct kvist_copy_runtime *runtime = lane->owner->runtime;
    void *device = lane->owner->device;
    if (lane->started) {
        (void)pthread_join(lane->thread, NULL);
    }
    if (lane->stream != NULL) {
        kvist_lane_synchronize(lane);
    }
    for (size_t index = 0; index < lane->ring.chunk_count; index++) {
        if (lane->ring.chunks[index].event != NULL) {
            runtime->event_destroy(device, lane->ring.chunks[index].event);
        }
    }
    kvist_ring_fini(&lane->ring);
    if (lane->pinned != NULL) {
        runtime->pinned_free(device, lane->pinned);
    }
    if (lane->stream != NULL) {
        runtime->stream_destroy(device, lane->stream);
    }
    free(lane->batch);
    (void)pthread_cond_destroy(&lane->work);
}
