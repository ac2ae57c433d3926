/// The parsed problem in tiling terms: tiles, heads, alignment classes. Read-only for every later stage.
#pragma once

#include <cstdint>

#include "problem.hpp"

namespace fag::tiling {

/// Head-dim class of the compiled kernels; the value is the field of the tiling key. `above` has no kernel.
enum class DAlign : std::uint32_t { d64 = 0, d128 = 1, d192 = 2, above = 3 };
enum class DvAlign : std::uint32_t { dv128 = 0, dv192 = 1 };

struct Facts {
    std::int64_t tile_rows = 1;  ///< min(128, s1), 1 for an empty side
    std::int64_t tile_cols = 1;
    std::int64_t s1_outer = 0;  ///< row tiles of the longest sequence
    std::int64_t s2_outer = 0;
    std::int64_t heads = 0;       ///< b * n2 * g, query heads of the whole batch
    std::int64_t tiles_head = 0;  ///< s1_outer * s2_outer
    std::int64_t tiles = 0;       ///< heads * tiles_head
    DAlign d_align = DAlign::d64;
    DvAlign dv_align = DvAlign::dv128;
};

/// a / b rounded up, for a >= 0 and b > 0.
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

/// Throws std::overflow_error if the tiles of the batch cannot be numbered in int64.
Facts parse_facts(const Problem& problem);

}  // namespace fag::tiling
