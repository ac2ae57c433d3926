/// Tensors as CANN's operators take them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "api.hpp"

namespace fag::cann {

/// A view of device memory.
struct TensorRef {
    std::uint64_t storage;  ///< address of the storage's first element
    std::string dtype;      ///< "float32" and the like, see tensors.cpp
    std::vector<std::int64_t> shape;
    std::vector<std::int64_t> strides;  ///< in elements
    std::int64_t offset;                ///< elements from the storage's begin to the view's
    std::vector<std::int64_t> storage_shape;
};

struct DestroyTensor {
    void operator()(aclTensor* tensor) const;
};
/// CANN's descriptor of a tensor; it copies shape and strides, and owns no device memory.
using Tensor = std::unique_ptr<aclTensor, DestroyTensor>;

/// Throws Missing, Error, or std::invalid_argument for a dtype that CANN's number is not known of, or strides that are
/// not one per dimension.
Tensor make_tensor(const TensorRef& view);

}  // namespace fag::cann
