/// Arrays of other frameworks on the CPU, by the DLPack protocol, without copying.
#pragma once

namespace pybind11 {
class module_;
}

namespace fag {

/// Adds `array_from_dlpack(capsule) -> (ndarray, dtype name)`.
void bind_dlpack(pybind11::module_& m);

}  // namespace fag
