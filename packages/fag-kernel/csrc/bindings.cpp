/// The extension module: each part binds itself in its own directory.
#include <pybind11/pybind11.h>

#include "dlpack.hpp"
#include "problem.hpp"

namespace fag::tiling {
void bind_tiling(pybind11::module_& m);
}
namespace fag::cann {
void bind_cann(pybind11::module_& m);
}
namespace fag::cpu {
void bind_cpu(pybind11::module_& m);
}

PYBIND11_MODULE(_native, m) {
    m.doc() = "Native part of fag_kernel: host tiling, CPU kernels, CANN's runtime. Private; use fag_kernel.plan, abi, cann.";
    fag::bind_problem(m);
    fag::bind_dlpack(m);
    fag::tiling::bind_tiling(m);
    fag::cann::bind_cann(m);
    fag::cpu::bind_cpu(m);
}
