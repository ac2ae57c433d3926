/// Python face of the CPU kernels; called by fag_kernel.abi only.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "backward.hpp"
#include "forward.hpp"
#include "levels.hpp"

namespace py = pybind11;

namespace fag::cpu {
namespace {

using Words = py::array_t<std::int32_t, py::array::c_style>;
/// (address, element strides of batch, sequence and head).
using ArrayRef = std::pair<std::uintptr_t, std::array<std::int64_t, 3>>;

DType dtype_of(const std::string& name) {
    if (name == "float16") return DType::f16;
    if (name == "bfloat16") return DType::bf16;
    if (name == "float32") return DType::f32;
    throw py::type_error("fag_kernel: dtype must be float16, bfloat16 or float32, got " + name + ".");
}

Array array_of(const ArrayRef& ref) {
    const auto& [address, strides] = ref;
    return {reinterpret_cast<std::byte*>(address), strides[0], strides[1], strides[2]};
}

float* floats_at(std::uintptr_t address) { return reinterpret_cast<float*>(address); }

float checked_scale(double scale) {
    if (!std::isfinite(static_cast<float>(scale))) {
        throw std::invalid_argument("fag_kernel: softmax_scale must be finite in float32, got " + std::to_string(scale) +
                                    ".");
    }
    return static_cast<float>(scale);
}

int checked_threads(std::int64_t num_threads) {
    if (num_threads < 1) fail("num_threads", "be at least 1", num_threads);
    return static_cast<int>(std::min<std::int64_t>(num_threads, 4096));
}

Metadata metadata_of(const Words& words) {
    if (words.ndim() != 1) fail("metadata", "have one dimension", words.ndim());
    return {words.data(), static_cast<std::int64_t>(words.size())};
}

void cpu_forward(const Problem& problem, const Words& metadata, const std::string& dtype, const ArrayRef& q,
                 const ArrayRef& k, const ArrayRef& v, std::uintptr_t sinks, const ArrayRef& out, std::uintptr_t lse,
                 double softmax_scale, std::int64_t num_threads) {
    const ForwardArgs args{problem, dtype_of(dtype), array_of(q), array_of(k), array_of(v), floats_at(sinks),
                           array_of(out), floats_at(lse), checked_scale(softmax_scale), checked_threads(num_threads)};
    const Metadata words = metadata_of(metadata);
    const py::gil_scoped_release unlocked;
    forward(args, words);
}

void cpu_backward(const Problem& problem, const Words& metadata, const std::string& dtype, const ArrayRef& q,
                  const ArrayRef& k, const ArrayRef& v, const ArrayRef& dout, const ArrayRef& attn_out,
                  std::uintptr_t lse, std::uintptr_t dlse, std::uintptr_t sinks, const ArrayRef& dq, const ArrayRef& dk,
                  const ArrayRef& dv, std::uintptr_t dsinks, double softmax_scale, std::int64_t num_threads) {
    const BackwardArgs args{problem, dtype_of(dtype), array_of(q), array_of(k), array_of(v), array_of(dout),
                            array_of(attn_out), floats_at(lse), floats_at(dlse), floats_at(sinks), array_of(dq),
                            array_of(dk), array_of(dv), floats_at(dsinks), checked_scale(softmax_scale),
                            checked_threads(num_threads)};
    const Metadata words = metadata_of(metadata);
    const py::gil_scoped_release unlocked;
    backward(args, words);
}

}  // namespace

void bind_cpu(py::module_& m) {
    m.def("cpu_forward", &cpu_forward, "Attention; see fag_kernel.abi.forward.");
    m.def("cpu_backward", &cpu_backward, "Gradient of attention; see fag_kernel.abi.backward.");
    m.def("cpu_level", [] { return std::string(current_isa().name); }, "Instruction-set level in use.");
    m.def("cpu_levels", &available_levels, "Levels this CPU can run, weakest first.");
    m.def("cpu_levels_only_by_name", &levels_only_by_name, "Levels that are never chosen by themselves, and why.");
    m.def(
        "set_cpu_level", [](const std::optional<std::string>& name) { set_level(name.value_or("")); }, py::arg("name"),
        "Use another level, or the best one again with None.");
}

}  // namespace fag::cpu
