#include "forward_block.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "careful.hpp"
#include "visible_rows.hpp"

namespace fag::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

SoftmaxState SoftmaxState::at(float* memory, const TileShape& shape) {
    float* row_max = memory + shape.tile_rows * shape.dv.padded_cols;
    return {memory, row_max, row_max + shape.tile_rows};
}

void SoftmaxState::clear(int num_rows) const {
    std::fill(row_max, row_max + num_rows, -kInfinity);
    std::fill(row_sum, row_sum + num_rows, 0.0f);
}

void SoftmaxState::copy_from(const SoftmaxState& other, int num_rows, const TileShape& shape) const {
    std::copy(other.out, other.out + static_cast<std::int64_t>(num_rows) * shape.dv.padded_cols, out);
    std::copy(other.row_max, other.row_max + num_rows, row_max);
    std::copy(other.row_sum, other.row_sum + num_rows, row_sum);
}

void SoftmaxState::merge(const SoftmaxState& later, int num_rows, const TileShape& shape) const {
    const std::int64_t width = shape.dv.padded_cols;
    const float unit = shape.products.exp_unit;
    for (int row = 0; row < num_rows; ++row) {
        if (later.row_sum[row] == 0.0f) continue;  // it saw nothing
        const float highest = std::max(row_max[row], later.row_max[row]);
        const float base = highest == -kInfinity ? 0.0f : highest;
        const float mine = std::exp(unit * (row_max[row] - base));
        const float theirs = std::exp(unit * (later.row_max[row] - base));
        row_sum[row] = row_sum[row] * mine + later.row_sum[row] * theirs;
        row_max[row] = highest;
        float* out_row = out + row * width;
        const float* later_row = later.out + row * width;
        for (std::int64_t c = 0; c < width; ++c) out_row[c] = out_row[c] * mine + later_row[c] * theirs;
    }
}

KeyStep take_key_step(Arena& arena, const TileShape& shape) {
    KeyStep step;
    step.k_cols = arena.take<Word>(shape.tile_keys * shape.d.row_words);
    step.v_reduced = arena.take<Word>(shape.words_along_keys() * shape.dv.padded_cols);
    return step;
}

std::int64_t key_step_bytes(const TileShape& shape) {
    return 4 * (shape.tile_keys * shape.d.row_words + shape.words_along_keys() * shape.dv.padded_cols);
}

StepBuffers take_step_buffers(Arena& arena, const TileShape& shape) {
    return {arena.take<float>(shape.tile_rows * shape.tile_keys),
            arena.take<Word>(shape.tile_rows * shape.words_along_keys())};
}

void add_step(const TileShape& shape, const Word* q, int num_rows, const KeyStep& keys, const Visible& visible,
              const StepBuffers& buffers, const SoftmaxState& state, bool is_first) {
    const Products& ops = shape.products;
    const auto padded_keys = static_cast<int>(round_up(keys.num_keys, kAlign));
    for (int key = 0; key < padded_keys; key += ops.panel) {
        const int width = std::min(ops.panel, padded_keys - key);
        const RowSpan seen = rows_seeing(visible, num_rows, key, key + width);
        ops.gemm({q + static_cast<std::int64_t>(seen.begin) * shape.d.row_words, shape.d.row_words,
                  keys.k_cols + static_cast<std::int64_t>(key) * shape.d.row_words,
                  buffers.s + static_cast<std::int64_t>(seen.begin) * padded_keys + key, padded_keys,
                  seen.end - seen.begin, width, shape.d.words, Merge::replace, Ahead::panel});
    }
    const std::int64_t distance = shape.words_along_keys();
    ops.softmax_step({buffers.s, num_rows, padded_keys, visible, shape.scale, state.row_max, state.row_sum, state.out,
                      shape.dv.padded_cols, shape.dv.padded_cols, buffers.p, distance});
    add_reduced_keys(shape, {buffers.p, num_rows, keys.num_keys, visible}, keys.v_reduced, shape.dv, state.out,
                     is_first ? Merge::replace : Merge::continue_, Ahead::panel);
    if (!keys.v_is_finite) {
        add_not_finite_keys(shape, num_rows, keys.v_rows, keys.num_keys, shape.dv, visible, buffers.p, state.out);
    }
}

}  // namespace fag::cpu
