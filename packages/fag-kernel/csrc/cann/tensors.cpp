#include "tensors.hpp"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "library.hpp"
#include "status.hpp"

namespace fag::cann {

namespace {

/// Numbers of aclDataType.
struct DataType {
    const char* name;
    int number;
};
constexpr DataType kDataTypes[] = {
    {"float32", 0}, {"float16", 1}, {"int8", 2}, {"int32", 3}, {"uint8", 4}, {"int64", 9}, {"bool", 12}, {"bfloat16", 27},
};

constexpr int kFormatNd = 2;  ///< ACL_FORMAT_ND

int data_type(const std::string& name) {
    const auto* found = std::find_if(std::begin(kDataTypes), std::end(kDataTypes),
                                     [&](const DataType& type) { return name == type.name; });
    if (found == std::end(kDataTypes)) {
        std::string names;
        for (const DataType& type : kDataTypes) names += (names.empty() ? "" : ", ") + std::string(type.name);
        throw std::invalid_argument("cann: dtype must be one of " + names + ", got " + name + ".");
    }
    return found->number;
}

}  // namespace

void DestroyTensor::operator()(aclTensor* tensor) const { tensor_api().aclDestroyTensor(tensor); }

Tensor make_tensor(const TensorRef& view) {
    if (view.strides.size() != view.shape.size()) {
        throw std::invalid_argument("cann: strides must be one per dimension, got " +
                                    std::to_string(view.strides.size()) + " strides for " +
                                    std::to_string(view.shape.size()) + " dimensions.");
    }
    Tensor tensor(tensor_api().aclCreateTensor(view.shape.data(), view.shape.size(), data_type(view.dtype),
                                               view.strides.data(), view.offset, kFormatNd, view.storage_shape.data(),
                                               view.storage_shape.size(), reinterpret_cast<void*>(view.storage)));
    if (tensor == nullptr) throw failure("aclCreateTensor", std::nullopt);
    return tensor;
}

}  // namespace fag::cann
