/*
 * _kvist - the Python extension: module, helpers. Objects are in _client.c, _batch.c, _copy.c.
 *
 * Role        a thin, checked way from Python to libkvist and to the copy library. No Python code
 *             runs on libkvist's thread: segments are registered for copying in C.
 * Errors      kvist.Error with .status ("UNAVAILABLE") and a sentence; TypeError and ValueError
 *             for arguments
 */
#include "_binding.h"

#include <string.h>

static struct PyModuleDef module_def;

struct kvist_binding_state *kvist_binding_state_of(PyObject *self)
{
    return PyType_GetModuleState(Py_TYPE(self));
}

PyObject *
kvist_binding_raise(PyObject *self, enum kvist_status status, const struct kvist_error *err)
{
    const struct kvist_binding_state *state = kvist_binding_state_of(self);
    const char *text = err && err->text[0] ? err->text : kvist_status_text(status);
    PyObject *error = PyObject_CallFunction(state->error, "s", text);
    if (!error)
        return NULL;
    PyObject *name = PyUnicode_FromString(kvist_status_name(status));
    if (name && PyObject_SetAttrString(error, "status", name) == 0)
        PyErr_SetObject(state->error, error);
    Py_XDECREF(name);
    Py_DECREF(error);
    return NULL;
}

bool kvist_binding_seconds(PyObject *value, uint64_t *us_out)
{
    double seconds = PyFloat_AsDouble(value);
    if (PyErr_Occurred())
        return false;
    if (!(seconds >= 0.0 && seconds <= 1e9)) {
        PyErr_SetString(PyExc_ValueError, "a time must be between 0 and 1e9 seconds");
        return false;
    }
    *us_out = (uint64_t)(seconds * 1e6);
    return true;
}

bool kvist_binding_args(const char *name, Py_ssize_t arg_count, Py_ssize_t min, Py_ssize_t max)
{
    if (arg_count >= min && arg_count <= max)
        return true;
    PyErr_Format(PyExc_TypeError,
                 "%s() takes %zd to %zd arguments, %zd were given",
                 name,
                 min,
                 max,
                 arg_count);
    return false;
}

/* One key of a list into 32 bytes; the last `drop` bytes are left out. */
static bool key_put(PyObject *item, size_t drop, uint8_t *out)
{
    char *bytes = NULL;
    Py_ssize_t length = 0;
    if (PyBytes_AsStringAndSize(item, &bytes, &length) != 0)
        return false;
    if ((size_t)length <= drop) {
        PyErr_SetString(PyExc_ValueError, "a key is empty");
        return false;
    }
    if (kvist_client_key(bytes, (size_t)length - drop, out) != KVIST_OK) {
        PyErr_SetString(PyExc_ValueError, "a key could not be made from these bytes");
        return false;
    }
    return true;
}

static bool keys_from_list(PyObject *list, size_t drop, uint8_t *out)
{
    Py_ssize_t count = PyList_Size(list);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GetItem(list, i);
        if (!item || !key_put(item, drop, out + (size_t)i * KVIST_KEY_BYTES))
            return false;
    }
    return true;
}

bool kvist_binding_keys_parse(PyObject *value, struct kvist_binding_keys *keys_out)
{
    struct kvist_binding_keys keys = {NULL, 0, NULL};
    if (PyBytes_Check(value)) {
        char *bytes = NULL;
        Py_ssize_t length = 0;
        if (PyBytes_AsStringAndSize(value, &bytes, &length) != 0)
            return false;
        if (length % KVIST_KEY_BYTES != 0) {
            PyErr_SetString(PyExc_ValueError, "packed keys must be a multiple of 32 bytes");
            return false;
        }
        keys.data = (const uint8_t *)bytes;
        keys.count = (size_t)length / KVIST_KEY_BYTES;
    } else if (PyList_Check(value)) {
        keys.count = (size_t)PyList_Size(value);
        keys.owned = PyMem_Calloc(keys.count + 1, KVIST_KEY_BYTES);
        if (!keys.owned) {
            PyErr_NoMemory();
            return false;
        }
        if (!keys_from_list(value, 0, keys.owned)) {
            PyMem_Free(keys.owned);
            return false;
        }
        keys.data = keys.owned;
    } else {
        PyErr_SetString(PyExc_TypeError, "keys must be packed bytes or a list of bytes");
        return false;
    }
    *keys_out = keys;
    return true;
}

void kvist_binding_keys_free(struct kvist_binding_keys *keys)
{
    PyMem_Free(keys->owned);
    keys->owned = NULL;
}

bool kvist_binding_range(PyObject *const *args,
                         Py_ssize_t arg_count,
                         Py_ssize_t from,
                         size_t count,
                         size_t *start_out,
                         size_t *stop_out)
{
    size_t start = 0;
    size_t stop = count;
    if (arg_count > from) {
        start = PyLong_AsSize_t(args[from]);
        if (PyErr_Occurred())
            return false;
    }
    if (arg_count > from + 1 && args[from + 1] != Py_None) {
        stop = PyLong_AsSize_t(args[from + 1]);
        if (PyErr_Occurred())
            return false;
    }
    if (start > stop || stop > count) {
        PyErr_Format(PyExc_IndexError, "[%zu, %zu) is not within %zu items", start, stop, count);
        return false;
    }
    *start_out = start;
    *stop_out = stop;
    return true;
}

PyDoc_STRVAR(
    pack_keys_doc,
    "pack_keys(keys, drop=0)\n--\n\n"
    "Pack a list of n bytes objects into n*32 bytes, leaving out the last `drop` bytes of\n"
    "each; what is shorter than 32 bytes is zero-extended, what is longer is hashed.");

static PyObject *module_pack_keys(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    if (!kvist_binding_args("pack_keys", arg_count, 1, 2))
        return NULL;
    if (!PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "keys must be a list of bytes");
        return NULL;
    }
    size_t drop = 0;
    if (arg_count > 1) {
        drop = PyLong_AsSize_t(args[1]);
        if (PyErr_Occurred())
            return NULL;
    }
    Py_ssize_t count = PyList_Size(args[0]);
    PyObject *packed = PyBytes_FromStringAndSize(NULL, count * KVIST_KEY_BYTES);
    if (!packed)
        return NULL;
    if (!keys_from_list(args[0], drop, (uint8_t *)PyBytes_AsString(packed))) {
        Py_DECREF(packed);
        return NULL;
    }
    return packed;
}

PyDoc_STRVAR(copy_available_doc,
             "copy_available(kind, device=0)\n--\n\n"
             "Whether a kind of Copy can work here: built in, and such a device is there.");

static PyObject *
module_copy_available(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    if (!kvist_binding_args("copy_available", arg_count, 1, 2))
        return NULL;
    long kind = PyLong_AsLong(args[0]);
    long device = arg_count > 1 ? PyLong_AsLong(args[1]) : 0;
    if (PyErr_Occurred())
        return NULL;
    if (kind < KVIST_COPY_HOST || kind > KVIST_COPY_STAGED || device < 0 || device > INT32_MAX)
        Py_RETURN_FALSE;
    bool available;
    PyThreadState *gil = PyEval_SaveThread();
    available = kvist_copy_available((enum kvist_copy_kind)kind, (int)device);
    PyEval_RestoreThread(gil);
    return PyBool_FromLong(available);
}

static PyMethodDef module_methods[] = {
    {"pack_keys", KVIST_BINDING_FAST(module_pack_keys), pack_keys_doc},
    {"copy_available", KVIST_BINDING_FAST(module_copy_available), copy_available_doc},
    {NULL, NULL, 0, NULL},
};

static int add_constants(PyObject *module)
{
    static const struct {
        const char *name;
        long value;
    } rows[] = {
        {"TOOL", KVIST_ROLE_TOOL},
        {"SCHEDULER", KVIST_ROLE_SCHEDULER},
        {"WORKER", KVIST_ROLE_WORKER},
        {"ENGINE", KVIST_ROLE_ENGINE},
        {"MISS", KVIST_PROBE_MISS},
        {"READY", KVIST_PROBE_READY},
        {"NVME", KVIST_PROBE_NVME},
        {"LOADING", KVIST_PROBE_LOADING},
        {"STORE", KVIST_COPY_STORE},
        {"LOAD", KVIST_COPY_LOAD},
        {"HOST", KVIST_COPY_HOST},
        {"DIRECT", KVIST_COPY_DIRECT},
        {"STAGED", KVIST_COPY_STAGED},
        {"KEY_BYTES", KVIST_KEY_BYTES},
        {"TAKE_BYTES", sizeof(struct kvist_take)},
        {"RANKS_MAX", KVIST_RANKS_MAX},
        {"SESSION_POOLS_MAX", KVIST_SESSION_POOLS_MAX},
        {"BLOCK_BYTES_MIN", KVIST_BLOCK_BYTES_MIN},
        {"BLOCK_BYTES_MAX", KVIST_BLOCK_BYTES_MAX},
        {"COPY_RANGES_MAX", KVIST_COPY_RANGES_MAX},
        {"COPY_TENSORS_MAX", KVIST_COPY_TENSORS_MAX},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (PyModule_AddIntConstant(module, rows[i].name, rows[i].value) != 0)
            return -1;
    }
    return 0;
}

static int add_types(PyObject *module, struct kvist_binding_state *state)
{
    state->client = kvist_binding_client_type(module);
    state->pool = kvist_binding_pool_type(module);
    state->leases = kvist_binding_leases_type(module);
    state->takes = kvist_binding_takes_type(module);
    state->copy = kvist_binding_copy_type(module);
    state->layout = kvist_binding_layout_type(module);
    PyTypeObject *types[] = {
        state->client, state->pool, state->leases, state->takes, state->copy, state->layout};
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        if (!types[i] || PyModule_AddType(module, types[i]) != 0)
            return -1;
    }
    return 0;
}

static int module_exec(PyObject *module)
{
    struct kvist_binding_state *state = PyModule_GetState(module);
    PyObject *names = Py_BuildValue("{s:s}", "status", "UNKNOWN");
    if (!names)
        return -1;
    state->error = PyErr_NewExceptionWithDoc(
        "kvist.Error",
        "A call of libkvist failed; `status` is its name, as in status.h.",
        NULL,
        names);
    Py_DECREF(names);
    if (!state->error || PyModule_AddObjectRef(module, "Error", state->error) != 0)
        return -1;
    return add_constants(module) != 0 ? -1 : add_types(module, state);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct kvist_binding_state *state = PyModule_GetState(module);
    Py_VISIT(state->error);
    Py_VISIT(state->client);
    Py_VISIT(state->pool);
    Py_VISIT(state->leases);
    Py_VISIT(state->takes);
    Py_VISIT(state->copy);
    Py_VISIT(state->layout);
    return 0;
}

static int module_clear(PyObject *module)
{
    struct kvist_binding_state *state = PyModule_GetState(module);
    Py_CLEAR(state->error);
    Py_CLEAR(state->client);
    Py_CLEAR(state->pool);
    Py_CLEAR(state->leases);
    Py_CLEAR(state->takes);
    Py_CLEAR(state->copy);
    Py_CLEAR(state->layout);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

PyDoc_STRVAR(module_doc, "Binding of libkvist and of the copy library; see kvist/_kvist.pyi.");

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvist._kvist",
    .m_doc = module_doc,
    .m_size = sizeof(struct kvist_binding_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__kvist(void);

PyMODINIT_FUNC PyInit__kvist(void)
{
    return PyModuleDef_Init(&module_def);
}
