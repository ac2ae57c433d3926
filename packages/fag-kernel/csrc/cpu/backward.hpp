/// The gradient of attention on the CPU.
#pragma once

#include "arrays.hpp"

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

/// Writes all of dq, dk, dv (and dsinks). Throws std::bad_alloc if scratch memory is not to be had.
///
/// Bits depend on neither num_threads nor the split of any metadata: dQ of a row is summed tile column by tile column
/// (each from zero) in key order; dK and dV of a key are one sum over the query heads and, within a head, over ascending
/// rows.
void backward(const BackwardArgs& args);

}  // namespace fag::cpu
