#include "backward_schedule.hpp"

#include <algorithm>

#include "threads_ahead.hpp"

namespace fag::cpu {
namespace {

/// Shared heads are cut into about this many groups per thread.
constexpr std::int64_t kGroupsPerThread = 8;
/// Smaller heads are never shared: two tiles or so are done before another thread has fetched what it needs.
constexpr std::int64_t kMinSharedPairs = 2 * 128 * 128;

/// Costs in (query, key) pairs, those that a mask hides inside a column's rows included.
struct Costs {
    std::vector<std::int64_t> columns;       ///< of a head of each batch entry, one entry after the other
    std::vector<std::int64_t> first_column;  ///< (b + 1,)
    std::vector<std::int64_t> heads;         ///< (b,) of one query head
    std::int64_t total = 0;
};

Costs count_costs(const Problem& problem, const TileGrid& grid) {
    Costs costs;
    costs.first_column.push_back(0);
    for (std::size_t b = 0; b < static_cast<std::size_t>(problem.b); ++b) {
        const std::int64_t s1 = problem.lengths_q[b], s2 = problem.lengths_kv[b];
        const Band band(problem, s1, s2);
        std::int64_t head = 0;
        for (std::int64_t key = 0; key < s2; key += grid.keys_per_tile) {
            const std::int64_t end = std::min(s2, key + grid.keys_per_tile);
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

BackwardSchedule make_backward_schedule(const Problem& problem, const GradWork& work, int max_threads) {
    BackwardSchedule schedule;
    if (work.cores.empty()) return schedule;
    const Costs costs = count_costs(problem, work.grid);
    schedule.num_threads = threads_worth_waking(2 * (3 * problem.d + 2 * problem.dv), costs.total, max_threads);
    ThreadsAhead threads(schedule.num_threads, costs.total);
    const std::int64_t group_cost = costs.total / (schedule.num_threads * kGroupsPerThread);

    for (std::int64_t b = 0; b < problem.b; ++b) {
        const auto at = static_cast<std::size_t>(b);
        const std::int64_t head_cost = costs.heads[at];
        if (head_cost == 0) continue;
        const std::int64_t columns = costs.first_column[at + 1] - costs.first_column[at];
        for (std::int64_t n2 = 0; n2 < problem.n2; ++n2) {
            if (problem.g * head_cost < kMinSharedPairs || threads.fits(problem.g * head_cost)) {
                schedule.spans.push_back({b, n2, 0, problem.g, 0, columns});
                threads.take(problem.g * head_cost);
                continue;
            }
            const std::int64_t shared_kv = problem.g > 1 ? schedule.num_shared_kv++ : -1;
            for (std::int64_t g = 0; g < problem.g; ++g) {
                if (columns == 1 || head_cost < kMinSharedPairs || threads.fits(head_cost)) {
                    schedule.spans.push_back({b, n2, g, g + 1, 0, columns, shared_kv});
                    threads.take(head_cost);
                    continue;
                }
                const std::int64_t shared_query = schedule.num_shared_queries++;
                std::int64_t first = 0, cost = 0;
                for (std::int64_t column = 0; column < columns; ++column) {
                    cost += costs.columns[static_cast<std::size_t>(costs.first_column[at] + column)];
                    if (cost < group_cost && column + 1 < columns) continue;
                    schedule.spans.push_back({b, n2, g, g + 1, first, column + 1, shared_kv, shared_query});
                    threads.take(cost);
                    first = column + 1;
                    cost = 0;
                }
            }
        }
    }
    return schedule;
}

}  // namespace fag::cpu
