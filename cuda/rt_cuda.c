/*
 * rt_cuda - the runtime on CUDA.
 *
 * Role        the only file that calls CUDA. Needs no GPU to be linked or loaded: the static
 *             runtime library opens the driver when it is first used.
 * Threads     cudaSetDevice() in a caller's thread and back would leave a context, some hundred
 *             MiB, on the caller's device, which may well be another one (a thread that never
 *             chose has device 0). So a call whose thread is on another device runs in a thread
 *             of its own.
 * Errors      a call that failed clears the thread's last error: the engine's own checks would
 *             find it otherwise
 * Source      CUDA runtime API: Memory, Stream and Event Management
 */
#include "cuda/runtime.h"

#include <cuda_runtime_api.h>

#include <stdlib.h>

#define BATCH_DRIVER_MIN 12080 /* the first driver that takes cudaMemcpyBatchAsync() */

struct device {
    int ordinal;
    bool batches;            /* the driver takes batches */
    bool registers_readonly; /* and read-only mappings */
};

/* One call to CUDA, in a form that can be handed to another thread. */
struct call {
    const struct device *device;
    cudaError_t (*run)(const struct call *call);
    void *pointer;
    void **pointer_out;
    size_t bytes;
    unsigned flags;
    cudaStream_t stream;
    cudaStream_t *stream_out;
    cudaEvent_t event;
    cudaEvent_t *event_out;
    cudaError_t error; /* of the other thread */
};

static cudaError_t call_here(const struct call *call)
{
    cudaError_t error = call->run(call);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return error;
}

static void *call_thread(void *ctx)
{
    struct call *call = ctx;
    call->error = cudaSetDevice(call->device->ordinal);
    if (call->error == cudaSuccess) {
        call->error = call_here(call);
    }
    return NULL;
}

static cudaError_t call_run(struct call *call)
{
    int current = -1;
    cudaError_t error = cudaGetDevice(&current);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return error;
    }
    if (current == call->device->ordinal) {
        return call_here(call);
    }
    pthread_t thread;
    if (kvist_copy_thread_start(&thread, "kvist-cuda", call_thread, call) != 0) {
        return cudaErrorMemoryAllocation;
    }
    (void)pthread_join(thread, NULL);
    return call->error;
}

static enum kvist_status
status_from_cuda(cudaError_t error, const char *what, struct kvist_error *err)
{
    if (error == cudaSuccess) {
        return KVIST_OK;
    }
    enum kvist_status status = KVIST_SYSTEM;
    if (error == cudaErrorMemoryAllocation) {
        status = KVIST_NO_MEMORY;
    } else if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ||
               error == cudaErrorNotSupported) {
        status = KVIST_UNSUPPORTED;
    }
    return kvist_error_set(
        err, status, (int32_t)error, "cuda", "%s: %s", what, cudaGetErrorString(error));
}

/* --- Device -------------------------------------------------------------------------------------
 */

static bool attribute(int ordinal, enum cudaDeviceAttr name)
{
    int value = 0;
    if (cudaDeviceGetAttribute(&value, name, ordinal) != cudaSuccess) {
        (void)cudaGetLastError();
        return false;
    }
    return value != 0;
}

static bool rt_available(int ordinal, enum kvist_copy_kind kind)
{
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        (void)cudaGetLastError();
        return false;
    }
    return ordinal < count &&
           (kind != KVIST_COPY_DIRECT || attribute(ordinal, cudaDevAttrHostRegisterSupported));
}

static enum kvist_status rt_open(int ordinal, void **device_out, struct kvist_error *err)
{
    int driver = 0;
    cudaError_t error = cudaDriverGetVersion(&driver);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return status_from_cuda(error, "cudaDriverGetVersion", err);
    }
    struct device *device = calloc(1, sizeof(*device));
    if (device == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "cuda", "no memory for a device");
    }
    device->ordinal = ordinal;
    device->batches = driver >= BATCH_DRIVER_MIN;
    device->registers_readonly = attribute(ordinal, cudaDevAttrHostRegisterReadOnlySupported);
    *device_out = device;
    return KVIST_OK;
}

static void rt_close(void *device)
{
    free(device);
}

static void rt_thread_enter(void *pointer)
{
    const struct device *device = pointer;
    if (cudaSetDevice(device->ordinal) != cudaSuccess) {
        /* Each later call of the thread fails then, and its jobs are reported as failed. */
        (void)cudaGetLastError();
    }
}

/* --- Memory -------------------------------------------------------------------------------------
 */

static cudaError_t run_register(const struct call *call)
{
    return cudaHostRegister(call->pointer, call->bytes, call->flags);
}

static enum kvist_status
rt_host_register(void *pointer, void *base, uint64_t bytes, bool *writable_out)
{
    const struct device *device = pointer;
    struct call call = {
        .device = device,
        .run = run_register,
        .pointer = base,
        .bytes = bytes,
        .flags = cudaHostRegisterDefault,
    };
    bool writable = true;
    cudaError_t error = call_run(&call);
    if (error != cudaSuccess && device->registers_readonly) {
        writable = false;
        call.flags = cudaHostRegisterReadOnly;
        error = call_run(&call);
    }
    if (error == cudaSuccess) {
        *writable_out = writable;
    }
    return status_from_cuda(error, "cudaHostRegister", NULL);
}

static cudaError_t run_unregister(const struct call *call)
{
    return cudaHostUnregister(call->pointer);
}

static void rt_host_unregister(void *device, void *base)
{
    struct call call = {.device = device, .run = run_unregister, .pointer = base};
    (void)call_run(&call);
}

static cudaError_t run_pinned_alloc(const struct call *call)
{
    return cudaHostAlloc(call->pointer_out, call->bytes, cudaHostAllocDefault);
}

static enum kvist_status
rt_pinned_alloc(void *device, size_t bytes, void **memory_out, struct kvist_error *err)
{
    struct call call = {
        .device = device, .run = run_pinned_alloc, .pointer_out = memory_out, .bytes = bytes};
    return status_from_cuda(call_run(&call), "cudaHostAlloc (staging_bytes)", err);
}

static cudaError_t run_pinned_free(const struct call *call)
{
    return cudaFreeHost(call->pointer);
}

static void rt_pinned_free(void *device, void *memory)
{
    struct call call = {.device = device, .run = run_pinned_free, .pointer = memory};
    (void)call_run(&call);
}

/* --- Streams ------------------------------------------------------------------------------------
 */

static cudaError_t run_stream_create(const struct call *call)
{
    return cudaStreamCreateWithFlags(call->stream_out, cudaStreamNonBlocking);
}

static enum kvist_status rt_stream_create(void *device, void **stream_out, struct kvist_error *err)
{
    cudaStream_t stream = NULL;
    struct call call = {.device = device, .run = run_stream_create, .stream_out = &stream};
    enum kvist_status status = status_from_cuda(call_run(&call), "cudaStreamCreate", err);
    if (status == KVIST_OK) {
        *stream_out = stream;
    }
    return status;
}

static cudaError_t run_stream_destroy(const struct call *call)
{
    return cudaStreamDestroy(call->stream);
}

static void rt_stream_destroy(void *device, void *stream)
{
    struct call call = {.device = device, .run = run_stream_destroy, .stream = stream};
    (void)call_run(&call);
}

static cudaError_t run_stream_wait(const struct call *call)
{
    return cudaStreamWaitEvent(call->stream, call->event, 0);
}

static enum kvist_status
rt_stream_wait(void *device, void *stream, void *event, struct kvist_error *err)
{
    struct call call = {.device = device, .run = run_stream_wait, .stream = stream, .event = event};
    return status_from_cuda(call_run(&call), "cudaStreamWaitEvent", err);
}

static cudaError_t run_stream_synchronize(const struct call *call)
{
    return cudaStreamSynchronize(call->stream);
}

static enum kvist_status rt_stream_synchronize(void *device, void *stream)
{
    struct call call = {.device = device, .run = run_stream_synchronize, .stream = stream};
    return status_from_cuda(call_run(&call), "cudaStreamSynchronize", NULL);
}

/* --- Events -------------------------------------------------------------------------------------
 */

static cudaError_t run_event_create(const struct call *call)
{
    return cudaEventCreateWithFlags(call->event_out,
                                    cudaEventDisableTiming | cudaEventBlockingSync);
}

static enum kvist_status rt_event_create(void *device, void **event_out, struct kvist_error *err)
{
    cudaEvent_t event = NULL;
    struct call call = {.device = device, .run = run_event_create, .event_out = &event};
    enum kvist_status status = status_from_cuda(call_run(&call), "cudaEventCreate", err);
    if (status == KVIST_OK) {
        *event_out = event;
    }
    return status;
}

static cudaError_t run_event_destroy(const struct call *call)
{
    return cudaEventDestroy(call->event);
}

static void rt_event_destroy(void *device, void *event)
{
    struct call call = {.device = device, .run = run_event_destroy, .event = event};
    (void)call_run(&call);
}

static cudaError_t run_event_record(const struct call *call)
{
    return cudaEventRecord(call->event, call->stream);
}

static enum kvist_status
rt_event_record(void *device, void *event, void *stream, struct kvist_error *err)
{
    struct call call = {
        .device = device, .run = run_event_record, .stream = stream, .event = event};
    return status_from_cuda(call_run(&call), "cudaEventRecord (is the stream the device's?)", err);
}

static cudaError_t run_event_query(const struct call *call)
{
    return cudaEventQuery(call->event);
}

static enum kvist_status rt_event_query(void *device, void *event)
{
    struct call call = {.device = device, .run = run_event_query, .event = event};
    cudaError_t error = call_run(&call);
    return error == cudaErrorNotReady ? KVIST_BUSY
                                      : status_from_cuda(error, "cudaEventQuery", NULL);
}

static cudaError_t run_event_synchronize(const struct call *call)
{
    return cudaEventSynchronize(call->event);
}

static enum kvist_status rt_event_synchronize(void *device, void *event)
{
    struct call call = {.device = device, .run = run_event_synchronize, .event = event};
    return status_from_cuda(call_run(&call), "cudaEventSynchronize", NULL);
}

/* --- Copies -------------------------------------------------------------------------------------
 */

static cudaError_t copy_each(cudaStream_t stream,
                             enum kvist_copy_direction direction,
                             const struct kvist_copy_piece *pieces,
                             size_t piece_count)
{
    cudaError_t error = cudaSuccess;
    for (size_t index = 0; error == cudaSuccess && index < piece_count; index++) {
        const struct kvist_copy_piece *piece = &pieces[index];
        error = direction == KVIST_COPY_STORE
                    ? cudaMemcpyAsync(
                          piece->slot, piece->tensor, piece->bytes, cudaMemcpyDeviceToHost, stream)
                    : cudaMemcpyAsync(
                          piece->tensor, piece->slot, piece->bytes, cudaMemcpyHostToDevice, stream);
    }
    return error;
}

#if CUDART_VERSION >= BATCH_DRIVER_MIN
static cudaError_t copy_together(cudaStream_t stream,
                                 enum kvist_copy_direction direction,
                                 const struct kvist_copy_piece *pieces,
                                 size_t piece_count)
{
    bool store = direction == KVIST_COPY_STORE;
    void *targets[KVIST_RUNTIME_BATCH_MAX];
    void *sources[KVIST_RUNTIME_BATCH_MAX];
    size_t sizes[KVIST_RUNTIME_BATCH_MAX];
    for (size_t index = 0; index < piece_count; index++) {
        targets[index] = store ? pieces[index].slot : pieces[index].tensor;
        sources[index] = store ? pieces[index].tensor : pieces[index].slot;
        sizes[index] = pieces[index].bytes;
    }
    struct cudaMemcpyAttributes attributes = {
        .srcAccessOrder = cudaMemcpySrcAccessOrderStream,
        .flags = cudaMemcpyFlagPreferOverlapWithCompute,
    };
    size_t first = 0;
#if CUDART_VERSION >= 13000
    return cudaMemcpyBatchAsync(
        targets, (const void *const *)sources, sizes, piece_count, &attributes, &first, 1, stream);
#else
    size_t failed = 0;
    return cudaMemcpyBatchAsync(
        targets, sources, sizes, piece_count, &attributes, &first, 1, &failed, stream);
#endif
}
#else
#define copy_together copy_each
#endif

/* Called by our own threads only, which are on the device. */
static enum kvist_status rt_copy_batch(void *pointer,
                                       void *stream,
                                       enum kvist_copy_direction direction,
                                       const struct kvist_copy_piece *pieces,
                                       size_t piece_count)
{
    const struct device *device = pointer;
    cudaError_t error = device->batches && piece_count > 1
                            ? copy_together(stream, direction, pieces, piece_count)
                            : copy_each(stream, direction, pieces, piece_count);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return status_from_cuda(error, "cudaMemcpyBatchAsync", NULL);
}

const struct kvist_copy_runtime *kvist_copy_runtime_cuda(void)
{
    static const struct kvist_copy_runtime runtime = {
        .available = rt_available,
        .open = rt_open,
        .close = rt_close,
        .thread_enter = rt_thread_enter,
        .host_register = rt_host_register,
        .host_unregister = rt_host_unregister,
        .pinned_alloc = rt_pinned_alloc,
        .pinned_free = rt_pinned_free,
        .stream_create = rt_stream_create,
        .stream_destroy = rt_stream_destroy,
        .stream_wait = rt_stream_wait,
        .stream_synchronize = rt_stream_synchronize,
        .event_create = rt_event_create,
        .event_destroy = rt_event_destroy,
        .event_record = rt_event_record,
        .event_query = rt_event_query,
        .event_synchronize = rt_event_synchronize,
        .copy_batch = rt_copy_batch,
    };
    return &runtime;
}
