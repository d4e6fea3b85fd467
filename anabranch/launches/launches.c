/* Kernels launched again: what the first call of a kind found out, with the pointers of this one.
 *
 * Tensors are read through DLPack's C exchange table, which torch publishes on its Tensor type:
 * some 60 ns each, against 300 ns for data_ptr(), stride(), shape and dtype from Python. Driver
 * functions come in as addresses, so neither torch's headers nor CUDA's are needed.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* DLPack 1: what is used of it. */
typedef struct { int32_t type, index; } Device;
typedef struct { uint8_t code, bits; uint16_t lanes; } DataType;
typedef struct {
    void *data;
    Device device;
    int32_t ndim;
    DataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Tensor;
typedef struct {
    uint32_t major, minor;
    void *previous, *allocate, *managed_from_object, *managed_to_object;
    int (*tensor_from_object)(void *, Tensor *);
    int (*current_stream)(int32_t type, int32_t index, void **);
} Exchange;

/* CUDA driver: a launch and its one attribute. */
typedef struct { int id; char padding[4]; union { int on; char bytes[64]; } value; } Attribute;
typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    Attribute *attributes;
    unsigned num_attributes;
} LaunchConfig;
enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

enum { MAX_TENSORS = 24, MAX_DIMS = 8, MAX_PARAMETERS = 160, MAX_MAPS = 16, MAP_BYTES = 128 };
enum { MAX_STRUCT = 1024 };
enum { VALUE, POINTER, MAP, STRUCT, FIELD }; /* kinds of parameters, as in prepare.py */
enum { L2_PROMOTION_128B = 2 };
typedef struct { _Alignas(64) char bytes[MAP_BYTES]; } TensorMap;

static struct {
    int (*launch)(const LaunchConfig *, void *function, void **parameters, void **extra);
    int (*get_context)(void **);
    int (*push_context)(void *);
    int (*pop_context)(void **);
    int (*error_string)(int, const char **);
    int (*encode_map)(TensorMap *, int type, uint32_t rank, void *address, const uint64_t *shape,
                      const uint64_t *strides, const uint32_t *box, const uint32_t *steps,
                      int interleave, int swizzle, int promotion, int fill);
    int (*move_map)(TensorMap *, void *address);
} driver;

typedef struct {
    int kind, tensor; /* of the call, whose address is added to `value` */
    int place;        /* of a pointer that is a field of the launch's struct */
    uint64_t value;
    TensorMap map;
} Parameter;
typedef struct {
    void *function;
    unsigned grid[3], block[3], shared_bytes, overlaps;
    int num_parameters;
    Parameter *parameters;
    char *structure; /* that the kernel takes by value, or NULL */
} Launch;
typedef struct {
    void *context;
    Device device;
    int num_tensors, num_launches;
    Launch launches[];
} Prepared;

static const Exchange *exchange;
static int32_t device_type; /* of the tensors that are launched with */
static PyObject *requires_grad;
static const char CAPSULE[] = "anabranch.prepared";

static int fail(int result, const char *what) {
    const char *reason = "unknown error";
    if (!result) return 0;
    driver.error_string(result, &reason);
    PyErr_Format(PyExc_RuntimeError, "%s failed: %s", what, reason);
    return -1;
}

static char *put(char *end, const void *from, size_t size) {
    memcpy(end, from, size);
    return end + size;
}

/* describe(tensors or None for each): all that a call is checked and prepared for, as bytes; None
 * where a tensor has no memory, as a tracer's. */
static PyObject *describe(PyObject *module, PyObject *tensors) {
    char buffer[MAX_TENSORS * (32 + 2 * MAX_DIMS * sizeof(int64_t))], *end = buffer;
    uintptr_t addresses[MAX_TENSORS];
    if (!PyTuple_Check(tensors) || PyTuple_GET_SIZE(tensors) > MAX_TENSORS) Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
        PyObject *object = PyTuple_GET_ITEM(tensors, i);
        Tensor tensor;
        int8_t head[3] = {-1, 0, 0};
        addresses[i] = 0;
        if (object == Py_None) {
            end = put(end, head, 1);
            continue;
        }
        if (exchange->tensor_from_object(object, &tensor)) {
            PyErr_Clear();
            Py_RETURN_NONE;
        }
        if (!tensor.data || tensor.ndim > MAX_DIMS) Py_RETURN_NONE;
        PyObject *tracked = PyObject_GetAttr(object, requires_grad);
        if (!tracked) return NULL;
        Py_DECREF(tracked);
        addresses[i] = (uintptr_t)tensor.data + tensor.byte_offset;
        head[0] = (int8_t)tensor.ndim;
        head[1] = (int8_t)((addresses[i] % 16) | (tracked == Py_True ? 16 : 0));
        while (addresses[(int)head[2]] != addresses[i]) head[2]++; /* the first at this place */
        end = put(end, head, sizeof head);
        end = put(end, &tensor.dtype, sizeof tensor.dtype);
        end = put(end, &tensor.device, sizeof tensor.device);
        end = put(end, tensor.shape, tensor.ndim * sizeof(int64_t));
        end = put(end, tensor.strides, tensor.ndim * sizeof(int64_t));
    }
    return PyBytes_FromStringAndSize(buffer, end - buffer);
}

/* The first byte of a tensor and the one after the last. */
static int read_span(PyObject *object, uintptr_t *span) {
    Tensor tensor;
    if (exchange->tensor_from_object(object, &tensor)) return -1;
    int64_t last = 0;
    for (int d = 0; d < tensor.ndim; d++) last += (tensor.shape[d] - 1) * tensor.strides[d];
    span[0] = (uintptr_t)tensor.data + tensor.byte_offset;
    span[1] = span[0] + (uintptr_t)(last + 1) * (tensor.dtype.bits * tensor.dtype.lanes / 8);
    return 0;
}

/* is_apart(written, read): whether no tensor of `written` shares memory with one of `read`. */
static PyObject *is_apart(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    uintptr_t mine[2], other[2];
    if (nargs != 2 || !PyTuple_Check(args[0]) || !PyTuple_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "is_apart takes two tuples");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[0]); i++) {
        if (read_span(PyTuple_GET_ITEM(args[0], i), mine)) return NULL;
        for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(args[1]); j++) {
            PyObject *read = PyTuple_GET_ITEM(args[1], j);
            if (read == Py_None) continue;
            if (read_span(read, other)) return NULL;
            if (mine[0] < other[1] && other[0] < mine[1]) Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
}

/* encode(address, type, swizzle, fill, box, shape, strides in bytes), innermost first: a map. */
static PyObject *encode(PyObject *module, PyObject *args) {
    unsigned long long address;
    int type, swizzle, fill;
    PyObject *lists[3];
    uint64_t numbers[3][5];
    uint32_t box[5], steps[5] = {1, 1, 1, 1, 1};
    TensorMap map;
    if (!PyArg_ParseTuple(args, "KiiiO!O!O!", &address, &type, &swizzle, &fill, &PyTuple_Type,
                          &lists[0], &PyTuple_Type, &lists[1], &PyTuple_Type, &lists[2]))
        return NULL;
    Py_ssize_t rank = PyTuple_GET_SIZE(lists[0]);
    for (int l = 0; l < 3; l++) {
        if (rank > 5 || PyTuple_GET_SIZE(lists[l]) != rank - (l == 2))
            return PyErr_Format(PyExc_ValueError, "a map of %zd dimensions", rank);
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(lists[l]); i++)
            numbers[l][i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(lists[l], i));
    }
    if (PyErr_Occurred()) return NULL;
    for (Py_ssize_t i = 0; i < rank; i++) box[i] = (uint32_t)numbers[0][i];
    int result = driver.encode_map(&map, type, (uint32_t)rank, (void *)(uintptr_t)address,
                                   numbers[1], numbers[2], box, steps, 0, swizzle,
                                   L2_PROMOTION_128B, fill);
    if (fail(result, "cuTensorMapEncodeTiled")) return NULL;
    return PyBytes_FromStringAndSize(map.bytes, MAP_BYTES);
}

static void release(PyObject *capsule) {
    Prepared *prepared = PyCapsule_GetPointer(capsule, CAPSULE);
    for (int i = 0; prepared && i < prepared->num_launches; i++) {
        free(prepared->launches[i].parameters);
        free(prepared->launches[i].structure);
    }
    free(prepared);
}

/* (kind, tensor, value, place, bytes of a map or a struct); fields follow their struct */
static int read_parameter(PyObject *given, int num_tensors, Launch *launch, Parameter *parameter) {
    const char *bytes;
    Py_ssize_t size;
    unsigned long long value;
    if (!PyArg_ParseTuple(given, "iiKiy#", &parameter->kind, &parameter->tensor, &value,
                          &parameter->place, &bytes, &size))
        return -1;
    int is_struct = parameter->kind == STRUCT && !launch->structure && size <= MAX_STRUCT;
    int is_field = parameter->kind == FIELD && launch->structure && !size &&
                   (unsigned)parameter->place <= MAX_STRUCT - sizeof(void *);
    int is_other = parameter->kind < STRUCT && size == (parameter->kind == MAP ? MAP_BYTES : 0);
    if ((!is_struct && !is_field && !is_other) ||
        (unsigned)parameter->tensor >= (unsigned)num_tensors) {
        PyErr_Format(PyExc_ValueError, "a parameter of kind %d, tensor %d and %zd bytes",
                     parameter->kind, parameter->tensor, size);
        return -1;
    }
    parameter->value = value;
    if (is_struct && !(launch->structure = calloc(1, MAX_STRUCT))) return -1;
    memcpy(is_struct ? launch->structure : parameter->map.bytes, bytes, size);
    return 0;
}

/* (function, grid, block, shared bytes, whether it overlaps, parameters) */
static int read_launch(PyObject *given, int num_tensors, Launch *launch) {
    unsigned long long function;
    PyObject *parameters;
    if (!PyArg_ParseTuple(given, "K(III)(III)IIO!", &function, &launch->grid[0], &launch->grid[1],
                          &launch->grid[2], &launch->block[0], &launch->block[1],
                          &launch->block[2], &launch->shared_bytes, &launch->overlaps,
                          &PyTuple_Type, &parameters))
        return -1;
    Py_ssize_t count = PyTuple_GET_SIZE(parameters);
    if (count > MAX_PARAMETERS) {
        PyErr_Format(PyExc_ValueError, "a launch of %zd parameters", count);
        return -1;
    }
    launch->function = (void *)(uintptr_t)function;
    launch->num_parameters = (int)count;
    launch->parameters = aligned_alloc(64, (count + 1) * sizeof(Parameter));
    if (!launch->parameters) return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (read_parameter(PyTuple_GET_ITEM(parameters, i), num_tensors, launch,
                           &launch->parameters[i]))
            return -1;
    return 0;
}

/* prepare(context, device index, number of tensors, launches): what `run` takes. */
static PyObject *prepare(PyObject *module, PyObject *args) {
    unsigned long long context;
    int index, num_tensors;
    PyObject *launches;
    if (!PyArg_ParseTuple(args, "KiiO!", &context, &index, &num_tensors, &PyTuple_Type, &launches))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(launches);
    if (num_tensors > MAX_TENSORS)
        return PyErr_Format(PyExc_ValueError, "a call of %d tensors", num_tensors);
    Prepared *prepared = calloc(1, sizeof *prepared + count * sizeof(Launch));
    if (!prepared) return PyErr_NoMemory();
    prepared->context = (void *)(uintptr_t)context;
    prepared->device = (Device){device_type, index};
    prepared->num_tensors = num_tensors;
    prepared->num_launches = (int)count;
    PyObject *capsule = PyCapsule_New(prepared, CAPSULE, release);
    for (Py_ssize_t i = 0; capsule && i < count; i++)
        if (read_launch(PyTuple_GET_ITEM(launches, i), num_tensors, &prepared->launches[i]))
            Py_CLEAR(capsule);
    return capsule;
}

static int start(const Launch *launch, const uint64_t *addresses, void *stream) {
    uint64_t values[MAX_PARAMETERS];
    TensorMap maps[MAX_MAPS];
    _Alignas(8) char structure[MAX_STRUCT];
    void *parameters[MAX_PARAMETERS];
    int num_maps = 0, count = 0, result = 0;
    if (launch->structure) memcpy(structure, launch->structure, MAX_STRUCT);
    for (int i = 0; i < launch->num_parameters && !result; i++) {
        const Parameter *parameter = &launch->parameters[i];
        void *place = &values[i];
        values[i] = parameter->value;
        if (parameter->kind != VALUE) values[i] += addresses[parameter->tensor];
        if (parameter->kind == FIELD) {
            memcpy(structure + parameter->place, &values[i], sizeof values[i]);
            continue;
        }
        if (parameter->kind == STRUCT) place = structure;
        if (parameter->kind == MAP) {
            place = &maps[num_maps++ % MAX_MAPS];
            memcpy(place, &parameter->map, sizeof(TensorMap));
            result = driver.move_map(place, (void *)(uintptr_t)values[i]);
        }
        parameters[count++] = place;
    }
    Attribute overlap = {.id = PROGRAMMATIC_STREAM_SERIALIZATION, .value = {.on = 1}};
    LaunchConfig config = {
        .grid = {launch->grid[0], launch->grid[1], launch->grid[2]},
        .block = {launch->block[0], launch->block[1], launch->block[2]},
        .shared_bytes = launch->shared_bytes,
        .stream = stream,
        .attributes = &overlap,
        .num_attributes = launch->overlaps,
    };
    return result ? result : driver.launch(&config, launch->function, parameters, NULL);
}

/* run(prepared, tensors or None for each) */
static PyObject *run(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    uint64_t addresses[MAX_TENSORS];
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "run takes 2 arguments");
    const Prepared *prepared = PyCapsule_GetPointer(args[0], CAPSULE);
    if (!prepared) return NULL;
    if (!PyTuple_Check(args[1]) || PyTuple_GET_SIZE(args[1]) != prepared->num_tensors)
        return PyErr_Format(PyExc_TypeError, "run takes %d tensors", prepared->num_tensors);
    for (int i = 0; i < prepared->num_tensors; i++) {
        Tensor tensor = {0};
        PyObject *object = PyTuple_GET_ITEM(args[1], i);
        if (object != Py_None && exchange->tensor_from_object(object, &tensor)) return NULL;
        addresses[i] = (uintptr_t)tensor.data + tensor.byte_offset;
    }
    void *stream, *current = NULL, *context = prepared->context;
    if (exchange->current_stream(prepared->device.type, prepared->device.index, &stream))
        return NULL;
    int result;
    Py_BEGIN_ALLOW_THREADS /* a full queue blocks, and a host callback ahead may want the GIL */
    result = driver.get_context(&current);
    int elsewhere = !result && current != context;
    if (elsewhere) result = driver.push_context(context);
    for (int i = 0; i < prepared->num_launches && !result; i++)
        result = start(&prepared->launches[i], addresses, stream);
    if (elsewhere) driver.pop_context(&context);
    Py_END_ALLOW_THREADS
    if (fail(result, "a prepared launch")) return NULL;
    Py_RETURN_NONE;
}

/* attach(exchange capsule): read tensors */
static PyObject *attach(PyObject *module, PyObject *capsule) {
    exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!exchange) return NULL;
    if (exchange->major != 1 || !exchange->tensor_from_object)
        return PyErr_Format(PyExc_RuntimeError, "torch has no DLPack 1 exchange table");
    requires_grad = PyUnicode_InternFromString("requires_grad");
    Py_RETURN_NONE;
}

/* connect(device type, driver addresses): launch kernels */
static PyObject *connect(PyObject *module, PyObject *args) {
    unsigned long long f[7];
    if (!PyArg_ParseTuple(args, "i(KKKKKKK)", &device_type, &f[0], &f[1], &f[2], &f[3], &f[4],
                          &f[5], &f[6]))
        return NULL;
    _Static_assert(sizeof driver == sizeof f, "pointers have 64 bits");
    memcpy(&driver, f, sizeof driver);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"attach", attach, METH_O, NULL},
    {"connect", connect, METH_VARARGS, NULL},
    {"describe", describe, METH_O, NULL},
    {"is_apart", (PyCFunction)(void (*)(void))is_apart, METH_FASTCALL, NULL},
    {"encode", encode, METH_VARARGS, NULL},
    {"prepare", prepare, METH_VARARGS, NULL},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "launches", .m_size = -1, .m_methods = methods};
PyMODINIT_FUNC PyInit_launches(void) { return PyModule_Create(&definition); }
