#include "forward_schedule.hpp"

#include <algorithm>

#include "arrays.hpp"
#include "operands.hpp"
#include "threads_ahead.hpp"

namespace fag::cpu {
namespace {

/// Costs in (query, key) pairs, those that a mask hides inside a block's keys included.
struct Costs {
    std::vector<std::int64_t> blocks;       ///< of a kv head of each batch entry, one entry after the other
    std::vector<std::int64_t> first_block;  ///< (b + 1,)
    std::vector<std::int64_t> heads;        ///< (b,) of one kv head
    std::int64_t total = 0;
};

Costs count_costs(const Problem& problem) {
    const RowBlocks blocks{problem};
    Costs costs;
    costs.first_block.push_back(0);
    for (std::int64_t b = 0; b < problem.b; ++b) {
        const std::int64_t num_rows = blocks.num_rows(b);
        std::int64_t head = 0;
        for (std::int64_t block = 0; block < blocks.count(b); ++block) {
            const Interval seen = blocks.keys(b, block);
            const std::int64_t rows = std::min<std::int64_t>(kTile, num_rows - block * kTile);
            costs.blocks.push_back(rows * (1 + (seen.empty() ? 0 : seen.end - seen.begin)));
            head += costs.blocks.back();
        }
        costs.first_block.push_back(static_cast<std::int64_t>(costs.blocks.size()));
        costs.heads.push_back(head);
        costs.total += problem.n2 * head;
    }
    return costs;
}

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

ForwardSchedule make_forward_schedule(const Problem& problem, int max_threads) {
    const Costs costs = count_costs(problem);
    ForwardSchedule schedule;
    schedule.num_threads = threads_worth_waking(2 * (problem.d + problem.dv), costs.total, max_threads);
    ThreadsAhead threads(schedule.num_threads, costs.total);

    const RowBlocks blocks{problem};
    for (std::int64_t b = 0; b < problem.b; ++b) {
        const auto at = static_cast<std::size_t>(b);
        const std::int64_t count = costs.first_block[at + 1] - costs.first_block[at];
        if (count == 0) continue;
        const std::int64_t all_units = ceil_div(problem.lengths_kv[at], kUnitKeys);
        for (std::int64_t n2 = 0; n2 < problem.n2; ++n2) {
            const auto first = static_cast<std::int64_t>(schedule.spans.size());
            if (threads.leaves_enough_behind(costs.heads[at])) {
                schedule.spans.push_back({b, n2, 0, count, 0, all_units});
                threads.take(costs.heads[at]);
            } else {
                // The last rows first: under a causal mask they cost most, and what is small comes at the end.
                for (std::int64_t block = count - 1; block >= 0; --block) {
                    const std::int64_t cost = costs.blocks[static_cast<std::size_t>(costs.first_block[at] + block)];
                    const Interval units = blocks.units(b, block);
                    if (units.end - units.begin <= 1 || threads.fits(cost)) {
                        schedule.spans.push_back({b, n2, block, block + 1, 0, all_units});
                        threads.take(cost);
                        continue;
                    }
                    for (std::int64_t unit = units.begin; unit < units.end; ++unit) {
                        schedule.spans.push_back({b, n2, block, block + 1, unit, unit + 1, schedule.num_shared});
                        threads.take(cost / (units.end - units.begin));
                    }
                    ++schedule.num_shared;
                }
            }
            schedule.heads.push_back({first, static_cast<std::int64_t>(schedule.spans.size())});
        }
    }
    return schedule;
}

}  // namespace fag::cpu
