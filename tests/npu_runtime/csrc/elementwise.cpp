/// The operators of libopapi that torch_npu's copies, casts, fills and sums of gradients need, in any strides.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "operators.hpp"

namespace npu_stub {

namespace {

double half_to_double(uint16_t bits) {
    const int exponent = bits >> 10 & 0x1F;
    const int fraction = bits & 0x3FF;
    double value;
    if (exponent == 0) value = std::ldexp(fraction, -24);
    else if (exponent == 31) value = fraction == 0 ? INFINITY : NAN;
    else value = std::ldexp(1024 + fraction, exponent - 25);
    return bits & 0x8000 ? -value : value;
}

uint16_t double_to_half(double value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return sign | 0x7E00;
    const double magnitude = std::fabs(value);
    if (magnitude == 0) return sign;
    if (magnitude >= 65520.0) return sign | 0x7C00;
    int exponent = 0;
    std::frexp(magnitude, &exponent);
    const int scale = std::max(exponent - 11, -24);  // of the last place
    const auto places = static_cast<int>(std::nearbyint(std::ldexp(magnitude, -scale)));
    return sign | static_cast<uint16_t>(((scale + 24) << 10) + places);
}

double bfloat16_to_double(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

uint16_t float_to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);  // to nearest, ties to even
}

template <typename Value>
double load_as(const char* address) {
    Value value;
    std::memcpy(&value, address, sizeof value);
    return static_cast<double>(value);
}

template <typename Value>
void store_as(char* address, double number) {
    const auto value = static_cast<Value>(number);
    std::memcpy(address, &value, sizeof value);
}

double load(const char* address, int type) {
    switch (type) {
        case kFloat32: return load_as<float>(address);
        case kFloat16: return half_to_double(static_cast<uint16_t>(load_as<uint16_t>(address)));
        case kBFloat16: return bfloat16_to_double(static_cast<uint16_t>(load_as<uint16_t>(address)));
        case kFloat64: return load_as<double>(address);
        case kInt8: return load_as<int8_t>(address);
        case kUInt8: return load_as<uint8_t>(address);
        case kBool: return load_as<uint8_t>(address);
        case kInt16: return load_as<int16_t>(address);
        case kInt32: return load_as<int32_t>(address);
        default: return load_as<int64_t>(address);
    }
}

void store(char* address, int type, double value) {
    switch (type) {
        case kFloat32: return store_as<float>(address, value);
        case kFloat16: return store_as<uint16_t>(address, double_to_half(value));
        case kBFloat16: return store_as<uint16_t>(address, float_to_bfloat16(static_cast<float>(value)));
        case kFloat64: return store_as<double>(address, value);
        case kInt8: return store_as<int8_t>(address, value);
        case kUInt8: return store_as<uint8_t>(address, value);
        case kBool: return store_as<uint8_t>(address, value != 0);
        case kInt16: return store_as<int16_t>(address, value);
        case kInt32: return store_as<int32_t>(address, value);
        default: return store_as<int64_t>(address, value);
    }
}

/// Calls `visit(index)` for every index of a shape, the last axis fastest.
template <typename Visit>
void for_each_index(const std::vector<int64_t>& shape, Visit visit) {
    for (const int64_t extent : shape) {
        if (extent == 0) return;
    }
    std::vector<int64_t> index(shape.size(), 0);
    while (true) {
        visit(index);
        size_t axis = shape.size();
        while (axis > 0 && ++index[axis - 1] == shape[axis - 1]) index[--axis] = 0;
        if (axis == 0) return;
    }
}

/// Address of the element at an index of a shape that the tensor is broadcast to.
char* element(const Tensor& tensor, const std::vector<int64_t>& index) {
    const size_t skipped = index.size() - tensor.shape.size();
    int64_t offset = 0;
    for (size_t axis = 0; axis < tensor.shape.size(); ++axis) {
        if (tensor.shape[axis] != 1) offset += index[skipped + axis] * tensor.strides[axis];
    }
    return tensor.begin() + offset * static_cast<int64_t>(bytes_of_type(tensor.type));
}

bool can_broadcast(const Tensor& from, const Tensor& to) {
    if (from.shape.size() > to.shape.size()) return false;
    const size_t skipped = to.shape.size() - from.shape.size();
    for (size_t axis = 0; axis < from.shape.size(); ++axis) {
        if (from.shape[axis] != 1 && from.shape[axis] != to.shape[skipped + axis]) return false;
    }
    return true;
}

Outcome shape_mismatch(const Operator& call) {
    return {kAclnnInvalidArgument, std::string(call.symbol) + ": shapes cannot be broadcast"};
}

/// tensors[1] into tensors[0].
Outcome copy(const Operator& call) {
    const Tensor& to = *call.tensors[0].tensor;
    const Tensor& from = *call.tensors[1].tensor;
    if (!can_broadcast(from, to)) return shape_mismatch(call);
    for_each_index(to.shape, [&](const auto& index) {
        char* target = element(to, index);
        const char* source = element(from, index);
        if (to.type == from.type) std::memcpy(target, source, bytes_of_type(to.type));
        else store(target, to.type, load(source, from.type));
    });
    return {};
}

/// A value into tensors[0].
std::function<Outcome(const Operator&)> fill(double value) {
    return [value](const Operator& call) -> Outcome {
        const Tensor& to = *call.tensors[0].tensor;
        for_each_index(to.shape, [&](const auto& index) { store(element(to, index), to.type, value); });
        return {};
    };
}

/// combine(element of tensors[1], of tensors[2]) into tensors[0]. Without tensors[2] the second one is `constant`.
template <typename Combine>
std::function<Outcome(const Operator&)> binary(Combine combine, double constant = 0) {
    return [combine, constant](const Operator& call) -> Outcome {
        const Tensor& to = *call.tensors[0].tensor;
        const Tensor& left = *call.tensors[1].tensor;
        const Tensor* right = call.tensors.size() > 2 ? call.tensors[2].tensor.get() : nullptr;
        if (!can_broadcast(left, to) || (right != nullptr && !can_broadcast(*right, to))) return shape_mismatch(call);
        for_each_index(to.shape, [&](const auto& index) {
            const double other = right == nullptr ? constant : load(element(*right, index), right->type);
            store(element(to, index), to.type, combine(load(element(left, index), left.type), other));
        });
        return {};
    };
}

auto add(double alpha) {
    return [alpha](double left, double right) { return left + alpha * right; };
}

double multiply(double left, double right) { return left * right; }

}  // namespace

}  // namespace npu_stub

using namespace npu_stub;

/// Phase two of an operator is the same for all.
#define PHASE_TWO(name)                                                                          \
    EXPORT int name(void* workspace, uint64_t bytes, void* executor, void* stream) {             \
        return launch(#name, workspace, bytes, executor, stream);                                \
    }

EXPORT int aclnnInplaceCopyGetWorkspaceSize(void* self, const void* source, uint64_t* bytes, void** executor) {
    return prepare("aclnnInplaceCopyGetWorkspaceSize",
                   {"aclnnInplaceCopy", {{"self", self}, {"source", source}}, {}, 0, copy}, bytes, executor);
}
PHASE_TWO(aclnnInplaceCopy)

EXPORT int aclnnCastGetWorkspaceSize(const void* self, int, void* out, uint64_t* bytes, void** executor) {
    return prepare("aclnnCastGetWorkspaceSize", {"aclnnCast", {{"out", out}, {"self", self}}, {}, 0, copy}, bytes,
                   executor);
}
PHASE_TWO(aclnnCast)

EXPORT int aclnnInplaceZeroGetWorkspaceSize(void* self, uint64_t* bytes, void** executor) {
    return prepare("aclnnInplaceZeroGetWorkspaceSize", {"aclnnInplaceZero", {{"self", self}}, {}, 0, fill(0)}, bytes,
                   executor);
}
PHASE_TWO(aclnnInplaceZero)

EXPORT int aclnnInplaceOneGetWorkspaceSize(void* self, uint64_t* bytes, void** executor) {
    return prepare("aclnnInplaceOneGetWorkspaceSize", {"aclnnInplaceOne", {{"self", self}}, {}, 0, fill(1)}, bytes,
                   executor);
}
PHASE_TWO(aclnnInplaceOne)

EXPORT int aclnnInplaceFillScalarGetWorkspaceSize(void* self, const void* value, uint64_t* bytes, void** executor) {
    const double number = scalar_value(value, "aclnnInplaceFillScalar value");
    return prepare("aclnnInplaceFillScalarGetWorkspaceSize",
                   {"aclnnInplaceFillScalar", {{"self", self}}, {}, 0, fill(number)}, bytes, executor);
}
PHASE_TWO(aclnnInplaceFillScalar)

// ---- sums and products; `s` at the end of a name: with a scalar ----

EXPORT int aclnnAddGetWorkspaceSize(const void* self, const void* other, const void* alpha, void* out,
                                    uint64_t* bytes, void** executor) {
    const auto run = binary(add(scalar_value(alpha, "aclnnAdd alpha")));
    return prepare("aclnnAddGetWorkspaceSize",
                   {"aclnnAdd", {{"out", out}, {"self", self}, {"other", other}}, {}, 0, run}, bytes, executor);
}
PHASE_TWO(aclnnAdd)

EXPORT int aclnnAddsGetWorkspaceSize(const void* self, const void* other, const void* alpha, void* out,
                                     uint64_t* bytes, void** executor) {
    const auto run = binary(add(scalar_value(alpha, "aclnnAdds alpha")), scalar_value(other, "aclnnAdds other"));
    return prepare("aclnnAddsGetWorkspaceSize", {"aclnnAdds", {{"out", out}, {"self", self}}, {}, 0, run}, bytes,
                   executor);
}
PHASE_TWO(aclnnAdds)

EXPORT int aclnnInplaceAddGetWorkspaceSize(void* self, const void* other, const void* alpha, uint64_t* bytes,
                                           void** executor) {
    const auto run = binary(add(scalar_value(alpha, "aclnnInplaceAdd alpha")));
    return prepare("aclnnInplaceAddGetWorkspaceSize",
                   {"aclnnInplaceAdd", {{"self", self}, {"self", self}, {"other", other}}, {}, 0, run}, bytes,
                   executor);
}
PHASE_TWO(aclnnInplaceAdd)

EXPORT int aclnnInplaceAddsGetWorkspaceSize(void* self, const void* other, const void* alpha, uint64_t* bytes,
                                            void** executor) {
    const auto run =
        binary(add(scalar_value(alpha, "aclnnInplaceAdds alpha")), scalar_value(other, "aclnnInplaceAdds other"));
    return prepare("aclnnInplaceAddsGetWorkspaceSize",
                   {"aclnnInplaceAdds", {{"self", self}, {"self", self}}, {}, 0, run}, bytes, executor);
}
PHASE_TWO(aclnnInplaceAdds)

EXPORT int aclnnMulGetWorkspaceSize(const void* self, const void* other, void* out, uint64_t* bytes,
                                    void** executor) {
    return prepare("aclnnMulGetWorkspaceSize",
                   {"aclnnMul", {{"out", out}, {"self", self}, {"other", other}}, {}, 0, binary(multiply)}, bytes,
                   executor);
}
PHASE_TWO(aclnnMul)

EXPORT int aclnnMulsGetWorkspaceSize(const void* self, const void* other, void* out, uint64_t* bytes,
                                     void** executor) {
    const auto run = binary(multiply, scalar_value(other, "aclnnMuls other"));
    return prepare("aclnnMulsGetWorkspaceSize", {"aclnnMuls", {{"out", out}, {"self", self}}, {}, 0, run}, bytes,
                   executor);
}
PHASE_TWO(aclnnMuls)
