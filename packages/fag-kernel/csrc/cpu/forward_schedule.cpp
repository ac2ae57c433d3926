#include "forward_schedule.hpp"

#include "arrays.hpp"
#include "operands.hpp"
#include "threads_ahead.hpp"

namespace fag::cpu {
namespace {

/// A head that is shared out is cut into about this many groups of blocks per thread.
constexpr std::int64_t kGroupsPerThread = 8;

}  // namespace

std::int64_t RowBlocks::count(std::int64_t b) const { return ceil_div(num_rows(b), kTile); }

Interval RowBlocks::keys(std::int64_t b, std::int64_t block) const {
    const auto at = static_cast<std::size_t>(b);
    const std::int64_t first = block * kTile, last = std::min(num_rows(b), first + kTile) - 1;
    const Band band(problem, problem.lengths_q[at], problem.lengths_kv[at]);
    return band.keys_of_rows(first / problem.g, last / problem.g + 1);
}

Interval RowBlocks::units(std::int64_t b, std::int64_t block) const {
    const Interval seen = keys(b, block);
    if (seen.empty()) return {};
    return {seen.begin / kUnitKeys, ceil_div(seen.end, kUnitKeys)};
}

ForwardSchedule make_forward_schedule(const Problem& problem, int num_threads) {
    const RowBlocks blocks{problem};
    std::vector<std::vector<std::int64_t>> costs;  // of each block of a kv head; a block without keys is not free
    std::vector<std::int64_t> head_cost;
    std::int64_t total = 0;
    for (std::int64_t b = 0; b < problem.b; ++b) {
        costs.emplace_back();
        head_cost.push_back(0);
        for (std::int64_t block = 0; block < blocks.count(b); ++block) {
            const Interval seen = blocks.keys(b, block);
            costs.back().push_back(1 + (seen.empty() ? 0 : ceil_div(seen.end, kTile) - seen.begin / kTile));
            head_cost.back() += costs.back().back();
        }
        total += problem.n2 * head_cost.back();
    }
    ThreadsAhead threads(num_threads, total);
    const std::int64_t group_cost = std::max<std::int64_t>(1, total / (num_threads * kGroupsPerThread));

    ForwardSchedule schedule;
    for (std::int64_t b = 0; b < problem.b; ++b) {
        const auto at = static_cast<std::size_t>(b);
        const std::int64_t count = blocks.count(b);
        const std::int64_t all_units = ceil_div(problem.lengths_kv[at], kUnitKeys);
        for (std::int64_t n2 = 0; n2 < problem.n2; ++n2) {
            if (threads.fits(head_cost[at])) {
                schedule.spans.push_back({b, n2, 0, count, 0, all_units});
                threads.take(head_cost[at]);
                continue;
            }
            std::int64_t first = 0, cost = 0;
            for (std::int64_t block = 0; block < count; ++block) {
                const std::int64_t block_cost = costs[at][static_cast<std::size_t>(block)];
                const Interval units = blocks.units(b, block);
                if (first == block && units.end - units.begin > 1 && !threads.fits(block_cost)) {
                    for (std::int64_t unit = units.begin; unit < units.end; ++unit) {
                        schedule.spans.push_back({b, n2, block, block + 1, unit, unit + 1, schedule.num_shared});
                        threads.take(block_cost / (units.end - units.begin));
                    }
                    ++schedule.num_shared;
                    first = block + 1;
                    continue;
                }
                cost += block_cost;
                if (cost < group_cost && block + 1 < count) continue;
                schedule.spans.push_back({b, n2, first, block + 1, 0, all_units});
                threads.take(cost);
                first = block + 1;
                cost = 0;
            }
        }
    }
    return schedule;
}

}  // namespace fag::cpu
