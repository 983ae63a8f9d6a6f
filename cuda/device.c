#include "cuda/device.h"

#include "proto/base/clock.h"
#include "proto/base/fault.h"

#include <stdlib.h>

static enum kvist_status
event_take(struct kvist_device *device, void **event_out, struct kvist_error *err)
{
    (void)pthread_mutex_lock(&device->mutex);
    void *event = device->event_count == 0 ? NULL : device->events[--device->event_count];
    (void)pthread_mutex_unlock(&device->mutex);
    if (event != NULL) {
        *event_out = event;
        return KVIST_OK;
    }
    if (kvist_fault_point("copy.event_create")) {
        return kvist_error_set(err, KVIST_SYSTEM, 0, "copy", "no event");
    }
    return device->runtime->event_create(device->device, event_out, err);
}

static void event_give(struct kvist_device *device, void **event)
{
    if (*event == NULL) {
        return;
    }
    (void)pthread_mutex_lock(&device->mutex);
    bool kept = device->event_count < KVIST_DEVICE_EVENTS_MAX;
    if (kept) {
        device->events[device->event_count++] = *event;
    }
    (void)pthread_mutex_unlock(&device->mutex);
    if (!kept) {
        device->runtime->event_destroy(device->device, *event);
    }
    *event = NULL;
}

static void device_release(void *impl, struct kvist_copy_job *job)
{
    struct kvist_device *device = impl;
    event_give(device, &job->begin_event);
    for (size_t layer = 0; layer < job->layer_count; layer++) {
        event_give(device, &job->layers[layer].event);
    }
}

static enum kvist_status
device_submit(void *impl, struct kvist_copy_job *job, void *stream, struct kvist_error *err)
{
    struct kvist_device *device = impl;
    enum kvist_status status = event_take(device, &job->begin_event, err);
    for (size_t layer = 0; status == KVIST_OK && layer < job->layer_count; layer++) {
        status = event_take(device, &job->layers[layer].event, err);
    }
    if (status == KVIST_OK) {
        status = kvist_fault_point("copy.begin_record")
                     ? kvist_error_set(err, KVIST_SYSTEM, 0, "copy", "cannot record an event")
                     : device->runtime->event_record(device->device, job->begin_event, stream, err);
    }
    if (status != KVIST_OK) {
        device_release(device, job);
        return status;
    }
    kvist_lane_submit(&device->lanes[job->direction], job);
    return KVIST_OK;
}

static bool settled_locked(const struct kvist_copy_job *job)
{
    return job->issued && job->chunks_pending == 0;
}

/* The job is settled: take the device's word for the rest. */
static void
job_end(struct kvist_device *device, struct kvist_copy_job *job, enum kvist_status status)
{
    struct kvist_lane *lane = &device->lanes[job->direction];
    if (status != KVIST_OK) {
        kvist_lane_synchronize(lane);
    }
    (void)pthread_mutex_lock(&device->mutex);
    if (status != KVIST_OK || job->failures != lane->failures) {
        job->status = KVIST_SYSTEM;
    }
    (void)pthread_mutex_unlock(&device->mutex);
    job->ended_us = kvist_clock_now_us();
}

static bool device_done(void *impl, struct kvist_copy_job *job)
{
    struct kvist_device *device = impl;
    (void)pthread_mutex_lock(&device->mutex);
    bool settled = settled_locked(job);
    (void)pthread_mutex_unlock(&device->mutex);
    if (!settled || job->ended_us != 0) {
        return settled;
    }
    enum kvist_status status = job->status;
    if (status == KVIST_OK) {
        status = kvist_fault_point("copy.event_query")
                     ? KVIST_SYSTEM
                     : device->runtime->event_query(device->device,
                                                    job->layers[job->layer_count - 1].event);
    }
    if (status == KVIST_BUSY) {
        return false;
    }
    job_end(device, job, status);
    return true;
}

static void device_wait(void *impl, struct kvist_copy_job *job)
{
    struct kvist_device *device = impl;
    (void)pthread_mutex_lock(&device->mutex);
    while (!settled_locked(job)) {
        (void)pthread_cond_wait(&device->progress, &device->mutex);
    }
    (void)pthread_mutex_unlock(&device->mutex);
    if (job->ended_us != 0) {
        return;
    }
    enum kvist_status status = job->status;
    if (status == KVIST_OK) {
        status = kvist_fault_point("copy.event_synchronize")
                     ? KVIST_SYSTEM
                     : device->runtime->event_synchronize(device->device,
                                                          job->layers[job->layer_count - 1].event);
    }
    job_end(device, job, status);
}

static enum kvist_status device_layer_wait(
    void *impl, struct kvist_copy_job *job, size_t layer, void *stream, struct kvist_error *err)
{
    struct kvist_device *device = impl;
    (void)pthread_mutex_lock(&device->mutex);
    while (job->layers_issued <= layer && !job->issued) {
        (void)pthread_cond_wait(&device->progress, &device->mutex);
    }
    bool failed = job->status != KVIST_OK;
    (void)pthread_mutex_unlock(&device->mutex);
    if (failed) {
        return kvist_error_set(err,
                               KVIST_SYSTEM,
                               0,
                               "copy",
                               "job %llu failed: poll reports it",
                               (unsigned long long)job->number);
    }
    return device->runtime->stream_wait(device->device, stream, job->layers[layer].event, err);
}

static void device_segment_add(void *impl, void *base, uint64_t bytes)
{
    kvist_direct_segment_add(impl, base, bytes);
}

static void device_segment_remove(void *impl, void *base, uint64_t bytes)
{
    (void)bytes;
    kvist_direct_segment_remove(impl, base);
}

static void device_destroy(void *impl)
{
    struct kvist_device *device = impl;
    (void)pthread_mutex_lock(&device->mutex);
    device->stopping = true;
    for (size_t index = 0; index < 2; index++) {
        if (device->lanes[index].owner != NULL) {
            (void)pthread_cond_signal(&device->lanes[index].work);
        }
    }
    (void)pthread_mutex_unlock(&device->mutex);
    for (size_t index = 0; index < 2; index++) {
        kvist_lane_fini(&device->lanes[index]);
    }
    while (device->event_count > 0) {
        device->runtime->event_destroy(device->device, device->events[--device->event_count]);
    }
    kvist_direct_segments_drop(device);
    kvist_segments_fini(&device->segments);
    device->runtime->close(device->device);
    (void)pthread_cond_destroy(&device->progress);
    (void)pthread_mutex_destroy(&device->mutex);
    free(device);
}

static enum kvist_status device_create(const struct kvist_copy_options *options,
                                       const struct kvist_copy_runtime *runtime,
                                       struct kvist_copy_counters *counters,
                                       void **impl_out,
                                       struct kvist_error *err)
{
    struct kvist_device *device = calloc(1, sizeof(*device));
    if (device == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "copy", "no memory for a copy object");
    }
    enum kvist_status status = runtime->open(options->device, &device->device, err);
    if (status != KVIST_OK) {
        free(device);
        return status;
    }
    device->runtime = runtime;
    device->kind = options->kind;
    device->counters = counters;
    (void)pthread_mutex_init(&device->mutex, NULL);
    (void)pthread_cond_init(&device->progress, NULL);
    kvist_segments_init(&device->segments);
    for (unsigned index = 0; status == KVIST_OK && index < 2; index++) {
        status = kvist_lane_init(&device->lanes[index],
                                 device,
                                 (enum kvist_copy_direction)index,
                                 options->staging_bytes / 2,
                                 err);
    }
    if (status != KVIST_OK) {
        device_destroy(device);
        return status;
    }
    *impl_out = device;
    return KVIST_OK;
}

const struct kvist_copy_ops kvist_copy_device_ops = {
    .create = device_create,
    .destroy = device_destroy,
    .submit = device_submit,
    .done = device_done,
    .wait = device_wait,
    .release = device_release,
    .layer_wait = device_layer_wait,
    .segment_add = device_segment_add,
    .segment_remove = device_segment_remove,
};
