/// Whether whole key columns are dealt across cores instead of linear tile ranges.
#pragma once

#include <cstdint>
#include <string>

#include "key.hpp"
#include "parse.hpp"
#include "platform.hpp"
#include "problem.hpp"
#include "schedule.hpp"

namespace fag::tiling {

/// Decision with its reason: if rejected, whether the kernel cannot (capability) or we do not want to (preference).
struct Swizzle {
    bool is_chosen = false;
    bool is_capability = false;  ///< kind of a rejection
    std::string reason;          ///< one clause with the values
    std::int64_t live_heads = 0;
    std::int64_t live_bytes = 0;  ///< saturated at 2^63 - 1; 0 where the decision fell before it was needed
};

/// `fields` is the key with swizzle off.
Swizzle select_swizzle(const Problem& problem, const Facts& facts, const Schedule& schedule, const Platform& platform,
                       const KeyFields& fields);

}  // namespace fag::tiling
