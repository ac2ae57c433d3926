/// Python face of CANN's runtime; called by fag_kernel.cann and fag_kernel.ascend950.launch only.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "aclnn.hpp"
#include "launch.hpp"
#include "library.hpp"
#include "status.hpp"

namespace py = pybind11;

namespace fag::cann {
namespace {

/// Addresses and handles come as integers.
void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

/// A text of the runtime's, which may be in any encoding, or cut within a character.
py::str text_of(const std::string& bytes) {
    PyObject* text = PyUnicode_DecodeUTF8(bytes.data(), static_cast<py::ssize_t>(bytes.size()), "replace");
    if (text == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::str>(text);
}

/// The reason of the Missing that `find` throws, or nothing.
std::optional<py::str> reason_of(const std::function<void()>& find) {
    try {
        const py::gil_scoped_release released;  // loading a library may run much code
        find();
    } catch (const Missing& missing) {
        return text_of(missing.what());
    }
    return std::nullopt;
}

TensorRef tensor_of(const py::tuple& ref) {
    if (ref.size() != 6) throw py::type_error("cann: a tensor must be a TensorRef, got another tuple.");
    using Sizes = std::vector<std::int64_t>;
    return {ref[0].cast<std::uint64_t>(), ref[1].cast<std::string>(),  ref[2].cast<Sizes>(),
            ref[3].cast<Sizes>(),         ref[4].cast<std::int64_t>(), ref[5].cast<Sizes>()};
}

Value value_of(const py::handle& value) {
    if (value.is_none()) return std::monostate{};
    if (py::isinstance<py::tuple>(value)) return tensor_of(value.cast<py::tuple>());
    if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
    if (py::isinstance<py::float_>(value)) return value.cast<double>();
    if (py::isinstance<py::str>(value)) return value.cast<std::string>();
    return value.cast<std::int64_t>();
}

std::unique_ptr<AclnnCall> prepare(const std::string& symbol, const py::dict& arguments) {
    Values values;
    for (const auto& [name, value] : arguments) values.emplace(name.cast<std::string>(), value_of(value));
    const py::gil_scoped_release released;
    return std::make_unique<AclnnCall>(symbol, values);
}

/// (kernel, blocks, index of each parameter's address) of a launch.
using PyStep = std::tuple<const DeviceFunction*, std::uint32_t, std::vector<std::size_t>>;

std::unique_ptr<LaunchSequence> make_sequence(const std::vector<PyStep>& py_steps, std::vector<std::uint64_t> offsets) {
    std::vector<LaunchStep> steps;
    for (const auto& [function, blocks, parameters] : py_steps) steps.push_back({function, blocks, parameters});
    return std::make_unique<LaunchSequence>(std::move(steps), std::move(offsets));
}

void run_sequence(const LaunchSequence& sequence, std::uint64_t stream, const std::vector<std::uint64_t>& addresses) {
    if (addresses.size() != sequence.num_addresses()) throw py::value_error("cann: addresses must be one per parameter.");
    const py::gil_scoped_release released;
    sequence.run(addresses, pointer(stream));
}

void memset_async(std::uint64_t address, std::uint64_t bytes, std::uint64_t stream) {
    const py::gil_scoped_release released;
    const RuntimeApi& api = runtime_api();
    if (bytes > 0) check("aclrtMemsetAsync", api.aclrtMemsetAsync(pointer(address), bytes, 0, bytes, pointer(stream)));
}

std::string soc_name() {
    const py::gil_scoped_release released;
    const char* name = runtime_api().aclrtGetSocName();
    if (name == nullptr) throw failure("aclrtGetSocName", std::nullopt);
    return name;
}

std::int32_t current_device() {
    std::int32_t device = -1;
    check("aclrtGetDevice", runtime_api().aclrtGetDevice(&device));
    return device;
}

void raise_cann_error(const py::object& call, const py::object& code, const std::string& text) {
    const py::object type = py::module_::import("fag_kernel.cann").attr("CannError");
    PyErr_SetObject(type.ptr(), type(call, code, text_of(text)).ptr());
}

}  // namespace

void bind_cann(py::module_& m) {
    py::register_local_exception_translator([](std::exception_ptr error) {
        try {
            if (error) std::rethrow_exception(error);
        } catch (const Error& failed) {
            raise_cann_error(py::cast(failed.call), py::cast(failed.code), failed.what());
        } catch (const Missing& missing) {
            raise_cann_error(py::none(), py::none(), missing.what());
        }
    });

    m.def("cann_missing_runtime", [] { return reason_of([] { runtime_api(); }); });
    m.def("cann_missing_launcher", [] {
        return reason_of([] {
            runtime_api();
            launch_api();
        });
    });
    m.def("cann_missing_operator", [](const std::string& symbol) {
        return reason_of([&] {
            operator_api(symbol);
            tensor_api();
        });
    });
    m.def("cann_soc_name", &soc_name);
    m.def("cann_current_device", &current_device);
    m.def("cann_memset_async", &memset_async);

    py::class_<AclnnCall>(m, "AclnnCall")
        .def_property_readonly("workspace_bytes", &AclnnCall::workspace_bytes)
        .def(
            "run",
            [](AclnnCall& call, std::uint64_t workspace, std::uint64_t stream) {
                const py::gil_scoped_release released;
                call.run(pointer(workspace), pointer(stream));
            },
            py::arg("workspace_address"), py::arg("stream"));
    m.def("aclnn_prepare", &prepare, py::arg("symbol"), py::arg("arguments"));
    m.def("aclnn_arguments", [](const std::string& symbol) {
        py::list out;
        for (const Argument& argument : aclnn_arguments(symbol)) out.append(py::make_tuple(argument.name, argument.kind));
        return out;
    });

    py::class_<DeviceFunction, std::unique_ptr<DeviceFunction, py::nodelete>>(m, "DeviceFunction")
        .def(py::init([](const std::string& symbol, const py::bytes& object, bool is_vector) {
                 std::string bytes = object;
                 const py::gil_scoped_release released;
                 return std::unique_ptr<DeviceFunction, py::nodelete>(
                     new DeviceFunction(symbol, std::move(bytes), is_vector));
             }),
             py::kw_only(), py::arg("symbol"), py::arg("object"), py::arg("is_vector"));
    py::class_<LaunchSequence>(m, "LaunchSequence")
        .def(py::init(&make_sequence), py::arg("steps"), py::arg("offsets"))
        .def("run", &run_sequence, py::arg("stream"), py::arg("addresses"));
}

}  // namespace fag::cann
