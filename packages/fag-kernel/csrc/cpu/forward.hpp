/// Attention on the CPU.
#pragma once

#include "arrays.hpp"
#include "metadata.hpp"

namespace fag::cpu {

struct ForwardArgs {
    const Problem& problem;
    DType dtype;
    Array q, k, v;
    const float* sinks;  ///< or null
    Array out;
    float* lse;
    float softmax_scale;
    int num_threads;
};

/// Writes all of out and lse. Throws std::invalid_argument before anything is written if the metadata does not fit the
/// problem, std::bad_alloc if scratch memory is not to be had.
///
/// Bits depend on neither num_threads nor the metadata's split: the online softmax of a row runs in steps of 128 keys
/// within units of 2048 keys, each unit from scratch; the units are merged in key order.
void forward(const ForwardArgs& args, const Metadata& metadata);

}  // namespace fag::cpu
