#include "backward.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>

#include "backward_margins.hpp"
#include "backward_schedule.hpp"
#include "backward_tile.hpp"
#include "levels.hpp"
#include "pool.hpp"
#include "query_sums.hpp"

namespace fag::cpu {
namespace {

/// Packed rows of a head are kept while they fit; of a longer head the last slot is packed anew for each column.
constexpr std::int64_t kRowCacheBytes = std::int64_t{4} << 20;

/// What all threads of a call share.
struct Job {
    const BackwardArgs& args;
    const GradWork& work;
    const BackwardSchedule& schedule;
    TileShape shape;
    std::int64_t longest_q = 0;
    std::int64_t longest_kv = 0;
    std::unique_ptr<SharedSum[]> shared_queries{};
    std::unique_ptr<SharedSum[]> shared_kv{};
    std::atomic<std::int64_t> next_span{0};
    std::atomic<std::int64_t> next_margin{0};
    std::atomic<bool> failed{false};
};

/// One query head of one batch entry.
struct Head {
    std::int64_t b;
    std::int64_t n2;
    std::int64_t g;
    std::int64_t n1;
    std::int64_t s1;
    std::int64_t s2;
    Band band;
    Rows q, k, v, dout, out, dq, dk, dv;
    const float* lse;
    const float* dlse;
};

Head make_head(const BackwardArgs& args, std::int64_t b, std::int64_t n2, std::int64_t g) {
    const Problem& p = args.problem;
    const std::int64_t n1 = n2 * p.g + g;
    const std::int64_t s1 = p.lengths_q[static_cast<std::size_t>(b)];
    const std::int64_t s2 = p.lengths_kv[static_cast<std::size_t>(b)];
    const auto query_side = [&](const Array& array) { return array.rows(p, p.starts_q, args.dtype, b, n1); };
    const auto key_side = [&](const Array& array) { return array.rows(p, p.starts_kv, args.dtype, b, n2); };
    const std::int64_t lse_at = lse_offset(p, b, n1);
    return {b, n2, g, n1, s1, s2, Band(p, s1, s2),
            query_side(args.q), key_side(args.k), key_side(args.v), query_side(args.dout), query_side(args.out),
            query_side(args.dq), key_side(args.dk), key_side(args.dv),
            args.lse + lse_at, args.dlse == nullptr ? nullptr : args.dlse + lse_at};
}

/// Packed row tiles of the head that this thread works on.
class RowCache {
public:
    RowCache(Arena& arena, const Job& job) : job_(job) {
        const std::int64_t tiles = ceil_div(job.longest_q, kTile);
        const std::int64_t fitting = kRowCacheBytes / row_tile_bytes(job.shape);
        slots_.resize(static_cast<std::size_t>(std::max<std::int64_t>(1, std::min(tiles, fitting))));
        for (Slot& slot : slots_) slot.tile = take_row_tile(arena, job.shape);
    }

    const RowTile& get(const Head& head, const Packer& packer, std::int64_t i) {
        Slot& slot = slots_[static_cast<std::size_t>(
            std::min<std::int64_t>(i, static_cast<std::int64_t>(slots_.size()) - 1))];
        if (slot.b != head.b || slot.n1 != head.n1 || slot.index != i) {
            pack(head, packer, i, slot.tile);
            slot.b = head.b;
            slot.n1 = head.n1;
            slot.index = i;
        }
        return slot.tile;
    }

private:
    struct Slot {
        RowTile tile;
        std::int64_t b = -1;
        std::int64_t n1 = -1;
        std::int64_t index = -1;
    };

    void pack(const Head& head, const Packer& packer, std::int64_t i, RowTile& tile) const {
        const TileShape& shape = job_.shape;
        const std::int64_t row = i * job_.work.grid.rows_per_tile;
        tile.num_rows = static_cast<int>(std::min(head.s1 - row, job_.work.grid.rows_per_tile));
        tile.q_rows = {head.q.row(row), head.q.stride_bytes};
        tile.dout_rows = {head.dout.row(row), head.dout.stride_bytes};
        packer.rows(tile.q_rows, tile.num_rows, shape.d, tile.q);
        packer.rows(tile.dout_rows, tile.num_rows, shape.dv, tile.dout);
        tile.q_is_finite = packer.rows_transposed(tile.q_rows, tile.num_rows, shape.d, tile.q_t);
        tile.dout_is_finite = packer.rows_transposed(tile.dout_rows, tile.num_rows, shape.dv, tile.dout_t);
        shape.isa.dot_rows[static_cast<int>(shape.dtype)](tile.dout_rows.base, tile.dout_rows.stride_bytes,
                                                          head.out.row(row), head.out.stride_bytes, tile.num_rows,
                                                          shape.dv.cols, tile.shift);
        for (int r = 0; r < tile.num_rows; ++r) {
            tile.lse[r] = head.lse[row + r];
            if (head.dlse != nullptr) tile.shift[r] -= head.dlse[row + r];
        }
        tile.lse[tile.num_rows] = tile.shift[tile.num_rows] = 0.0f;  // partner of an odd last row
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
          buffers_(take_tile_buffers(arena, shape_)),
          keys_(take_key_tile(arena, shape_)),
          packer_{shape_.isa, shape_.products, shape_.dtype,
                  arena.take<Word>(packer_scratch_words(shape_.d.padded_cols))},
          transposed_(arena.take<float>(kTile * shape_.d.padded_cols)),
          rows_(arena, job),
          arena_(arena) {
        if (job.schedule.num_shared_queries > 0) parked_.emplace(arena, shape_);
    }

    void run(const BackwardSpan& span) {
        if (span.shared_kv < 0 && job_.args.problem.g > 1) own_dkv_ = own_sum(own_dkv_, dkv_floats());
        if (span.shared_query < 0) own_dq_ = own_sum(own_dq_, dq_floats());
        for (std::int64_t g = span.g_begin; g < span.g_end; ++g) {
            const Head head = make_head(job_.args, span.b, span.n2, g);
            for (std::int64_t column = span.col_begin; column < span.col_end; ++column) {
                run_column(span, head, column);
            }
        }
    }

    /// After the last span: what still waits for other threads.
    void finish() {
        if (parked_) parked_->settle_all(job_.failed);
    }

private:
    void run_column(const BackwardSpan& span, const Head& head, std::int64_t column) {
        const TileGrid& grid = job_.work.grid;
        const std::int64_t key = column * grid.keys_per_tile;
        const std::int64_t key_end = std::min(head.s2, key + grid.keys_per_tile);
        const Interval seen = head.band.rows_of_keys(key, key_end);
        if (seen.empty()) return;
        pack_keys(head, key, key_end);
        const std::int64_t last = ceil_div(seen.end, grid.rows_per_tile);
        for (std::int64_t i = seen.begin / grid.rows_per_tile; i < last; ++i) run_tile(span, head, column, i);
        finish_column(span, head, column, key);
    }

    void pack_keys(const Head& head, std::int64_t key, std::int64_t key_end) {
        std::fill(std::begin(keys_.panel_started), std::end(keys_.panel_started), false);
        if (packed_b_ == head.b && packed_n2_ == head.n2 && packed_key_ == key) return;
        keys_.num_keys = static_cast<int>(key_end - key);
        keys_.k_rows = {head.k.row(key), head.k.stride_bytes};
        packer_.columns(keys_.k_rows, keys_.num_keys, shape_.d, keys_.k_cols);
        packer_.columns({head.v.row(key), head.v.stride_bytes}, keys_.num_keys, shape_.dv, keys_.v_cols);
        keys_.k_is_finite = packer_.reduced_rows(keys_.k_rows, keys_.num_keys, shape_.d, keys_.k_reduced);
        packed_b_ = head.b;
        packed_n2_ = head.n2;
        packed_key_ = key;
    }

    void run_tile(const BackwardSpan& span, const Head& head, std::int64_t column, std::int64_t i) {
        const TileGrid& grid = job_.work.grid;
        const RowTile& rows = rows_.get(head, packer_, i);
        const std::int64_t row = i * grid.rows_per_tile;
        const Visible visible = tile_visibility(head.band, row, rows.num_rows, column * grid.keys_per_tile,
                                                keys_.num_keys, buffers_);
        add_to_keys(shape_, rows, keys_, visible, buffers_);

        const Interval seen = head.band.keys_of_rows(row, row + rows.num_rows);
        const std::int64_t rank = column - seen.begin / grid.keys_per_tile;
        const bool is_last = column + 1 == ceil_div(seen.end, grid.keys_per_tile);
        const Rows out{head.dq.row(row), head.dq.stride_bytes};
        const auto add_to = [&](float* dq, Merge merge) {
            add_to_queries(shape_, rows, keys_, visible, buffers_, dq, merge);
        };
        const Merge merge = rank == 0 ? Merge::replace : Merge::add;
        const std::int64_t total_at = i * kTile * shape_.d.padded_cols;
        if (span.shared_query < 0) {
            add_to(own_dq_ + total_at, merge);
            if (is_last) store_queries(shape_, own_dq_ + total_at, rows.num_rows, out);
            return;
        }
        SharedSum& sum = job_.shared_queries[span.shared_query];
        float* total = sum.open(ceil_div(head.s1, grid.rows_per_tile), dq_floats()) + total_at;
        const QueryShare share{&sum, i, rank, is_last, total, rows.num_rows, out};
        parked_->settle();
        if (parked_->may_add_now(share)) {
            add_to(total, merge);
            if (is_last) store_queries(shape_, total, rows.num_rows, out);
            sum.pass_on(i, rank);
        } else {
            add_to(parked_->make_room(job_.failed), Merge::replace);
            parked_->park(share);
        }
    }

    /// Adds the column's dK, dV of this query head to those of the heads before it; the last one rounds and stores.
    void finish_column(const BackwardSpan& span, const Head& head, std::int64_t column, std::int64_t key) {
        SharedSum* shared = span.shared_kv < 0 ? nullptr : &job_.shared_kv[span.shared_kv];
        float* sum = own_dkv_;
        if (shared != nullptr) {
            sum = shared->open(ceil_div(head.s2, job_.work.grid.keys_per_tile), dkv_floats());
            wait_until(job_.failed, [&] {
                if (parked_) parked_->settle();  // another thread may wait for those
                return shared->is_turn(column, head.g);
            });
        }
        const std::int64_t tile = column * kTile * (shape_.d.padded_cols + shape_.dv.padded_cols);
        float* dk_sum = sum == nullptr ? nullptr : sum + tile;
        float* dv_sum = sum == nullptr ? nullptr : dk_sum + kTile * shape_.d.padded_cols;
        finish_keys(head, keys_.dk_t, shape_.d, shape_.scale, dk_sum, {head.dk.row(key), head.dk.stride_bytes});
        finish_keys(head, keys_.dv_t, shape_.dv, 1.0f, dv_sum, {head.dv.row(key), head.dv.stride_bytes});
        if (shared != nullptr) shared->pass_on(column, head.g);
    }

    void finish_keys(const Head& head, const float* gradient_t, const Layout2D& shape, float scale, float* sum,
                     const Rows& out) {
        const int padded_keys = keys_.padded_keys();
        const int panel = shape_.products.panel;
        const std::int64_t cols = shape.padded_cols;
        for (int at = 0; at < padded_keys; at += panel) {
            const int width = std::min(panel, padded_keys - at);
            float* rows = transposed_ + at * cols;
            if (!keys_.panel_started[at / kAlign]) {
                std::fill(rows, rows + width * cols, 0.0f);
                continue;
            }
            shape_.isa.transpose(reinterpret_cast<const Word*>(gradient_t + at * cols), width, shape.cols, width,
                                 reinterpret_cast<Word*>(rows), cols);
        }
        const std::int64_t count = keys_.num_keys * cols;
        const bool is_first = head.g == 0, is_last = head.g + 1 == job_.args.problem.g;
        if (!is_first) {
            for (std::int64_t x = 0; x < count; ++x) transposed_[x] = sum[x] + transposed_[x];
        }
        if (!is_last) {
            std::copy(transposed_, transposed_ + count, sum);
            return;
        }
        shape_.isa.store_rows[static_cast<int>(shape_.dtype)](transposed_, cols, keys_.num_keys, shape.cols, scale,
                                                              out.base, out.stride_bytes);
    }

    std::int64_t dq_floats() const { return ceil_div(job_.longest_q, kTile) * kTile * shape_.d.padded_cols; }
    std::int64_t dkv_floats() const {
        return ceil_div(job_.longest_kv, kTile) * kTile * (shape_.d.padded_cols + shape_.dv.padded_cols);
    }
    float* own_sum(float* known, std::int64_t count) { return known != nullptr ? known : arena_.take<float>(count); }

    Job& job_;
    const TileShape& shape_;
    TileBuffers buffers_;
    KeyTile keys_;
    Packer packer_;
    float* transposed_;
    RowCache rows_;
    Arena& arena_;
    std::optional<ParkedQueries> parked_;
    float* own_dq_ = nullptr;
    float* own_dkv_ = nullptr;
    std::int64_t packed_b_ = -1;
    std::int64_t packed_n2_ = -1;
    std::int64_t packed_key_ = -1;
};

void work_until_done(Job& job, Margins& margins) {
    try {
        ScopedArena arena;
        const auto num_spans = static_cast<std::int64_t>(job.schedule.spans.size());
        std::int64_t at = job.next_span.fetch_add(1);
        if (at < num_spans) {
            Worker worker(*arena, job);
            for (; at < num_spans && !job.failed.load(); at = job.next_span.fetch_add(1)) {
                worker.run(job.schedule.spans[static_cast<std::size_t>(at)]);
            }
            worker.finish();
        }
        while ((at = job.next_margin.fetch_add(1)) < margins.count()) margins.run(at);
    } catch (const Abandoned&) {
        // The thread it waited for has reported its own failure.
    } catch (...) {
        job.failed.store(true);
        throw;
    }
}

}  // namespace

void backward(const BackwardArgs& args, const Metadata& metadata) {
    const Problem& p = args.problem;
    const GradWork work = read_grad_work(p, metadata);
    const BackwardSchedule schedule = make_backward_schedule(p, work, args.num_threads);
    const Isa& isa = current_isa();
    const Products& products = isa.products(args.dtype);
    Job job{.args = args,
            .work = work,
            .schedule = schedule,
            .shape = {isa, products, args.dtype, layout_of(p.d, products), layout_of(p.dv, products),
                      args.softmax_scale}};
    for (const std::int64_t s : p.lengths_q) job.longest_q = std::max(job.longest_q, s);
    for (const std::int64_t s : p.lengths_kv) job.longest_kv = std::max(job.longest_kv, s);
    job.shared_queries = std::make_unique<SharedSum[]>(static_cast<std::size_t>(schedule.num_shared_queries));
    job.shared_kv = std::make_unique<SharedSum[]>(static_cast<std::size_t>(schedule.num_shared_kv));

    Margins margins(args, work.grid, isa);
    const auto spans = static_cast<std::int64_t>(schedule.spans.size());
    const auto threads = static_cast<int>(std::clamp<std::int64_t>(spans, 1, schedule.num_threads));
    run_parallel(threads, [&](int) { work_until_done(job, margins); });
    margins.finish();
}

}  // namespace fag::cpu
