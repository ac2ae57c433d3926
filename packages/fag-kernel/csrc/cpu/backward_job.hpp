/// What the threads of a backward call share, and where the rows of a head lie.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>

#include "backward.hpp"
#include "backward_schedule.hpp"
#include "backward_tile.hpp"
#include "shared_sum.hpp"

namespace fag::cpu {

struct BackwardJob {
    const BackwardArgs& args;
    const TileSize tile;
    const BackwardSchedule& schedule;
    TileShape shape;
    std::int64_t longest_q = 0;
    std::int64_t longest_kv = 0;
    std::unique_ptr<SharedSum[]> shared_queries{};  ///< dQ of heads whose columns several spans compute
    std::atomic<std::int64_t> next_span{0};
    std::atomic<std::int64_t> next_margin{0};
    std::atomic<bool> failed{false};

    std::int64_t row_tiles(std::int64_t s1) const { return ceil_div(s1, tile.rows); }
    /// Row tiles that a column sees at most: all, or those of a window.
    std::int64_t row_tiles_of_column(std::int64_t s1) const {
        return blocks_in_band(args.problem, tile.keys, tile.rows, row_tiles(s1));
    }
    /// True if some heads are done by one thread alone, with accumulators of its own.
    bool owns_heads() const {
        return std::any_of(schedule.spans.begin(), schedule.spans.end(),
                           [](const BackwardSpan& span) { return span.shared_query < 0; });
    }
    /// Accumulators of dQ: tiles of tile_rows x d.padded_cols.
    std::int64_t query_tile_floats() const { return shape.tile_rows * shape.d.padded_cols; }
};

/// One query head of one batch entry.
struct QueryHead {
    std::int64_t b;
    std::int64_t n1;
    std::int64_t s1;
    Rows q, dout, out, dq;
    const float* lse;
    const float* dlse;  ///< or null
};

QueryHead query_head(const BackwardArgs& args, std::int64_t b, std::int64_t n1);

/// One kv head of one batch entry.
struct KeyHead {
    std::int64_t b;
    std::int64_t n2;
    std::int64_t s2;
    Band band;
    Rows k, v, dk, dv;
};

KeyHead key_head(const BackwardArgs& args, std::int64_t b, std::int64_t n2);

}  // namespace fag::cpu
