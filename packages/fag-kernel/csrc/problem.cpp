#include "problem.hpp"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <limits>

namespace py = pybind11;

namespace fag {

void fail(const std::string& name, const std::string& rule, std::int64_t value) {
    throw std::invalid_argument("fag_kernel: " + name + " must " + rule + ", got " + std::to_string(value) + ".");
}

namespace {

/// Upper bound of sizes that are summed or shifted below; leaves 2^8 of headroom in int64.
constexpr std::int64_t kMaxElements = std::int64_t{1} << 55;
/// Bound of a single length, window or head count, so that sums and differences of them cannot overflow.
constexpr std::int64_t kMaxExtent = std::int64_t{1} << 40;
/// Tokens of a tensor: 2^16 batch entries of 2^31 tokens reach that far with stride 0.
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 48;

void check_extent(const char* name, std::int64_t value, std::int64_t low) {
    if (value < low) fail(name, "be at least " + std::to_string(low), value);
    if (value > kMaxExtent) fail(name, "be at most 2^40", value);
}

void check_side(const Problem& p, const char* side, std::int64_t s, std::int64_t t, std::int64_t n, std::int64_t width,
                const std::vector<std::int64_t>& lengths, const std::vector<std::int64_t>& starts) {
    const std::string suffix = std::string("_") + side;
    const auto count = static_cast<std::int64_t>(lengths.size());
    if (count != p.b) fail("lengths" + suffix, "have b entries", count);
    if (static_cast<std::int64_t>(starts.size()) != p.b) {
        fail("starts" + suffix, "have b entries", static_cast<std::int64_t>(starts.size()));
    }
    if (!p.is_tnd() && checked_product("b * s", p.b, s) != t) fail("t" + suffix, "be b * s", t);
    // Of one tensor, and of the longest rectangle of rows that is ever numbered.
    if (checked_product("elements of a tensor", t, n, width) > kMaxElements) {
        fail("elements" + suffix, "be at most 2^55", checked_product("elements of a tensor", t, n, width));
    }
    for (std::int64_t i = 0; i < p.b; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const std::int64_t end = i + 1 < p.b ? starts[at + 1] : t;
        if (starts[at] < 0 || starts[at] > end || end > t) {
            fail("starts" + suffix, "be non-decreasing from 0 to t", starts[at]);
        }
        if (lengths[at] < 0 || lengths[at] > end - starts[at]) {
            fail("lengths" + suffix, "be between 0 and the slot's length", lengths[at]);
        }
        if (lengths[at] > s) fail("lengths" + suffix, "be at most s", lengths[at]);
    }
}

std::vector<std::int64_t> to_vector(const py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>& values) {
    return {values.data(), values.data() + values.size()};
}

}  // namespace

std::int64_t Problem::slot_q(std::int64_t i) const {
    const auto at = static_cast<std::size_t>(i);
    return (i + 1 < b ? starts_q[at + 1] : t1) - starts_q[at];
}

std::int64_t Problem::slot_kv(std::int64_t i) const {
    const auto at = static_cast<std::size_t>(i);
    return (i + 1 < b ? starts_kv[at + 1] : t2) - starts_kv[at];
}

std::int64_t Problem::longest_q() const {
    return lengths_q.empty() ? 0 : *std::max_element(lengths_q.begin(), lengths_q.end());
}

std::int64_t Problem::longest_kv() const {
    return lengths_kv.empty() ? 0 : *std::max_element(lengths_kv.begin(), lengths_kv.end());
}

void Problem::check() const {
    check_extent("b", b, 0);
    check_extent("n1", n1, 1);
    check_extent("n2", n2, 1);
    check_extent("d", d, 1);
    check_extent("dv", dv, 1);
    check_extent("s1", s1, 0);
    check_extent("s2", s2, 0);
    if (t1 < 0 || t1 > kMaxTokens) fail("t1", "be between 0 and 2^48", t1);
    if (t2 < 0 || t2 > kMaxTokens) fail("t2", "be between 0 and 2^48", t2);
    check_extent("win_left", win_left, kUnbounded);
    check_extent("win_right", win_right, kUnbounded);
    if (n1 % n2 != 0) fail("n1", "be a multiple of n2=" + std::to_string(n2), n1);
    if (g != n1 / n2) fail("g", "be n1 / n2", g);
    if (dv > d) fail("dv", "be at most d=" + std::to_string(d), dv);
    if (layout != Layout::bsnd && layout != Layout::bnsd && layout != Layout::tnd) {
        fail("layout", "be 0, 1 or 2", static_cast<std::int64_t>(layout));
    }
    if (mask_mode != MaskMode::none && mask_mode != MaskMode::causal && mask_mode != MaskMode::window) {
        fail("mask_mode", "be 0, 3 or 4", static_cast<std::int64_t>(mask_mode));
    }
    if (mask_mode != MaskMode::window && (win_left != kUnbounded || win_right != kUnbounded)) {
        fail("win_left and win_right", "be -1 without a window mask", win_left != kUnbounded ? win_left : win_right);
    }
    check_side(*this, "q", s1, t1, n1, d, lengths_q, starts_q);
    check_side(*this, "kv", s2, t2, n2, d, lengths_kv, starts_kv);
}

void bind_problem(py::module_& m) {
    using Lengths = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>;
    py::class_<Problem>(m, "Problem", "Native mirror of fag_metadata.AttentionProblem; see csrc/problem.hpp.")
        .def(py::init([](int layout, std::int64_t b, std::int64_t n1, std::int64_t n2, std::int64_t d, std::int64_t dv,
                         std::int64_t s1, std::int64_t s2, std::int64_t t1, std::int64_t t2, int mask_mode,
                         std::int64_t win_left, std::int64_t win_right, bool has_cu_seqlens_q, bool has_cu_seqlens_kv,
                         bool has_seqused_q, bool has_seqused_kv, bool is_variable, std::int64_t max_seqlen_q,
                         std::int64_t max_seqlen_kv, const Lengths& lengths_q, const Lengths& lengths_kv,
                         const Lengths& starts_q, const Lengths& starts_kv) {
                 Problem p;
                 p.layout = static_cast<Layout>(layout);
                 p.b = b;
                 p.n1 = n1;
                 p.n2 = n2;
                 p.g = n2 > 0 ? n1 / n2 : 0;
                 p.d = d;
                 p.dv = dv;
                 p.s1 = s1;
                 p.s2 = s2;
                 p.t1 = t1;
                 p.t2 = t2;
                 p.mask_mode = static_cast<MaskMode>(mask_mode);
                 p.win_left = win_left;
                 p.win_right = win_right;
                 p.has_cu_seqlens_q = has_cu_seqlens_q;
                 p.has_cu_seqlens_kv = has_cu_seqlens_kv;
                 p.has_seqused_q = has_seqused_q;
                 p.has_seqused_kv = has_seqused_kv;
                 p.is_variable = is_variable;
                 p.max_seqlen_q = max_seqlen_q;
                 p.max_seqlen_kv = max_seqlen_kv;
                 p.lengths_q = to_vector(lengths_q);
                 p.lengths_kv = to_vector(lengths_kv);
                 p.starts_q = to_vector(starts_q);
                 p.starts_kv = to_vector(starts_kv);
                 p.check();
                 return p;
             }),
             py::kw_only(), py::arg("layout"), py::arg("b"), py::arg("n1"), py::arg("n2"), py::arg("d"), py::arg("dv"),
             py::arg("s1"), py::arg("s2"), py::arg("t1"), py::arg("t2"), py::arg("mask_mode"), py::arg("win_left"),
             py::arg("win_right"), py::arg("has_cu_seqlens_q"), py::arg("has_cu_seqlens_kv"), py::arg("has_seqused_q"),
             py::arg("has_seqused_kv"), py::arg("is_variable"), py::arg("max_seqlen_q"), py::arg("max_seqlen_kv"),
             py::arg("lengths_q"), py::arg("lengths_kv"), py::arg("starts_q"), py::arg("starts_kv"))
        .def_readonly("b", &Problem::b)
        .def_readonly("n1", &Problem::n1)
        .def_readonly("n2", &Problem::n2)
        .def_readonly("g", &Problem::g)
        .def_readonly("d", &Problem::d)
        .def_readonly("dv", &Problem::dv)
        .def_readonly("s1", &Problem::s1)
        .def_readonly("s2", &Problem::s2)
        .def_readonly("t1", &Problem::t1)
        .def_readonly("t2", &Problem::t2)
        .def_readonly("win_left", &Problem::win_left)
        .def_readonly("win_right", &Problem::win_right)
        .def_readonly("is_variable", &Problem::is_variable)
        .def_property_readonly("layout", [](const Problem& p) { return static_cast<int>(p.layout); })
        .def_property_readonly("mask_mode", [](const Problem& p) { return static_cast<int>(p.mask_mode); });
}

}  // namespace fag
