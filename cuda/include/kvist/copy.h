/*
 * copy - moving blocks between slots and an engine's KV tensors.
 *
 * Role        one interface, three implementations: `host` (memcpy; CPU engines and every test),
 *             `direct` (segments registered with the device; batched asynchronous copies) and
 *             `staged` (a ring of pinned buffers; for segments that are not registered). Knows
 *             nothing of keys, leases or the daemon: slots come as addresses in this process.
 * Shapes      tensor t: [block_count][block_stride_bytes]; a plan is a list of ranges, each
 *             bytes long: tensor t, block b, offset o in the block <-> address in a slot
 * Units       bytes; microseconds
 * Ownership   tensors and slots are borrowed from submit until the job is reported; a plan's
 *             ranges are copied at submit
 * Threads     submit, poll, wait, layer_wait: one thread at a time; segment_add, segment_remove,
 *             stats: any thread, also beside those; create before, destroy after all others.
 *             Copies run elsewhere (device streams, the implementation's own threads). Those
 *             threads do not survive a fork: create in the process that copies.
 * Order       none between two jobs that have not been reported: a slot or tensor block that one
 *             job writes is not used by another until the first was reported
 * Limits      ranges lie inside their tensor's page_bytes: checked at submit.
 *             KVIST_COPY_RANGES_MAX a plan, KVIST_COPY_JOBS_MAX jobs that were not reported
 * Errors      INVALID: a range outside its tensor, nothing was copied; EXISTS: the job's number
 *             is in use; BUSY: too many jobs, poll first; UNSUPPORTED: this build or machine has
 *             no such device; SYSTEM: a device error, the job is reported as failed, its target
 *             bytes are undefined. A failed job touches nothing once it has been reported, and
 *             later jobs work where the device still does.
 * Source      CUDA runtime API: cudaHostRegister, cudaMemcpyBatchAsync, stream-ordered events
 */
#ifndef KVIST_COPY_H
#define KVIST_COPY_H

#include <kvist/error.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVIST_COPY_RANGES_MAX        (1U << 20)
#define KVIST_COPY_JOBS_MAX          1024U
#define KVIST_COPY_TENSORS_MAX       4096U
#define KVIST_COPY_LAYERS_MAX        4096U
#define KVIST_COPY_THREADS_MAX       64U
#define KVIST_COPY_STAGING_BYTES_MIN (1ULL << 20)
#define KVIST_COPY_STAGING_BYTES_MAX (16ULL << 30)

struct kvist_copy_tensor {
    void *base;           /* device memory, or host memory for `host` */
    uint64_t block_count; /* 1 and more */
    uint64_t block_stride_bytes;
    uint64_t page_bytes; /* bytes of a block that count, 1 to the stride */
};

struct kvist_copy_range {
    uint32_t tensor;
    uint32_t reserved; /* 0 */
    uint64_t block;
    uint64_t offset; /* in the tensor's block */
    uint64_t bytes;  /* 1 and more */
    void *slot;      /* where in a slot: any alignment */
};

enum kvist_copy_direction {
    KVIST_COPY_STORE, /* tensor -> slot */
    KVIST_COPY_LOAD,  /* slot -> tensor */
};

enum kvist_copy_kind {
    KVIST_COPY_HOST,
    KVIST_COPY_DIRECT,
    KVIST_COPY_STAGED,
};

struct kvist_copy_options {
    size_t struct_bytes;
    enum kvist_copy_kind kind;
    int device;             /* CUDA ordinal; the caller's current device is never changed */
    uint64_t staging_bytes; /* DIRECT, STAGED: pinned memory of both rings, 0: 64 MiB */
    uint32_t thread_count;  /* HOST: copy threads, 0: 1 */
    const struct kvist_copy_tensor *tensors; /* [tensor_count], copied */
    size_t tensor_count;
};

#define KVIST_COPY_OPTIONS_INIT                                                                    \
    {                                                                                              \
        sizeof(struct kvist_copy_options), KVIST_COPY_HOST, 0, 0, 0, NULL, 0                       \
    }

struct kvist_copy;

/**
 * Whether a kind can work here: built in, and a device is there. For other kinds than HOST this
 * initialises the CUDA driver in the process: a child forked later cannot use it.
 */
KVIST_API bool kvist_copy_available(enum kvist_copy_kind kind, int device);

/**
 * Threads and, for DIRECT and STAGED, streams and the pinned rings.
 *
 * @return OK, INVALID (options, a tensor), UNSUPPORTED (no such device here), NO_MEMORY, SYSTEM
 */
KVIST_API KVIST_MUST_USE enum kvist_status
kvist_copy_create(const struct kvist_copy_options *options,
                  struct kvist_copy **copy_out,
                  struct kvist_error *err);

/** Waits for all jobs. NULL is fine. */
KVIST_API void kvist_copy_destroy(struct kvist_copy **copy);

/**
 * Make a mapped segment known to the device (DIRECT: cudaHostRegister; else nothing). Any thread.
 * A failure is no error: ranges in it go the staged way, and the stats count it. Takes about as
 * long as pinning the pages does; jobs go on meanwhile.
 */
KVIST_API void kvist_copy_segment_add(struct kvist_copy *copy, void *base, uint64_t bytes);

/** Forget a segment, before it is unmapped; no job may use it. Any thread. */
KVIST_API void kvist_copy_segment_remove(struct kvist_copy *copy, void *base, uint64_t bytes);

/**
 * Start a plan. Never waits for copies.
 *
 * @param job     the caller's number, reported back
 * @param ranges  [range_count]; tensor, block, offset and bytes are checked, slot is trusted
 * @param stream  STORE and LOAD are ordered after what is on this stream now (a cudaStream_t of the
 *                device, NULL: its default stream). HOST ignores it: the caller's tensors are
 * ready.
 */
KVIST_API KVIST_MUST_USE enum kvist_status kvist_copy_submit(struct kvist_copy *copy,
                                                             uint64_t job,
                                                             enum kvist_copy_direction direction,
                                                             const struct kvist_copy_range *ranges,
                                                             size_t range_count,
                                                             void *stream,
                                                             struct kvist_error *err);

struct kvist_copy_result {
    uint64_t job;
    enum kvist_status status; /* OK, or SYSTEM */
    uint64_t bytes;
    uint64_t elapsed_us; /* from submit until the end was seen: by a copy thread, poll or wait */
};

/** Jobs that have ended since the last call; at most result_max. */
KVIST_API size_t kvist_copy_poll(struct kvist_copy *copy,
                                 struct kvist_copy_result *results_out,
                                 size_t result_max);

/** Block until a job has ended (it is still reported by poll). Unknown or reported jobs: at once.
 */
KVIST_API void kvist_copy_wait(struct kvist_copy *copy, uint64_t job);

/* --- Layer pipeline -----------------------------------------------------------------------------
 */

/**
 * Copy layer by layer: the ranges of layer i are those in [layer_starts[i], layer_starts[i + 1]),
 * the first start is 0. As submit, and kvist_copy_layer_wait() makes a stream wait for one layer
 * alone, so that layer i computes while i + 1 loads (or, for a STORE, while i is written back).
 */
KVIST_API KVIST_MUST_USE enum kvist_status
kvist_copy_submit_layers(struct kvist_copy *copy,
                         uint64_t job,
                         enum kvist_copy_direction direction,
                         const struct kvist_copy_range *ranges,
                         const size_t *layer_starts, /* [layer_count + 1] */
                         size_t layer_count,
                         void *stream,
                         struct kvist_error *err);

/**
 * Make stream (HOST: the caller) wait for a layer of a job: what is put on the stream afterwards
 * may read that layer's tensor blocks (LOAD), or overwrite them (STORE). The caller is held only
 * until the layer's copies have been handed to the device. That the slots of a STORE are filled is
 * what poll reports.
 *
 * @return OK, NOT_FOUND (no such job, or reported), INVALID (no such layer), SYSTEM (the job
 * failed)
 */
KVIST_API KVIST_MUST_USE enum kvist_status kvist_copy_layer_wait(
    struct kvist_copy *copy, uint64_t job, size_t layer, void *stream, struct kvist_error *err);

/* --- Counters -----------------------------------------------------------------------------------
 */

struct kvist_copy_stats {
    uint64_t jobs_done;           /* reported as OK */
    uint64_t jobs_failed;         /* reported as failed */
    uint64_t host_bytes;          /* copied by memcpy between tensor and slot */
    uint64_t direct_bytes;        /* handed to the device between tensor and slot */
    uint64_t staged_bytes;        /* through a pinned ring */
    uint64_t segments_registered; /* now */
    uint64_t segments_refused;    /* registrations that failed, ever: their ranges are staged */
};

/** Counters since create. Any thread. */
KVIST_API void kvist_copy_stats_get(const struct kvist_copy *copy,
                                    struct kvist_copy_stats *stats_out);

#ifdef __cplusplus
}
#endif

#endif
