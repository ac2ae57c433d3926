/// Cuts the row blocks of a forward into spans that threads pull.
#pragma once

#include <cstdint>
#include <vector>

#include "mask.hpp"
#include "metadata.hpp"

namespace fag::cpu {

/// Keys after which the online softmax of a row starts afresh; the unit of work that a row can be cut into.
inline constexpr std::int64_t kUnitKeys = 2048;

/// Row blocks [block_begin, block_end) of a kv head, of each of them the rows [row_begin, row_end) if it has so many, and
/// the units [unit_begin, unit_end) of their keys.
struct ForwardSpan {
    std::int64_t b;
    std::int64_t n2;
    std::int64_t block_begin;
    std::int64_t block_end;
    std::int64_t row_begin;
    std::int64_t row_end;
    std::int64_t unit_begin;
    std::int64_t unit_end;
    std::int64_t shared = -1;  ///< index among blocks whose units several spans compute (then of one block); -1: none
};

/// Rows of a kv head are (query position, query head), the query head running fastest. Blocks of kTile of them.
struct RowBlocks {
    const Problem& problem;
    std::int64_t num_rows(std::int64_t b) const {
        return problem.lengths_q[static_cast<std::size_t>(b)] * problem.g;
    }
    std::int64_t count(std::int64_t b) const;
    /// Units of keys [begin, end) that the rows of a block see.
    Interval units(std::int64_t b, std::int64_t block) const;
    Interval keys(std::int64_t b, std::int64_t block) const;
};

struct ForwardSchedule {
    int num_threads = 1;              ///< that it was made for
    std::vector<ForwardSpan> spans;  ///< kv head by kv head
    std::vector<Interval> heads;      ///< the spans of each kv head
    std::int64_t num_shared = 0;
};

/// (query, key) pairs of all heads, those that a mask hides inside a block's keys included.
std::int64_t forward_pairs(const Problem& problem);

/// Whole kv heads where that keeps all threads busy to the end, else row blocks, else pieces of one block: its units, or
/// rows of it if all their keys are one unit. Bits depend on none of that: rows of a piece go through the steps of their
/// block.
ForwardSchedule make_forward_schedule(const Problem& problem, int num_threads);

}  // namespace fag::cpu
