/// Cuts the tiles of a backward into spans that threads pull in order.
#pragma once

#include <cstdint>
#include <vector>

#include "mask.hpp"
#include "metadata.hpp"

namespace fag::cpu {

/// Columns [col_begin, col_end) of query heads [g_begin, g_end) of one kv head.
struct BackwardSpan {
    std::int64_t b;
    std::int64_t n2;
    std::int64_t g_begin;
    std::int64_t g_end;
    std::int64_t col_begin;
    std::int64_t col_end;
    std::int64_t shared_kv = -1;     ///< index among kv heads whose dK, dV several spans add up; -1: this one alone
    std::int64_t shared_query = -1;  ///< index among query heads whose dQ several spans add up; -1: this one alone
};

struct BackwardSchedule {
    int num_threads = 1;              ///< worth waking for this much work, at most as many as allowed
    std::vector<BackwardSpan> spans;  ///< in tile order, so that whoever waits for an earlier span never waits in vain
    std::int64_t num_shared_kv = 0;
    std::int64_t num_shared_queries = 0;
};

/// Whole kv heads where that keeps all threads busy to the end, else whole query heads, else groups of columns.
/// The metadata's cores are joined first: where one core ended and the next began has no influence on a result, and
/// the number of threads at hand is a better guide than the number of cores of the target.
BackwardSchedule make_backward_schedule(const Problem& problem, const GradWork& work, int max_threads);

}  // namespace fag::cpu
