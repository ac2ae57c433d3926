/// How many threads a call is worth, and when threads that pull work in order become free.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pool.hpp"

namespace fag::cpu {

/// Threads for `pairs` (query, key) pairs of `pair_ops` floating-point operations each. Waking a thread takes some
/// microseconds; less work than this per thread is done sooner without it. Threads that are awake are worth less work, as
/// long as it is enough for all of them: they meet at the end.
inline int threads_worth_waking(std::int64_t pair_ops, std::int64_t pairs, int max_threads) {
    constexpr double kOpsPerThread = 4e6, kOpsIfAwake = 5e5;
    const double ops = static_cast<double>(pair_ops) * static_cast<double>(pairs);
    const double most = static_cast<double>(max_threads);
    if (ops < kOpsPerThread * most && ops >= kOpsIfAwake * most && threads_are_awake(max_threads)) return max_threads;
    return static_cast<int>(std::clamp(ops / kOpsPerThread, 1.0, most));
}

/// Threads take pieces in order, each as soon as it is free. Says which of them should be shared out.
class ThreadsAhead {
public:
    ThreadsAhead(int count, std::int64_t total_cost)
        : busy_until_(static_cast<std::size_t>(count), 0), mean_(static_cast<double>(total_cost) / count) {}

    /// True if the thread that would take the piece is done with it soon after the mean of all threads.
    bool fits(std::int64_t cost) const { return ends_before(kTolerance * mean_, cost); }

    /// True if it is done so long before, half a piece, that what comes behind can be cut to even out what cannot be
    /// foreseen: cores differ in speed, and others use them too.
    bool leaves_enough_behind(std::int64_t cost) const {
        return ends_before(mean_ - 0.5 * static_cast<double>(cost), cost);
    }

    void take(std::int64_t cost) { busy_until_[static_cast<std::size_t>(first_free() - busy_until_.begin())] += cost; }

private:
    /// How much longer than the mean the last thread may take: sharing has costs of its own (cache traffic, operands
    /// packed once per thread).
    static constexpr double kTolerance = 1.03;

    bool ends_before(double limit, std::int64_t cost) const {
        return busy_until_.size() == 1 || static_cast<double>(*first_free() + cost) <= limit;
    }

    std::vector<std::int64_t>::const_iterator first_free() const {
        return std::min_element(busy_until_.begin(), busy_until_.end());
    }

    std::vector<std::int64_t> busy_until_;
    double mean_;
};

}  // namespace fag::cpu
