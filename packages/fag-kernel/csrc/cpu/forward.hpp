/// Attention on the CPU.
#pragma once

#include <memory>
#include <mutex>

#include "arrays.hpp"
#include "forward_schedule.hpp"
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

/// What the calls of one problem have in common. Threads may share it.
class ForwardPlan {
public:
    /// Throws std::invalid_argument if the metadata does not fit the problem, which must outlive the plan.
    ForwardPlan(const Problem& problem, const Metadata& metadata);

    /// Who computes what in a call with at most so many threads, as many as are worth waking now.
    std::shared_ptr<const ForwardSchedule> schedule(int max_threads);

private:
    /// A longer schedule is made anew for each call: kept ones would take megabytes.
    static constexpr std::size_t kMostKeptSpans = 64;

    const Problem& problem_;
    std::int64_t pairs_;
    std::mutex mutex_;  ///< of kept_
    std::shared_ptr<const ForwardSchedule> kept_;
};

/// Writes all of out and lse, by a schedule of args.problem. Throws std::bad_alloc if scratch memory is not to be had.
///
/// Bits depend on neither num_threads nor the split of any metadata: the online softmax of a row runs in steps of 128 keys
/// within units of 2048 keys, each unit from scratch; the units are merged in key order.
void forward(const ForwardArgs& args, const ForwardSchedule& schedule);

}  // namespace fag::cpu
