/*
 * _pool - the Pool object: finding, taking, addressing, marking, verifying.
 *
 * Role        parse, check, call libkvist, make Python objects. The data path's calls never wait.
 * Threads     calls on many keys drop the GIL; see _binding.h for `busy`
 */
#include "_binding.h"

#include <string.h>

struct kvist_pool *kvist_binding_pool_handle(struct kvist_pool_object *pool)
{
    if (pool->handle && pool->client->handle)
        return pool->handle;
    PyErr_SetString(PyExc_ValueError, "the Pool or its Client is closed");
    return NULL;
}

/* Drop the GIL around a statement that works on many keys; else run it at once. */
#define RUN_KEYS(self, count, statement)                                                           \
    do {                                                                                           \
        if ((count) < KVIST_BINDING_QUICK_KEYS) {                                                  \
            statement;                                                                             \
        } else {                                                                                   \
            (self)->client->busy++;                                                                \
            PyThreadState *gil = PyEval_SaveThread();                                              \
            statement;                                                                             \
            PyEval_RestoreThread(gil);                                                             \
            (self)->client->busy--;                                                                \
        }                                                                                          \
    } while (0)

/* What probe, acquire, touch and prefetch have in common: (keys, start=0, stop=None). */
struct key_call {
    struct kvist_pool *handle;
    struct kvist_binding_keys keys;
    const uint8_t *first;
    size_t count;
};

static bool key_call_begin(struct kvist_pool_object *self,
                           const char *name,
                           PyObject *const *args,
                           Py_ssize_t arg_count,
                           struct key_call *call)
{
    size_t start = 0;
    size_t stop = 0;
    if (!kvist_binding_args(name, arg_count, 1, 3))
        return false;
    call->handle = kvist_binding_pool_handle(self);
    if (!call->handle || !kvist_binding_keys_parse(args[0], &call->keys))
        return false;
    if (!kvist_binding_range(args, arg_count, 1, call->keys.count, &start, &stop)) {
        kvist_binding_keys_free(&call->keys);
        return false;
    }
    call->first = call->keys.data + start * KVIST_KEY_BYTES;
    call->count = stop - start;
    return true;
}

static size_t batch_of(size_t left)
{
    return left < KVIST_KEYS_MAX ? left : KVIST_KEYS_MAX;
}

static enum kvist_status probe_all(const struct key_call *call, uint8_t *out)
{
    enum kvist_status status = KVIST_OK;
    for (size_t done = 0; done < call->count && status == KVIST_OK; done += KVIST_KEYS_MAX)
        status = kvist_pool_probe(call->handle,
                                  call->first + done * KVIST_KEY_BYTES,
                                  batch_of(call->count - done),
                                  out + done);
    return status;
}

PyDoc_STRVAR(pool_probe_doc,
             "probe(keys, start=0, stop=None)\n--\n\n"
             "Where keys are, without leasing: one byte each, MISS, READY, NVME or LOADING.");

static PyObject *pool_probe(PyObject *object, PyObject *const *args, Py_ssize_t arg_count)
{
    struct kvist_pool_object *self = (struct kvist_pool_object *)object;
    struct key_call call;
    if (!key_call_begin(self, "probe", args, arg_count, &call))
        return NULL;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)call.count);
    if (result) {
        uint8_t *out = (uint8_t *)PyBytes_AsString(result);
        enum kvist_status status;
        RUN_KEYS(self, call.count, status = probe_all(&call, out));
        if (status != KVIST_OK) {
            Py_CLEAR(result);
            kvist_binding_raise(object, status, NULL);
        }
    }
    kvist_binding_keys_free(&call.keys);
    return result;
}

/* Leases the leading run, batch by batch, all of one arena. */
static enum kvist_status acquire_run(const struct key_call *call,
                                     struct kvist_lease *leases,
                                     size_t *lease_count_out,
                                     enum kvist_probe *stop_out)
{
    enum kvist_status status = KVIST_OK;
    enum kvist_probe stop = KVIST_PROBE_READY;
    size_t held = 0;
    while (held < call->count && stop == KVIST_PROBE_READY && status == KVIST_OK) {
        size_t made = 0;
        status = kvist_pool_acquire(call->handle,
                                    call->first + held * KVIST_KEY_BYTES,
                                    batch_of(call->count - held),
                                    leases + held,
                                    &made,
                                    &stop);
        if (made > 0 && leases[held].instance != leases[0].instance) {
            kvist_pool_release(call->handle, leases + held, made);
            stop = KVIST_PROBE_MISS;
            break;
        }
        held += made;
        if (status == KVIST_BUSY)
            stop = KVIST_PROBE_MISS;
    }
    *lease_count_out = held;
    *stop_out = stop;
    return status == KVIST_BUSY ? KVIST_OK : status;
}

PyDoc_STRVAR(pool_acquire_doc,
             "acquire(keys, start=0, stop=None)\n--\n\n"
             "Lease the leading run of keys [start, stop) that are in DRAM and mapped by every\n"
             "rank: (Leases, why it ended). READY: it did not end. MISS also when the session's\n"
             "lease records are used up.");

static PyObject *pool_acquire(PyObject *object, PyObject *const *args, Py_ssize_t arg_count)
{
    struct kvist_pool_object *self = (struct kvist_pool_object *)object;
    struct key_call call;
    if (!key_call_begin(self, "acquire", args, arg_count, &call))
        return NULL;
    PyObject *result = NULL;
    struct kvist_lease few[8];
    struct kvist_lease *leases = few;
    size_t made = 0;
    enum kvist_probe stop = KVIST_PROBE_MISS;
    enum kvist_status status;
    if (call.count > sizeof(few) / sizeof(few[0]))
        leases = PyMem_Malloc(call.count * sizeof(*leases));
    if (!leases) {
        PyErr_NoMemory();
        goto free_keys;
    }
    RUN_KEYS(self, call.count, status = acquire_run(&call, leases, &made, &stop));
    if (status != KVIST_OK) {
        kvist_pool_release(call.handle, leases, made);
        kvist_binding_raise(object, status, NULL);
        goto free_leases;
    }
    PyObject *batch = kvist_binding_leases_new(self, leases, made);
    if (batch)
        result = Py_BuildValue("(Ni)", batch, (int)stop);
    else
        kvist_pool_release(call.handle, leases, made);
free_leases:
    if (leases != few)
        PyMem_Free(leases);
free_keys:
    kvist_binding_keys_free(&call.keys);
    return result;
}

PyDoc_STRVAR(pool_touch_doc,
             "touch(keys, start=0, stop=None)\n--\n\n"
             "Say that blocks were used without leasing them; keys in prefix order. Lossy.");

static PyObject *pool_touch(PyObject *object, PyObject *const *args, Py_ssize_t arg_count)
{
    struct kvist_pool_object *self = (struct kvist_pool_object *)object;
    struct key_call call;
    if (!key_call_begin(self, "touch", args, arg_count, &call))
        return NULL;
    /* Later batches first: a chain is touched from its tail. */
    for (size_t left = call.count; left > 0;) {
        size_t some = left % KVIST_KEYS_MAX ? left % KVIST_KEYS_MAX : KVIST_KEYS_MAX;
        left -= some;
        kvist_pool_touch(call.handle, call.first + left * KVIST_KEY_BYTES, some);
    }
    kvist_binding_keys_free(&call.keys);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    pool_prefetch_doc,
    "prefetch(keys, start=0, stop=None)\n--\n\n"
    "Ask the daemon to bring blocks from NVMe. Posted. False: not all could be asked for.");

static PyObject *pool_prefetch(PyObject *object, PyObject *const *args, Py_ssize_t arg_count)
{
    struct kvist_pool_object *self = (struct kvist_pool_object *)object;
    struct key_call call;
    if (!key_call_begin(self, "prefetch", args, arg_count, &call))
        return NULL;
    enum kvist_status status = KVIST_OK;
    for (size_t done = 0; done < call.count && status == KVIST_OK; done += KVIST_KEYS_MAX)
        status = kvist_pool_prefetch(
            call.handle, call.first + done * KVIST_KEY_BYTES, batch_of(call.count - done));
    kvist_binding_keys_free(&call.keys);
    return PyBool_FromLong(status == KVIST_OK);
}

PyDoc_STRVAR(
    pool_take_doc,
    "take(count)\n--\n\n"
    "Take up to `count` granted slots to fill; fewer, down to 0, when there are no more or\n"
    "the daemon is away. To be given back by commit() or untake().");

static PyObject *pool_take(PyObject *object, PyObject *const *args, Py_ssize_t arg_count)
{
    struct kvist_pool_object *self = (struct kvist_pool_object *)object;
    if (!kvist_binding_args("take", arg_count, 1, 1))
        return NULL;
    size_t count = PyLong_AsSize_t(args[0]);
    if (PyErr_Occurred())
        return NULL;
    struct kvist_pool *handle = kvist_binding_pool_handle(self);
    if (!handle)
        return NULL;
    if (count > KVIST_GRANTS_MAX)
        count = KVIST_GRANTS_MAX;
    struct kvist_take *takes = PyMem_Malloc((count + 1) * sizeof(*takes));
    if (!takes)
        return PyErr_NoMemory();
    PyObject *result = NULL;
    size_t made = 0;
    enum kvist_status status = kvist_pool_take(handle, count, takes, &made);
    if (status != KVIST_OK) {
        kvist_binding_raise(object, status, NULL);
    } else {
        result = kvist_binding_takes_new(self, takes, made);
        if (!result)
            kvist_pool_untake(handle, takes, made);
    }
    PyMem_Free(takes);
    return result;
}

PyDoc_STRVAR(pool_wait_doc,
             "wait(timeout_s)\n--\n\n"
             "Wait until the pool is open and a first segment or grant is at hand.");

static PyObject *pool_wait(PyObject *object, PyObject *const *args, Py_ssize_t arg_count)
{
    struct kvist_pool_object *self = (struct kvist_pool_object *)object;
    struct kvist_error err = KVIST_ERROR_INIT;
    uint64_t timeout_us = 0;
    if (!kvist_binding_args("wait", arg_count, 1, 1) ||
        !kvist_binding_seconds(args[0], &timeout_us))
        return NULL;
    struct kvist_pool *handle = kvist_binding_pool_handle(self);
    if (!handle)
        return NULL;
    enum kvist_status status;
    self->client->busy++;
    PyThreadState *gil = PyEval_SaveThread();
    status = kvist_pool_wait(handle, timeout_us, &err);
    PyEval_RestoreThread(gil);
    self->client->busy--;
    if (status != KVIST_OK)
        return kvist_binding_raise(object, status, &err);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(pool_pin_doc,
             "pin(instance)\n--\n\n"
             "Keep the mappings of an arena while copying. False: that arena is gone.");

static PyObject *pool_pin(PyObject *object, PyObject *const *args, Py_ssize_t arg_count)
{
    struct kvist_pool *handle = kvist_binding_pool_handle((struct kvist_pool_object *)object);
    if (!handle || !kvist_binding_args("pin", arg_count, 1, 1))
        return NULL;
    uint64_t instance = PyLong_AsUnsignedLongLong(args[0]);
    if (PyErr_Occurred())
        return NULL;
    bool pinned = kvist_pool_pin(handle, instance) == KVIST_OK;
    if (pinned) {
        ((struct kvist_pool_object *)object)->pins++;
        ((struct kvist_pool_object *)object)->client->pins++;
    }
    return PyBool_FromLong(pinned);
}

PyDoc_STRVAR(pool_unpin_doc, "unpin(instance)\n--\n\nUndo one pin() that returned True.");

static PyObject *pool_unpin(PyObject *object, PyObject *const *args, Py_ssize_t arg_count)
{
    struct kvist_pool *handle = kvist_binding_pool_handle((struct kvist_pool_object *)object);
    if (!handle || !kvist_binding_args("unpin", arg_count, 1, 1))
        return NULL;
    uint64_t instance = PyLong_AsUnsignedLongLong(args[0]);
    if (PyErr_Occurred())
        return NULL;
    struct kvist_pool_object *self = (struct kvist_pool_object *)object;
    if (self->pins == 0) {
        PyErr_SetString(PyExc_ValueError, "nothing is pinned");
        return NULL;
    }
    kvist_pool_unpin(handle, instance);
    self->pins--;
    self->client->pins--;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(pool_slot_address_doc,
             "slot_address(instance, slot)\n--\n\n"
             "Address of a slot in this process, valid while pinned; None: not mapped here.");

static PyObject *pool_slot_address(PyObject *object, PyObject *const *args, Py_ssize_t arg_count)
{
    struct kvist_pool *handle = kvist_binding_pool_handle((struct kvist_pool_object *)object);
    if (!handle || !kvist_binding_args("slot_address", arg_count, 2, 2))
        return NULL;
    uint64_t instance = PyLong_AsUnsignedLongLong(args[0]);
    unsigned long slot = PyLong_AsUnsignedLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    void *address =
        slot <= UINT32_MAX ? kvist_pool_slot_address(handle, instance, (uint32_t)slot) : NULL;
    if (!address)
        Py_RETURN_NONE;
    return PyLong_FromVoidPtr(address);
}

PyDoc_STRVAR(
    pool_mark_doc,
    "mark(takes)\n--\n\n"
    "Set this rank's fill marks: its bytes of these slots are there. `takes`: n*TAKE_BYTES\n"
    "from Takes.tobytes(). Returns how many could not be marked.");

static PyObject *pool_mark(PyObject *object, PyObject *const *args, Py_ssize_t arg_count)
{
    struct kvist_pool *handle = kvist_binding_pool_handle((struct kvist_pool_object *)object);
    char *bytes = NULL;
    Py_ssize_t length = 0;
    if (!handle || !kvist_binding_args("mark", arg_count, 1, 1) ||
        PyBytes_AsStringAndSize(args[0], &bytes, &length) != 0)
        return NULL;
    if ((size_t)length % sizeof(struct kvist_take) != 0) {
        PyErr_SetString(PyExc_ValueError, "takes must be a multiple of TAKE_BYTES");
        return NULL;
    }
    size_t failures = 0;
    for (size_t at = 0; at < (size_t)length; at += sizeof(struct kvist_take)) {
        struct kvist_take take;
        memcpy(&take, bytes + at, sizeof(take));
        failures += kvist_pool_mark(handle, &take) != KVIST_OK;
    }
    return PyLong_FromSize_t(failures);
}

static void verify_all(struct kvist_pool *handle,
                       const uint8_t *keys,
                       const char *slots,
                       size_t count,
                       uint64_t instance,
                       uint64_t block_bytes,
                       char *out)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t slot = 0;
        memcpy(&slot, slots + i * sizeof(slot), sizeof(slot));
        const void *address = kvist_pool_slot_address(handle, instance, slot);
        enum kvist_status status =
            address ? kvist_pool_verify(
                          handle, keys + i * KVIST_KEY_BYTES, instance, slot, address, block_bytes)
                    : KVIST_STALE;
        out[i] = (char)status;
    }
}

PyDoc_STRVAR(pool_verify_doc,
             "verify(keys, slots, instance, block_bytes)\n--\n\n"
             "Check leased and pinned slots against their checksums: one status number each. 0 is\n"
             "OK, CORRUPT and NOT_FOUND (no checksum yet) as in status.h, STALE: not mapped here.");

static PyObject *pool_verify(PyObject *object, PyObject *const *args, Py_ssize_t arg_count)
{
    struct kvist_pool_object *self = (struct kvist_pool_object *)object;
    struct kvist_pool *handle = kvist_binding_pool_handle(self);
    struct kvist_binding_keys keys = {NULL, 0, NULL};
    char *slots = NULL;
    Py_ssize_t length = 0;
    PyObject *result = NULL;
    if (!handle || !kvist_binding_args("verify", arg_count, 4, 4) ||
        PyBytes_AsStringAndSize(args[1], &slots, &length) != 0)
        return NULL;
    uint64_t instance = PyLong_AsUnsignedLongLong(args[2]);
    uint64_t block_bytes = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[3]);
    if (PyErr_Occurred() || !kvist_binding_keys_parse(args[0], &keys))
        return NULL;
    if ((size_t)length != keys.count * sizeof(uint32_t) ||
        block_bytes > kvist_pool_slot_bytes(handle)) {
        PyErr_SetString(PyExc_ValueError, "one uint32 slot a key, and at most slot_bytes");
        goto free_keys;
    }
    result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)keys.count);
    if (!result)
        goto free_keys;
    char *out = PyBytes_AsString(result);
    self->client->busy++;
    PyThreadState *gil = PyEval_SaveThread();
    verify_all(handle, keys.data, slots, keys.count, instance, block_bytes, out);
    PyEval_RestoreThread(gil);
    self->client->busy--;
free_keys:
    kvist_binding_keys_free(&keys);
    return result;
}

/* --- Life ------------------------------------------------------------------------------------- */

PyDoc_STRVAR(pool_close_doc,
             "close()\n--\n\n"
             "Close the pool. Error BUSY while leases, takes or pins of it are held.");

static PyObject *pool_close(PyObject *object, PyObject *none)
{
    (void)none;
    struct kvist_pool_object *self = (struct kvist_pool_object *)object;
    if (!self->handle || !self->client->handle)
        Py_RETURN_NONE;
    if (self->held > 0 || self->pins > 0 || self->client->busy > 0) {
        struct kvist_error err = KVIST_ERROR_INIT;
        kvist_error_set(&err,
                        KVIST_BUSY,
                        0,
                        "pool",
                        "%zu leases and takes and %zu pins are held, or a call runs",
                        self->held,
                        self->pins);
        return kvist_binding_raise(object, KVIST_BUSY, &err);
    }
    kvist_pool_close(&self->handle);
    Py_RETURN_NONE;
}

static void pool_dealloc(PyObject *object)
{
    struct kvist_pool_object *self = (struct kvist_pool_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    /* Leases and Takes hold a reference, so all leases are released; takes that were dropped are
     * the session's until it ends, and so is then the pool. */
    if (self->handle && self->client->handle && self->held == 0 && self->pins == 0)
        kvist_pool_close(&self->handle);
    Py_DECREF(self->client);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *pool_id(PyObject *object, void *closure)
{
    (void)closure;
    struct kvist_pool *handle = kvist_binding_pool_handle((struct kvist_pool_object *)object);
    if (!handle)
        return NULL;
    uint8_t id[KVIST_KEY_BYTES] = {0};
    kvist_pool_id(handle, id);
    return PyBytes_FromStringAndSize((const char *)id, sizeof(id));
}

static PyObject *pool_slot_bytes(PyObject *object, void *closure)
{
    (void)closure;
    struct kvist_pool *handle = kvist_binding_pool_handle((struct kvist_pool_object *)object);
    return handle ? PyLong_FromUnsignedLongLong(kvist_pool_slot_bytes(handle)) : NULL;
}

static PyObject *pool_instance(PyObject *object, void *closure)
{
    (void)closure;
    struct kvist_pool *handle = kvist_binding_pool_handle((struct kvist_pool_object *)object);
    return handle ? PyLong_FromUnsignedLongLong(kvist_pool_instance(handle)) : NULL;
}

static PyObject *pool_held(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromSize_t(((struct kvist_pool_object *)object)->held);
}

PyTypeObject *kvist_binding_pool_type(PyObject *module)
{
    static PyMethodDef methods[] = {
        {"probe", KVIST_BINDING_FAST(pool_probe), pool_probe_doc},
        {"acquire", KVIST_BINDING_FAST(pool_acquire), pool_acquire_doc},
        {"touch", KVIST_BINDING_FAST(pool_touch), pool_touch_doc},
        {"prefetch", KVIST_BINDING_FAST(pool_prefetch), pool_prefetch_doc},
        {"take", KVIST_BINDING_FAST(pool_take), pool_take_doc},
        {"wait", KVIST_BINDING_FAST(pool_wait), pool_wait_doc},
        {"pin", KVIST_BINDING_FAST(pool_pin), pool_pin_doc},
        {"unpin", KVIST_BINDING_FAST(pool_unpin), pool_unpin_doc},
        {"slot_address", KVIST_BINDING_FAST(pool_slot_address), pool_slot_address_doc},
        {"mark", KVIST_BINDING_FAST(pool_mark), pool_mark_doc},
        {"verify", KVIST_BINDING_FAST(pool_verify), pool_verify_doc},
        {"close", KVIST_BINDING_NONE(pool_close), pool_close_doc},
        {NULL, NULL, 0, NULL},
    };
    static PyGetSetDef getters[] = {
        {"id", pool_id, NULL, "32 bytes; zeros until the pool is open.", NULL},
        {"slot_bytes", pool_slot_bytes, NULL, "Room for one block, a multiple of 4096.", NULL},
        {"instance", pool_instance, NULL, "The arena that slot numbers mean; 0: none yet.", NULL},
        {"held", pool_held, NULL, "Leases and takes that have not been given back.", NULL},
        {NULL, NULL, NULL, NULL, NULL},
    };
    static PyType_Slot slots[] = {
        {Py_tp_dealloc, pool_dealloc},
        {Py_tp_methods, methods},
        {Py_tp_getset, getters},
        {0, NULL},
    };
    static PyType_Spec spec = {
        .name = "kvist._kvist.Pool",
        .basicsize = sizeof(struct kvist_pool_object),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}
