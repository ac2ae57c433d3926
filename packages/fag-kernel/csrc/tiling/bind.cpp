#include <pybind11/pybind11.h>

namespace fag::tiling {

void bind_tiling(pybind11::module_&) {}

}  // namespace fag::tiling
