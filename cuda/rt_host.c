#include "cuda/rt_host.h"

#include "proto/base/fault.h"

#include <stdlib.h>
#include <string.h>

struct event {
    uint64_t recorded; /* records put on streams */
    uint64_t reached;  /* the latest one executed */
    bool failed;       /* it stood behind a failed copy */
    size_t references; /* owner, and operations in queues */
};

enum operation_kind {
    OPERATION_COPY,
    OPERATION_KERNEL,
    OPERATION_RECORD,
    OPERATION_WAIT,
};

struct operation {
    struct operation *next;
    enum operation_kind kind;
    enum kvist_copy_direction direction;
    struct kvist_copy_piece *pieces;
    size_t piece_count;
    kvist_rt_kernel_fn *kernel;
    void *ctx;
    struct event *event;
    uint64_t record; /* RECORD, WAIT: which one */
};

struct stream {
    pthread_t thread;
    struct operation *head; /* the first is being executed */
    struct operation *tail;
    bool failed;
    bool stopping;
};

struct range {
    struct range *next;
    uintptr_t base;
    uint64_t bytes;
};

struct device {
    struct stream *default_stream;
    struct range *ranges; /* pinned and registered memory */
};

/* Streams are shared between devices and tests, so there is one lock over all. */
static struct {
    pthread_mutex_t mutex;
    pthread_cond_t change; /* an operation was queued or has ended */
    size_t live_count;
} host = {.mutex = PTHREAD_MUTEX_INITIALIZER, .change = PTHREAD_COND_INITIALIZER};

static void live_add(size_t change)
{
    (void)pthread_mutex_lock(&host.mutex);
    host.live_count += change;
    (void)pthread_mutex_unlock(&host.mutex);
}

size_t kvist_rt_live_count(void)
{
    (void)pthread_mutex_lock(&host.mutex);
    size_t count = host.live_count;
    (void)pthread_mutex_unlock(&host.mutex);
    return count;
}

/* --- Streams ------------------------------------------------------------------------------------
 */

static void event_release_locked(struct event *event)
{
    if (--event->references == 0) {
        free(event);
    }
}

static void operation_free_locked(struct operation *operation)
{
    if (operation->event != NULL) {
        event_release_locked(operation->event);
    }
    free(operation->pieces);
    free(operation);
}

/* Backwards: no caller may lean on an order inside a batch. */
static bool copy_execute(const struct operation *operation)
{
    for (size_t index = operation->piece_count; index-- > 0;) {
        const struct kvist_copy_piece *piece = &operation->pieces[index];
        if (kvist_fault_point("rt.copy")) {
            return false;
        }
        if (operation->direction == KVIST_COPY_STORE) {
            memcpy(piece->slot, piece->tensor, piece->bytes);
        } else {
            memcpy(piece->tensor, piece->slot, piece->bytes);
        }
    }
    return true;
}

static void operation_execute_locked(struct stream *stream, const struct operation *operation)
{
    struct event *event = operation->event;
    switch (operation->kind) {
    case OPERATION_RECORD:
        event->reached = operation->record;
        event->failed = stream->failed;
        return;
    case OPERATION_WAIT:
        while (event->reached < operation->record) {
            (void)pthread_cond_wait(&host.change, &host.mutex);
        }
        return;
    case OPERATION_COPY:
    case OPERATION_KERNEL:
        break;
    }
    (void)pthread_mutex_unlock(&host.mutex);
    bool fine = true;
    if (operation->kind == OPERATION_KERNEL) {
        operation->kernel(operation->ctx);
    } else {
        fine = copy_execute(operation);
    }
    (void)pthread_mutex_lock(&host.mutex);
    stream->failed = stream->failed || !fine;
}

static void *stream_thread(void *ctx)
{
    struct stream *stream = ctx;
    (void)pthread_mutex_lock(&host.mutex);
    for (;;) {
        while (stream->head == NULL && !stream->stopping) {
            (void)pthread_cond_wait(&host.change, &host.mutex);
        }
        struct operation *operation = stream->head;
        if (operation == NULL) {
            break;
        }
        operation_execute_locked(stream, operation);
        stream->head = operation->next;
        if (stream->head == NULL) {
            stream->tail = NULL;
        }
        operation_free_locked(operation);
        (void)pthread_cond_broadcast(&host.change);
    }
    (void)pthread_mutex_unlock(&host.mutex);
    return NULL;
}

void *kvist_rt_stream_create(void)
{
    struct stream *stream = calloc(1, sizeof(*stream));
    if (stream == NULL ||
        kvist_copy_thread_start(&stream->thread, "rt-stream", stream_thread, stream) != 0) {
        free(stream);
        return NULL;
    }
    live_add(1);
    return stream;
}

void kvist_rt_stream_destroy(void *pointer)
{
    struct stream *stream = pointer;
    (void)pthread_mutex_lock(&host.mutex);
    stream->stopping = true;
    (void)pthread_cond_broadcast(&host.change);
    (void)pthread_mutex_unlock(&host.mutex);
    (void)pthread_join(stream->thread, NULL);
    free(stream);
    live_add((size_t)-1);
}

static void operation_queue_locked(struct stream *stream, struct operation *operation)
{
    if (stream->tail == NULL) {
        stream->head = operation;
    } else {
        stream->tail->next = operation;
    }
    stream->tail = operation;
    (void)pthread_cond_broadcast(&host.change);
}

enum kvist_status kvist_rt_stream_launch(void *stream, kvist_rt_kernel_fn *kernel, void *ctx)
{
    struct operation *operation = calloc(1, sizeof(*operation));
    if (operation == NULL) {
        return KVIST_NO_MEMORY;
    }
    operation->kind = OPERATION_KERNEL;
    operation->kernel = kernel;
    operation->ctx = ctx;
    (void)pthread_mutex_lock(&host.mutex);
    operation_queue_locked(stream, operation);
    (void)pthread_mutex_unlock(&host.mutex);
    return KVIST_OK;
}

static enum kvist_status stream_drain(struct stream *stream)
{
    (void)pthread_mutex_lock(&host.mutex);
    while (stream->head != NULL) {
        (void)pthread_cond_wait(&host.change, &host.mutex);
    }
    bool failed = stream->failed;
    stream->failed = false;
    (void)pthread_mutex_unlock(&host.mutex);
    return failed ? KVIST_SYSTEM : KVIST_OK;
}

void kvist_rt_stream_synchronize(void *stream)
{
    (void)stream_drain(stream);
}

/* --- Memory -------------------------------------------------------------------------------------
 */

static enum kvist_status range_add(struct device *device, const void *base, uint64_t bytes)
{
    struct range *range = malloc(sizeof(*range));
    if (range == NULL) {
        return KVIST_NO_MEMORY;
    }
    range->base = (uintptr_t)base;
    range->bytes = bytes;
    (void)pthread_mutex_lock(&host.mutex);
    range->next = device->ranges;
    device->ranges = range;
    host.live_count++;
    (void)pthread_mutex_unlock(&host.mutex);
    return KVIST_OK;
}

static void range_remove(struct device *device, const void *base)
{
    (void)pthread_mutex_lock(&host.mutex);
    struct range **link = &device->ranges;
    while (*link != NULL && (*link)->base != (uintptr_t)base) {
        link = &(*link)->next;
    }
    struct range *range = *link;
    if (range != NULL) {
        *link = range->next;
        host.live_count--;
    }
    (void)pthread_mutex_unlock(&host.mutex);
    free(range);
}

static bool range_reaches_locked(const struct device *device, const struct kvist_copy_piece *piece)
{
    for (const struct range *range = device->ranges; range != NULL; range = range->next) {
        uint64_t offset = (uintptr_t)piece->slot - range->base;
        if (offset < range->bytes && piece->bytes <= range->bytes - offset) {
            return true;
        }
    }
    return false;
}

static enum kvist_status
rt_host_register(void *device, void *base, uint64_t bytes, bool *writable_out)
{
    *writable_out = true;
    return range_add(device, base, bytes);
}

static void rt_host_unregister(void *device, void *base)
{
    range_remove(device, base);
}

static enum kvist_status
rt_pinned_alloc(void *device, size_t bytes, void **memory_out, struct kvist_error *err)
{
    void *memory = NULL;
    if (posix_memalign(&memory, 4096, bytes) != 0) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "rt_host", "no pinned memory");
    }
    enum kvist_status status = range_add(device, memory, bytes);
    if (status != KVIST_OK) {
        free(memory);
        return status;
    }
    *memory_out = memory;
    return KVIST_OK;
}

static void rt_pinned_free(void *device, void *memory)
{
    range_remove(device, memory);
    free(memory);
}

/* --- Events and copies --------------------------------------------------------------------------
 */

static struct stream *stream_choose(struct device *device, void *stream)
{
    return stream != NULL ? stream : device->default_stream;
}

static enum kvist_status rt_event_create(void *device, void **event_out, struct kvist_error *err)
{
    (void)device;
    struct event *event = calloc(1, sizeof(*event));
    if (event == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "rt_host", "no event");
    }
    event->references = 1;
    live_add(1);
    *event_out = event;
    return KVIST_OK;
}

static void rt_event_destroy(void *device, void *event)
{
    (void)device;
    (void)pthread_mutex_lock(&host.mutex);
    event_release_locked(event);
    host.live_count--;
    (void)pthread_mutex_unlock(&host.mutex);
}

static enum kvist_status
event_queue(struct stream *stream, struct event *event, enum operation_kind kind)
{
    struct operation *operation = calloc(1, sizeof(*operation));
    if (operation == NULL) {
        return KVIST_NO_MEMORY;
    }
    (void)pthread_mutex_lock(&host.mutex);
    operation->kind = kind;
    operation->event = event;
    event->references++;
    event->recorded += kind == OPERATION_RECORD ? 1 : 0;
    operation->record = event->recorded;
    operation_queue_locked(stream, operation);
    (void)pthread_mutex_unlock(&host.mutex);
    return KVIST_OK;
}

static enum kvist_status
rt_event_record(void *device, void *event, void *stream, struct kvist_error *err)
{
    (void)err;
    return event_queue(stream_choose(device, stream), event, OPERATION_RECORD);
}

static enum kvist_status
rt_stream_wait(void *device, void *stream, void *event, struct kvist_error *err)
{
    (void)err;
    return event_queue(stream_choose(device, stream), event, OPERATION_WAIT);
}

static enum kvist_status event_status_locked(const struct event *event)
{
    if (event->reached < event->recorded) {
        return KVIST_BUSY;
    }
    return event->failed ? KVIST_SYSTEM : KVIST_OK;
}

static enum kvist_status rt_event_query(void *device, void *event)
{
    (void)device;
    (void)pthread_mutex_lock(&host.mutex);
    enum kvist_status status = event_status_locked(event);
    (void)pthread_mutex_unlock(&host.mutex);
    return status;
}

static enum kvist_status rt_event_synchronize(void *device, void *event)
{
    (void)device;
    (void)pthread_mutex_lock(&host.mutex);
    enum kvist_status status = KVIST_BUSY;
    while ((status = event_status_locked(event)) == KVIST_BUSY) {
        (void)pthread_cond_wait(&host.change, &host.mutex);
    }
    (void)pthread_mutex_unlock(&host.mutex);
    return status;
}

static enum kvist_status rt_copy_batch(void *device,
                                       void *stream,
                                       enum kvist_copy_direction direction,
                                       const struct kvist_copy_piece *pieces,
                                       size_t piece_count)
{
    struct operation *operation = calloc(1, sizeof(*operation));
    if (operation == NULL || (operation->pieces = malloc(piece_count * sizeof(*pieces))) == NULL) {
        free(operation);
        return KVIST_NO_MEMORY;
    }
    memcpy(operation->pieces, pieces, piece_count * sizeof(*pieces));
    operation->kind = OPERATION_COPY;
    operation->direction = direction;
    operation->piece_count = piece_count;
    (void)pthread_mutex_lock(&host.mutex);
    bool reaches = true;
    for (size_t index = 0; index < piece_count; index++) {
        reaches = reaches && range_reaches_locked(device, &pieces[index]);
    }
    if (reaches) {
        operation_queue_locked(stream, operation);
    } else {
        operation_free_locked(operation);
    }
    (void)pthread_mutex_unlock(&host.mutex);
    return reaches ? KVIST_OK : KVIST_INVALID;
}

/* --- Device -------------------------------------------------------------------------------------
 */

static bool rt_available(int device, enum kvist_copy_kind kind)
{
    (void)kind;
    return device == 0;
}

static enum kvist_status rt_open(int ordinal, void **device_out, struct kvist_error *err)
{
    (void)ordinal;
    struct device *device = calloc(1, sizeof(*device));
    if (device == NULL || (device->default_stream = kvist_rt_stream_create()) == NULL) {
        free(device);
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "rt_host", "no device");
    }
    *device_out = device;
    return KVIST_OK;
}

static void rt_close(void *pointer)
{
    struct device *device = pointer;
    kvist_rt_stream_destroy(device->default_stream);
    free(device);
}

static void rt_thread_enter(void *device)
{
    (void)device;
}

static enum kvist_status rt_stream_create(void *device, void **stream_out, struct kvist_error *err)
{
    (void)device;
    if (kvist_fault_point("rt.stream_create") || (*stream_out = kvist_rt_stream_create()) == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "rt_host", "no stream");
    }
    return KVIST_OK;
}

static void rt_stream_destroy(void *device, void *stream)
{
    (void)device;
    kvist_rt_stream_destroy(stream);
}

static enum kvist_status rt_stream_synchronize(void *device, void *stream)
{
    return stream_drain(stream_choose(device, stream));
}

const struct kvist_copy_runtime *kvist_copy_runtime_host(void)
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
