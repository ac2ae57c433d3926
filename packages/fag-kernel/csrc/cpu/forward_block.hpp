/// One block of rows of the forward: the online softmax over its keys.
#pragma once

#include "backward_tile.hpp"
#include "operands.hpp"

namespace fag::cpu {

/// Running state of up to kTile rows: numerator, maximum (in units of exp_unit) and sum of the softmax.
struct SoftmaxState {
    float* out = nullptr;      ///< [row][dv.padded_cols]
    float* row_max = nullptr;
    float* row_sum = nullptr;

    static std::int64_t num_floats(const TileShape& shape) { return shape.tile_rows * (shape.dv.padded_cols + 2); }
    static SoftmaxState at(float* memory, const TileShape& shape);
    /// No key seen yet. The numerator holds anything until the first step has replaced it.
    void clear(int num_rows) const;
    /// Takes over the keys of `later`, which lie behind those of this state.
    void merge(const SoftmaxState& later, int num_rows, const TileShape& shape) const;
    void copy_from(const SoftmaxState& other, int num_rows, const TileShape& shape) const;
};

/// Keys and values of one step of up to kTile keys.
struct KeyStep {
    Word* k_cols = nullptr;     ///< K^T: B of S
    Word* v_reduced = nullptr;  ///< V: B of P V
    int num_keys = 0;
    bool v_is_finite = true;
    Rows v_rows;
};

KeyStep take_key_step(Arena& arena, const TileShape& shape);
std::int64_t key_step_bytes(const TileShape& shape);

struct StepBuffers {
    float* s = nullptr;  ///< [row][key]
    Word* p = nullptr;   ///< [row][word along the keys], distance shape.words_along_keys()
};

StepBuffers take_step_buffers(Arena& arena, const TileShape& shape);

/// Adds the step's keys to the state of rows that `q` holds (packed by Packer::rows). Of a state that has seen no key
/// yet (is_first) the numerator is not read.
void add_step(const TileShape& shape, const Word* q, int num_rows, const KeyStep& keys, const Visible& visible,
              const StepBuffers& buffers, const SoftmaxState& state, bool is_first);

}  // namespace fag::cpu
