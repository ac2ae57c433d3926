/// What the threads of a backward call share, and where the rows of a head lie.
#pragma once

#include <atomic>
#include <memory>

#include "backward.hpp"
#include "backward_memory.hpp"
#include "backward_schedule.hpp"
#include "shared_sum.hpp"
#include "span_queues.hpp"

namespace fag::cpu {

struct BackwardJob {
    const BackwardArgs& args;
    const TileShape& shape;
    const BackwardSchedule& schedule;
    std::int64_t longest_q = 0;
    std::int64_t longest_kv = 0;
    SpanQueues spans{schedule.heads};
    std::unique_ptr<SharedSum[]> shared_queries{};  ///< dQ of heads whose columns several spans compute
    std::atomic<std::int64_t> next_margin{0};
    std::atomic<bool> failed{false};

    std::int64_t row_tiles_of_column(std::int64_t s1) const { return fag::cpu::row_tiles_of_column(args.problem, s1); }
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
    std::int64_t column_keys;
    Band band;
    Interval row_tiles;  ///< of a query head: those that see any key
    Rows k, v, dk, dv;

    std::int64_t first_key(std::int64_t column) const { return column * column_keys; }
};

KeyHead key_head(const BackwardArgs& args, std::int64_t b, std::int64_t n2);

}  // namespace fag::cpu
