/// Descriptors: aclTensor and aclScalar, what they say, and which of them exist.

#include <cmath>
#include <cstring>
#include <map>
#include <mutex>

#include "operators.hpp"

namespace npu_stub {

namespace {

struct Descriptors {
    std::mutex mutex;
    std::map<const void*, std::shared_ptr<const Tensor>> tensors;
    std::map<const void*, double> scalars;
};

Descriptors& descriptors() {
    static Descriptors& instance = *new Descriptors;
    return instance;
}

/// A handle that no later descriptor gets: a destroyed one stays recognisable.
const void* new_handle() { return new char; }

double read_scalar(const void* value, int type) {
    const auto read = [value](auto zero) {
        std::memcpy(&zero, value, sizeof zero);
        return static_cast<double>(zero);
    };
    switch (type) {
        case kFloat32: return read(float{});
        case kFloat64: return read(double{});
        case kInt64: return read(int64_t{});
        case kInt32: return read(int32_t{});
        case kBool: return read(bool{});
        default: return std::nan("");
    }
}

/// Why a description is not one of a tensor; empty if it is.
std::string complaint_about(const Tensor& tensor) {
    if (name_of_type(tensor.type) == nullptr) return "data type " + std::to_string(tensor.type) + " is not known";
    if (tensor.offset < 0) return "offset is negative";
    int64_t last = tensor.offset;
    for (size_t axis = 0; axis < tensor.shape.size(); ++axis) {
        if (tensor.shape[axis] < 0 || tensor.strides[axis] < 0) return "a dimension or stride is negative";
        last += (tensor.shape[axis] - 1) * tensor.strides[axis];
    }
    int64_t storage = 1;
    for (const int64_t extent : tensor.storage_shape) storage *= extent;
    if (tensor.num_elements() == 0) return "";
    if (tensor.storage == nullptr) return "data pointer is null";
    return last < storage ? "" : "the last element lies beyond the storage shape";
}

template <typename Map>
int destroy(const char* symbol, const char* kind, Map& map, const void* handle) {
    const Entry entry(symbol);
    if (entry.code != kOk) return entry.code;
    const std::lock_guard lock(descriptors().mutex);
    if (map.erase(handle) == 0) {
        violate("unknown or destroyed descriptor: " + std::string(symbol));
        return fail(kInvalidHandle, "the descriptor does not exist");
    }
    count_live(kind, -1);
    return kOk;
}

}  // namespace

const char* name_of_type(int type) {
    switch (type) {
        case kFloat32: return "float32";
        case kFloat16: return "float16";
        case kInt8: return "int8";
        case kInt32: return "int32";
        case kUInt8: return "uint8";
        case kInt16: return "int16";
        case kInt64: return "int64";
        case kFloat64: return "float64";
        case kBool: return "bool";
        case kBFloat16: return "bfloat16";
        default: return nullptr;
    }
}

size_t bytes_of_type(int type) {
    switch (type) {
        case kInt8:
        case kUInt8:
        case kBool: return 1;
        case kFloat16:
        case kBFloat16:
        case kInt16: return 2;
        case kFloat32:
        case kInt32: return 4;
        default: return 8;
    }
}

int64_t Tensor::num_elements() const {
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    return count;
}

size_t Tensor::extent_bytes() const {
    if (num_elements() == 0) return 0;
    int64_t last = 0;
    for (size_t axis = 0; axis < shape.size(); ++axis) last += (shape[axis] - 1) * strides[axis];
    return static_cast<size_t>(last + 1) * bytes_of_type(type);
}

std::shared_ptr<const Tensor> tensor_of(const void* handle, const std::string& purpose) {
    if (handle == nullptr) return nullptr;
    const std::lock_guard lock(descriptors().mutex);
    const auto found = descriptors().tensors.find(handle);
    if (found != descriptors().tensors.end()) return found->second;
    violate("unknown or destroyed descriptor: " + purpose);
    return nullptr;
}

double scalar_value(const void* scalar, const char* purpose) {
    const std::lock_guard lock(descriptors().mutex);
    const auto found = descriptors().scalars.find(scalar);
    if (found != descriptors().scalars.end()) return found->second;
    violate("unknown or destroyed descriptor: " + std::string(purpose));
    return std::nan("");
}

}  // namespace npu_stub

using namespace npu_stub;

EXPORT const void* aclCreateTensor(const int64_t* shape, uint64_t num_dims, int type, const int64_t* strides,
                                   int64_t offset, int, const int64_t* storage_shape, uint64_t num_storage_dims,
                                   void* storage) {
    const Entry entry("aclCreateTensor", nullptr, {{"type", type}, {"dims", static_cast<int64_t>(num_dims)}});
    if (entry.code != kOk) {
        return nullptr;
    }
    auto tensor = std::make_shared<Tensor>();
    tensor->type = type;
    tensor->shape.assign(shape, shape + num_dims);
    tensor->strides.assign(strides, strides + num_dims);
    tensor->offset = offset;
    tensor->storage_shape.assign(storage_shape, storage_shape + num_storage_dims);
    tensor->storage = static_cast<char*>(storage);
    if (const std::string complaint = complaint_about(*tensor); !complaint.empty()) {
        fail(kAclnnInvalidArgument, "aclCreateTensor: " + complaint);
        return nullptr;
    }
    const void* handle = new_handle();
    const std::lock_guard lock(descriptors().mutex);
    descriptors().tensors[handle] = tensor;
    count_live("tensors", 1);
    return handle;
}

EXPORT int aclDestroyTensor(const void* tensor) {
    return destroy("aclDestroyTensor", "tensors", descriptors().tensors, tensor);
}

EXPORT const void* aclCreateScalar(const void* value, int type) {
    const Entry entry("aclCreateScalar", nullptr, {{"type", type}});
    if (entry.code != kOk) return nullptr;
    const void* handle = new_handle();
    const std::lock_guard lock(descriptors().mutex);
    descriptors().scalars[handle] = read_scalar(value, type);
    count_live("scalars", 1);
    return handle;
}

EXPORT int aclDestroyScalar(const void* scalar) {
    return destroy("aclDestroyScalar", "scalars", descriptors().scalars, scalar);
}
