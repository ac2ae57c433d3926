#include "dlpack.hpp"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

namespace py = pybind11;

namespace fag {

namespace {

// The structures of DLPack's stable, unversioned C ABI. NumPy's own reader knows no bfloat16, hence this one.
struct DLDevice {
    std::int32_t device_type;
    std::int32_t device_id;
};
struct DLDataType {
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
};
struct DLTensor {
    void* data;
    DLDevice device;
    std::int32_t ndim;
    DLDataType dtype;
    std::int64_t* shape;
    std::int64_t* strides;  ///< in elements; null = compact
    std::uint64_t byte_offset;
};
struct DLManagedTensor {
    DLTensor dl_tensor;
    void* manager_ctx;
    void (*deleter)(DLManagedTensor*);
};

constexpr std::int32_t kCpu = 1;
enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };
constexpr const char* kFresh = "dltensor";
constexpr const char* kUsed = "used_dltensor";

struct NamedType {
    std::uint8_t code;
    std::uint8_t bits;
    const char* name;     ///< as fag_metadata.TensorSpec wants it
    const char* storage;  ///< NumPy type of the returned array
};

constexpr NamedType kTypes[] = {
    {kFloat, 16, "float16", "float16"}, {kBfloat, 16, "bfloat16", "uint16"}, {kFloat, 32, "float32", "float32"},
    {kFloat, 64, "float64", "float64"}, {kInt, 8, "int8", "int8"},           {kInt, 16, "int16", "int16"},
    {kInt, 32, "int32", "int32"},       {kInt, 64, "int64", "int64"},        {kUInt, 8, "uint8", "uint8"},
    {kBool, 8, "bool", "bool"},
};

const NamedType& find_type(const DLDataType& dtype) {
    for (const NamedType& type : kTypes) {
        if (type.code == dtype.code && type.bits == dtype.bits && dtype.lanes == 1) return type;
    }
    throw py::type_error("fag_kernel: DLPack array must have a known element type, got code " +
                         std::to_string(dtype.code) + " with " + std::to_string(dtype.bits) + " bits.");
}

py::tuple array_from_dlpack(const py::capsule& capsule) {
    if (capsule.name() == nullptr || std::string(capsule.name()) != kFresh) {
        throw py::type_error("fag_kernel: DLPack capsule must be an unused \"dltensor\".");
    }
    auto* managed = capsule.get_pointer<DLManagedTensor>();
    const DLTensor& tensor = managed->dl_tensor;
    if (tensor.device.device_type != kCpu) {
        throw py::type_error("fag_kernel: DLPack array must lie on the CPU, got device type " +
                             std::to_string(tensor.device.device_type) + ".");
    }
    const NamedType& type = find_type(tensor.dtype);
    const py::dtype storage(type.storage);
    const auto item = static_cast<std::int64_t>(storage.itemsize());
    std::vector<std::int64_t> shape(tensor.shape, tensor.shape + tensor.ndim);
    std::vector<std::int64_t> strides(shape.size());
    std::int64_t compact = item;
    for (std::size_t axis = shape.size(); axis-- > 0; compact *= shape[axis]) {
        strides[axis] = tensor.strides != nullptr ? tensor.strides[axis] * item : compact;
    }

    // From here on the array owns the tensor; the capsule is marked so that its destructor leaves it alone.
    PyCapsule_SetName(capsule.ptr(), kUsed);
    const py::capsule owner(managed, [](void* pointer) {
        auto* held = static_cast<DLManagedTensor*>(pointer);
        if (held->deleter != nullptr) held->deleter(held);
    });
    const void* data = static_cast<const char*>(tensor.data) + tensor.byte_offset;
    return py::make_tuple(py::array(storage, shape, strides, data, owner), type.name);
}

}  // namespace

void bind_dlpack(py::module_& m) { m.def("array_from_dlpack", &array_from_dlpack); }

}  // namespace fag
