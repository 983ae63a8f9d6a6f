/*
 * _copy - Copy and Layout objects: blocks between KV tensors and slots.
 *
 * Role        turns (slots, block ids, layout) into a copy plan in C, and submits it
 * Shapes      chunk: blocks_per_chunk consecutive blocks of a request, kept in one slot. Within a
 *             slot each ref of the layout has a run of blocks_per_chunk * bytes at slot_offset,
 *             block after block.
 * Ownership   tensors are borrowed: whoever makes a Copy keeps them alive
 * Threads     submit, poll and wait by one thread at a time
 */
#include "_binding.h"

#include <string.h>

/* --- Layout ----------------------------------------------------------------------------------- */

static void layout_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyMem_Free(((struct kvist_layout_object *)object)->refs);
    PyObject_Free(object);
    Py_DECREF(type);
}

static bool layout_fill(struct kvist_layout_object *self, PyObject *list)
{
    for (size_t i = 0; i < self->ref_count; i++) {
        PyObject *item = PyList_GetItem(list, (Py_ssize_t)i);
        unsigned int tensor = 0;
        unsigned long long bytes = 0;
        unsigned long long offset = 0;
        if (!item || !PyTuple_Check(item)) {
            PyErr_SetString(PyExc_TypeError, "a ref must be (tensor, bytes, slot_offset)");
            return false;
        }
        if (!PyArg_ParseTuple(item, "IKK", &tensor, &bytes, &offset))
            return false;
        if (bytes == 0 || bytes > KVIST_BLOCK_BYTES_MAX || offset > KVIST_BLOCK_BYTES_MAX ||
            offset + bytes * self->blocks_per_chunk > KVIST_BLOCK_BYTES_MAX) {
            PyErr_SetString(PyExc_ValueError, "a ref lies beyond the largest block");
            return false;
        }
        self->refs[i].tensor = tensor;
        self->refs[i].bytes = bytes;
        self->refs[i].slot_offset = offset;
        uint64_t end = offset + bytes * self->blocks_per_chunk;
        if (end > self->slot_bytes)
            self->slot_bytes = end;
    }
    return true;
}

PyDoc_STRVAR(layout_doc,
             "Layout(refs, blocks_per_chunk)\n--\n\n"
             "Where the blocks of a chunk lie in a slot. refs: a list of (tensor, bytes,\n"
             "slot_offset): block b of the chunk is `bytes` of that tensor's block, at\n"
             "slot_offset + b * bytes.");

static PyObject *layout_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char k0[] = "refs";
    static char k1[] = "blocks_per_chunk";
    static char *names[] = {k0, k1, NULL};
    PyObject *list = NULL;
    unsigned int blocks_per_chunk = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OI", names, &list, &blocks_per_chunk))
        return NULL;
    if (!PyList_Check(list) || PyList_Size(list) == 0 || blocks_per_chunk == 0 ||
        PyList_Size(list) > (Py_ssize_t)KVIST_COPY_TENSORS_MAX || blocks_per_chunk > (1U << 16)) {
        PyErr_SetString(PyExc_ValueError,
                        "a list of refs and 1 to 65536 blocks a chunk are needed");
        return NULL;
    }
    struct kvist_layout_object *self = PyObject_New(struct kvist_layout_object, type);
    if (!self)
        return NULL;
    self->ref_count = (size_t)PyList_Size(list);
    self->blocks_per_chunk = blocks_per_chunk;
    self->slot_bytes = 0;
    self->refs = PyMem_Calloc(self->ref_count, sizeof(*self->refs));
    if (!self->refs)
        PyErr_NoMemory();
    if (!self->refs || !layout_fill(self, list))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *layout_slot_bytes(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(((struct kvist_layout_object *)object)->slot_bytes);
}

PyTypeObject *kvist_binding_layout_type(PyObject *module)
{
    static PyGetSetDef getters[] = {
        {"slot_bytes", layout_slot_bytes, NULL, "Bytes of a slot up to the last ref's end.", NULL},
        {NULL, NULL, NULL, NULL, NULL},
    };
    static PyType_Slot slots[] = {
        {Py_tp_doc, (void *)(uintptr_t)layout_doc},
        {Py_tp_new, layout_new},
        {Py_tp_dealloc, layout_dealloc},
        {Py_tp_getset, getters},
        {0, NULL},
    };
    static PyType_Spec spec = {
        .name = "kvist._kvist.Layout",
        .basicsize = sizeof(struct kvist_layout_object),
        .flags = Py_TPFLAGS_DEFAULT,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}

/* --- Copy ------------------------------------------------------------------------------------- */

static void copy_end(struct kvist_copy_object *self)
{
    struct kvist_copy *handle = self->handle;
    self->handle = NULL;
    PyThreadState *gil = PyEval_SaveThread();
    kvist_copy_destroy(&handle);
    PyEval_RestoreThread(gil);
}

static void copy_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    copy_end((struct kvist_copy_object *)object);
    PyObject_Free(object);
    Py_DECREF(type);
}

static struct kvist_copy *copy_handle(struct kvist_copy_object *self)
{
    if (!self->handle)
        PyErr_SetString(PyExc_ValueError, "the Copy is closed");
    return self->handle;
}

static struct kvist_copy_tensor *tensors_parse(PyObject *list, size_t *count_out)
{
    if (!PyList_Check(list) || PyList_Size(list) == 0 ||
        PyList_Size(list) > (Py_ssize_t)KVIST_COPY_TENSORS_MAX) {
        PyErr_Format(PyExc_ValueError, "tensors must be a list of 1 to %u", KVIST_COPY_TENSORS_MAX);
        return NULL;
    }
    size_t count = (size_t)PyList_Size(list);
    struct kvist_copy_tensor *tensors = PyMem_Calloc(count, sizeof(*tensors));
    if (!tensors) {
        PyErr_NoMemory();
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        PyObject *item = PyList_GetItem(list, (Py_ssize_t)i);
        unsigned long long base = 0;
        unsigned long long blocks = 0;
        unsigned long long stride = 0;
        unsigned long long page = 0;
        if (!item || !PyTuple_Check(item)) {
            PyErr_SetString(PyExc_TypeError, "a tensor must be (base, blocks, stride, page)");
            goto free_tensors;
        }
        if (!PyArg_ParseTuple(item, "KKKK", &base, &blocks, &stride, &page))
            goto free_tensors;
        if (base == 0 || blocks == 0 || page == 0 || page > stride) {
            PyErr_SetString(PyExc_ValueError, "a tensor is empty, or its pages overlap");
            goto free_tensors;
        }
        tensors[i].base = (void *)(uintptr_t)base;
        tensors[i].block_count = blocks;
        tensors[i].block_stride_bytes = stride;
        tensors[i].page_bytes = page;
    }
    *count_out = count;
    return tensors;
free_tensors:
    PyMem_Free(tensors);
    return NULL;
}

PyDoc_STRVAR(copy_doc,
             "Copy(kind, tensors, device=0, staging_bytes=0, threads=0)\n--\n\n"
             "Copies between slots and tensors: HOST by threads, DIRECT and STAGED on a CUDA\n"
             "device. tensors: a list of (base address, block count, stride bytes, page bytes),\n"
             "which the caller keeps alive.");

static PyObject *copy_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char k0[] = "kind";
    static char k1[] = "tensors";
    static char k2[] = "device";
    static char k3[] = "staging_bytes";
    static char k4[] = "threads";
    static char *names[] = {k0, k1, k2, k3, k4, NULL};
    struct kvist_copy_options options = KVIST_COPY_OPTIONS_INIT;
    struct kvist_error err = KVIST_ERROR_INIT;
    int kind = 0;
    PyObject *list = NULL;
    unsigned long long staging_bytes = 0;
    unsigned int threads = 0;
    if (!PyArg_ParseTupleAndKeywords(args,
                                     keywords,
                                     "iO|iKI",
                                     names,
                                     &kind,
                                     &list,
                                     &options.device,
                                     &staging_bytes,
                                     &threads))
        return NULL;
    if (kind < KVIST_COPY_HOST || kind > KVIST_COPY_STAGED || options.device < 0) {
        PyErr_SetString(PyExc_ValueError, "kind must be HOST, DIRECT or STAGED, device 0 or more");
        return NULL;
    }
    struct kvist_copy_tensor *tensors = tensors_parse(list, &options.tensor_count);
    if (!tensors)
        return NULL;
    options.kind = (enum kvist_copy_kind)kind;
    options.tensors = tensors;
    options.staging_bytes = staging_bytes;
    options.thread_count = threads;
    struct kvist_copy_object *self = PyObject_New(struct kvist_copy_object, type);
    if (self) {
        enum kvist_status status;
        self->handle = NULL;
        self->busy = 0;
        self->clients = 0;
        PyThreadState *gil = PyEval_SaveThread();
        status = kvist_copy_create(&options, &self->handle, &err);
        PyEval_RestoreThread(gil);
        if (status != KVIST_OK) {
            kvist_binding_raise((PyObject *)self, status, &err);
            Py_CLEAR(self);
        }
    }
    PyMem_Free(tensors);
    return (PyObject *)self;
}

/* A submit call, checked; block_ids are native int32. */
struct submit_call {
    struct kvist_pool *pool;
    const struct kvist_layout_object *layout;
    const char *slots; /* [slot_count] unaligned uint32 */
    size_t slot_count;
    const char *block_ids; /* [block_count] unaligned int32 */
    size_t block_count;
    size_t skip;
    uint64_t instance;
};

/* Fill in the ranges of one slot's blocks [first, last) of the call; false: a bad block id. */
static bool slot_ranges(const struct submit_call *call,
                        char *address,
                        size_t slot_index,
                        struct kvist_copy_range *ranges,
                        size_t *range_count)
{
    size_t per_chunk = call->layout->blocks_per_chunk;
    size_t first = slot_index == 0 ? call->skip : 0;
    size_t at = slot_index * per_chunk + first - call->skip; /* index in block_ids */
    size_t left = call->block_count - at;
    size_t last = first + left < per_chunk ? first + left : per_chunk;
    for (size_t r = 0; r < call->layout->ref_count; r++) {
        const struct kvist_layout_ref *ref = &call->layout->refs[r];
        for (size_t b = first; b < last; b++) {
            int32_t block = 0;
            memcpy(&block, call->block_ids + (at + b - first) * sizeof(block), sizeof(block));
            if (block < 0)
                return false;
            struct kvist_copy_range *range = &ranges[(*range_count)++];
            range->tensor = ref->tensor;
            range->reserved = 0;
            range->block = (uint64_t)block;
            range->offset = 0;
            range->bytes = ref->bytes;
            range->slot = address + ref->slot_offset + b * ref->bytes;
        }
    }
    return true;
}

/* Build and submit the plan. absent[i]: slot i is not mapped here, and was left out. */
static enum kvist_status submit_plan(const struct submit_call *call,
                                     struct kvist_copy *copy,
                                     uint64_t job,
                                     enum kvist_copy_direction direction,
                                     void *stream,
                                     struct kvist_copy_range *ranges,
                                     bool *absent,
                                     size_t *range_count_out,
                                     struct kvist_error *err)
{
    size_t range_count = 0;
    for (size_t i = 0; i < call->slot_count; i++) {
        uint32_t slot = 0;
        memcpy(&slot, call->slots + i * sizeof(slot), sizeof(slot));
        char *address = kvist_pool_slot_address(call->pool, call->instance, slot);
        absent[i] = !address;
        if (address && !slot_ranges(call, address, i, ranges, &range_count))
            return kvist_error_set(err, KVIST_INVALID, 0, "copy", "a block id is negative");
    }
    *range_count_out = range_count;
    if (range_count == 0)
        return KVIST_OK;
    return kvist_copy_submit(copy, job, direction, ranges, range_count, stream, err);
}

static PyObject *absent_list(const bool *absent, size_t count)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < count; i++) {
        if (!absent[i])
            continue;
        PyObject *index = PyLong_FromSize_t(i);
        if (!index || PyList_Append(list, index) != 0)
            Py_CLEAR(list);
        Py_XDECREF(index);
    }
    return list;
}

static bool submit_check(const struct submit_call *call)
{
    size_t per_chunk = call->layout->blocks_per_chunk;
    if (call->skip >= per_chunk || call->block_count == 0 ||
        (call->skip + call->block_count + per_chunk - 1) / per_chunk != call->slot_count) {
        PyErr_Format(PyExc_ValueError,
                     "%zu blocks after %zu skipped do not fill %zu slots of %zu",
                     call->block_count,
                     call->skip,
                     call->slot_count,
                     per_chunk);
        return false;
    }
    if (call->layout->slot_bytes > kvist_pool_slot_bytes(call->pool)) {
        PyErr_SetString(PyExc_ValueError, "the layout is larger than the pool's slots");
        return false;
    }
    if (call->block_count > KVIST_COPY_RANGES_MAX / call->layout->ref_count) {
        PyErr_SetString(PyExc_ValueError, "too many ranges for one plan: submit fewer slots");
        return false;
    }
    return true;
}

/* Runs a checked call; returns (submitted, absent slots). */
static PyObject *submit_run(struct kvist_copy_object *self,
                            struct kvist_client_object *client,
                            const struct submit_call *call,
                            uint64_t job,
                            enum kvist_copy_direction direction,
                            void *stream)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    PyObject *result = NULL;
    size_t range_count = 0;
    enum kvist_status status;
    struct kvist_copy *handle = self->handle;
    struct kvist_copy_range *ranges =
        PyMem_Malloc(call->block_count * call->layout->ref_count * sizeof(*ranges));
    bool *absent = PyMem_Calloc(call->slot_count, sizeof(bool));
    if (!ranges || !absent) {
        PyErr_NoMemory();
        goto free_all;
    }
    self->busy++;
    client->busy++;
    PyThreadState *gil = PyEval_SaveThread();
    status = submit_plan(call, handle, job, direction, stream, ranges, absent, &range_count, &err);
    PyEval_RestoreThread(gil);
    client->busy--;
    self->busy--;
    if (status != KVIST_OK) {
        kvist_binding_raise((PyObject *)self, status, &err);
        goto free_all;
    }
    PyObject *list = absent_list(absent, call->slot_count);
    if (list)
        result = Py_BuildValue("(NN)", PyBool_FromLong(range_count > 0), list);
free_all:
    PyMem_Free(ranges);
    PyMem_Free(absent);
    return result;
}

PyDoc_STRVAR(
    copy_submit_doc,
    "submit(job, direction, pool, instance, slots, layout, block_ids, skip=0, stream=0)\n"
    "--\n\n"
    "Start copying chunks. `slots`: n uint32 as bytes; `block_ids`: a C-contiguous buffer\n"
    "of int32, the chunks' blocks in order; the first chunk lacks its first `skip` blocks.\n"
    "The caller has pinned `instance`, until the job is reported. `stream`: a\n"
    "cudaStream_t as an integer. Returns (submitted, indices of slots that are not mapped\n"
    "here and were left out); submitted is False when none was left.");

static PyObject *copy_submit(PyObject *object, PyObject *args)
{
    struct kvist_copy_object *self = (struct kvist_copy_object *)object;
    const struct kvist_binding_state *state = kvist_binding_state_of(object);
    struct submit_call call = {0};
    unsigned long long job = 0;
    int direction = 0;
    PyObject *pool = NULL;
    unsigned long long instance = 0;
    Py_ssize_t slots_bytes = 0;
    PyObject *layout = NULL;
    Py_buffer blocks = {0};
    Py_ssize_t skip = 0;
    unsigned long long stream = 0;
    PyObject *result = NULL;
    if (!copy_handle(self) || !PyArg_ParseTuple(args,
                                                "KiO!Ky#O!y*|nK",
                                                &job,
                                                &direction,
                                                state->pool,
                                                &pool,
                                                &instance,
                                                &call.slots,
                                                &slots_bytes,
                                                state->layout,
                                                &layout,
                                                &blocks,
                                                &skip,
                                                &stream))
        return NULL;
    struct kvist_pool_object *pool_object = (struct kvist_pool_object *)pool;
    call.pool = kvist_binding_pool_handle(pool_object);
    call.layout = (const struct kvist_layout_object *)layout;
    call.slot_count = (size_t)slots_bytes / sizeof(uint32_t);
    call.block_ids = blocks.buf;
    call.block_count = (size_t)blocks.len / sizeof(int32_t);
    call.skip = (size_t)skip;
    call.instance = instance;
    if (skip < 0 || slots_bytes % (Py_ssize_t)sizeof(uint32_t) != 0 ||
        blocks.len % (Py_ssize_t)sizeof(int32_t) != 0 || direction < KVIST_COPY_STORE ||
        direction > KVIST_COPY_LOAD)
        PyErr_SetString(PyExc_ValueError, "direction, skip, slots or block_ids are malformed");
    else if (call.pool && submit_check(&call))
        result = submit_run(self,
                            pool_object->client,
                            &call,
                            job,
                            (enum kvist_copy_direction)direction,
                            (void *)(uintptr_t)stream);
    PyBuffer_Release(&blocks);
    return result;
}

PyDoc_STRVAR(copy_poll_doc,
             "poll()\n--\n\n"
             "Jobs that have ended since the last call: a list of (job, ok, bytes, elapsed_us).");

static PyObject *copy_poll(PyObject *object, PyObject *none)
{
    (void)none;
    struct kvist_copy *handle = copy_handle((struct kvist_copy_object *)object);
    struct kvist_copy_result results[64];
    size_t count = 0;
    PyObject *list = handle ? PyList_New(0) : NULL;
    if (!list)
        return NULL;
    do {
        count = kvist_copy_poll(handle, results, sizeof(results) / sizeof(results[0]));
        for (size_t i = 0; i < count; i++) {
            PyObject *row = Py_BuildValue("(KNKK)",
                                          (unsigned long long)results[i].job,
                                          PyBool_FromLong(results[i].status == KVIST_OK),
                                          (unsigned long long)results[i].bytes,
                                          (unsigned long long)results[i].elapsed_us);
            if (!row || PyList_Append(list, row) != 0) {
                Py_XDECREF(row);
                Py_DECREF(list);
                return NULL;
            }
            Py_DECREF(row);
        }
    } while (count == sizeof(results) / sizeof(results[0]));
    return list;
}

PyDoc_STRVAR(copy_wait_doc,
             "wait(job)\n--\n\n"
             "Block until a job has ended; poll() still reports it. Unknown jobs: at once.");

static PyObject *copy_wait(PyObject *object, PyObject *const *args, Py_ssize_t arg_count)
{
    struct kvist_copy_object *self = (struct kvist_copy_object *)object;
    struct kvist_copy *handle = copy_handle(self);
    if (!handle || !kvist_binding_args("wait", arg_count, 1, 1))
        return NULL;
    uint64_t job = PyLong_AsUnsignedLongLong(args[0]);
    if (PyErr_Occurred())
        return NULL;
    self->busy++;
    PyThreadState *gil = PyEval_SaveThread();
    kvist_copy_wait(handle, job);
    PyEval_RestoreThread(gil);
    self->busy--;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(copy_close_doc,
             "close()\n--\n\n"
             "Wait for all jobs and end. Error BUSY while an open Client registers segments here.");

static PyObject *copy_close(PyObject *object, PyObject *none)
{
    (void)none;
    struct kvist_copy_object *self = (struct kvist_copy_object *)object;
    if (self->busy || self->clients) {
        struct kvist_error err = KVIST_ERROR_INIT;
        kvist_error_set(
            &err, KVIST_BUSY, 0, "copy", "a Client or another call still uses this Copy");
        return kvist_binding_raise(object, KVIST_BUSY, &err);
    }
    copy_end(self);
    Py_RETURN_NONE;
}

PyTypeObject *kvist_binding_copy_type(PyObject *module)
{
    static PyMethodDef methods[] = {
        {"submit", (PyCFunction)(void (*)(void))copy_submit, METH_VARARGS, copy_submit_doc},
        {"poll", KVIST_BINDING_NONE(copy_poll), copy_poll_doc},
        {"wait", KVIST_BINDING_FAST(copy_wait), copy_wait_doc},
        {"close", KVIST_BINDING_NONE(copy_close), copy_close_doc},
        {NULL, NULL, 0, NULL},
    };
    static PyType_Slot slots[] = {
        {Py_tp_doc, (void *)(uintptr_t)copy_doc},
        {Py_tp_new, copy_new},
        {Py_tp_dealloc, copy_dealloc},
        {Py_tp_methods, methods},
        {0, NULL},
    };
    static PyType_Spec spec = {
        .name = "kvist._kvist.Copy",
        .basicsize = sizeof(struct kvist_copy_object),
        .flags = Py_TPFLAGS_DEFAULT,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}
