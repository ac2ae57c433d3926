#include "visible_rows.hpp"

#include <algorithm>

namespace fag::cpu {

RowSpan rows_seeing(const Visible& visible, int num_rows, int key_begin, int key_end) {
    if (visible.all) return {0, num_rows};
    int begin = 0, end = num_rows;
    while (begin < end && visible.last[begin] <= key_begin) ++begin;
    while (end > begin && visible.first[end - 1] >= key_end) --end;
    return {begin, end};
}

void add_reduced_keys(const TileShape& shape, const Weights& weights, const Word* reduced, const Layout2D& width,
                      float* out, Merge merge, Ahead ahead, const float* start) {
    const Products& ops = shape.products;
    const std::int64_t distance = shape.words_along_keys();
    const Visible& visible = weights.visible;
    const int step = visible.all ? weights.num_rows : kMaskedRows;
    for (int col = 0; col < width.padded_cols; col += ops.panel) {
        const int panel_width = std::min(ops.panel, width.padded_cols - col);
        for (int row = 0; row < weights.num_rows; row += step) {
            const int num_rows = std::min(step, weights.num_rows - row);
            const int key_begin = visible.all ? 0 : visible.first[row] / ops.packing * ops.packing;
            const int key_end = visible.all ? weights.num_keys : visible.last[row + num_rows - 1];
            const int word_begin = key_begin / ops.packing;
            const int num_words = std::max(0, static_cast<int>(ceil_div(key_end, ops.packing)) - word_begin);
            const std::int64_t at = static_cast<std::int64_t>(row) * width.padded_cols + col;
            ops.gemm({weights.words + row * distance + word_begin, distance,
                      reduced + col * distance + static_cast<std::int64_t>(word_begin) * panel_width,
                      out + at, width.padded_cols, num_rows, panel_width, num_words, merge, ahead,
                      start == nullptr ? nullptr : start + at});
        }
    }
}

}  // namespace fag::cpu
