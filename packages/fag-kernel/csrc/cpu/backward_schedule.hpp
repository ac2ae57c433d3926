/// Cuts the tiles of a backward into spans that threads pull in order.
#pragma once

#include <cstdint>
#include <vector>

#include "mask.hpp"
#include "metadata.hpp"

namespace fag::cpu {

/// Columns [col_begin, col_end) of a kv head, for all its query heads.
struct BackwardSpan {
    std::int64_t b;
    std::int64_t n2;
    std::int64_t col_begin;
    std::int64_t col_end;
    /// Index of the first of the kv head's query heads among those whose dQ several spans add up; -1: this one alone.
    std::int64_t shared_query = -1;
};

struct BackwardSchedule {
    int num_threads = 1;              ///< worth waking for this much work, at most as many as allowed
    std::vector<BackwardSpan> spans;  ///< in key order, so that whoever waits for an earlier span never waits in vain
    std::int64_t num_shared_queries = 0;
};

/// Whole kv heads where that keeps all threads busy to the end, else groups of columns.
BackwardSchedule make_backward_schedule(const Problem& problem, TileSize tile, int max_threads);

}  // namespace fag::cpu
