/// How many threads a call is worth, and when threads that pull work in order become free.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fag::cpu {

/// Threads for `pairs` (query, key) pairs of `pair_ops` floating-point operations each. Waking a thread takes some
/// microseconds; less work than this per thread is done sooner without it.
inline int threads_worth_waking(std::int64_t pair_ops, std::int64_t pairs, int max_threads) {
    constexpr double kOpsPerThread = 4e6;
    const double worth = static_cast<double>(pair_ops) * static_cast<double>(pairs) / kOpsPerThread;
    return static_cast<int>(std::clamp(worth, 1.0, static_cast<double>(max_threads)));
}

/// Threads take pieces in order, each as soon as it is free. A piece fits if the thread that would take it is done with
/// it soon after the mean of all threads; a piece that does not fit should be shared out.
class ThreadsAhead {
public:
    ThreadsAhead(int count, std::int64_t total_cost)
        : busy_until_(static_cast<std::size_t>(count), 0),
          limit_(kTolerance * static_cast<double>(total_cost) / count) {}

    bool fits(std::int64_t cost) const {
        return busy_until_.size() == 1 || static_cast<double>(*first_free() + cost) <= limit_;
    }

    void take(std::int64_t cost) { busy_until_[static_cast<std::size_t>(first_free() - busy_until_.begin())] += cost; }

private:
    /// How much longer than the mean the last thread may take: sharing has costs of its own (cache traffic, operands
    /// packed once per thread).
    static constexpr double kTolerance = 1.03;

    std::vector<std::int64_t>::const_iterator first_free() const {
        return std::min_element(busy_until_.begin(), busy_until_.end());
    }

    std::vector<std::int64_t> busy_until_;
    double limit_;
};

}  // namespace fag::cpu
