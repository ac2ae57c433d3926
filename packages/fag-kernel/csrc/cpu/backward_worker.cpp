#include "backward_worker.hpp"

#include <algorithm>

namespace fag::cpu {

BackwardWorker::BackwardWorker(Arena& arena, BackwardJob& job)
    : job_(job),
      shape_(job.shape),
      arena_(arena),
      buffers_(take_tile_buffers(arena, shape_)),
      keys_(take_key_tile(arena, shape_)),
      own_dk_t_(keys_.dk_t),
      own_dv_t_(keys_.dv_t),
      packer_{shape_.isa, shape_.products, shape_.dtype,
              arena.take<Word>(std::max(shape_.tile_rows, shape_.tile_keys) * shape_.d.padded_cols)},
      transposed_(arena.take<float>(shape_.tile_keys * shape_.d.padded_cols)),
      rows_(arena, job) {
    if (job.schedule.num_shared_queries > 0) parked_.emplace(arena, shape_);
}

void BackwardWorker::run(const BackwardSpan& span) {
    const std::int64_t g = job_.args.problem.g;
    const KeyHead head = key_head(job_.args, span.b, span.n2);
    heads_.clear();
    for (std::int64_t i = 0; i < g; ++i) heads_.push_back(query_head(job_.args, span.b, span.n2 * g + i));
    const bool all_heads_at_once = g == 1 || span.shared_query >= 0 || rows_.holds(g, heads_.front().s1);
    if (span.shared_query < 0 && own_dq_ == nullptr) {
        own_dq_ = arena_.take<float>(rows_.most_tiles() * job_.query_tile_floats());
    }
    if (all_heads_at_once) {
        run_columns_for_all_heads(span, head);
    } else {
        run_heads_for_all_columns(span, head);
    }
}

void BackwardWorker::finish() {
    if (parked_) parked_->settle_all(job_.failed);
}

void BackwardWorker::run_columns_for_all_heads(const BackwardSpan& span, const KeyHead& head) {
    for (std::int64_t column = span.col_begin; column < span.col_end; ++column) {
        if (!open_column(head, column, own_dk_t_, own_dv_t_)) continue;
        for (std::int64_t g = 0; g < job_.args.problem.g; ++g) run_rows(span, head, column, g);
        store_column(head, column);
    }
}

void BackwardWorker::run_heads_for_all_columns(const BackwardSpan& span, const KeyHead& head) {
    const std::int64_t g_end = job_.args.problem.g;
    const std::int64_t floats_of_a_key = shape_.d.padded_cols + shape_.dv.padded_cols;
    if (column_sums_ == nullptr) column_sums_ = arena_.take<float>(round_up(job_.longest_kv, kTile) * floats_of_a_key);
    column_started_.resize(static_cast<std::size_t>(span.col_end - span.col_begin));
    for (std::int64_t g = 0; g < g_end; ++g) {
        for (std::int64_t column = span.col_begin; column < span.col_end; ++column) {
            float* sums = column_sums_ + head.first_key(column) * floats_of_a_key;
            if (!open_column(head, column, sums, sums + head.column_keys * shape_.d.padded_cols)) continue;
            // Not all panels: one that no row sees holds no sum.
            StartedPanels& started = column_started_[static_cast<std::size_t>(column - span.col_begin)];
            if (g > 0) keys_.panel_started = started;
            run_rows(span, head, column, g);
            started = keys_.panel_started;
            if (g + 1 == g_end) store_column(head, column);
        }
    }
}

bool BackwardWorker::open_column(const KeyHead& head, std::int64_t column, float* dk_t, float* dv_t) {
    const std::int64_t key = head.first_key(column), key_end = std::min(head.s2, key + head.column_keys);
    if (head.band.rows_of_keys(key, key_end).empty()) return false;
    keys_.dk_t = dk_t;
    keys_.dv_t = dv_t;
    keys_.panel_started.fill(false);
    if (packed_b_ == head.b && packed_n2_ == head.n2 && packed_column_ == column) return true;
    keys_.num_keys = static_cast<int>(key_end - key);
    keys_.k_rows = {head.k.row(key), head.k.stride_bytes};
    packer_.columns(keys_.k_rows, keys_.num_keys, shape_.d, keys_.k_cols);
    packer_.columns({head.v.row(key), head.v.stride_bytes}, keys_.num_keys, shape_.dv, keys_.v_cols);
    keys_.k_is_finite = packer_.reduced_rows(keys_.k_rows, keys_.num_keys, shape_.d, keys_.k_reduced,
                                             shape_.words_along_keys());
    packed_b_ = head.b;
    packed_n2_ = head.n2;
    packed_column_ = column;
    return true;
}

void BackwardWorker::run_rows(const BackwardSpan& span, const KeyHead& head, std::int64_t column, std::int64_t g) {
    const std::int64_t key = head.first_key(column);
    const Interval seeing = head.band.rows_of_keys(key, key + keys_.num_keys);
    const std::int64_t end = ceil_div(seeing.end, kTile);
    for (std::int64_t i = seeing.begin / kTile; i < end; ++i) run_tile(span, head, column, g, i);
}

void BackwardWorker::run_tile(const BackwardSpan& span, const KeyHead& head, std::int64_t column, std::int64_t g,
                              std::int64_t i) {
    const QueryHead& query = heads_[static_cast<std::size_t>(g)];
    const bool is_alone = span.shared_query < 0;
    const bool has_place = !is_alone || rows_.holds(job_.args.problem.g, query.s1);
    const RowTile& rows = rows_.get(query, has_place ? g : 0, i, packer_);
    const std::int64_t row = i * kTile;
    const Visible visible =
        tile_visibility(head.band, row, rows.num_rows, head.first_key(column), keys_.num_keys, buffers_);
    add_to_keys(shape_, rows, keys_, visible, buffers_);

    const Interval seen = head.band.keys_of_rows(row, row + rows.num_rows);
    const std::int64_t rank = column - seen.begin / head.column_keys;
    const bool is_last = column + 1 == ceil_div(seen.end, head.column_keys);
    const Merge merge = rank == 0 ? Merge::replace : Merge::add;
    const Rows out{query.dq.row(row), query.dq.stride_bytes};
    if (is_alone) {
        // A tile's sum begins and ends while columns see it: others take its place then.
        const std::int64_t tiles = job_.row_tiles_of_column(query.s1);
        float* dq = own_dq_ + ((has_place ? g : 0) * tiles + i % tiles) * job_.query_tile_floats();
        add_to_queries(shape_, rows, keys_, visible, buffers_, dq, merge);
        if (is_last) store_queries(shape_, dq, rows.num_rows, out);
        return;
    }
    SharedSum& sum = job_.shared_queries[static_cast<std::size_t>(span.shared_query + g)];
    const std::int64_t tiles = head.row_tiles.end - head.row_tiles.begin, tile = i - head.row_tiles.begin;
    float* total = sum.open(tiles, tiles * job_.query_tile_floats()) + tile * job_.query_tile_floats();
    const QueryShare share{&sum, tile, rank, is_last, total, rows.num_rows, out};
    parked_->settle();
    if (parked_->may_add_now(share)) {
        add_to_queries(shape_, rows, keys_, visible, buffers_, total, merge);
        pass_on(shape_, share);
    } else {
        float* values = parked_->make_room(job_.failed);
        add_to_queries(shape_, rows, keys_, visible, buffers_, values, Merge::replace);
        parked_->park(share);
    }
}

void BackwardWorker::store_column(const KeyHead& head, std::int64_t column) {
    const std::int64_t key = head.first_key(column);
    store_keys(keys_.dk_t, shape_.d, shape_.scale, {head.dk.row(key), head.dk.stride_bytes});
    store_keys(keys_.dv_t, shape_.dv, 1.0f, {head.dv.row(key), head.dv.stride_bytes});
}

void BackwardWorker::store_keys(const float* gradient_t, const Layout2D& width, float scale, const Rows& out) {
    const int padded_keys = keys_.padded_keys();
    const int panel = shape_.products.panel;
    const std::int64_t cols = width.padded_cols;
    for (int key = 0; key < padded_keys; key += panel) {
        const int panel_keys = std::min(panel, padded_keys - key);
        float* rows = transposed_ + key * cols;
        if (keys_.panel_started[key / kAlign]) {
            shape_.isa.transpose(reinterpret_cast<const Word*>(gradient_t + key * cols), panel_keys, width.cols,
                                 panel_keys, reinterpret_cast<Word*>(rows), cols);
        } else {  // no row sees these keys
            std::fill(rows, rows + panel_keys * cols, 0.0f);
        }
    }
    shape_.isa.store_rows[static_cast<int>(shape_.dtype)](transposed_, cols, keys_.num_keys, width.cols, &scale, 0,
                                                          out.base, out.stride_bytes);
}

}  // namespace fag::cpu
