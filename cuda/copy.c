#include "cuda/copy_internal.h"
#include "cuda/runtime.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

#include <kvist/copy.h>

#include <stdlib.h>
#include <string.h>

#define COPY_MAGIC            0x6b766370U
#define STAGING_BYTES_DEFAULT (64ULL << 20)

struct kvist_copy {
    uint32_t magic;
    const struct kvist_copy_ops *ops;
    void *impl;
    struct kvist_copy_tensor *tensors; /* [tensor_count] */
    size_t tensor_count;
    struct kvist_copy_job *jobs[KVIST_COPY_JOBS_MAX]; /* not reported yet, in order of submit */
    size_t job_count;
    struct kvist_copy_counters counters;
};

static enum kvist_status
tensor_check(const struct kvist_copy_tensor *tensor, size_t index, struct kvist_error *err)
{
    uint64_t bytes = 0;
    if (tensor->base == NULL || tensor->block_count == 0 || tensor->page_bytes == 0 ||
        tensor->page_bytes > tensor->block_stride_bytes ||
        __builtin_mul_overflow(tensor->block_count, tensor->block_stride_bytes, &bytes) ||
        bytes > UINTPTR_MAX - (uintptr_t)tensor->base) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "copy",
                               "tensor %zu: needs a base, blocks, and 1 <= page_bytes <= stride "
                               "(got blocks %llu, stride %llu, page %llu)",
                               index,
                               (unsigned long long)tensor->block_count,
                               (unsigned long long)tensor->block_stride_bytes,
                               (unsigned long long)tensor->page_bytes);
    }
    return KVIST_OK;
}

static enum kvist_status options_check(const struct kvist_copy_options *options,
                                       struct kvist_error *err)
{
    if (options->struct_bytes != sizeof(*options)) {
        return kvist_error_set(
            err,
            KVIST_INVALID,
            0,
            "copy",
            "options of %zu bytes, %zu expected: use KVIST_COPY_OPTIONS_INIT and "
            "build against this library",
            options->struct_bytes,
            sizeof(*options));
    }
    if ((unsigned)options->kind > KVIST_COPY_STAGED) {
        return kvist_error_set(
            err, KVIST_INVALID, 0, "copy", "no copy kind %u", (unsigned)options->kind);
    }
    if (options->thread_count > KVIST_COPY_THREADS_MAX ||
        (options->staging_bytes != 0 && options->staging_bytes < KVIST_COPY_STAGING_BYTES_MIN) ||
        options->staging_bytes > KVIST_COPY_STAGING_BYTES_MAX) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "copy",
                               "thread_count %u is above %u, or staging_bytes %llu is not in %llu "
                               "to %llu",
                               options->thread_count,
                               KVIST_COPY_THREADS_MAX,
                               (unsigned long long)options->staging_bytes,
                               KVIST_COPY_STAGING_BYTES_MIN,
                               KVIST_COPY_STAGING_BYTES_MAX);
    }
    if (options->tensors == NULL || options->tensor_count == 0 ||
        options->tensor_count > KVIST_COPY_TENSORS_MAX) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "copy",
                               "%zu tensors, 1 to %u expected",
                               options->tensor_count,
                               KVIST_COPY_TENSORS_MAX);
    }
    for (size_t index = 0; index < options->tensor_count; index++) {
        enum kvist_status status = tensor_check(&options->tensors[index], index, err);
        if (status != KVIST_OK) {
            return status;
        }
    }
    return KVIST_OK;
}

static bool
runtime_available(const struct kvist_copy_runtime *runtime, enum kvist_copy_kind kind, int device)
{
    return runtime != NULL && device >= 0 && runtime->available(device, kind);
}

bool kvist_copy_available(enum kvist_copy_kind kind, int device)
{
    if (kind == KVIST_COPY_HOST) {
        return true;
    }
    return (unsigned)kind <= KVIST_COPY_STAGED &&
           runtime_available(kvist_copy_runtime_cuda(), kind, device);
}

/* The runtime that a kind runs on: NULL for HOST. */
static enum kvist_status runtime_choose(const struct kvist_copy_options *options,
                                        const struct kvist_copy_runtime **runtime,
                                        struct kvist_error *err)
{
    if (options->kind == KVIST_COPY_HOST) {
        *runtime = NULL;
        return KVIST_OK;
    }
    if (*runtime == NULL) {
        *runtime = kvist_copy_runtime_cuda();
    }
    if (*runtime == NULL) {
        return kvist_error_set(
            err,
            KVIST_UNSUPPORTED,
            0,
            "copy",
            "this build has no CUDA: build with -DKVIST_WITH_CUDA=ON, or use the "
            "host kind");
    }
    if (!runtime_available(*runtime, options->kind, options->device)) {
        return kvist_error_set(err,
                               KVIST_UNSUPPORTED,
                               0,
                               "copy",
                               "no usable CUDA device %d: check nvidia-smi and the driver's "
                               "version, or use the host kind",
                               options->device);
    }
    return KVIST_OK;
}

enum kvist_status kvist_copy_create_with(const struct kvist_copy_options *options,
                                         const struct kvist_copy_runtime *runtime,
                                         struct kvist_copy **copy_out,
                                         struct kvist_error *err)
{
    KVIST_CHECK_OR(options != NULL && copy_out != NULL, KVIST_INVALID);
    enum kvist_status status = options_check(options, err);
    if (status == KVIST_OK) {
        status = runtime_choose(options, &runtime, err);
    }
    if (status != KVIST_OK) {
        return status;
    }
    struct kvist_copy_options chosen = *options;
    chosen.thread_count = chosen.thread_count == 0 ? 1 : chosen.thread_count;
    chosen.staging_bytes = chosen.staging_bytes == 0 ? STAGING_BYTES_DEFAULT : chosen.staging_bytes;

    struct kvist_copy *copy = calloc(1, sizeof(*copy));
    size_t tensors_bytes = options->tensor_count * sizeof(*options->tensors);
    if (copy == NULL || (copy->tensors = malloc(tensors_bytes)) == NULL) {
        status = kvist_error_set(err, KVIST_NO_MEMORY, 0, "copy", "no memory for a copy object");
        goto free_copy;
    }
    memcpy(copy->tensors, options->tensors, tensors_bytes);
    copy->tensor_count = options->tensor_count;
    copy->ops = options->kind == KVIST_COPY_HOST ? &kvist_copy_host_ops : &kvist_copy_device_ops;
    status = copy->ops->create(&chosen, runtime, &copy->counters, &copy->impl, err);
    if (status != KVIST_OK) {
        goto free_tensors;
    }
    copy->magic = COPY_MAGIC;
    *copy_out = copy;
    return KVIST_OK;

free_tensors:
    free(copy->tensors);
free_copy:
    free(copy);
    return status;
}

enum kvist_status kvist_copy_create(const struct kvist_copy_options *options,
                                    struct kvist_copy **copy_out,
                                    struct kvist_error *err)
{
    return kvist_copy_create_with(options, NULL, copy_out, err);
}

static void job_free(struct kvist_copy_job *job)
{
    if (job != NULL) {
        free(job->layers);
        free(job->pieces);
        free(job);
    }
}

void kvist_copy_destroy(struct kvist_copy **copy_pointer)
{
    if (copy_pointer == NULL || *copy_pointer == NULL) {
        return;
    }
    struct kvist_copy *copy = *copy_pointer;
    *copy_pointer = NULL;
    for (size_t index = 0; index < copy->job_count; index++) {
        copy->ops->wait(copy->impl, copy->jobs[index]);
        copy->ops->release(copy->impl, copy->jobs[index]);
        job_free(copy->jobs[index]);
    }
    copy->ops->destroy(copy->impl);
    copy->magic = 0;
    free(copy->tensors);
    free(copy);
}

static bool copy_valid(const struct kvist_copy *copy)
{
    return copy != NULL && copy->magic == COPY_MAGIC;
}

void kvist_copy_segment_add(struct kvist_copy *copy, void *base, uint64_t bytes)
{
    if (copy_valid(copy) && base != NULL && bytes > 0 && bytes <= UINTPTR_MAX - (uintptr_t)base) {
        copy->ops->segment_add(copy->impl, base, bytes);
    }
}

void kvist_copy_segment_remove(struct kvist_copy *copy, void *base, uint64_t bytes)
{
    if (copy_valid(copy) && base != NULL) {
        copy->ops->segment_remove(copy->impl, base, bytes);
    }
}

static struct kvist_copy_job *job_find(const struct kvist_copy *copy, uint64_t number)
{
    for (size_t index = 0; index < copy->job_count; index++) {
        if (copy->jobs[index]->number == number) {
            return copy->jobs[index];
        }
    }
    return NULL;
}

/* Check one range and resolve it to addresses. */
static enum kvist_status range_resolve(const struct kvist_copy *copy,
                                       const struct kvist_copy_range *range,
                                       size_t index,
                                       struct kvist_copy_piece *piece_out,
                                       struct kvist_error *err)
{
    if (range->tensor >= copy->tensor_count) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "copy",
                               "range %zu: no tensor %u, there are %zu",
                               index,
                               range->tensor,
                               copy->tensor_count);
    }
    const struct kvist_copy_tensor *tensor = &copy->tensors[range->tensor];
    if (range->block >= tensor->block_count || range->offset > tensor->page_bytes ||
        range->bytes > tensor->page_bytes - range->offset || range->bytes == 0 ||
        range->slot == NULL || range->reserved != 0) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "copy",
                               "range %zu: block %llu, offset %llu, %llu bytes does not lie in "
                               "tensor %u (%llu blocks of %llu bytes), or has no slot",
                               index,
                               (unsigned long long)range->block,
                               (unsigned long long)range->offset,
                               (unsigned long long)range->bytes,
                               range->tensor,
                               (unsigned long long)tensor->block_count,
                               (unsigned long long)tensor->page_bytes);
    }
    *piece_out = (struct kvist_copy_piece){
        .tensor = (unsigned char *)tensor->base + range->block * tensor->block_stride_bytes +
                  range->offset,
        .slot = range->slot,
        .bytes = range->bytes,
    };
    return KVIST_OK;
}

/* Fill the job's pieces and the bytes of its layers. */
static enum kvist_status job_resolve(const struct kvist_copy *copy,
                                     struct kvist_copy_job *job,
                                     const struct kvist_copy_range *ranges,
                                     struct kvist_error *err)
{
    size_t index = 0;
    for (size_t layer = 0; layer < job->layer_count; layer++) {
        uint64_t layer_bytes = 0;
        for (; index < job->layers[layer].piece_end; index++) {
            enum kvist_status status =
                range_resolve(copy, &ranges[index], index, &job->pieces[index], err);
            if (status != KVIST_OK) {
                return status;
            }
            if (__builtin_add_overflow(layer_bytes, job->pieces[index].bytes, &layer_bytes)) {
                return kvist_error_set(err, KVIST_INVALID, 0, "copy", "the plan is too large");
            }
        }
        job->layers[layer].bytes_left = layer_bytes;
        if (__builtin_add_overflow(job->bytes, layer_bytes, &job->bytes)) {
            return kvist_error_set(err, KVIST_INVALID, 0, "copy", "the plan is too large");
        }
    }
    return KVIST_OK;
}

static enum kvist_status plan_check(const struct kvist_copy *copy,
                                    uint64_t number,
                                    const struct kvist_copy_range *ranges,
                                    const size_t *layer_starts,
                                    size_t layer_count,
                                    struct kvist_error *err)
{
    if (layer_starts == NULL || layer_count == 0 || layer_count > KVIST_COPY_LAYERS_MAX ||
        layer_starts[0] != 0) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "copy",
                               "a plan has 1 to %u layers, the first starts at 0",
                               KVIST_COPY_LAYERS_MAX);
    }
    for (size_t layer = 0; layer < layer_count; layer++) {
        if (layer_starts[layer] > layer_starts[layer + 1]) {
            return kvist_error_set(
                err, KVIST_INVALID, 0, "copy", "layer %zu ends before it starts", layer);
        }
    }
    if (layer_starts[layer_count] > KVIST_COPY_RANGES_MAX ||
        (ranges == NULL && layer_starts[layer_count] > 0)) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "copy",
                               "%zu ranges, at most %u in a plan: split it",
                               layer_starts[layer_count],
                               KVIST_COPY_RANGES_MAX);
    }
    if (job_find(copy, number) != NULL) {
        return kvist_error_set(err,
                               KVIST_EXISTS,
                               0,
                               "copy",
                               "job %llu has not been reported yet",
                               (unsigned long long)number);
    }
    if (copy->job_count == KVIST_COPY_JOBS_MAX) {
        return kvist_error_set(err,
                               KVIST_BUSY,
                               0,
                               "copy",
                               "%u jobs are not reported yet: poll, then submit again",
                               KVIST_COPY_JOBS_MAX);
    }
    return KVIST_OK;
}

static struct kvist_copy_job *job_create(uint64_t number,
                                         enum kvist_copy_direction direction,
                                         const size_t *layer_starts,
                                         size_t layer_count)
{
    struct kvist_copy_job *job = calloc(1, sizeof(*job));
    if (job == NULL) {
        return NULL;
    }
    job->number = number;
    job->direction = direction;
    job->piece_count = layer_starts[layer_count];
    job->layer_count = layer_count;
    job->pieces = calloc(job->piece_count + 1, sizeof(*job->pieces));
    job->layers = calloc(layer_count, sizeof(*job->layers));
    if (job->pieces == NULL || job->layers == NULL) {
        job_free(job);
        return NULL;
    }
    for (size_t layer = 0; layer < layer_count; layer++) {
        job->layers[layer].piece_end = layer_starts[layer + 1];
    }
    return job;
}

enum kvist_status kvist_copy_submit_layers(struct kvist_copy *copy,
                                           uint64_t number,
                                           enum kvist_copy_direction direction,
                                           const struct kvist_copy_range *ranges,
                                           const size_t *layer_starts,
                                           size_t layer_count,
                                           void *stream,
                                           struct kvist_error *err)
{
    KVIST_CHECK_OR(copy_valid(copy), KVIST_INVALID);
    KVIST_CHECK_OR((unsigned)direction <= KVIST_COPY_LOAD, KVIST_INVALID);
    enum kvist_status status = plan_check(copy, number, ranges, layer_starts, layer_count, err);
    if (status != KVIST_OK) {
        return status;
    }
    struct kvist_copy_job *job = job_create(number, direction, layer_starts, layer_count);
    if (job == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "copy", "no memory for a copy plan");
    }
    job->submitted_us = kvist_clock_now_us();
    status = job_resolve(copy, job, ranges, err);
    if (status == KVIST_OK) {
        status = copy->ops->submit(copy->impl, job, stream, err);
    }
    if (status != KVIST_OK) {
        job_free(job);
        return status;
    }
    copy->jobs[copy->job_count++] = job;
    return KVIST_OK;
}

enum kvist_status kvist_copy_submit(struct kvist_copy *copy,
                                    uint64_t job,
                                    enum kvist_copy_direction direction,
                                    const struct kvist_copy_range *ranges,
                                    size_t range_count,
                                    void *stream,
                                    struct kvist_error *err)
{
    const size_t layer_starts[2] = {0, range_count};
    return kvist_copy_submit_layers(copy, job, direction, ranges, layer_starts, 1, stream, err);
}

static void job_report(struct kvist_copy *copy,
                       struct kvist_copy_job *job,
                       struct kvist_copy_result *result_out)
{
    *result_out = (struct kvist_copy_result){
        .job = job->number,
        .status = job->status,
        .bytes = job->bytes,
        .elapsed_us = job->ended_us - job->submitted_us,
    };
    atomic_fetch_add_explicit(job->status == KVIST_OK ? &copy->counters.jobs_done
                                                      : &copy->counters.jobs_failed,
                              1,
                              memory_order_relaxed);
    copy->ops->release(copy->impl, job);
    job_free(job);
}

size_t
kvist_copy_poll(struct kvist_copy *copy, struct kvist_copy_result *results_out, size_t result_max)
{
    KVIST_CHECK_OR(copy_valid(copy) && results_out != NULL, 0);
    size_t result_count = 0;
    size_t kept = 0;
    for (size_t index = 0; index < copy->job_count; index++) {
        struct kvist_copy_job *job = copy->jobs[index];
        if (result_count < result_max && copy->ops->done(copy->impl, job)) {
            job_report(copy, job, &results_out[result_count++]);
        } else {
            copy->jobs[kept++] = job;
        }
    }
    copy->job_count = kept;
    return result_count;
}

void kvist_copy_wait(struct kvist_copy *copy, uint64_t number)
{
    struct kvist_copy_job *job = copy_valid(copy) ? job_find(copy, number) : NULL;
    if (job != NULL) {
        copy->ops->wait(copy->impl, job);
    }
}

enum kvist_status kvist_copy_layer_wait(
    struct kvist_copy *copy, uint64_t number, size_t layer, void *stream, struct kvist_error *err)
{
    KVIST_CHECK_OR(copy_valid(copy), KVIST_INVALID);
    struct kvist_copy_job *job = job_find(copy, number);
    if (job == NULL) {
        return kvist_error_set(err,
                               KVIST_NOT_FOUND,
                               0,
                               "copy",
                               "no job %llu, or it was reported",
                               (unsigned long long)number);
    }
    if (layer >= job->layer_count) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "copy",
                               "no layer %zu, the job has %zu",
                               layer,
                               job->layer_count);
    }
    return copy->ops->layer_wait(copy->impl, job, layer, stream, err);
}

void kvist_copy_stats_get(const struct kvist_copy *copy, struct kvist_copy_stats *stats_out)
{
    if (!copy_valid(copy) || stats_out == NULL) {
        return;
    }
    const struct kvist_copy_counters *counters = &copy->counters;
    *stats_out = (struct kvist_copy_stats){
        .jobs_done = atomic_load(&counters->jobs_done),
        .jobs_failed = atomic_load(&counters->jobs_failed),
        .host_bytes = atomic_load(&counters->host_bytes),
        .direct_bytes = atomic_load(&counters->direct_bytes),
        .staged_bytes = atomic_load(&counters->staged_bytes),
        .segments_registered = atomic_load(&counters->segments_registered),
        .segments_refused = atomic_load(&counters->segments_refused),
    };
}
