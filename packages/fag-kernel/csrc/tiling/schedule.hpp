/// How many cores are launched.
#pragma once

#include <cstdint>

#include "parse.hpp"
#include "platform.hpp"
#include "problem.hpp"

namespace fag::tiling {

struct Schedule {
    std::int64_t fused = 0;     ///< units split over the cores: tiles (BN2GS1S2) or query heads (BN2)
    std::int64_t per_core = 0;  ///< ceil(fused / cube cores): units of every core but the last
    std::int64_t used_cores = 0;
    bool is_linear = false;  ///< dense equal split; else all cores are launched and read their ranges from the metadata
};

/// At least one core, also for a problem without a tile: the outputs have to be cleared.
Schedule parse_schedule(const Problem& problem, const Facts& facts, Route route, const Platform& platform);

}  // namespace fag::tiling
