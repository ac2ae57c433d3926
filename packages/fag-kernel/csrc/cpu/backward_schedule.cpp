#include "backward_schedule.hpp"

#include <algorithm>

#include "arrays.hpp"
#include "threads_ahead.hpp"

namespace fag::cpu {
namespace {

/// Shared heads are cut into about this many groups per thread.
constexpr std::int64_t kGroupsPerThread = 8;

/// Visible tiles of each column of a head of batch entry b.
std::vector<std::int64_t> column_costs(const Problem& problem, const TileGrid& grid, std::size_t b) {
    const std::int64_t s1 = problem.lengths_q[b], s2 = problem.lengths_kv[b];
    const Band band(problem, s1, s2);
    std::vector<std::int64_t> costs;
    for (std::int64_t key = 0; key < s2; key += grid.keys_per_tile) {
        const Interval rows = band.rows_of_keys(key, std::min(s2, key + grid.keys_per_tile));
        costs.push_back(rows.empty() ? 0
                                     : ceil_div(rows.end, grid.rows_per_tile) - rows.begin / grid.rows_per_tile);
    }
    return costs;
}

}  // namespace

BackwardSchedule make_backward_schedule(const Problem& problem, const GradWork& work, int num_threads) {
    BackwardSchedule schedule;
    if (work.cores.empty()) return schedule;

    std::vector<std::vector<std::int64_t>> costs;
    std::vector<std::int64_t> head_cost;
    std::int64_t total = 0;
    for (std::size_t b = 0; b < static_cast<std::size_t>(problem.b); ++b) {
        costs.push_back(column_costs(problem, work.grid, b));
        std::int64_t cost = 0;
        for (const std::int64_t c : costs.back()) cost += c;
        head_cost.push_back(cost);
        total += problem.n1 * cost;
    }
    ThreadsAhead threads(num_threads, total);
    const std::int64_t group_cost = std::max<std::int64_t>(1, total / (num_threads * kGroupsPerThread));

    for (std::int64_t b = 0; b < problem.b; ++b) {
        const auto at = static_cast<std::size_t>(b);
        if (head_cost[at] == 0) continue;
        const auto columns = static_cast<std::int64_t>(costs[at].size());
        for (std::int64_t n2 = 0; n2 < problem.n2; ++n2) {
            if (threads.fits(problem.g * head_cost[at])) {
                schedule.spans.push_back({b, n2, 0, problem.g, 0, columns});
                threads.take(problem.g * head_cost[at]);
                continue;
            }
            const std::int64_t shared_kv = problem.g > 1 ? schedule.num_shared_kv++ : -1;
            for (std::int64_t g = 0; g < problem.g; ++g) {
                if (threads.fits(head_cost[at])) {
                    schedule.spans.push_back({b, n2, g, g + 1, 0, columns, shared_kv});
                    threads.take(head_cost[at]);
                    continue;
                }
                const std::int64_t shared_query = schedule.num_shared_queries++;
                std::int64_t first = 0, cost = 0;
                for (std::int64_t column = 0; column < columns; ++column) {
                    cost += costs[at][static_cast<std::size_t>(column)];
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
