/// CANN's own attention operators: the two phases of an aclnn call, with arguments by name.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "library.hpp"
#include "tensors.hpp"

namespace fag::cann {

/// Value of an argument; monostate is an absent tensor.
using Value = std::variant<std::monostate, TensorRef, double, std::int64_t, bool, std::string>;
using Values = std::map<std::string, Value, std::less<>>;

struct DestroyExecutor {
    void operator()(aclOpExecutor* executor) const;
};

/// A call between its two phases. Whatever happens, descriptors and executor are freed: by run(), or with the object; of
/// a first phase that fails there is no executor.
class AclnnCall {
public:
    /// First phase. Optional tensors may be left out.
    ///
    /// Throws Missing, Error, or std::invalid_argument: an operator or an argument that the table does not have, a
    /// missing argument, or a value of another type.
    AclnnCall(const std::string& symbol, const Values& values);

    std::uint64_t workspace_bytes() const { return workspace_bytes_; }

    /// Second phase, once: queues the operator on `stream`. `workspace` has workspace_bytes() and may be null for none.
    ///
    /// Throws Error, or std::invalid_argument for a second run or a missing workspace.
    void run(void* workspace, aclrtStream stream);

private:
    const std::string symbol_;
    const OperatorApi api_;
    std::vector<Tensor> tensors_;
    std::uint64_t workspace_bytes_ = 0;
    /// The second phase consumes it, whether it succeeds or not; null afterwards.
    std::unique_ptr<aclOpExecutor, DestroyExecutor> executor_;
};

/// An argument of an operator's first phase; kind is "tensor", "optional tensor", "double", "int64", "bool" or "layout".
struct Argument {
    const char* name;
    const char* kind;
};

/// The arguments of an operator in order. Throws std::invalid_argument for another operator.
std::span<const Argument> aclnn_arguments(const std::string& symbol);

}  // namespace fag::cann
