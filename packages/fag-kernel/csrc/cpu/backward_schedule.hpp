/// Cuts the tiles of a backward into spans that threads pull in order.
#pragma once

#include <cstdint>
#include <vector>

#include "backward_tile.hpp"

namespace fag::cpu {

/// Keys of a column of a batch entry. dQ of a row is a sum over columns, each summed from zero, so this may depend on
/// nothing but the entry itself. A short sequence with many query heads for each kv head has narrow columns, so that
/// several threads can work on one kv head; 64 keys cost 1 % of the time, 32 would cost 3 %.
std::int64_t column_keys(const Problem& problem, std::int64_t b);

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
    std::vector<BackwardSpan> spans;  ///< kv head by kv head, in key order
    std::vector<Interval> heads;      ///< the spans of each kv head
    std::int64_t num_shared_queries = 0;
    std::int64_t own_bytes = 0;       ///< most accumulators of a kv head that one thread does alone
};

/// Whole kv heads where that keeps all threads busy to the end and within their memory, else columns.
BackwardSchedule make_backward_schedule(const Problem& problem, const TileShape& shape, int max_threads);

}  // namespace fag::cpu
