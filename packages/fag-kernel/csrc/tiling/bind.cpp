/// Python sees the plan as plain dictionaries; fag_kernel.plan gives them their types.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <vector>

#include "check.hpp"
#include "plan.hpp"

namespace py = pybind11;

namespace fag::tiling {

namespace {

py::dict to_dict(const KeyFields& f) {
    py::dict out;
    out["template_id"] = f.template_id;
    out["is_tnd"] = f.is_tnd;
    out["mask"] = f.mask;
    out["is_swizzle"] = f.is_swizzle;
    out["d_align"] = f.d_align;
    out["dv_align"] = f.dv_align;
    out["is_multiblk"] = f.is_multiblk;
    out["needs_zero"] = f.needs_zero;
    return out;
}

KeyFields from_dict(const py::dict& fields) {
    const auto field = [&](const char* name) { return fields[name].cast<std::uint32_t>(); };
    KeyFields f;
    f.template_id = field("template_id");
    f.is_tnd = field("is_tnd");
    f.mask = field("mask");
    f.is_swizzle = field("is_swizzle");
    f.d_align = field("d_align");
    f.dv_align = field("dv_align");
    f.is_multiblk = field("is_multiblk");
    f.needs_zero = field("needs_zero");
    return f;
}

py::dict to_dict(const Plan& plan) {
    py::dict out;
    out["tiling_key"] = plan.key;
    out["key_problem"] = plan.key_problem;
    out["block_dim"] = plan.schedule.used_cores;
    out["is_linear"] = plan.schedule.is_linear;
    out["s1_outer"] = plan.facts.s1_outer;
    out["s2_outer"] = plan.facts.s2_outer;
    out["is_swizzle"] = plan.swizzle.is_chosen;
    out["swizzle_is_capability"] = plan.swizzle.is_capability;
    out["swizzle_reason"] = plan.swizzle.reason;
    out["live_heads"] = plan.swizzle.live_heads;
    out["live_bytes"] = plan.swizzle.live_bytes;
    out["workspace_bytes"] = plan.workspace.bytes;
    out["dq_offset"] = plan.workspace.dq_offset;
    out["dk_offset"] = plan.workspace.dk_offset;
    out["dv_offset"] = plan.workspace.dv_offset;
    out["tiling_data"] = py::bytes(reinterpret_cast<const char*>(&plan.tiling_data), sizeof(TilingData));
    return out;
}

/// Name, offset and kind ("q" int64, "f" float32) of every field, for the test of the Python view.
std::vector<std::tuple<const char*, std::size_t, const char*>> tiling_data_fields() {
#define FAG_FIELD(member) {#member, offsetof(TilingData, member), sizeof(TilingData::member) == 4 ? "f" : "q"}
    return {
        FAG_FIELD(b),          FAG_FIELD(s1),         FAG_FIELD(s2),         FAG_FIELD(n1),          FAG_FIELD(n2),
        FAG_FIELD(d),          FAG_FIELD(dv),         FAG_FIELD(scale_value), FAG_FIELD(g_size),     FAG_FIELD(view_d0_q),
        FAG_FIELD(view_d2_q),  FAG_FIELD(coef_b0_q),  FAG_FIELD(view_d0_kv), FAG_FIELD(view_d2_kv),  FAG_FIELD(coef_b0_kv),
        FAG_FIELD(coef_n0),    FAG_FIELD(coef_n2),    FAG_FIELD(mask_mode),  FAG_FIELD(win_left),    FAG_FIELD(win_right),
        FAG_FIELD(sparse_type), FAG_FIELD(s1_token),  FAG_FIELD(s2_token),   FAG_FIELD(total_per_batch_num),
    };
#undef FAG_FIELD
}

}  // namespace

void bind_tiling(py::module_& m) {
    py::register_local_exception_translator([](std::exception_ptr error) {
        try {
            if (error) std::rethrow_exception(error);
        } catch (const Unsupported& unsupported) {
            const py::object type = py::module_::import("fag_metadata.errors").attr("UnsupportedError");
            PyErr_SetString(type.ptr(), unsupported.what());
        }
    });
    m.attr("DEFAULT_LIBAPI_RESERVE_BYTES") = kDefaultLibapiReserveBytes;
    m.def(
        "make_plan",
        [](const Problem& problem, int route, std::int64_t cube_cores, std::int64_t vector_cores, std::int64_t l2_bytes,
           std::int64_t libapi_reserve_bytes, double softmax_scale) {
            const Platform platform = parse_platform(cube_cores, vector_cores, l2_bytes, libapi_reserve_bytes);
            return to_dict(make_plan(problem, static_cast<Route>(route), platform, softmax_scale));
        },
        py::kw_only(), py::arg("problem"), py::arg("route"), py::arg("cube_cores"), py::arg("vector_cores"),
        py::arg("l2_bytes"), py::arg("libapi_reserve_bytes"), py::arg("softmax_scale"));
    m.def("why_infeasible", [](const Problem& problem, int route) {
        return why_infeasible(problem, static_cast<Route>(route));
    });
    m.def("encode_key", [](const py::dict& fields) { return encode_key(from_dict(fields)); });
    m.def("decode_key", [](std::uint64_t key) { return to_dict(decode_key(key)); });
    m.def("why_invalid_key", [](std::uint64_t key) { return why_invalid(decode_key(key)); });
    m.def("valid_keys", &valid_keys);
    m.def("tiling_data_fields", &tiling_data_fields);
}

}  // namespace fag::tiling
