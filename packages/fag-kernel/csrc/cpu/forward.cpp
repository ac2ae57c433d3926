#include "forward.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>

#include "forward_block.hpp"
#include "levels.hpp"
#include "pool.hpp"
#include "shared_sum.hpp"
#include "span_queues.hpp"
#include "threads_ahead.hpp"

namespace fag::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Packed keys of a kv head are kept while those that a block sees fit; of more the last slot is packed anew for each
/// block.
constexpr std::int64_t kKeyCacheBytes = std::int64_t{4} << 20;

/// What all threads of a call share.
struct Job {
    const ForwardArgs& args;
    const ForwardSchedule& schedule;
    TileShape shape;
    std::int64_t longest_kv = 0;
    std::unique_ptr<SharedSum[]> shared{};  ///< state of a block whose units several threads compute
    SpanQueues spans{schedule.heads};
    std::atomic<std::int64_t> next_padding{0};
    std::atomic<bool> failed{false};
};

/// Packed steps of the kv head that this thread works on.
class KeyCache {
public:
    KeyCache(Arena& arena, const Job& job) : job_(job) {
        const std::int64_t steps = std::max<std::int64_t>(1, steps_of_block(job.longest_kv));
        const std::int64_t fitting = std::max<std::int64_t>(1, kKeyCacheBytes / key_step_bytes(job.shape));
        slots_.resize(static_cast<std::size_t>(std::min(steps, fitting)));
        for (Slot& slot : slots_) slot.step = take_key_step(arena, job.shape);
    }

    /// Keys [i * kTile, ...) of a kv head.
    const KeyStep& get(std::int64_t b, std::int64_t n2, const Packer& packer, std::int64_t i) {
        const auto count = static_cast<std::int64_t>(slots_.size());
        const std::int64_t steps = steps_of_block(job_.args.problem.lengths_kv[static_cast<std::size_t>(b)]);
        Slot& slot = slots_[static_cast<std::size_t>(steps <= count ? i % steps : std::min(i, count - 1))];
        if (slot.b != b || slot.n2 != n2 || slot.index != i) {
            pack(b, n2, packer, i, slot.step);
            slot.b = b;
            slot.n2 = n2;
            slot.index = i;
        }
        return slot.step;
    }

private:
    struct Slot {
        KeyStep step;
        std::int64_t b = -1;
        std::int64_t n2 = -1;
        std::int64_t index = -1;
    };

    /// Steps that a block of rows sees at most: all of a head of s2 keys, or those of a window.
    std::int64_t steps_of_block(std::int64_t s2) const {
        const Problem& p = job_.args.problem;
        return blocks_in_band(p, ceil_div(kTile - 1, p.g) + 1, kTile, ceil_div(s2, kTile));
    }

    void pack(std::int64_t b, std::int64_t n2, const Packer& packer, std::int64_t i, KeyStep& step) const {
        const ForwardArgs& args = job_.args;
        const Problem& p = args.problem;
        const std::int64_t key = i * kTile;
        const Rows k = args.k.rows(p, p.starts_kv, args.dtype, b, n2);
        const Rows v = args.v.rows(p, p.starts_kv, args.dtype, b, n2);
        step.num_keys =
            static_cast<int>(std::min<std::int64_t>(kTile, p.lengths_kv[static_cast<std::size_t>(b)] - key));
        step.v_rows = {v.row(key), v.stride_bytes};
        packer.columns({k.row(key), k.stride_bytes}, step.num_keys, job_.shape.d, step.k_cols);
        step.v_is_finite = packer.reduced_rows(step.v_rows, step.num_keys, job_.shape.dv, step.v_reduced,
                                               job_.shape.words_along_keys());
    }

    const Job& job_;
    std::vector<Slot> slots_;
};

/// One thread's part of a call.
class Worker {
public:
    Worker(Arena& arena, Job& job)
        : job_(job),
          shape_(job.shape),
          blocks_{job.args.problem},
          packer_{shape_.isa, shape_.products, shape_.dtype,
                  arena.take<Word>(shape_.tile_keys * shape_.d.padded_cols)},
          buffers_(take_step_buffers(arena, shape_)),
          first_(arena.take<std::int32_t>(shape_.tile_rows)),
          last_(arena.take<std::int32_t>(shape_.tile_rows)),
          factors_(arena.take<float>(shape_.tile_rows)),
          q_(arena.take<Word>(shape_.tile_rows * shape_.d.row_words)),
          unit_(SoftmaxState::at(arena.take<float>(SoftmaxState::num_floats(shape_)), shape_)),
          total_(SoftmaxState::at(arena.take<float>(SoftmaxState::num_floats(shape_)), shape_)),
          keys_(arena, job) {}

    void run(const ForwardSpan& span) {
        for (std::int64_t block = span.block_begin; block < span.block_end; ++block) run_block(span, block);
    }

private:
    /// Rows of a block: (position, query head) from first_row on, the head running fastest.
    struct Block {
        std::int64_t b;
        std::int64_t n2;
        std::int64_t first_row;
        int num_rows;
        Band band;
    };

    void run_block(const ForwardSpan& span, std::int64_t index) {
        const Problem& p = job_.args.problem;
        const auto at = static_cast<std::size_t>(span.b);
        const std::int64_t first_row = index * kTile + span.row_begin;
        const std::int64_t end_row = std::min(index * kTile + span.row_end, blocks_.num_rows(span.b));
        const Block block{span.b, span.n2, first_row, static_cast<int>(end_row - first_row),
                          Band(p, p.lengths_q[at], p.lengths_kv[at])};
        const Interval seen = blocks_.keys(span.b, index);
        const Interval units = blocks_.units(span.b, index);
        if (!seen.empty()) pack_queries(block);
        if (span.shared >= 0) {
            run_shared_unit(span, block, seen, units);
            return;
        }
        if (units.empty()) {
            std::fill_n(total_.out, block.num_rows * static_cast<std::int64_t>(shape_.dv.padded_cols), 0.0f);
            total_.clear(block.num_rows);
        }
        for (std::int64_t unit = units.begin; unit < units.end; ++unit) {
            const SoftmaxState& state = unit == units.begin ? total_ : unit_;
            run_unit(block, seen, unit, state);
            if (unit != units.begin) total_.merge(unit_, block.num_rows, shape_);
        }
        finish(block, total_);
    }

    /// One unit of a block whose units several threads compute: they merge in order, the last one writes the rows.
    void run_shared_unit(const ForwardSpan& span, const Block& block, const Interval& seen, const Interval& units) {
        run_unit(block, seen, span.unit_begin, unit_);
        SharedSum& shared = job_.shared[span.shared];
        const SoftmaxState state = SoftmaxState::at(shared.open(1, SoftmaxState::num_floats(shape_)), shape_);
        const std::int64_t rank = span.unit_begin - units.begin;
        wait_until(job_.failed, [&] { return shared.is_turn(0, rank); });
        if (rank == 0) {
            state.copy_from(unit_, block.num_rows, shape_);
        } else {
            state.merge(unit_, block.num_rows, shape_);
        }
        if (span.unit_end == units.end) finish(block, state);
        shared.pass_on(0, rank);
    }

    void run_unit(const Block& block, const Interval& seen, std::int64_t unit, const SoftmaxState& state) {
        state.clear(block.num_rows);
        const std::int64_t first = std::max(seen.begin, unit * kUnitKeys) / kTile;
        const std::int64_t end = ceil_div(std::min(seen.end, (unit + 1) * kUnitKeys), kTile);
        for (std::int64_t step = first; step < end; ++step) {
            const KeyStep& keys = keys_.get(block.b, block.n2, packer_, step);
            add_step(shape_, q_, block.num_rows, keys, visibility(block, step * kTile, keys.num_keys), buffers_, state,
                     step == first);
        }
    }

    Visible visibility(const Block& block, std::int64_t key, int num_keys) const {
        const std::int64_t g = job_.args.problem.g;
        const std::int64_t first = block.first_row / g, last = (block.first_row + block.num_rows - 1) / g;
        if (num_keys % kAlign == 0 && block.band.sees_all(first, last + 1, key, key + num_keys)) {
            return {nullptr, nullptr, true};
        }
        for (int row = 0; row < block.num_rows; ++row) {
            const Interval seen = block.band.keys((block.first_row + row) / g);
            first_[row] = static_cast<std::int32_t>(std::clamp<std::int64_t>(seen.begin - key, 0, num_keys));
            last_[row] = static_cast<std::int32_t>(std::clamp<std::int64_t>(seen.end - key, 0, num_keys));
        }
        return {first_, last_, false};
    }

    /// Calls visit(head, first position, first row of the block, number of rows) for each query head in the block; its
    /// rows in the block are g apart.
    template <typename Visit>
    void for_each_head(const Block& block, const Visit& visit) const {
        const std::int64_t g = job_.args.problem.g;
        for (std::int64_t first = 0; first < std::min<std::int64_t>(g, block.num_rows); ++first) {
            const std::int64_t row = block.first_row + first;
            visit(block.n2 * g + row % g, row / g, first, static_cast<int>(ceil_div(block.num_rows - first, g)));
        }
    }

    void pack_queries(const Block& block) {
        const ForwardArgs& args = job_.args;
        const auto pack = shape_.products.pack_columns[static_cast<int>(shape_.dtype)];
        for_each_head(block, [&](std::int64_t head, std::int64_t position, std::int64_t row, int count) {
            const Rows q = args.q.rows(args.problem, args.problem.starts_q, args.dtype, block.b, head);
            pack(q.row(position), q.stride_bytes, count, shape_.d.cols, q_ + row * shape_.d.row_words,
                 args.problem.g * shape_.d.row_words);
        });
    }

    /// Divides by the sums, brings in the sinks, writes out and lse.
    void finish(const Block& block, const SoftmaxState& state) const {
        const ForwardArgs& args = job_.args;
        const std::int64_t width = shape_.dv.padded_cols;
        for_each_head(block, [&](std::int64_t head, std::int64_t position, std::int64_t row, int count) {
            const float sink = args.sinks == nullptr ? -kInfinity : args.sinks[head];
            float* lse = args.lse + lse_offset(args.problem, block.b, head);
            for (int i = 0; i < count; ++i) {
                const std::int64_t at = row + i * args.problem.g;
                const bool sees_keys = !block.band.keys(position + i).empty();
                factors_[at] = finish_row(sees_keys, sink, shape_.products.exp_unit * state.row_max[at],
                                          state.row_sum[at], lse[position + i]);
            }
            const Rows out = args.out.rows(args.problem, args.problem.starts_q, args.dtype, block.b, head);
            shape_.isa.store_rows[static_cast<int>(args.dtype)](state.out + row * width, args.problem.g * width, count,
                                                                shape_.dv.cols, factors_ + row, args.problem.g,
                                                                out.row(position), out.stride_bytes);
        });
    }

    /// Sets lse, returns the factor of the numerator.
    static float finish_row(bool sees_keys, float sink, float row_max, float row_sum, float& lse) {
        if (!sees_keys || sink == kInfinity) {
            lse = sink;
            return 0.0f;
        }
        if (sink == -kInfinity) {
            lse = row_max + std::log(row_sum);
            return 1.0f / row_sum;
        }
        const float highest = std::max(row_max, sink);
        const float share = std::exp(row_max - highest);
        const float sum = row_sum * share + std::exp(sink - highest);
        lse = highest + std::log(sum);
        return share / sum;
    }

    Job& job_;
    const TileShape& shape_;
    RowBlocks blocks_;
    Packer packer_;
    StepBuffers buffers_;
    std::int32_t* first_;
    std::int32_t* last_;
    float* factors_;  ///< of the numerators of a block's rows
    Word* q_;
    SoftmaxState unit_;
    SoftmaxState total_;
    KeyCache keys_;
};

/// Rows of the slot that the sequence does not use: out 0, lse -inf.
void clear_padding(const ForwardArgs& args, std::int64_t b, std::int64_t head) {
    const Problem& p = args.problem;
    const std::int64_t begin = p.lengths_q[static_cast<std::size_t>(b)], end = p.slot_q(b);
    const Rows out = args.out.rows(p, p.starts_q, args.dtype, b, head);
    const auto bytes = static_cast<std::size_t>(p.dv * kDTypeBytes[static_cast<int>(args.dtype)]);
    for (std::int64_t row = begin; row < end; ++row) std::fill_n(out.row(row), bytes, std::byte{0});
    float* lse = args.lse + lse_offset(p, b, head);
    std::fill(lse + begin, lse + end, -kInfinity);
}

void work_until_done(Job& job) {
    try {
        ScopedArena arena;
        SpanQueues::Place place;
        std::int64_t at = job.spans.next(place);
        if (at >= 0) {
            Worker worker(*arena, job);
            for (; at >= 0 && !job.failed.load(); at = job.spans.next(place)) {
                worker.run(job.schedule.spans[static_cast<std::size_t>(at)]);
            }
        }
        const Problem& p = job.args.problem;
        while ((at = job.next_padding.fetch_add(1)) < p.b * p.n1) clear_padding(job.args, at / p.n1, at % p.n1);
    } catch (const Abandoned&) {
        // The thread it waited for has reported its own failure.
    } catch (...) {
        job.failed.store(true);
        throw;
    }
}

}  // namespace

ForwardPlan::ForwardPlan(const Problem& problem, const Metadata& metadata)
    : problem_(problem), pairs_(forward_pairs(problem)) {
    check_forward_work(problem, metadata);
}

std::shared_ptr<const ForwardSchedule> ForwardPlan::schedule(int max_threads) {
    const int threads = threads_worth_waking(2 * (problem_.d + problem_.dv), pairs_, max_threads);
    {
        const std::lock_guard lock(mutex_);
        if (kept_ != nullptr && kept_->num_threads == threads) return kept_;
    }
    auto made = std::make_shared<const ForwardSchedule>(make_forward_schedule(problem_, threads));
    if (made->spans.size() <= kMostKeptSpans) {
        const std::lock_guard lock(mutex_);
        kept_ = made;
    }
    return made;
}

void forward(const ForwardArgs& args, const ForwardSchedule& schedule) {
    const Problem& p = args.problem;
    const std::int64_t longest_rows = p.longest_q() * p.g, longest_kv = p.longest_kv();
    Job job{.args = args,
            .schedule = schedule,
            .shape = make_tile_shape(current_isa(), args.dtype, p.d, p.dv, args.softmax_scale, longest_rows, longest_kv),
            .longest_kv = longest_kv};
    job.shared = std::make_unique<SharedSum[]>(static_cast<std::size_t>(schedule.num_shared));
    const auto spans = static_cast<std::int64_t>(schedule.spans.size());
    const auto threads = static_cast<int>(std::clamp<std::int64_t>(spans, 1, schedule.num_threads));
    run_parallel(threads, args.num_threads, [&](int) { work_until_done(job); });
}

}  // namespace fag::cpu
