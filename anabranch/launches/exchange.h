/* What C extensions share: tensors as torch hands them over, and a launch by the driver. */
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
