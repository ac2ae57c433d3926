#include "backward_schedule.hpp"

#include <algorithm>

#include "backward_memory.hpp"
#include "threads_ahead.hpp"

namespace fag::cpu {
namespace {

/// Smaller kv heads are never shared: two tiles or so are done before another thread has fetched what it needs.
constexpr std::int64_t kMinSharedPairs = 2 * kTile * kTile;

/// Costs in (query, key) pairs, those that a mask hides inside a column's rows included.
struct Costs {
    std::vector<std::int64_t> columns;       ///< of a head of each batch entry, one entry after the other
    std::vector<std::int64_t> first_column;  ///< (b + 1,)
    std::vector<std::int64_t> heads;         ///< (b,) of one query head
    std::int64_t total = 0;
};

Costs count_costs(const Problem& problem) {
    Costs costs;
    costs.first_column.push_back(0);
    for (std::int64_t b = 0; b < problem.b; ++b) {
        const auto at = static_cast<std::size_t>(b);
        const std::int64_t s1 = problem.lengths_q[at], s2 = problem.lengths_kv[at], width = column_keys(problem, b);
        const Band band(problem, s1, s2);
        std::int64_t head = 0;
        for (std::int64_t key = 0; key < s2; key += width) {
            const std::int64_t end = std::min(s2, key + width);
            const Interval rows = band.rows_of_keys(key, end);
            costs.columns.push_back(rows.empty() ? 0 : (rows.end - rows.begin) * (end - key));
            head += costs.columns.back();
        }
        costs.first_column.push_back(static_cast<std::int64_t>(costs.columns.size()));
        costs.heads.push_back(head);
        costs.total += problem.n1 * head;
    }
    return costs;
}

}  // namespace

std::int64_t column_keys(const Problem& problem, std::int64_t b) {
    const bool is_short = problem.lengths_kv[static_cast<std::size_t>(b)] <= 2 * kTile;
    return is_short && problem.g >= 4 ? kTile / 2 : kTile;
}

BackwardSchedule make_backward_schedule(const Problem& problem, const TileShape& shape, int max_threads) {
    BackwardSchedule schedule;
    const Costs costs = count_costs(problem);
    schedule.num_threads = threads_worth_waking(2 * (3 * problem.d + 2 * problem.dv), costs.total, max_threads);
    ThreadsAhead threads(schedule.num_threads, costs.total);

    for (std::int64_t b = 0; b < problem.b; ++b) {
        const auto at = static_cast<std::size_t>(b);
        if (costs.heads[at] == 0) continue;
        const std::int64_t columns = costs.first_column[at + 1] - costs.first_column[at];
        const std::int64_t kv_head_cost = problem.g * costs.heads[at];
        const std::int64_t own = own_bytes(problem, shape, b);
        const bool is_never_shared = schedule.num_threads == 1 || columns == 1 || kv_head_cost < kMinSharedPairs;
        for (std::int64_t n2 = 0; n2 < problem.n2; ++n2) {
            const auto first = static_cast<std::int64_t>(schedule.spans.size());
            if (is_never_shared || (fits_thread(shape, own) && threads.leaves_enough_behind(kv_head_cost))) {
                schedule.spans.push_back({b, n2, 0, columns});
                schedule.own_bytes = std::max(schedule.own_bytes, own);
                threads.take(kv_head_cost);
            } else {
                for (std::int64_t column = 0; column < columns; ++column) {
                    const std::int64_t cost =
                        problem.g * costs.columns[static_cast<std::size_t>(costs.first_column[at] + column)];
                    if (cost == 0) continue;
                    schedule.spans.push_back({b, n2, column, column + 1, schedule.num_shared_queries});
                    threads.take(cost);
                }
                schedule.num_shared_queries += problem.g;
            }
            schedule.heads.push_back({first, static_cast<std::int64_t>(schedule.spans.size())});
        }
    }
    return schedule;
}

}  // namespace fag::cpu
