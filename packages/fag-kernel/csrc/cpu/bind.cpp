/// Python face of the CPU kernels; called by fag_kernel.abi only.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cmath>
#include <optional>
#include <string>

#include "backward.hpp"
#include "forward.hpp"
#include "levels.hpp"
#include "metadata.hpp"

namespace py = pybind11;

namespace fag::cpu {
namespace {

using Words = py::array_t<std::int32_t, py::array::c_style>;
/// Element strides of batch, sequence and head.
using Strides = std::array<std::int64_t, 3>;

DType dtype_of(const std::string& name) {
    if (name == "float16") return DType::f16;
    if (name == "bfloat16") return DType::bf16;
    if (name == "float32") return DType::f32;
    throw py::type_error("fag_kernel: dtype must be float16, bfloat16 or float32, got " + name + ".");
}

Array array_of(std::uintptr_t address, const Strides& strides) {
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

/// What `make` gives, without Python's lock: a large problem takes milliseconds to look at.
template <typename Make>
auto unlocked(const Make& make) {
    const py::gil_scoped_release released;
    return make();
}

/// Forwards of one problem on arrays that lie alike: what does not depend on their addresses is looked at once.
class PreparedForward {
public:
    PreparedForward(const Problem& problem, const Words& metadata, const std::string& dtype, const Strides& q,
                    const Strides& k, const Strides& v, const Strides& out)
        : problem_(problem), dtype_(dtype_of(dtype)), q_(q), k_(k), v_(v), out_(out),
          plan_(unlocked([&problem, words = metadata_of(metadata)] { return ForwardPlan(problem, words); })) {}

    void run(std::uintptr_t q, std::uintptr_t k, std::uintptr_t v, std::uintptr_t sinks, std::uintptr_t out,
             std::uintptr_t lse, double softmax_scale, std::int64_t num_threads) {
        const ForwardArgs args{problem_, dtype_, array_of(q, q_), array_of(k, k_), array_of(v, v_), floats_at(sinks),
                               array_of(out, out_), floats_at(lse), checked_scale(softmax_scale),
                               checked_threads(num_threads)};
        unlocked([&] { forward(args, *plan_.schedule(args.num_threads)); });
    }

private:
    const Problem& problem_;
    DType dtype_;
    Strides q_, k_, v_, out_;
    ForwardPlan plan_;
};

/// Likewise for gradients.
class PreparedBackward {
public:
    PreparedBackward(const Problem& problem, const Words& metadata, const std::string& dtype, const Strides& q,
                     const Strides& k, const Strides& v, const Strides& dout, const Strides& attn_out,
                     const Strides& dq, const Strides& dk, const Strides& dv)
        : problem_(problem), dtype_(dtype_of(dtype)), q_(q), k_(k), v_(v), dout_(dout), attn_out_(attn_out), dq_(dq),
          dk_(dk), dv_(dv) {
        unlocked([&problem, words = metadata_of(metadata)] { check_grad_work(problem, words); });
    }

    void run(std::uintptr_t q, std::uintptr_t k, std::uintptr_t v, std::uintptr_t dout, std::uintptr_t attn_out,
             std::uintptr_t lse, std::uintptr_t dlse, std::uintptr_t sinks, std::uintptr_t dq, std::uintptr_t dk,
             std::uintptr_t dv, std::uintptr_t dsinks, double softmax_scale, std::int64_t num_threads) const {
        const BackwardArgs args{problem_, dtype_, array_of(q, q_), array_of(k, k_), array_of(v, v_),
                                array_of(dout, dout_), array_of(attn_out, attn_out_), floats_at(lse), floats_at(dlse),
                                floats_at(sinks), array_of(dq, dq_), array_of(dk, dk_), array_of(dv, dv_),
                                floats_at(dsinks), checked_scale(softmax_scale), checked_threads(num_threads)};
        unlocked([&] { backward(args); });
    }

private:
    const Problem& problem_;
    DType dtype_;
    Strides q_, k_, v_, dout_, attn_out_, dq_, dk_, dv_;
};

}  // namespace

void bind_cpu(py::module_& m) {
    // The problem, argument 2, lives as long as what was prepared for it.
    py::class_<PreparedForward>(m, "PreparedForward", "See fag_kernel.abi.prepare_forward.")
        .def(py::init<const Problem&, const Words&, const std::string&, const Strides&, const Strides&, const Strides&,
                      const Strides&>(),
             py::keep_alive<1, 2>())
        .def("run", &PreparedForward::run);
    py::class_<PreparedBackward>(m, "PreparedBackward", "See fag_kernel.abi.prepare_backward.")
        .def(py::init<const Problem&, const Words&, const std::string&, const Strides&, const Strides&, const Strides&,
                      const Strides&, const Strides&, const Strides&, const Strides&, const Strides&>(),
             py::keep_alive<1, 2>())
        .def("run", &PreparedBackward::run);
    m.def("cpu_level", [] { return std::string(current_isa().name); }, "Instruction-set level in use.");
    m.def("cpu_levels", &available_levels, "Levels this CPU can run, weakest first.");
    m.def("cpu_levels_only_by_name", &levels_only_by_name, "Levels that are never chosen by themselves, and why.");
    m.def(
        "set_cpu_level", [](const std::optional<std::string>& name) { set_level(name.value_or("")); }, py::arg("name"),
        "Use another level, or the best one again with None.");
}

}  // namespace fag::cpu
