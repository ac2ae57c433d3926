/// How much scratch memory a thread of a backward takes: at most 8 MiB, of which the buffers of one tile get the last.
///
/// What a thread does alone needs accumulators of its own; they come first, packed rows get what is left. Of kv heads
/// whose accumulators would leave nothing several threads do columns, and dQ lies in memory that they share. Only a call
/// with a single thread takes more.
#pragma once

#include <algorithm>

#include "backward_tile.hpp"

namespace fag::cpu {

inline constexpr std::int64_t kThreadBytes = std::int64_t{7} << 20;
/// Contributions to dQ that wait: room for a few scheduling quanta of work of one thread on large tiles.
inline constexpr std::int64_t kParkedBytes = std::int64_t{2} << 20;
/// Packed rows: 17 tiles of head dim 128 in words of one value, twice as many in pairs.
inline constexpr std::int64_t kMostRowBytes = std::int64_t{9} << 19;

/// Accumulators of dQ of one row tile.
inline std::int64_t query_tile_bytes(const TileShape& shape) { return 4 * shape.tile_rows * shape.d.padded_cols; }

/// Row tiles that a column sees at most: all of a query head of s1 rows, or those of a window.
inline std::int64_t row_tiles_of_column(const Problem& problem, std::int64_t s1) {
    return blocks_in_band(problem, kTile, kTile, ceil_div(s1, kTile));
}

/// Accumulators of a thread that does a kv head alone: dQ of one query head; if there are more of them, dK and dV of all
/// columns too.
inline std::int64_t own_bytes(const Problem& problem, const TileShape& shape, std::int64_t b) {
    const auto at = static_cast<std::size_t>(b);
    const std::int64_t queries = row_tiles_of_column(problem, problem.lengths_q[at]) * query_tile_bytes(shape);
    const std::int64_t keys = round_up(problem.lengths_kv[at], kTile) * 4 * (shape.d.padded_cols + shape.dv.padded_cols);
    return queries + (problem.g > 1 ? keys : 0);
}

/// Whether a thread can have such accumulators beside everything else.
inline bool fits_thread(const TileShape& shape, std::int64_t own) {
    return own + kParkedBytes + row_tile_bytes(shape) <= kThreadBytes;
}

/// Row tiles that a thread keeps packed, at most.
inline std::int64_t row_tiles_kept(const TileShape& shape, std::int64_t own, bool has_parked) {
    const std::int64_t left = kThreadBytes - own - (has_parked ? kParkedBytes : 0);
    return std::max<std::int64_t>(1, std::min(kMostRowBytes, left) / row_tile_bytes(shape));
}

}  // namespace fag::cpu
