/*
 * rt_host - a runtime whose device memory is host memory.
 *
 * Role        runs the direct and staged kinds where there is no GPU. Streams are queues that a
 *             thread each executes in order; events are marks in them. Stricter than a GPU: a slot
 *             outside pinned or registered memory is refused, copies of a batch run backwards, an
 *             event stands for the record that was last when it was waited for.
 *             Not part of the installed library.
 * Threads     any
 * Faults      "rt.copy": a copy fails while it executes; the stream is broken until it has been
 *             synchronised
 */
#ifndef KVIST_RT_HOST_H
#define KVIST_RT_HOST_H

#include "cuda/runtime.h"

typedef void kvist_rt_kernel_fn(void *ctx);

const struct kvist_copy_runtime *kvist_copy_runtime_host(void);

/** A stream of the caller's, to be passed to submit. NULL when there is no memory or thread. */
void *kvist_rt_stream_create(void);

/** Waits for what is on it. */
void kvist_rt_stream_destroy(void *stream);

/** Put a function on a stream. */
KVIST_MUST_USE enum kvist_status
kvist_rt_stream_launch(void *stream, kvist_rt_kernel_fn *kernel, void *ctx);

/** Wait for what is on a stream. */
void kvist_rt_stream_synchronize(void *stream);

/** Streams, events, pinned and registered ranges that have not been given back. */
size_t kvist_rt_live_count(void);

#endif
