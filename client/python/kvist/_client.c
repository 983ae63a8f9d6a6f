/*
 * _client - Client and Pool objects.
 *
 * Role        parse, check, call libkvist, make Python objects. The data path's calls never wait.
 * Threads     calls on many keys, and those that wait, drop the GIL; see _binding.h for `busy`
 */
#include "_binding.h"

#include <string.h>

/* --- Client ----------------------------------------------------------------------------------- */

static void segment_mapped(void *ctx, struct kvist_pool *pool, void *base, uint64_t bytes)
{
    (void)pool;
    kvist_copy_segment_add(ctx, base, bytes);
}

static void segment_unmapping(void *ctx, struct kvist_pool *pool, void *base, uint64_t bytes)
{
    (void)pool;
    kvist_copy_segment_remove(ctx, base, bytes);
}

/* Let go of the handle; the caller holds the GIL and no call is busy. */
static void client_end(struct kvist_client_object *self)
{
    struct kvist_client *handle = self->handle;
    if (!handle)
        return;
    self->handle = NULL;
    PyThreadState *gil = PyEval_SaveThread();
    kvist_client_destroy(&handle);
    PyEval_RestoreThread(gil);
    if (self->copy)
        self->copy->clients--;
}

static void client_dealloc(PyObject *object)
{
    struct kvist_client_object *self = (struct kvist_client_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->pins > 0) {
        /* A copy may be running in the mappings: they, and what copies, stay until the process
         * ends. Whoever unpins before it drops the last reference never gets here. */
        PyObject_Free(object);
        Py_DECREF(type);
        return;
    }
    client_end(self);
    Py_XDECREF((PyObject *)self->copy);
    PyObject_Free(object);
    Py_DECREF(type);
}

static bool client_begin(struct kvist_client_object *self, struct kvist_client_options *options)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    if (self->copy) {
        if (!self->copy->handle) {
            PyErr_SetString(PyExc_ValueError, "the Copy is closed");
            return false;
        }
        options->segment_mapped = segment_mapped;
        options->segment_unmapping = segment_unmapping;
        options->ctx = self->copy->handle;
    }
    struct kvist_client *handle = NULL;
    enum kvist_status status;
    PyThreadState *gil = PyEval_SaveThread();
    status = kvist_client_create(options, &handle, &err);
    if (status == KVIST_OK) {
        status = kvist_client_thread_start(handle, &err);
        if (status != KVIST_OK)
            kvist_client_destroy(&handle);
    }
    PyEval_RestoreThread(gil);
    if (status != KVIST_OK) {
        kvist_binding_raise((PyObject *)self, status, &err);
        return false;
    }
    self->handle = handle;
    if (self->copy)
        self->copy->clients++;
    return true;
}

PyDoc_STRVAR(
    client_doc,
    "Client(role, session_id=b'', socket=None, rank=0, rank_count=1, name='',\n"
    "       detach_grace_s=0.0, copy=None)\n--\n\n"
    "One process's connection to the daemon. It need not find one: it goes on trying. Its\n"
    "messages are pumped by a thread of the library's own, in which no Python code runs.\n"
    "A session_id is 16 random bytes, equal in all processes of an engine. Segments of a\n"
    "WORKER are registered with `copy` as they come.");

static PyObject *client_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char k0[] = "role";
    static char k1[] = "session_id";
    static char k2[] = "socket";
    static char k3[] = "rank";
    static char k4[] = "rank_count";
    static char k5[] = "name";
    static char k6[] = "detach_grace_s";
    static char k7[] = "copy";
    static char *names[] = {k0, k1, k2, k3, k4, k5, k6, k7, NULL};
    struct kvist_client_options options = KVIST_CLIENT_OPTIONS_INIT;
    int role = 0;
    const char *session = "";
    Py_ssize_t session_bytes = 0;
    unsigned int rank = 0;
    unsigned int rank_count = 1;
    double grace_s = 0.0;
    PyObject *copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args,
                                     keywords,
                                     "i|y#zIIsdO",
                                     names,
                                     &role,
                                     &session,
                                     &session_bytes,
                                     &options.socket_path,
                                     &rank,
                                     &rank_count,
                                     &options.name,
                                     &grace_s,
                                     &copy))
        return NULL;
    const struct kvist_binding_state *state = PyType_GetModuleState(type);
    if (role < KVIST_ROLE_TOOL || role > KVIST_ROLE_ENGINE ||
        (role != KVIST_ROLE_TOOL && session_bytes != (Py_ssize_t)sizeof(options.session_id)) ||
        !(grace_s >= 0.0 && grace_s <= 1e9)) {
        PyErr_SetString(PyExc_ValueError,
                        "a known role, a session_id of 16 bytes and "
                        "a detach_grace_s of 0 or more are needed");
        return NULL;
    }
    if (copy != Py_None && !PyObject_TypeCheck(copy, state->copy)) {
        PyErr_SetString(PyExc_TypeError, "copy must be a Copy or None");
        return NULL;
    }
    options.role = (enum kvist_role)role;
    if (role != KVIST_ROLE_TOOL)
        memcpy(options.session_id, session, sizeof(options.session_id));
    options.rank = rank;
    options.rank_count = rank_count;
    options.detach_grace_us = (uint64_t)(grace_s * 1e6);
    struct kvist_client_object *self = PyObject_New(struct kvist_client_object, type);
    if (!self)
        return NULL;
    self->handle = NULL;
    self->busy = 0;
    self->pins = 0;
    self->copy = copy == Py_None ? NULL : (struct kvist_copy_object *)Py_NewRef(copy);
    if (!client_begin(self, &options))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static struct kvist_client *client_handle(struct kvist_client_object *self)
{
    if (!self->handle)
        PyErr_SetString(PyExc_ValueError, "the Client is closed");
    return self->handle;
}

PyDoc_STRVAR(client_close_doc,
             "close()\n--\n\n"
             "Disconnect and unmap. Leases end with it; pools, leases and takes become unusable.\n"
             "Error BUSY while a pin is held, or another thread is in a call.");

static PyObject *client_close(PyObject *object, PyObject *none)
{
    (void)none;
    struct kvist_client_object *self = (struct kvist_client_object *)object;
    if (self->busy || (self->handle && self->pins > 0)) {
        struct kvist_error err = KVIST_ERROR_INIT;
        kvist_error_set(&err,
                        KVIST_BUSY,
                        0,
                        "client",
                        "another thread is in a call of this Client, or %zu pins are held",
                        self->pins);
        return kvist_binding_raise(object, KVIST_BUSY, &err);
    }
    client_end(self);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(client_wait_doc,
             "wait(timeout_s)\n--\n\nWait until connected. Error: TIMED_OUT, or the refusal.");

static PyObject *client_wait(PyObject *object, PyObject *const *args, Py_ssize_t arg_count)
{
    struct kvist_client_object *self = (struct kvist_client_object *)object;
    struct kvist_error err = KVIST_ERROR_INIT;
    uint64_t timeout_us = 0;
    if (!kvist_binding_args("wait", arg_count, 1, 1) ||
        !kvist_binding_seconds(args[0], &timeout_us))
        return NULL;
    struct kvist_client *handle = client_handle(self);
    if (!handle)
        return NULL;
    enum kvist_status status;
    self->busy++;
    PyThreadState *gil = PyEval_SaveThread();
    status = kvist_client_wait(handle, timeout_us, &err);
    PyEval_RestoreThread(gil);
    self->busy--;
    if (status != KVIST_OK)
        return kvist_binding_raise(object, status, &err);
    Py_RETURN_NONE;
}

static PyObject *client_connected(PyObject *object, void *closure)
{
    (void)closure;
    const struct kvist_client_object *self = (const struct kvist_client_object *)object;
    return PyBool_FromLong(self->handle && kvist_client_connected(self->handle));
}

PyDoc_STRVAR(client_last_error_doc,
             "last_error()\n--\n\nThe latest refusal or connection error: (status, text) or None.");

static PyObject *client_last_error(PyObject *object, PyObject *none)
{
    (void)none;
    struct kvist_client *handle = client_handle((struct kvist_client_object *)object);
    if (!handle)
        return NULL;
    struct kvist_error err = KVIST_ERROR_INIT;
    kvist_client_last_error(handle, &err);
    if (err.status == KVIST_OK)
        Py_RETURN_NONE;
    return Py_BuildValue("(ss)", kvist_status_name(err.status), err.text);
}

PyDoc_STRVAR(client_stats_doc, "stats()\n--\n\nCounters and gauges of this client, by name.");

static PyObject *client_stats(PyObject *object, PyObject *none)
{
    (void)none;
    struct kvist_client *handle = client_handle((struct kvist_client_object *)object);
    if (!handle)
        return NULL;
    struct kvist_client_stats s = {0};
    kvist_client_stats(handle, &s);
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}",
                         "connects",
                         (unsigned long long)s.connects,
                         "hits",
                         (unsigned long long)s.hits,
                         "misses",
                         (unsigned long long)s.misses,
                         "lease_races",
                         (unsigned long long)s.lease_races,
                         "unmapped_misses",
                         (unsigned long long)s.unmapped_misses,
                         "takes",
                         (unsigned long long)s.takes,
                         "take_shortfalls",
                         (unsigned long long)s.take_shortfalls,
                         "commits",
                         (unsigned long long)s.commits,
                         "dropped_messages",
                         (unsigned long long)s.dropped_messages,
                         "leases_held",
                         (unsigned long long)s.leases_held,
                         "takes_held",
                         (unsigned long long)s.takes_held,
                         "grants_held",
                         (unsigned long long)s.grants_held,
                         "mapped_bytes",
                         (unsigned long long)s.mapped_bytes);
}

/* A list of (name, bytes) pairs; the strings stay owned by the list. */
static struct kvist_pool_field *fields_parse(PyObject *list, size_t *count_out)
{
    if (!PyList_Check(list) || PyList_Size(list) == 0 ||
        PyList_Size(list) > (Py_ssize_t)KVIST_IDENTITY_FIELDS_MAX) {
        PyErr_Format(PyExc_ValueError,
                     "fields must be a list of 1 to %u (name, bytes) pairs",
                     KVIST_IDENTITY_FIELDS_MAX);
        return NULL;
    }
    size_t count = (size_t)PyList_Size(list);
    struct kvist_pool_field *fields = PyMem_Calloc(count, sizeof(*fields));
    if (!fields) {
        PyErr_NoMemory();
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        PyObject *pair = PyList_GetItem(list, (Py_ssize_t)i);
        char *value = NULL;
        Py_ssize_t bytes = 0;
        if (!pair || !PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
            PyErr_SetString(PyExc_TypeError, "a field must be a (name, bytes) pair");
            goto free_fields;
        }
        fields[i].name = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(pair, 0), NULL);
        if (!fields[i].name ||
            PyBytes_AsStringAndSize(PyTuple_GetItem(pair, 1), &value, &bytes) != 0)
            goto free_fields;
        fields[i].value = value;
        fields[i].value_bytes = (size_t)bytes;
    }
    *count_out = count;
    return fields;
free_fields:
    PyMem_Free(fields);
    return NULL;
}

static PyObject *pool_new(struct kvist_client_object *client, struct kvist_pool *handle)
{
    const struct kvist_binding_state *state = kvist_binding_state_of((PyObject *)client);
    struct kvist_pool_object *self = PyObject_New(struct kvist_pool_object, state->pool);
    if (!self) {
        kvist_pool_close(&handle);
        return NULL;
    }
    self->client = (struct kvist_client_object *)Py_NewRef((PyObject *)client);
    self->handle = handle;
    self->held = 0;
    self->pins = 0;
    return (PyObject *)self;
}

PyDoc_STRVAR(
    client_open_pool_doc,
    "open_pool(fields, slot_bytes, sparse=False, read_only=False, shape=None)\n--\n\n"
    "Open a pool, now or as soon as the daemon is there. `fields`: the identity, a list of\n"
    "(name, bytes) in a fixed order. `slot_bytes`: all ranks' parts of a block. `shape`: a\n"
    "digest of this rank's tensors, compared among sessions.");

static PyObject *client_open_pool(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char k0[] = "fields";
    static char k1[] = "slot_bytes";
    static char k2[] = "sparse";
    static char k3[] = "read_only";
    static char k4[] = "shape";
    static char *names[] = {k0, k1, k2, k3, k4, NULL};
    struct kvist_client_object *self = (struct kvist_client_object *)object;
    struct kvist_pool_options options = KVIST_POOL_OPTIONS_INIT;
    struct kvist_error err = KVIST_ERROR_INIT;
    PyObject *list = NULL;
    unsigned long long slot_bytes = 0;
    int sparse = 0;
    int read_only = 0;
    const char *shape = NULL;
    Py_ssize_t shape_bytes = 0;
    if (!PyArg_ParseTupleAndKeywords(args,
                                     keywords,
                                     "OK|ppz#",
                                     names,
                                     &list,
                                     &slot_bytes,
                                     &sparse,
                                     &read_only,
                                     &shape,
                                     &shape_bytes) ||
        !client_handle(self))
        return NULL;
    struct kvist_pool_field *fields = fields_parse(list, &options.field_count);
    if (!fields)
        return NULL;
    options.fields = fields;
    options.slot_bytes = slot_bytes;
    options.sparse = sparse != 0;
    options.read_only = read_only != 0;
    options.shape = shape;
    options.shape_bytes = (size_t)shape_bytes;
    struct kvist_pool *handle = NULL;
    enum kvist_status status = kvist_pool_open(self->handle, &options, &handle, &err);
    PyMem_Free(fields);
    if (status != KVIST_OK)
        return kvist_binding_raise(object, status, &err);
    return pool_new(self, handle);
}

PyTypeObject *kvist_binding_client_type(PyObject *module)
{
    static PyMethodDef methods[] = {
        {"close", KVIST_BINDING_NONE(client_close), client_close_doc},
        {"wait", KVIST_BINDING_FAST(client_wait), client_wait_doc},
        {"last_error", KVIST_BINDING_NONE(client_last_error), client_last_error_doc},
        {"stats", KVIST_BINDING_NONE(client_stats), client_stats_doc},
        {"open_pool",
         (PyCFunction)(void (*)(void))client_open_pool,
         METH_VARARGS | METH_KEYWORDS,
         client_open_pool_doc},
        {NULL, NULL, 0, NULL},
    };
    static PyGetSetDef getters[] = {
        {"connected", client_connected, NULL, "Whether the daemon is there now.", NULL},
        {NULL, NULL, NULL, NULL, NULL},
    };
    static PyType_Slot slots[] = {
        {Py_tp_doc, (void *)(uintptr_t)client_doc},
        {Py_tp_new, client_new},
        {Py_tp_dealloc, client_dealloc},
        {Py_tp_methods, methods},
        {Py_tp_getset, getters},
        {0, NULL},
    };
    static PyType_Spec spec = {
        .name = "kvist._kvist.Client",
        .basicsize = sizeof(struct kvist_client_object),
        .flags = Py_TPFLAGS_DEFAULT,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}
