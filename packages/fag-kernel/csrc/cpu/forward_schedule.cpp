#include "forward_schedule.hpp"

#include <algorithm>

#include "arrays.hpp"
#include "operands.hpp"
#include "threads_ahead.hpp"
#include "visible_rows.hpp"

namespace fag::cpu {
namespace {

/// Costs in pairs; see forward_pairs.
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

/// Fills a schedule head by head.
class Cutter {
public:
    Cutter(const Problem& problem, const Costs& costs, ForwardSchedule& schedule)
        : problem_(problem), costs_(costs), schedule_(schedule), threads_(schedule.num_threads, costs.total) {}

    void add_head(std::int64_t b, std::int64_t n2) {
        const auto at = static_cast<std::size_t>(b);
        const std::int64_t blocks = costs_.first_block[at + 1] - costs_.first_block[at];
        if (blocks == 0) return;
        const auto first = static_cast<std::int64_t>(schedule_.spans.size());
        const ForwardSpan all{b, n2, 0, blocks, 0, kTile, 0, ceil_div(problem_.lengths_kv[at], kUnitKeys)};
        if (threads_.leaves_enough_behind(costs_.heads[at])) {
            add(all, costs_.heads[at]);
        } else {
            // The last rows first: under a causal mask they cost most, and what is small comes at the end.
            for (std::int64_t block = blocks - 1; block >= 0; --block) add_block(all, block);
        }
        schedule_.heads.push_back({first, static_cast<std::int64_t>(schedule_.spans.size())});
    }

private:
    void add_block(ForwardSpan span, std::int64_t block) {
        const RowBlocks blocks{problem_};
        const std::int64_t cost =
            costs_.blocks[static_cast<std::size_t>(costs_.first_block[static_cast<std::size_t>(span.b)] + block)];
        span.block_begin = block;
        span.block_end = block + 1;
        span.row_end = std::min<std::int64_t>(kTile, blocks.num_rows(span.b) - block * kTile);
        const Interval units = blocks.units(span.b, block);
        if (units.end - units.begin <= 1) {
            add_rows(span, cost);
        } else if (threads_.fits(cost)) {
            add(span, cost);
        } else {
            span.shared = schedule_.num_shared++;
            for (std::int64_t unit = units.begin; unit < units.end; ++unit) {
                span.unit_begin = unit;
                span.unit_end = unit + 1;
                add(span, cost / (units.end - units.begin));
            }
        }
    }

    /// Rows of a block in one piece if enough stays behind, else in ever smaller ones.
    void add_rows(const ForwardSpan& span, std::int64_t cost) {
        const std::int64_t rows = span.row_end - span.row_begin;
        if (rows < 2 * kFewestRows || threads_.leaves_enough_behind(cost)) return add(span, cost);
        const std::int64_t first = round_up(rows / 2, problem_.mask_mode == MaskMode::none ? kRowUnit : kMaskedRows);
        ForwardSpan half = span;
        half.row_end = span.row_begin + first;
        add_rows(half, cost * first / rows);
        half.row_begin = half.row_end;
        half.row_end = span.row_end;
        add_rows(half, cost - cost * first / rows);
    }

    void add(const ForwardSpan& span, std::int64_t cost) {
        schedule_.spans.push_back(span);
        threads_.take(cost);
    }

    /// Of a piece of a block, and what its first row is a multiple of where no row has keys of its own: the packed keys
    /// are read anew for every piece.
    static constexpr std::int64_t kFewestRows = 24;
    static constexpr std::int64_t kRowUnit = 8;

    const Problem& problem_;
    const Costs& costs_;
    ForwardSchedule& schedule_;
    ThreadsAhead threads_;
};

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

std::int64_t forward_pairs(const Problem& problem) { return count_costs(problem).total; }

ForwardSchedule make_forward_schedule(const Problem& problem, int num_threads) {
    const Costs costs = count_costs(problem);
    ForwardSchedule schedule;
    schedule.num_threads = num_threads;
    Cutter cutter(problem, costs, schedule);
    for (std::int64_t b = 0; b < problem.b; ++b) {
        for (std::int64_t n2 = 0; n2 < problem.n2; ++n2) cutter.add_head(b, n2);
    }
    return schedule;
}

}  // namespace fag::cpu
