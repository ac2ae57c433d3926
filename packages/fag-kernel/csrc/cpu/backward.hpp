/// The gradient of attention on the CPU.
#pragma once

#include "arrays.hpp"
#include "metadata.hpp"

namespace fag::cpu {

struct BackwardArgs {
    const Problem& problem;
    DType dtype;
    Array q, k, v, dout, out;
    const float* lse;
    const float* dlse;   ///< or null
    const float* sinks;  ///< or null
    Array dq, dk, dv;
    float* dsinks;       ///< or null
    float softmax_scale;
    int num_threads;
};

/// Writes all of dq, dk, dv (and dsinks). Throws std::invalid_argument before anything is written if the metadata does
/// not fit the problem, std::bad_alloc if scratch memory is not to be had.
///
/// Bits depend on neither num_threads nor the metadata's split: dQ of a row is summed tile column by tile column (128
/// keys, each from zero) in key order; dK and dV of a key are, per query head, one sum over ascending rows, and the
/// query heads of a kv head are added in order.
void backward(const BackwardArgs& args, const Metadata& metadata);

}  // namespace fag::cpu
