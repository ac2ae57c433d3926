/// Device workspace: [libapi reserve][dq][dk][dv][padding], float32 accumulators of template BN2GS1S2.
#pragma once

#include <cstdint>

#include "platform.hpp"
#include "problem.hpp"

namespace fag::tiling {

struct Workspace {
    std::int64_t bytes = 0;
    std::int64_t dq_offset = 0;  ///< bytes from the start; (t1, n1, d) float32
    std::int64_t dk_offset = 0;  ///< (t2, n2, d) float32
    std::int64_t dv_offset = 0;  ///< (t2, n2, dv) float32
};

/// BN2 kernels accumulate on chip: the reserve alone, and all offsets at its end. Throws std::overflow_error.
Workspace parse_workspace(const Problem& problem, Route route, const Platform& platform);

}  // namespace fag::tiling
