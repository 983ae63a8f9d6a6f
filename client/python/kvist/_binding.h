/*
 * _binding - what the files of the Python extension share.
 *
 * Role        object layouts, module state, argument helpers. Nothing here is seen from Python.
 * Ownership   an object holds references to what it stands on: Leases, Takes -> Pool -> Client ->
 *             Copy. A closed Client leaves its pools, leases and takes behind as empty shells.
 * Threads     object fields are guarded by the GIL; a call that drops the GIL raises `busy` first,
 *             and close() refuses while it is raised.
 */
#ifndef KVIST_PYTHON_BINDING_H
#define KVIST_PYTHON_BINDING_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <kvist/client.h>
#include <kvist/copy.h>

#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* From this many keys on a call may take 50 us, and drops the GIL. */
#define KVIST_BINDING_QUICK_KEYS 64U

struct kvist_binding_state {
    PyObject *error;
    PyTypeObject *client;
    PyTypeObject *pool;
    PyTypeObject *leases;
    PyTypeObject *takes;
    PyTypeObject *copy;
    PyTypeObject *layout;
};

struct kvist_copy_object {
    PyObject ob_base;
    struct kvist_copy *handle;
    size_t busy;
    size_t clients; /* open clients that register their segments here */
};

struct kvist_client_object {
    PyObject ob_base;
    struct kvist_client *handle;
    struct kvist_copy_object *copy;
    size_t busy;
    size_t pins; /* of all its pools: a copy may be running in their mappings */
};

struct kvist_pool_object {
    PyObject ob_base;
    struct kvist_client_object *client;
    struct kvist_pool *handle;
    size_t held; /* leases and takes that have not been given back */
    size_t pins;
};

/* Leases or Takes. */
struct kvist_batch_object {
    PyObject ob_base;
    struct kvist_pool_object *pool;
    union {
        void *items;
        struct kvist_lease *leases;
        struct kvist_take *takes;
    };
    bool *released;
    size_t count;
};

struct kvist_layout_ref {
    uint64_t bytes;
    uint64_t slot_offset;
    uint32_t tensor;
};

struct kvist_layout_object {
    PyObject ob_base;
    struct kvist_layout_ref *refs;
    size_t ref_count;
    size_t blocks_per_chunk;
    uint64_t slot_bytes; /* the end of the last ref's last block */
};

/* Keys of a call: borrowed from a bytes object, or made from a list. */
struct kvist_binding_keys {
    const uint8_t *data; /* [count][32] */
    size_t count;
    uint8_t *owned;
};

/* Registers one type; returns a new reference, or NULL with an exception set. */
PyTypeObject *kvist_binding_client_type(PyObject *module);
PyTypeObject *kvist_binding_pool_type(PyObject *module);
PyTypeObject *kvist_binding_leases_type(PyObject *module);
PyTypeObject *kvist_binding_takes_type(PyObject *module);
PyTypeObject *kvist_binding_copy_type(PyObject *module);
PyTypeObject *kvist_binding_layout_type(PyObject *module);

struct kvist_binding_state *kvist_binding_state_of(PyObject *self);

/* Set a kvist.Error. Always returns NULL. */
PyObject *
kvist_binding_raise(PyObject *self, enum kvist_status status, const struct kvist_error *err);

/* Seconds (float) to microseconds; false with an exception for what is negative or no number. */
bool kvist_binding_seconds(PyObject *value, uint64_t *us_out);

/* False with an exception set. */
bool kvist_binding_keys_parse(PyObject *value, struct kvist_binding_keys *keys_out);
void kvist_binding_keys_free(struct kvist_binding_keys *keys);

/* [start, stop) of args[from], args[from + 1] within count; both optional, stop may be None. */
bool kvist_binding_range(PyObject *const *args,
                         Py_ssize_t arg_count,
                         Py_ssize_t from,
                         size_t count,
                         size_t *start_out,
                         size_t *stop_out);

bool kvist_binding_args(const char *name, Py_ssize_t arg_count, Py_ssize_t min, Py_ssize_t max);

/* The open handle, or NULL with an exception. */
struct kvist_pool *kvist_binding_pool_handle(struct kvist_pool_object *pool);

/* Make a batch of copies of items; the pool counts them as held. NULL with an exception. */
PyObject *kvist_binding_leases_new(struct kvist_pool_object *pool,
                                   const struct kvist_lease *items,
                                   size_t count);
PyObject *kvist_binding_takes_new(struct kvist_pool_object *pool,
                                  const struct kvist_take *items,
                                  size_t count);

/* A method in a PyMethodDef row, whatever its signature. */
#define KVIST_BINDING_FAST(fn) ((PyCFunction)(void (*)(void))(fn)), METH_FASTCALL
#define KVIST_BINDING_NONE(fn) ((PyCFunction)(void (*)(void))(fn)), METH_NOARGS

#endif
