/*
 * copy_host - plans by memcpy, in threads.
 *
 * Role        the `host` kind: a queue of jobs, taken up in order; threads claim shares of about
 *             CLAIM_BYTES from the oldest job that has any left, so several work on one large job
 *             and small ranges do not cost a lock each. A share never crosses a layer's end.
 * Threads     one lock over queue, cursors and what is left to copy; bytes are moved without it
 */
#include "cuda/copy_internal.h"
#include "proto/base/clock.h"

#include <pthread.h>
#include <stdlib.h>

#define CLAIM_BYTES (256ULL << 10)

struct host_copy {
    pthread_mutex_t mutex;
    pthread_cond_t work;         /* a job was queued, or stopping */
    pthread_cond_t progress;     /* a layer or a job has been copied */
    struct kvist_copy_job *head; /* jobs with bytes that no thread has claimed */
    struct kvist_copy_job *tail;
    bool stopping;
    struct kvist_copy_counters *counters;
    pthread_t *threads; /* [thread_count] */
    uint32_t thread_count;
};

/* What one thread copies: `bytes` from a byte of a piece on, within a layer. */
struct claim {
    struct kvist_copy_job *job;
    size_t piece;
    size_t offset;
    size_t layer;
    uint64_t bytes;
};

static void claim_take_locked(struct host_copy *host, struct claim *claim_out)
{
    struct kvist_copy_job *job = host->head;
    while (job->cursor_piece == job->layers[job->cursor_layer].piece_end) {
        job->cursor_layer++;
    }
    *claim_out = (struct claim){
        .job = job,
        .piece = job->cursor_piece,
        .offset = job->cursor_offset,
        .layer = job->cursor_layer,
    };
    size_t end = job->layers[job->cursor_layer].piece_end;
    while (job->cursor_piece < end && claim_out->bytes < CLAIM_BYTES) {
        uint64_t room = CLAIM_BYTES - claim_out->bytes;
        uint64_t left = job->pieces[job->cursor_piece].bytes - job->cursor_offset;
        if (left > room) {
            job->cursor_offset += room;
            claim_out->bytes += room;
        } else {
            job->cursor_piece++;
            job->cursor_offset = 0;
            claim_out->bytes += left;
        }
    }
    if (job->cursor_piece == job->piece_count) {
        host->head = job->next;
        if (host->head == NULL) {
            host->tail = NULL;
        }
    }
}

static void claim_copy(const struct claim *claim)
{
    bool store = claim->job->direction == KVIST_COPY_STORE;
    size_t offset = claim->offset;
    uint64_t left = claim->bytes;
    for (size_t index = claim->piece; left > 0; index++) {
        const struct kvist_copy_piece *piece = &claim->job->pieces[index];
        size_t bytes = piece->bytes - offset < left ? piece->bytes - offset : left;
        unsigned char *tensor = piece->tensor + offset;
        unsigned char *slot = piece->slot + offset;
        kvist_copy_bytes(store ? slot : tensor, store ? tensor : slot, bytes);
        left -= bytes;
        offset = 0;
    }
}

static void claim_end_locked(struct host_copy *host, const struct claim *claim)
{
    struct kvist_copy_job *job = claim->job;
    struct kvist_copy_layer *layer = &job->layers[claim->layer];
    layer->bytes_left -= claim->bytes;
    job->bytes_left -= claim->bytes;
    if (job->bytes_left == 0) {
        job->ended_us = kvist_clock_now_us();
    }
    if (layer->bytes_left == 0) {
        (void)pthread_cond_broadcast(&host->progress);
    }
}

static void *host_thread(void *ctx)
{
    struct host_copy *host = ctx;
    (void)pthread_mutex_lock(&host->mutex);
    for (;;) {
        while (host->head == NULL && !host->stopping) {
            (void)pthread_cond_wait(&host->work, &host->mutex);
        }
        if (host->head == NULL) {
            break;
        }
        struct claim claim;
        claim_take_locked(host, &claim);
        (void)pthread_mutex_unlock(&host->mutex);
        claim_copy(&claim);
        atomic_fetch_add_explicit(&host->counters->host_bytes, claim.bytes, memory_order_relaxed);
        (void)pthread_mutex_lock(&host->mutex);
        claim_end_locked(host, &claim);
    }
    (void)pthread_mutex_unlock(&host->mutex);
    return NULL;
}

static void host_destroy(void *impl)
{
    struct host_copy *host = impl;
    (void)pthread_mutex_lock(&host->mutex);
    host->stopping = true;
    (void)pthread_cond_broadcast(&host->work);
    (void)pthread_mutex_unlock(&host->mutex);
    for (uint32_t index = 0; index < host->thread_count; index++) {
        (void)pthread_join(host->threads[index], NULL);
    }
    (void)pthread_cond_destroy(&host->progress);
    (void)pthread_cond_destroy(&host->work);
    (void)pthread_mutex_destroy(&host->mutex);
    free(host->threads);
    free(host);
}

static enum kvist_status host_create(const struct kvist_copy_options *options,
                                     const struct kvist_copy_runtime *runtime,
                                     struct kvist_copy_counters *counters,
                                     void **impl_out,
                                     struct kvist_error *err)
{
    (void)runtime;
    struct host_copy *host = calloc(1, sizeof(*host));
    if (host == NULL ||
        (host->threads = calloc(options->thread_count, sizeof(pthread_t))) == NULL) {
        free(host);
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "copy", "no memory for copy threads");
    }
    (void)pthread_mutex_init(&host->mutex, NULL);
    (void)pthread_cond_init(&host->work, NULL);
    (void)pthread_cond_init(&host->progress, NULL);
    host->counters = counters;
    while (host->thread_count < options->thread_count) {
        int error = kvist_copy_thread_start(
            &host->threads[host->thread_count], "kvist-copy", host_thread, host);
        if (error != 0) {
            host_destroy(host);
            return kvist_error_set_errno(err, error, "pthread_create", "cannot start copy threads");
        }
        host->thread_count++;
    }
    *impl_out = host;
    return KVIST_OK;
}

static enum kvist_status
host_submit(void *impl, struct kvist_copy_job *job, void *stream, struct kvist_error *err)
{
    (void)stream;
    (void)err;
    struct host_copy *host = impl;
    job->bytes_left = job->bytes;
    if (job->bytes == 0) {
        job->ended_us = kvist_clock_now_us();
        return KVIST_OK;
    }
    (void)pthread_mutex_lock(&host->mutex);
    if (host->tail == NULL) {
        host->head = job;
    } else {
        host->tail->next = job;
    }
    host->tail = job;
    if (job->bytes > CLAIM_BYTES) {
        (void)pthread_cond_broadcast(&host->work);
    } else {
        (void)pthread_cond_signal(&host->work);
    }
    (void)pthread_mutex_unlock(&host->mutex);
    return KVIST_OK;
}

static bool host_done(void *impl, struct kvist_copy_job *job)
{
    struct host_copy *host = impl;
    (void)pthread_mutex_lock(&host->mutex);
    bool done = job->bytes_left == 0;
    (void)pthread_mutex_unlock(&host->mutex);
    return done;
}

static void host_wait(void *impl, struct kvist_copy_job *job)
{
    struct host_copy *host = impl;
    (void)pthread_mutex_lock(&host->mutex);
    while (job->bytes_left > 0) {
        (void)pthread_cond_wait(&host->progress, &host->mutex);
    }
    (void)pthread_mutex_unlock(&host->mutex);
}

static void host_release(void *impl, struct kvist_copy_job *job)
{
    (void)impl;
    (void)job;
}

static enum kvist_status host_layer_wait(
    void *impl, struct kvist_copy_job *job, size_t layer, void *stream, struct kvist_error *err)
{
    (void)stream;
    (void)err;
    struct host_copy *host = impl;
    (void)pthread_mutex_lock(&host->mutex);
    while (job->layers[layer].bytes_left > 0) {
        (void)pthread_cond_wait(&host->progress, &host->mutex);
    }
    (void)pthread_mutex_unlock(&host->mutex);
    return KVIST_OK;
}

static void host_segment(void *impl, void *base, uint64_t bytes)
{
    (void)impl;
    (void)base;
    (void)bytes;
}

const struct kvist_copy_ops kvist_copy_host_ops = {
    .create = host_create,
    .destroy = host_destroy,
    .submit = host_submit,
    .done = host_done,
    .wait = host_wait,
    .release = host_release,
    .layer_wait = host_layer_wait,
    .segment_add = host_segment,
    .segment_remove = host_segment,
};
