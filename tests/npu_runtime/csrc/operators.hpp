/// aclnn operators: tensors as descriptors, and the two phases of a call.
///
/// Phase one (aclnnXGetWorkspaceSize) makes an executor from an Operator, phase two (aclnnX) queues it.
/// What is declared SHARED is used by the custom package's library too.

#pragma once

#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "stub.hpp"

#define SHARED __attribute__((visibility("default")))

namespace npu_stub {

/// aclDataType, as far as tensors here have it.
enum DataType : int {
    kFloat32 = 0,
    kFloat16 = 1,
    kInt8 = 2,
    kInt32 = 3,
    kUInt8 = 4,
    kInt16 = 6,
    kInt64 = 9,
    kFloat64 = 11,
    kBool = 12,
    kBFloat16 = 27,
};

/// Name as NumPy has it, and bytes per element; nullptr for a type that no tensor here has.
const char* name_of_type(int type);
size_t bytes_of_type(int type);

/// What aclCreateTensor was told.
struct Tensor {
    int type;
    std::vector<int64_t> shape;
    std::vector<int64_t> strides;  // elements
    int64_t offset;                // elements
    std::vector<int64_t> storage_shape;
    char* storage;

    int64_t num_elements() const;
    char* begin() const { return storage + offset * static_cast<int64_t>(bytes_of_type(type)); }
    /// From begin() to behind the last element.
    size_t extent_bytes() const;
};

/// The value of a live aclScalar; NaN, with a violation, if there is none.
double scalar_value(const void* scalar, const char* purpose);

/// The tensor of a live handle; nullptr, with a violation, for another one that is not null.
std::shared_ptr<const Tensor> tensor_of(const void* handle, const std::string& purpose);

struct TensorArgument {
    const char* name;
    const void* handle;  // nullptr: absent
    bool is_optional = false;
    std::shared_ptr<const Tensor> tensor = nullptr;  // filled in by prepare()
};

using Attribute = std::variant<double, int64_t, bool, std::string>;

/// A call of an operator, complete.
struct Operator {
    const char* symbol;
    std::vector<TensorArgument> tensors;
    std::vector<std::pair<const char*, Attribute>> attributes;
    uint64_t workspace_bytes = 0;
    std::function<Outcome(const Operator&)> run = nullptr;  // nullptr: the Python executor
};

/// Phase one: checks the descriptors and gives out an executor.
SHARED int prepare(const char* phase_symbol, Operator call, uint64_t* workspace_bytes, void** executor);

/// Phase two: queues the executor and takes it back.
SHARED int launch(const char* symbol, void* workspace, uint64_t workspace_bytes, void* executor, void* stream);

/// Runs a JSON request by the function that stub.py registered.
Outcome execute_in_python(const std::string& request);

}  // namespace npu_stub
