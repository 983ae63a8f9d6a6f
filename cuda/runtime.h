/*
 * runtime - the few device calls that the direct and staged ways stand on.
 *
 * Role        one table of calls, two implementations: rt_cuda.c (the CUDA runtime) and
 *             rt_host.c (host memory, streams as queues that a thread executes in order), so
 *             that the same state machines run and are tested where there is no GPU.
 * Ownership   a device is opened and closed; streams, events and pinned memory are given back
 *             before it is closed
 * Threads     any; one stream and one event at a time by one thread. The caller's current device
 *             is never changed. A thread of our own calls thread_enter once.
 * Errors      SYSTEM, with the foreign code in the error; NO_MEMORY; UNSUPPORTED
 */
#ifndef KVIST_COPY_RUNTIME_H
#define KVIST_COPY_RUNTIME_H

#include "cuda/copy_internal.h"

#define KVIST_RUNTIME_BATCH_MAX 1024U

struct kvist_copy_runtime {
    bool (*available)(int device, enum kvist_copy_kind kind);
    enum kvist_status (*open)(int device, void **device_out, struct kvist_error *err);
    void (*close)(void *device);
    /** Bind a thread of ours to the device for its life. */
    void (*thread_enter)(void *device);

    /** Pin mapped memory for the device; read-only mappings too where the device can. */
    enum kvist_status (*host_register)(void *device,
                                       void *base,
                                       uint64_t bytes,
                                       bool *writable_out);
    void (*host_unregister)(void *device, void *base);
    enum kvist_status (*pinned_alloc)(void *device,
                                      size_t bytes,
                                      void **memory_out,
                                      struct kvist_error *err);
    void (*pinned_free)(void *device, void *memory);

    enum kvist_status (*stream_create)(void *device, void **stream_out, struct kvist_error *err);
    void (*stream_destroy)(void *device, void *stream);
    /** Order the stream (NULL: the default one) after the event as recorded last. */
    enum kvist_status (*stream_wait)(void *device,
                                     void *stream,
                                     void *event,
                                     struct kvist_error *err);
    /** Block until nothing is on the stream any more, or the device is lost. */
    enum kvist_status (*stream_synchronize)(void *device, void *stream);

    enum kvist_status (*event_create)(void *device, void **event_out, struct kvist_error *err);
    void (*event_destroy)(void *device, void *event);
    /** stream: one of ours, or a caller's (NULL: the default one). */
    enum kvist_status (*event_record)(void *device,
                                      void *event,
                                      void *stream,
                                      struct kvist_error *err);
    /** OK: reached; BUSY: not yet; SYSTEM: the device failed. */
    enum kvist_status (*event_query)(void *device, void *event);
    enum kvist_status (*event_synchronize)(void *device, void *event);

    /**
     * Put copies on a stream, in any order among themselves. The array is not used after the call.
     * Slots lie in pinned or registered memory. piece_count: 1 to KVIST_RUNTIME_BATCH_MAX. By a
     * thread that has entered.
     */
    enum kvist_status (*copy_batch)(void *device,
                                    void *stream,
                                    enum kvist_copy_direction direction,
                                    const struct kvist_copy_piece *pieces,
                                    size_t piece_count);
};

/** CUDA; NULL in a build without the toolkit. */
const struct kvist_copy_runtime *kvist_copy_runtime_cuda(void);

#endif
