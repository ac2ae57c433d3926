/// The whole host tiling as a pure function: problem, route and platform in, plan out.
#pragma once

#include <cstdint>

#include "key.hpp"
#include "parse.hpp"
#include "platform.hpp"
#include "problem.hpp"
#include "schedule.hpp"
#include "sparse.hpp"
#include "swizzle.hpp"
#include "tiling_data.hpp"
#include "workspace.hpp"

namespace fag::tiling {

struct Plan {
    Facts facts;
    Sparse sparse;
    Schedule schedule;
    Swizzle swizzle;
    KeyFields key_fields;
    std::uint64_t key = 0;
    const char* key_problem = "";  ///< why no compiled kernel has this key; "" if one does
    Workspace workspace;
    TilingData tiling_data;
};

/// Throws Unsupported if the kernel of `route` cannot run the problem. A key without compiled kernel is reported, not
/// thrown: a target that runs no compiled kernel (the CPU) has a plan all the same.
Plan make_plan(const Problem& problem, Route route, const Platform& platform, double softmax_scale);

}  // namespace fag::tiling
