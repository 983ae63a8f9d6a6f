/*
 * _batch - Leases and Takes: batches of plain values that must be given back.
 *
 * Role        Leases releases itself when it is dropped, whole or in parts. Takes does not: a rank
 *             may still be writing, so what is neither committed nor untaken goes back when the
 *             session ends.
 * Invariants  pool->held == number of items of all batches that are not released
 */
#include "_binding.h"

#include <string.h>

static void give_back(struct kvist_pool_object *pool, bool *released, size_t start, size_t stop)
{
    for (size_t i = start; i < stop; i++) {
        if (!released[i]) {
            released[i] = true;
            pool->held--;
        }
    }
}

static PyObject *slots_bytes(size_t count, const void *first, size_t stride)
{
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(uint32_t)));
    if (!bytes)
        return NULL;
    char *out = PyBytes_AsString(bytes);
    for (size_t i = 0; i < count; i++)
        memcpy(out + i * sizeof(uint32_t), (const char *)first + i * stride, sizeof(uint32_t));
    return bytes;
}

/* --- Both ------------------------------------------------------------------------------------- */

static PyObject *batch_new(PyTypeObject *type,
                           struct kvist_pool_object *pool,
                           const void *items,
                           size_t count,
                           size_t item_bytes)
{
    struct kvist_batch_object *self = PyObject_New(struct kvist_batch_object, type);
    if (!self)
        return NULL;
    self->pool = (struct kvist_pool_object *)Py_NewRef((PyObject *)pool);
    self->count = 0;
    self->items = PyMem_Malloc((count + 1) * item_bytes);
    self->released = PyMem_Calloc(count + 1, sizeof(bool));
    if (!self->items || !self->released) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    memcpy(self->items, items, count * item_bytes);
    self->count = count;
    pool->held += count;
    return (PyObject *)self;
}

static void batch_dealloc(PyObject *object)
{
    struct kvist_batch_object *self = (struct kvist_batch_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyMem_Free(self->items);
    PyMem_Free(self->released);
    Py_DECREF(self->pool);
    PyObject_Free(object);
    Py_DECREF(type);
}

static Py_ssize_t batch_length(PyObject *object)
{
    return (Py_ssize_t)((struct kvist_batch_object *)object)->count;
}

/* --- Leases ----------------------------------------------------------------------------------- */

PyObject *kvist_binding_leases_new(struct kvist_pool_object *pool,
                                   const struct kvist_lease *items,
                                   size_t count)
{
    const struct kvist_binding_state *state = kvist_binding_state_of((PyObject *)pool);
    return batch_new(state->leases, pool, items, count, sizeof(*items));
}

static void leases_release_range(struct kvist_batch_object *self, size_t start, size_t stop)
{
    bool open = self->pool->handle && self->pool->client->handle;
    for (size_t i = start; i < stop;) {
        size_t end = i;
        while (end < stop && !self->released[end])
            end++;
        if (end > i && open)
            kvist_pool_release(self->pool->handle, self->leases + i, end - i);
        give_back(self->pool, self->released, i, end);
        i = end + 1;
    }
}

static void leases_dealloc(PyObject *object)
{
    struct kvist_batch_object *self = (struct kvist_batch_object *)object;
    leases_release_range(self, 0, self->count);
    batch_dealloc(object);
}

PyDoc_STRVAR(leases_release_doc,
             "release(start=0, stop=None)\n--\n\n"
             "Give leases [start, stop) back, after the last byte was read. Those that were given\n"
             "back before are left alone. What is left is released when the batch is dropped.");

static PyObject *leases_release(PyObject *object, PyObject *const *args, Py_ssize_t arg_count)
{
    struct kvist_batch_object *self = (struct kvist_batch_object *)object;
    size_t start = 0;
    size_t stop = 0;
    if (!kvist_binding_args("release", arg_count, 0, 2) ||
        !kvist_binding_range(args, arg_count, 0, self->count, &start, &stop))
        return NULL;
    leases_release_range(self, start, stop);
    Py_RETURN_NONE;
}

static PyObject *leases_slots(PyObject *object, void *closure)
{
    (void)closure;
    const struct kvist_batch_object *self = (const struct kvist_batch_object *)object;
    return slots_bytes(self->count, &self->leases[0].slot, sizeof(struct kvist_lease));
}

static PyObject *leases_instance(PyObject *object, void *closure)
{
    (void)closure;
    const struct kvist_batch_object *self = (const struct kvist_batch_object *)object;
    return PyLong_FromUnsignedLongLong(self->count ? self->leases[0].instance : 0);
}

static PyObject *leases_held(PyObject *object, void *closure)
{
    (void)closure;
    const struct kvist_batch_object *self = (const struct kvist_batch_object *)object;
    size_t held = 0;
    for (size_t i = 0; i < self->count; i++)
        held += !self->released[i];
    return PyLong_FromSize_t(held);
}

PyTypeObject *kvist_binding_leases_type(PyObject *module)
{
    static PyMethodDef methods[] = {
        {"release", KVIST_BINDING_FAST(leases_release), leases_release_doc},
        {NULL, NULL, 0, NULL},
    };
    static PyGetSetDef getters[] = {
        {"slots", leases_slots, NULL, "Slot numbers: n native uint32 as bytes.", NULL},
        {"instance", leases_instance, NULL, "The arena that the slot numbers mean.", NULL},
        {"held", leases_held, NULL, "How many have not been released.", NULL},
        {NULL, NULL, NULL, NULL, NULL},
    };
    static PyType_Slot slots[] = {
        {Py_tp_dealloc, leases_dealloc},
        {Py_sq_length, batch_length},
        {Py_tp_methods, methods},
        {Py_tp_getset, getters},
        {0, NULL},
    };
    static PyType_Spec spec = {
        .name = "kvist._kvist.Leases",
        .basicsize = sizeof(struct kvist_batch_object),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}

/* --- Takes ------------------------------------------------------------------------------------ */

PyObject *kvist_binding_takes_new(struct kvist_pool_object *pool,
                                  const struct kvist_take *items,
                                  size_t count)
{
    const struct kvist_binding_state *state = kvist_binding_state_of((PyObject *)pool);
    return batch_new(state->takes, pool, items, count, sizeof(*items));
}

/* A range whose takes are all still held; an exception otherwise. */
static bool takes_range(struct kvist_batch_object *self,
                        PyObject *const *args,
                        Py_ssize_t arg_count,
                        Py_ssize_t from,
                        size_t *start_out,
                        size_t *stop_out)
{
    size_t start = 0;
    size_t stop = 0;
    if (!kvist_binding_range(args, arg_count, from, self->count, &start, &stop))
        return false;
    for (size_t i = start; i < stop; i++) {
        if (self->released[i]) {
            PyErr_Format(PyExc_ValueError, "take %zu was given back before", i);
            return false;
        }
    }
    *start_out = start;
    *stop_out = stop;
    return true;
}

PyDoc_STRVAR(takes_untake_doc,
             "untake(start=0, stop=None)\n--\n\n"
             "Give takes [start, stop) back that no rank writes any more. Posted.");

static PyObject *takes_untake(PyObject *object, PyObject *const *args, Py_ssize_t arg_count)
{
    struct kvist_batch_object *self = (struct kvist_batch_object *)object;
    size_t start = 0;
    size_t stop = 0;
    if (!kvist_binding_args("untake", arg_count, 0, 2) ||
        !takes_range(self, args, arg_count, 0, &start, &stop))
        return NULL;
    struct kvist_pool *handle = kvist_binding_pool_handle(self->pool);
    if (!handle)
        return NULL;
    kvist_pool_untake(handle, self->takes + start, stop - start);
    give_back(self->pool, self->released, start, stop);
    Py_RETURN_NONE;
}

/* Commit in messages of at most KVIST_KEYS_MAX; each begins with the last key as its parent. */
static enum kvist_status takes_post(struct kvist_pool *handle,
                                    const struct kvist_take *takes,
                                    const uint8_t *keys,
                                    size_t count,
                                    const uint8_t *parent,
                                    uint64_t block_bytes)
{
    enum kvist_status worst = KVIST_OK;
    for (size_t done = 0; done < count;) {
        size_t some = count - done < KVIST_KEYS_MAX ? count - done : KVIST_KEYS_MAX;
        enum kvist_status status = kvist_pool_commit(
            handle, takes + done, keys + done * KVIST_KEY_BYTES, some, parent, block_bytes);
        if (status != KVIST_OK)
            worst = status;
        done += some;
        parent = keys + (done - 1) * KVIST_KEY_BYTES;
    }
    return worst;
}

PyDoc_STRVAR(
    takes_commit_doc,
    "commit(keys, parent, block_bytes, start=0, stop=None)\n--\n\n"
    "Publish takes [start, stop): every rank has marked its part. `keys` are those of the\n"
    "range, in prefix order; `parent` is the key of the block before the first, or None.\n"
    "Posted. False: the daemon is away, the takes are void.");

static PyObject *takes_commit(PyObject *object, PyObject *const *args, Py_ssize_t arg_count)
{
    struct kvist_batch_object *self = (struct kvist_batch_object *)object;
    struct kvist_binding_keys keys = {NULL, 0, NULL};
    struct kvist_binding_keys parent = {NULL, 0, NULL};
    PyObject *result = NULL;
    size_t start = 0;
    size_t stop = 0;
    if (!kvist_binding_args("commit", arg_count, 3, 5) ||
        !takes_range(self, args, arg_count, 3, &start, &stop))
        return NULL;
    uint64_t block_bytes = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred() || !kvist_binding_keys_parse(args[0], &keys))
        return NULL;
    if (args[1] != Py_None && !kvist_binding_keys_parse(args[1], &parent))
        goto free_keys;
    if (keys.count != stop - start || parent.count > 1) {
        PyErr_SetString(PyExc_ValueError, "one key a take, and at most one parent");
        goto free_parent;
    }
    struct kvist_pool *handle = kvist_binding_pool_handle(self->pool);
    if (!handle)
        goto free_parent;
    enum kvist_status status = takes_post(handle,
                                          self->takes + start,
                                          keys.data,
                                          keys.count,
                                          parent.count ? parent.data : NULL,
                                          block_bytes);
    if (status == KVIST_INVALID) {
        kvist_binding_raise(object, status, NULL);
        goto free_parent;
    }
    give_back(self->pool, self->released, start, stop);
    result = PyBool_FromLong(status == KVIST_OK);
free_parent:
    kvist_binding_keys_free(&parent);
free_keys:
    kvist_binding_keys_free(&keys);
    return result;
}

PyDoc_STRVAR(takes_tobytes_doc,
             "tobytes()\n--\n\n"
             "The takes as n*TAKE_BYTES bytes, for Pool.mark() in the ranks' processes.");

static PyObject *takes_tobytes(PyObject *object, PyObject *none)
{
    (void)none;
    const struct kvist_batch_object *self = (const struct kvist_batch_object *)object;
    return PyBytes_FromStringAndSize((const char *)self->items,
                                     (Py_ssize_t)(self->count * sizeof(struct kvist_take)));
}

static PyObject *takes_slots(PyObject *object, void *closure)
{
    (void)closure;
    const struct kvist_batch_object *self = (const struct kvist_batch_object *)object;
    return slots_bytes(self->count, &self->takes[0].slot, sizeof(struct kvist_take));
}

static PyObject *takes_instance(PyObject *object, void *closure)
{
    (void)closure;
    const struct kvist_batch_object *self = (const struct kvist_batch_object *)object;
    return PyLong_FromUnsignedLongLong(self->count ? self->takes[0].instance : 0);
}

PyTypeObject *kvist_binding_takes_type(PyObject *module)
{
    static PyMethodDef methods[] = {
        {"untake", KVIST_BINDING_FAST(takes_untake), takes_untake_doc},
        {"commit", KVIST_BINDING_FAST(takes_commit), takes_commit_doc},
        {"tobytes", KVIST_BINDING_NONE(takes_tobytes), takes_tobytes_doc},
        {NULL, NULL, 0, NULL},
    };
    static PyGetSetDef getters[] = {
        {"slots", takes_slots, NULL, "Slot numbers: n native uint32 as bytes.", NULL},
        {"instance", takes_instance, NULL, "The arena that the slot numbers mean.", NULL},
        {NULL, NULL, NULL, NULL, NULL},
    };
    static PyType_Slot slots[] = {
        {Py_tp_dealloc, batch_dealloc},
        {Py_sq_length, batch_length},
        {Py_tp_methods, methods},
        {Py_tp_getset, getters},
        {0, NULL},
    };
    static PyType_Spec spec = {
        .name = "kvist._kvist.Takes",
        .basicsize = sizeof(struct kvist_batch_object),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}
