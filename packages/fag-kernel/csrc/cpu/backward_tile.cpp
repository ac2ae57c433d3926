#include "backward_tile.hpp"

#include <algorithm>
#include <cstring>

#include "careful.hpp"
#include "visible_rows.hpp"

namespace fag::cpu {
namespace {

int round_down(int x, int unit) { return x / unit * unit; }

/// Rows of the panel that the element-wise part does not write, but dQ may read.
void zero_ds_rows(const TileShape& shape, const TileBuffers& buffers, int row_begin, int row_end, int key, int width) {
    const int packing = shape.products.packing;
    for (int row = row_begin; row < row_end; ++row) {
        std::memset(buffers.ds_rows + row * shape.words_along_keys() + key / packing, 0,
                    static_cast<std::size_t>(width / packing) * sizeof(Word));
    }
}

}  // namespace

TileShape make_tile_shape(const Isa& isa, DType dtype, std::int64_t d, std::int64_t dv, float scale,
                          std::int64_t longest_rows, std::int64_t longest_keys) {
    const Products& products = isa.products(dtype);
    const auto capacity = [&](std::int64_t longest) {
        return round_up(std::clamp<std::int64_t>(longest, 1, kTile), kAlign * products.packing);
    };
    return {isa,   products, dtype, layout_of(d, products), layout_of(dv, products), scale, capacity(longest_rows),
            capacity(longest_keys)};
}

RowTile take_row_tile(Arena& arena, const TileShape& shape) {
    RowTile tile;
    tile.q = arena.take<Word>(shape.tile_rows * shape.d.row_words);
    tile.dout = arena.take<Word>(shape.tile_rows * shape.dv.row_words);
    tile.q_t = arena.take<Word>(shape.d.padded_cols * shape.words_along_rows());
    tile.dout_t = arena.take<Word>(shape.dv.padded_cols * shape.words_along_rows());
    tile.lse = arena.take<float>(shape.tile_rows + 1);
    tile.shift = arena.take<float>(shape.tile_rows + 1);
    return tile;
}

std::int64_t row_tile_bytes(const TileShape& shape) {
    return 4 * (shape.tile_rows * (shape.d.row_words + shape.dv.row_words) +
                (shape.d.padded_cols + shape.dv.padded_cols) * shape.words_along_rows() + 2 * (shape.tile_rows + kAlign));
}

KeyTile take_key_tile(Arena& arena, const TileShape& shape) {
    KeyTile tile;
    tile.k_cols = arena.take<Word>(shape.tile_keys * shape.d.row_words);
    tile.v_cols = arena.take<Word>(shape.tile_keys * shape.dv.row_words);
    tile.k_reduced = arena.take<Word>(shape.words_along_keys() * shape.d.padded_cols);
    tile.dk_t = arena.take<float>(shape.tile_keys * shape.d.padded_cols);
    tile.dv_t = arena.take<float>(shape.tile_keys * shape.dv.padded_cols);
    return tile;
}

TileBuffers take_tile_buffers(Arena& arena, const TileShape& shape) {
    TileBuffers buffers;
    const std::int64_t panel = shape.tile_rows * std::min<std::int64_t>(shape.products.panel, shape.tile_keys);
    buffers.s = arena.take<float>(panel);
    buffers.dp = arena.take<float>(panel);
    buffers.p = arena.take<Word>(panel / shape.products.packing);
    buffers.ds = arena.take<Word>(panel / shape.products.packing);
    buffers.ds_rows = arena.take<Word>(shape.tile_rows * shape.words_along_keys());
    if (shape.products.share_residual != nullptr) {
        buffers.residual = arena.take<float>(shape.tile_rows + 1);
        buffers.dq_start = arena.take<float>(shape.tile_rows * shape.d.padded_cols);
    }
    buffers.first = arena.take<std::int32_t>(shape.tile_rows);
    buffers.last = arena.take<std::int32_t>(shape.tile_rows);
    return buffers;
}

Visible tile_visibility(const Band& band, std::int64_t row, int num_rows, std::int64_t key, int num_keys,
                        const TileBuffers& buffers) {
    const bool sees_all = band.sees_all(row, row + num_rows, key, key + num_keys);
    if (sees_all && num_keys % kAlign == 0) return {nullptr, nullptr, true};
    for (int i = 0; i < num_rows; ++i) {
        const Interval seen = band.keys(row + i);
        buffers.first[i] = static_cast<std::int32_t>(std::clamp<std::int64_t>(seen.begin - key, 0, num_keys));
        buffers.last[i] = static_cast<std::int32_t>(std::clamp<std::int64_t>(seen.end - key, 0, num_keys));
    }
    return {buffers.first, buffers.last, false};
}

void add_to_keys(const TileShape& shape, const RowTile& rows, KeyTile& keys, const Visible& visible,
                 const TileBuffers& buffers) {
    const Products& ops = shape.products;
    const int padded_keys = keys.padded_keys();
    Ahead ahead = Ahead::rows;  // with the first panel: the row tile comes from afar, with the others it is near
    if (buffers.residual != nullptr) std::fill(buffers.residual, buffers.residual + rows.num_rows + 1, 0.0f);
    for (int key = 0; key < padded_keys; key += ops.panel) {
        const int width = std::min(ops.panel, padded_keys - key);
        const RowSpan seen = rows_seeing(visible, rows.num_rows, key, key + width);
        if (seen.begin == seen.end) {
            zero_ds_rows(shape, buffers, 0, rows.num_rows, key, width);
            continue;
        }
        const int row_begin = round_down(seen.begin, ops.packing);
        const int row_end = static_cast<int>(round_up(seen.end, ops.packing));
        const int num_rows = seen.end - row_begin;
        ops.gemm({rows.q + static_cast<std::int64_t>(row_begin) * shape.d.row_words, shape.d.row_words,
                  keys.k_cols + static_cast<std::int64_t>(key) * shape.d.row_words, buffers.s, width, num_rows, width,
                  shape.d.words, Merge::replace, ahead});
        ops.gemm({rows.dout + static_cast<std::int64_t>(row_begin) * shape.dv.row_words, shape.dv.row_words,
                  keys.v_cols + static_cast<std::int64_t>(key) * shape.dv.row_words, buffers.dp, width, num_rows,
                  width, shape.dv.words, Merge::replace, ahead});
        ops.softmax_grad({buffers.s, buffers.dp, rows.num_rows, row_begin, row_end, key, width, visible, rows.lse,
                          rows.shift, shape.scale, buffers.p, buffers.ds, buffers.ds_rows, shape.words_along_keys(),
                          buffers.residual});
        zero_ds_rows(shape, buffers, 0, row_begin, key, width);
        zero_ds_rows(shape, buffers, std::min(row_end, rows.num_rows), rows.num_rows, key, width);

        const Merge merge = keys.panel_started[key / kAlign] ? Merge::continue_ : Merge::replace;
        keys.panel_started[key / kAlign] = true;
        const int word_begin = row_begin / ops.packing;
        const int num_words = (row_end - row_begin) / ops.packing;
        const std::int64_t b_offset = static_cast<std::int64_t>(word_begin) * width;
        float* dv_t = keys.dv_t + static_cast<std::int64_t>(key) * shape.dv.padded_cols;
        float* dk_t = keys.dk_t + static_cast<std::int64_t>(key) * shape.d.padded_cols;
        ops.gemm({rows.dout_t + word_begin, shape.words_along_rows(), buffers.p + b_offset, dv_t, width, shape.dv.cols,
                  width, num_words, merge, ahead});
        ops.gemm({rows.q_t + word_begin, shape.words_along_rows(), buffers.ds + b_offset, dk_t, width, shape.d.cols, width,
                  num_words, merge, ahead});
        ahead = Ahead::nothing;
        if (!rows.dout_is_finite) {
            add_not_finite_rows(shape, rows.dout_rows, shape.dv.cols, {row_begin, seen.end}, {key, width}, visible,
                                buffers.p, dv_t);
        }
        if (!rows.q_is_finite) {
            add_not_finite_rows(shape, rows.q_rows, shape.d.cols, {row_begin, seen.end}, {key, width}, visible,
                                buffers.ds, dk_t);
        }
    }
}

void add_to_queries(const TileShape& shape, const RowTile& rows, const KeyTile& keys, const Visible& visible,
                    const TileBuffers& buffers, float* dq, Merge merge) {
    const Products& ops = shape.products;
    if (ops.share_residual != nullptr) {
        ops.share_residual({buffers.residual, rows.num_rows, keys.num_keys, visible, keys.k_reduced,
                            shape.words_along_keys(), ops.panel, buffers.dq_start, shape.d.padded_cols});
    }
    add_reduced_keys(shape, {buffers.ds_rows, rows.num_rows, keys.num_keys, visible}, keys.k_reduced, shape.d, dq, merge,
                     Ahead::nothing, buffers.dq_start);
    if (!keys.k_is_finite) {
        add_not_finite_keys(shape, rows.num_rows, keys.k_rows, keys.num_keys, shape.d, visible, buffers.ds_rows, dq);
    }
}

}  // namespace fag::cpu
