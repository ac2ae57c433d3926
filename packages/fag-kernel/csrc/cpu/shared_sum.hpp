/// A float32 sum that several threads add to, in a fixed order.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "arena.hpp"

namespace fag::cpu {

/// Thrown in threads that wait when another one has failed; the caller sees the other one's exception.
struct Abandoned : std::exception {};

/// Accumulators cut into tiles. Contribution k to a tile may be added when k contributions are in.
/// Memory is there from the first use on, until every tile is finished.
class SharedSum {
public:
    /// The accumulators, made on first use. `num_tiles` counters start at 0; the memory is not initialised.
    float* open(std::int64_t num_tiles, std::int64_t num_floats) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!memory_) {
            unfinished_tiles_.store(num_tiles, std::memory_order_relaxed);
            counters_ = std::make_unique<std::atomic<std::int32_t>[]>(static_cast<std::size_t>(num_tiles));
            memory_ = allocate_bytes(static_cast<std::size_t>(num_floats) * sizeof(float));
        }
        return reinterpret_cast<float*>(memory_.get());
    }

    bool is_turn(std::int64_t tile, std::int64_t rank) const {
        return counters_[static_cast<std::size_t>(tile)].load(std::memory_order_acquire) == rank;
    }

    void pass_on(std::int64_t tile, std::int64_t rank) {
        counters_[static_cast<std::size_t>(tile)].store(static_cast<std::int32_t>(rank + 1), std::memory_order_release);
    }

    /// After the last contribution to a tile, whose sum nobody needs any more.
    void finish_tile() {
        if (unfinished_tiles_.fetch_sub(1) == 1) {
            const std::lock_guard<std::mutex> lock(mutex_);
            memory_.reset();
        }
    }

private:
    std::mutex mutex_;
    std::atomic<std::int64_t> unfinished_tiles_{0};
    std::unique_ptr<std::atomic<std::int32_t>[]> counters_;
    AlignedBytes memory_;
};

/// Calls is_ready until it returns true: a while without pause, then giving the core to others.
template <typename IsReady>
void wait_until(const std::atomic<bool>& failed, const IsReady& is_ready) {
    constexpr int kSpins = 1000;
    for (int spins = 0; !is_ready(); ++spins) {
        if (failed.load(std::memory_order_relaxed)) throw Abandoned();
        if (spins > kSpins) std::this_thread::yield();
    }
}

}  // namespace fag::cpu
