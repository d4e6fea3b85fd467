/* Launches the kernels of merge.cu with as little as possible between Python and the driver.
 *
 * Tensors are read through DLPack's C exchange table, which torch publishes on its Tensor type:
 * some 60 ns each, against 300 ns for data_ptr(), stride(), shape and dtype from Python. Driver
 * functions come in as addresses, so neither torch's headers nor CUDA's are needed.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "exchange.h"

enum { MAX_DEVICES = 64, MAX_SOURCES = 8, NUM_TYPES = 3 };
enum {
    PAIR1_VECTOR, PAIR2_VECTOR, PAIR1_SCALAR, FLAT_VECTOR, PARTS_VECTOR,
    PARTS_SCALAR, NUM_VARIANTS
};
enum { NUM_FUNCTIONS = NUM_VARIANTS * NUM_TYPES * NUM_TYPES };

static struct {
    int (*launch)(const LaunchConfig *, void *function, void **parameters, void **extra);
    int (*get_context)(void **);
    int (*push_context)(void *);
    int (*pop_context)(void **);
    int (*error_string)(int, const char **);
} driver;

/* As in merge.cu. */
typedef struct { void *out, *lse; int64_t out_strides[4], lse_strides[3]; } State;
typedef struct {
    uint32_t num_rows, num_heads, head_dim, num_parts, source_step, reserved;
    State merged, sources[MAX_SOURCES];
} Arguments;

/* As in layout.py. */
typedef struct {
    int one_row_block, two_rows_block, two_rows_threads, large_block, large_threads;
    int flat_block, flat_threads, parts_block, parts_threads, programmatic;
} Layout;

static struct {
    int32_t type; /* 0: no kernels loaded */
    void *context, *functions[NUM_FUNCTIONS];
    Layout layout;
} devices[MAX_DEVICES];

static const Exchange *exchange;
static PyTypeObject *state_type;
static PyObject *empty_strided, *dtypes[NUM_TYPES], *requires_grad;

typedef struct {
    Device device;
    int num_sources, input, output;
    int64_t shape[4]; /* parts, tokens, heads, head_dim */
    Arguments arguments;
} Merge;

static const char PYTHON_ERROR[] = "a Python exception is set";

static const int ITEMSIZES[NUM_TYPES] = {2, 2, 4};

static int type_of(DataType dtype) {
    if (dtype.lanes == 1 && dtype.code == 2 && dtype.bits == 16) return 0; /* half */
    if (dtype.lanes == 1 && dtype.code == 4 && dtype.bits == 16) return 1; /* bfloat16 */
    if (dtype.lanes == 1 && dtype.code == 2 && dtype.bits == 32) return 2; /* float */
    return -1;
}

/* The memory of a tensor with dimensions `first` to `last` of the merge; a stride is 0 where there
 * is nothing to step over. */
static const char *read_tensor(const Merge *merge, const Tensor *tensor, int first, int last,
                               void **data, int64_t *strides) {
    const int64_t *shape = merge->shape;
    int ndim = last - first;
    if (tensor->ndim != ndim || memcmp(tensor->shape, shape + first, ndim * sizeof *shape))
        return "the shapes differ";
    if (tensor->device.type != merge->device.type || tensor->device.index != merge->device.index)
        return "a tensor is on another device";
    if (!tensor->data) return "a tensor has no memory"; /* a fake one, of a tracer */
    *data = (char *)tensor->data + tensor->byte_offset;
    for (int d = 0; d < last; d++)
        strides[d] = d < first || shape[d] == 1 ? 0 : tensor->strides[d - first];
    return NULL;
}

/* `out` and `lse`, which may be NULL; `first` is 0 for a stack of parts, else 1. */
static const char *read_state(const Merge *merge, State *state, const Tensor *out,
                              PyObject *lse_object, int first) {
    Tensor lse;
    memset(state, 0, sizeof *state);
    if (type_of(out->dtype) < 0) return "out must be float16, bfloat16 or float32";
    const char *problem = read_tensor(merge, out, first, 4, &state->out, state->out_strides);
    if (problem || !lse_object) return problem;
    if (exchange->tensor_from_object(lse_object, &lse)) return PYTHON_ERROR;
    if (type_of(lse.dtype) != 2) return "lse must be float32";
    return read_tensor(merge, &lse, first, 3, &state->lse, state->lse_strides);
}

static const char *read_sources(Merge *merge, PyObject *states, int stacked) {
    Arguments *a = &merge->arguments;
    if (!PyTuple_Check(states)) return "states must be a tuple";
    merge->num_sources = (int)PyTuple_GET_SIZE(states);
    if (merge->num_sources < 1 || merge->num_sources > (stacked ? 1 : MAX_SOURCES))
        return "states must hold 1 to 8 states, or a stacked one";
    for (int i = 0; i < merge->num_sources; i++) {
        Tensor out;
        PyObject *state = PyTuple_GET_ITEM(states, i);
        if (!PyTuple_Check(state) || PyTuple_GET_SIZE(state) != 2) return "a state is (out, lse)";
        if (exchange->tensor_from_object(PyTuple_GET_ITEM(state, 0), &out)) return PYTHON_ERROR;
        if (i == 0) {
            if (out.ndim != 3 + stacked) return "out must be [tokens, heads, head_dim]";
            merge->device = out.device;
            merge->input = type_of(out.dtype);
            merge->shape[0] = 1;
            memcpy(merge->shape + 1 - stacked, out.shape, out.ndim * sizeof *out.shape);
            for (int d = 0; d < 4; d++)
                if ((uint64_t)merge->shape[d] - 1 >= INT32_MAX) return "a size is 0 or too large";
            if (merge->shape[1] > INT32_MAX / merge->shape[2]) return "there are 2^31 rows or more";
        }
        const char *problem =
            read_state(merge, &a->sources[i], &out, PyTuple_GET_ITEM(state, 1), !stacked);
        if (problem) return problem;
        if (type_of(out.dtype) != merge->input) return "the dtypes of out differ";
    }
    if (stacked && merge->shape[0] == 2) { /* two parts are two sources: the faster kernel */
        State *first = &a->sources[0], *second = &a->sources[1];
        int64_t out_step = first->out_strides[0], lse_step = first->lse_strides[0];
        first->out_strides[0] = first->lse_strides[0] = 0;
        *second = *first;
        second->out = (char *)second->out + out_step * ITEMSIZES[merge->input];
        second->lse = (float *)second->lse + lse_step;
        merge->num_sources = 2;
    }
    a->num_rows = (uint32_t)(merge->shape[1] * merge->shape[2]);
    a->num_heads = (uint32_t)merge->shape[2];
    a->head_dim = (uint32_t)merge->shape[3];
    a->num_parts = (uint32_t)(merge->num_sources > 1 ? merge->num_sources : merge->shape[0]);
    a->source_step = merge->num_sources > 1;
    a->reserved = 0;
    return NULL;
}

static const char *read_destination(Merge *merge, PyObject *out_object, PyObject *lse_object) {
    Tensor out;
    if (exchange->tensor_from_object(out_object, &out)) return PYTHON_ERROR;
    merge->output = type_of(out.dtype);
    return read_state(merge, &merge->arguments.merged, &out, lse_object, 1);
}

/* Where every tensor has equally spaced rows, (token, head) is one index. */
static void join_rows(Arguments *a, int num_sources, int64_t num_tokens) {
    State *states = &a->merged; /* the sources follow it */
    int64_t heads = a->num_heads;
    if (heads == 1) return;
    if (num_tokens > 1)
        for (int i = 0; i <= num_sources; i++)
            if (states[i].out_strides[1] != heads * states[i].out_strides[2] ||
                states[i].lse_strides[1] != heads * states[i].lse_strides[2])
                return;
    for (int i = 0; i <= num_sources; i++) {
        states[i].out_strides[1] = states[i].out_strides[2];
        states[i].lse_strides[1] = states[i].lse_strides[2];
    }
    a->num_heads = 1;
}

static int is_aligned(const State *state, int64_t itemsize, int64_t bytes) {
    int64_t steps = (int64_t)(intptr_t)state->out;
    for (int d = 0; d < 3; d++) steps |= state->out_strides[d] * itemsize;
    return state->out_strides[3] == 1 && steps % bytes == 0;
}

/* Whether rows are equally spaced, and all offsets in elements fit into 32 bits. */
static int is_flat(const Arguments *a, int num_sources) {
    const State *states = &a->merged; /* the sources follow it */
    if (a->num_heads > 1) return 0;
    for (int i = 0; i <= num_sources; i++) {
        int64_t out_step = states[i].out_strides[1], lse_step = states[i].lse_strides[1];
        int64_t most = (UINT32_MAX - (int64_t)a->head_dim) / a->num_rows;
        if (out_step < 0 || out_step > most || lse_step < 0 || lse_step > most) return 0;
    }
    return 1;
}

static int choose_launch(Merge *merge, const Layout *layout, LaunchConfig *config) {
    Arguments *a = &merge->arguments;
    int itemsize = ITEMSIZES[merge->input], width = 16 / itemsize;
    int stored = width * ITEMSIZES[merge->output];
    int vector = a->head_dim % width == 0 &&
                 is_aligned(&a->merged, ITEMSIZES[merge->output], stored < 16 ? stored : 16);
    for (int i = 0; i < merge->num_sources; i++)
        vector = vector && is_aligned(&a->sources[i], itemsize, 16);

    int pair = merge->num_sources == 2;
    int64_t lanes = vector ? a->head_dim / width : a->head_dim;
    int64_t threads = (int64_t)a->num_rows * lanes;
    int flat = pair && vector && threads < layout->flat_threads && lanes <= layout->flat_block &&
               is_flat(a, merge->num_sources);
    int two_rows = pair && vector && !flat && threads >= layout->two_rows_threads;
    int block = !pair ? layout->parts_block : flat ? layout->flat_block : layout->one_row_block;
    if (two_rows)
        block = threads < layout->large_threads ? layout->two_rows_block : layout->large_block;
    if (lanes > block) lanes = block;
    int64_t groups = 1;
    if (!pair) /* each group keeps at least two parts */
        while (groups * 4 <= a->num_parts && lanes * groups * 2 <= block && groups < 32 &&
               threads * groups < layout->parts_threads)
            groups *= 2;
    int64_t rows = block / (lanes * groups);
    int64_t rows_of_block = two_rows ? 2 * rows : rows;
    config->grid[0] = (unsigned)((a->num_rows + rows_of_block - 1) / rows_of_block);
    config->block[0] = (unsigned)lanes;
    config->block[1] = (unsigned)rows;
    config->block[2] = (unsigned)groups;
    if (!pair) return vector ? PARTS_VECTOR : PARTS_SCALAR;
    if (flat) return FLAT_VECTOR;
    return two_rows ? PAIR2_VECTOR : vector ? PAIR1_VECTOR : PAIR1_SCALAR;
}

static int launch_merge(Merge *merge) {
    int32_t index = merge->device.index;
    Attribute overlap = {.id = PROGRAMMATIC_STREAM_SERIALIZATION, .value = {.on = 1}};
    LaunchConfig config = {.grid = {1, 1, 1}, .attributes = &overlap};
    if (exchange->current_stream(merge->device.type, index, &config.stream)) return -1;
    join_rows(&merge->arguments, merge->num_sources, merge->shape[1]);
    int variant = choose_launch(merge, &devices[index].layout, &config);
    config.num_attributes = devices[index].layout.programmatic;
    void *function =
        devices[index].functions[(variant * NUM_TYPES + merge->input) * NUM_TYPES + merge->output];
    void *parameters[] = {&merge->arguments};

    int result;
    Py_BEGIN_ALLOW_THREADS /* a full queue blocks, and a host callback ahead may want the GIL */
    void *current = NULL, *context = devices[index].context;
    result = driver.get_context(&current);
    int elsewhere = !result && current != context;
    if (elsewhere) result = driver.push_context(context);
    if (!result) {
        result = driver.launch(&config, function, parameters, NULL);
        if (elsewhere) driver.pop_context(&context);
    }
    Py_END_ALLOW_THREADS
    if (!result) return 0;
    const char *reason = "unknown error";
    driver.error_string(result, &reason);
    PyErr_Format(PyExc_RuntimeError, "launch of the CUDA merge failed: %s", reason);
    return -1;
}

static int is_loaded(Device device) {
    return device.index >= 0 && device.index < MAX_DEVICES && device.type &&
           devices[device.index].type == device.type;
}

/* launch(states, stacked, out, lse): the launcher's contract in merge.py. */
static PyObject *launch(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    Merge merge;
    if (nargs != 4) return PyErr_Format(PyExc_TypeError, "launch takes 4 arguments");
    int stacked = args[1] == Py_True;
    const char *problem = read_sources(&merge, args[0], stacked);
    if (!problem && !is_loaded(merge.device)) problem = "no kernels are loaded for its device";
    if (!problem) problem = read_destination(&merge, args[2], args[3] == Py_None ? NULL : args[3]);
    if (problem == PYTHON_ERROR) return NULL;
    if (problem) return PyErr_Format(PyExc_ValueError, "CUDA merge: %s", problem);
    if (launch_merge(&merge)) return NULL;
    Py_RETURN_NONE;
}

/* A contiguous tensor on the current device. */
static PyObject *new_tensor(const int64_t *shape, int ndim, PyObject *dtype) {
    PyObject *sizes = PyTuple_New(ndim), *strides = PyTuple_New(ndim), *tensor = NULL;
    int64_t stride = 1;
    for (int d = ndim - 1; sizes && strides && d >= 0; stride *= shape[d--]) {
        PyTuple_SET_ITEM(sizes, d, PyLong_FromLongLong(shape[d]));
        PyTuple_SET_ITEM(strides, d, PyLong_FromLongLong(stride));
    }
    PyObject *args[] = {sizes, strides, dtype};
    if (!PyErr_Occurred()) tensor = PyObject_Vectorcall(empty_strided, args, 3, NULL);
    Py_XDECREF(sizes);
    Py_XDECREF(strides);
    return tensor;
}

/* Whether the long way has nothing to refuse, and new tensors would lie beside the sources. */
static int is_plain(Merge *merge, PyObject *states) {
    void *current = NULL;
    if (read_sources(merge, states, 0) || !is_loaded(merge->device)) return 0;
    if (driver.get_context(&current) || current != devices[merge->device.index].context) return 0;
    for (int i = 0; i < merge->num_sources; i++) {
        PyObject *state = PyTuple_GET_ITEM(states, i);
        if (Py_TYPE(state) != state_type) return 0;
        for (int field = 0; field < 2; field++) {
            PyObject *wanted = PyObject_GetAttr(PyTuple_GET_ITEM(state, field), requires_grad);
            Py_XDECREF(wanted);
            if (wanted != Py_False) return 0;
        }
    }
    return 1;
}

/* try_merge(states): a new merged state, or None where the long way has to look at it. */
static PyObject *try_merge(PyObject *module, PyObject *states) {
    Merge merge;
    if (!is_plain(&merge, states)) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    PyObject *merged = state_type->tp_alloc(state_type, 2);
    PyObject *out = merged ? new_tensor(merge.shape + 1, 3, dtypes[merge.input]) : NULL;
    PyObject *lse = out ? new_tensor(merge.shape + 1, 2, dtypes[2]) : NULL;
    if (!merged) return NULL;
    PyTuple_SET_ITEM(merged, 0, out);
    PyTuple_SET_ITEM(merged, 1, lse);
    const char *problem = lse ? read_destination(&merge, out, lse) : PYTHON_ERROR;
    if (!problem && !launch_merge(&merge)) return merged;
    if (problem && problem != PYTHON_ERROR) PyErr_SetString(PyExc_RuntimeError, problem);
    Py_DECREF(merged);
    return NULL;
}

/* attach(exchange capsule, AttentionState, empty_strided, its dtypes, driver addresses) */
static PyObject *attach(PyObject *module, PyObject *args) {
    PyObject *capsule, *type, *allocate, *types[NUM_TYPES];
    unsigned long long f[5];
    if (!PyArg_ParseTuple(args, "OO!O(OOO)(KKKKK)", &capsule, &PyType_Type, &type, &allocate,
                          &types[0], &types[1], &types[2], &f[0], &f[1], &f[2], &f[3], &f[4]))
        return NULL;
    exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!exchange) return NULL;
    if (exchange->major != 1 || !exchange->tensor_from_object)
        return PyErr_Format(PyExc_RuntimeError, "torch has no DLPack 1 exchange table");
    state_type = (PyTypeObject *)Py_NewRef(type);
    empty_strided = Py_NewRef(allocate);
    for (int i = 0; i < NUM_TYPES; i++) dtypes[i] = Py_NewRef(types[i]);
    requires_grad = PyUnicode_InternFromString("requires_grad");
    _Static_assert(sizeof driver == sizeof f, "pointers have 64 bits");
    memcpy(&driver, f, sizeof driver);
    Py_RETURN_NONE;
}

/* load(device type, device index, context, functions, layout) */
static PyObject *load(PyObject *module, PyObject *args) {
    int type, index;
    unsigned long long context;
    PyObject *functions;
    Layout l;
    if (!PyArg_ParseTuple(args, "iiKO!(iiiiiiiiip)", &type, &index, &context, &PyTuple_Type,
                          &functions, &l.one_row_block, &l.two_rows_block, &l.two_rows_threads,
                          &l.large_block, &l.large_threads, &l.flat_block, &l.flat_threads,
                          &l.parts_block, &l.parts_threads, &l.programmatic))
        return NULL;
    if (index < 0 || index >= MAX_DEVICES || PyTuple_GET_SIZE(functions) != NUM_FUNCTIONS)
        return PyErr_Format(PyExc_ValueError, "device %d with %zd functions", index,
                            PyTuple_GET_SIZE(functions));
    for (int i = 0; i < NUM_FUNCTIONS; i++)
        devices[index].functions[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(functions, i));
    if (PyErr_Occurred()) return NULL;
    devices[index].context = (void *)(uintptr_t)context;
    devices[index].layout = l;
    devices[index].type = type;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"attach", attach, METH_VARARGS, NULL},
    {"load", load, METH_VARARGS, NULL},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, NULL},
    {"try_merge", try_merge, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "launcher", .m_size = -1, .m_methods = methods};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&definition); }
