#include "careful.hpp"

#include <algorithm>
#include <cmath>

namespace fag::cpu {

void add_not_finite_rows(const TileShape& shape, const Rows& src, int cols, Extent rows, Panel panel,
                         const Visible& visible, const Word* weights, float* out_t) {
    const int packing = shape.products.packing;
    const std::int64_t element_bytes = kDTypeBytes[static_cast<int>(shape.dtype)];
    for (int row = rows.begin; row < rows.end; ++row) {
        const int first = visible.all ? panel.key : std::max(visible.first[row], panel.key);
        const int last = visible.all ? panel.key + panel.width : std::min(visible.last[row], panel.key + panel.width);
        for (int col = 0; col < cols; ++col) {
            const float value = to_float(shape.dtype, src.row(row) + col * element_bytes);
            if (std::isfinite(value)) continue;
            float* out = out_t + static_cast<std::int64_t>(col) * panel.width;
            for (int key = first; key < last; ++key) {
                const int at = key - panel.key;
                out[at] += word_value(weights[row / packing * panel.width + at], packing, row % packing) * value;
            }
        }
    }
}

void add_not_finite_keys(const TileShape& shape, int num_rows, const Rows& src, int num_keys, const Layout2D& width,
                         const Visible& visible, const Word* weights, float* out) {
    const int packing = shape.products.packing;
    const std::int64_t element_bytes = kDTypeBytes[static_cast<int>(shape.dtype)];
    for (int key = 0; key < num_keys; ++key) {
        for (int col = 0; col < width.cols; ++col) {
            const float value = to_float(shape.dtype, src.row(key) + col * element_bytes);
            if (std::isfinite(value)) continue;
            for (int row = 0; row < num_rows; ++row) {
                if (!visible.all && (key < visible.first[row] || key >= visible.last[row])) continue;
                const Word word = weights[row * shape.row_distance() + key / packing];
                out[static_cast<std::int64_t>(row) * width.padded_cols + col] +=
                    word_value(word, packing, key % packing) * value;
            }
        }
    }
}

}  // namespace fag::cpu
