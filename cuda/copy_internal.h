/*
 * copy_internal - what the front and the implementations of a copy object share.
 *
 * Role        the front (copy.c) checks plans, resolves ranges to pairs of addresses and keeps the
 *             table of jobs; an implementation (copy_host.c, device.c) moves the bytes.
 * Ownership   a job belongs to the front; an implementation uses it from submit until its done()
 *             has answered true, and never after release()
 * Threads     ops are called by the front's one thread, but segment_add and segment_remove by any
 */
#ifndef KVIST_COPY_INTERNAL_H
#define KVIST_COPY_INTERNAL_H

#include <kvist/copy.h>

#include <pthread.h>
#include <stdatomic.h>

struct kvist_copy_runtime;

/* One contiguous copy. `tensor` is device memory for the device implementations. */
struct kvist_copy_piece {
    unsigned char *tensor;
    unsigned char *slot;
    size_t bytes;
};

struct kvist_copy_layer {
    size_t piece_end;    /* first piece of the next layer */
    uint64_t bytes_left; /* host: not copied yet */
    void *event;         /* device: recorded behind the layer's copies */
};

struct kvist_copy_job {
    uint64_t number;
    enum kvist_copy_direction direction;
    struct kvist_copy_piece *pieces;
    size_t piece_count;
    struct kvist_copy_layer *layers;
    size_t layer_count; /* 1 and more */
    uint64_t bytes;
    uint64_t submitted_us;

    /* The implementation's, under its lock. */
    struct kvist_copy_job *next; /* in a queue */
    uint64_t ended_us;           /* 0: not yet */
    enum kvist_status status;
    uint64_t bytes_left;   /* host */
    size_t cursor_piece;   /* host: next byte to hand to a thread */
    size_t cursor_offset;  /* host */
    size_t cursor_layer;   /* host */
    void *begin_event;     /* device: what the caller's stream had at submit */
    uint64_t failures;     /* device: of the lane's stream when the job was taken up */
    size_t layers_issued;  /* device: layers whose event is recorded */
    size_t chunks_pending; /* device: staged chunks not scattered to their slots yet */
    bool issued;           /* device: all its work is with the device */
};

/* Counters of struct kvist_copy_stats. */
struct kvist_copy_counters {
    _Atomic uint64_t jobs_done;
    _Atomic uint64_t jobs_failed;
    _Atomic uint64_t host_bytes;
    _Atomic uint64_t direct_bytes;
    _Atomic uint64_t staged_bytes;
    _Atomic uint64_t segments_registered;
    _Atomic uint64_t segments_refused;
};

struct kvist_copy_ops {
    enum kvist_status (*create)(const struct kvist_copy_options *options,
                                const struct kvist_copy_runtime *runtime,
                                struct kvist_copy_counters *counters,
                                void **impl_out,
                                struct kvist_error *err);
    /** All jobs have been waited for and released. */
    void (*destroy)(void *impl);
    /** On failure the job was not taken, and nothing of it runs. */
    enum kvist_status (*submit)(void *impl,
                                struct kvist_copy_job *job,
                                void *stream,
                                struct kvist_error *err);
    /** Whether a job has ended; job->status and job->ended_us are set then. */
    bool (*done)(void *impl, struct kvist_copy_job *job);
    /** Block until done() would answer true. */
    void (*wait)(void *impl, struct kvist_copy_job *job);
    /** Give back what submit took. The job is done. */
    void (*release)(void *impl, struct kvist_copy_job *job);
    enum kvist_status (*layer_wait)(void *impl,
                                    struct kvist_copy_job *job,
                                    size_t layer,
                                    void *stream,
                                    struct kvist_error *err);
    void (*segment_add)(void *impl, void *base, uint64_t bytes);
    void (*segment_remove)(void *impl, void *base, uint64_t bytes);
};

extern const struct kvist_copy_ops kvist_copy_host_ops;
extern const struct kvist_copy_ops kvist_copy_device_ops;

/**
 * kvist_copy_create() with a runtime of the caller's, which outlives the object; NULL: the built-in
 * one. HOST needs none.
 */
KVIST_MUST_USE enum kvist_status kvist_copy_create_with(const struct kvist_copy_options *options,
                                                        const struct kvist_copy_runtime *runtime,
                                                        struct kvist_copy **copy_out,
                                                        struct kvist_error *err);

/**
 * Start a thread that takes no signals.
 *
 * @param name  at most 15 bytes
 * @return 0, or an errno value
 */
KVIST_MUST_USE int
kvist_copy_thread_start(pthread_t *thread_out, const char *name, void *(*run)(void *), void *ctx);

/** Copy bytes past the cache where that is faster; source and target do not overlap. */
void kvist_copy_bytes(void *target, const void *source, size_t bytes);

#endif
