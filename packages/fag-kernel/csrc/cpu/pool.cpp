#include "pool.hpp"

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include <pthread.h>

#include "float_state.hpp"

namespace fag::cpu {
namespace {

/// How often a waiting thread looks again before it sleeps: some 50 microseconds, longer than the gap between the
/// forward and backward calls of small layers, far shorter than anybody's patience with a busy idle core.
constexpr int kSpins = 2000;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/// Waits until `value` differs from `old`.
std::uint32_t wait_for_change(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
    for (int i = 0; i < kSpins; ++i) {
        const std::uint32_t now = value.load(std::memory_order_acquire);
        if (now != old) return now;
        relax();
    }
    value.wait(old, std::memory_order_acquire);
    return value.load(std::memory_order_acquire);
}

/// One helper thread. It waits for `started` to move, runs its share, then moves `finished`.
class Helper {
public:
    Helper() : thread_([this] { work(); }) { thread_.detach(); }

    void start(const std::function<void(int)>& task, int index) {
        task_ = &task;
        index_ = index;
        error_ = nullptr;
        started_.fetch_add(1, std::memory_order_release);
        started_.notify_one();
    }

    /// The exception of the task, if it threw one.
    std::exception_ptr finish() {
        const std::uint32_t target = started_.load(std::memory_order_relaxed);
        std::uint32_t seen = finished_.load(std::memory_order_acquire);
        while (seen != target) seen = wait_for_change(finished_, seen);
        return error_;
    }

private:
    [[noreturn]] void work() {
        std::uint32_t seen = 0;
        for (;;) {
            while (started_.load(std::memory_order_acquire) == seen) wait_for_change(started_, seen);
            ++seen;
            try {
                (*task_)(index_);
            } catch (...) {
                error_ = std::current_exception();
            }
            finished_.store(seen, std::memory_order_release);
            finished_.notify_one();
        }
    }

    const std::function<void(int)>* task_ = nullptr;
    int index_ = 0;
    std::exception_ptr error_;
    std::atomic<std::uint32_t> started_{0};
    std::atomic<std::uint32_t> finished_{0};
    std::thread thread_;
};

/// Helpers that no call uses at the moment. Never destroyed: the threads end with the process.
class Pool {
public:
    /// `count` helpers, taken from the idle ones or new. The caller owns them until give_back.
    std::vector<Helper*> take(int count) {
        std::vector<Helper*> taken;
        taken.reserve(static_cast<std::size_t>(count));
        const std::lock_guard<std::mutex> lock(mutex_);
        idle_.reserve(idle_.size() + static_cast<std::size_t>(count));
        try {
            while (static_cast<int>(taken.size()) < count) {
                if (idle_.empty()) {
                    all_.reserve(all_.size() + 1);
                    idle_.reserve(all_.size() + 1);
                    taken.push_back(new Helper);
                    all_.push_back(taken.back());
                } else {
                    taken.push_back(idle_.back());
                    idle_.pop_back();
                }
            }
        } catch (...) {
            idle_.insert(idle_.end(), taken.begin(), taken.end());
            throw;
        }
        return taken;
    }

    void give_back(const std::vector<Helper*>& helpers) noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        idle_.insert(idle_.end(), helpers.rbegin(), helpers.rend());  // capacity was reserved for all helpers
    }

private:
    std::mutex mutex_;
    std::vector<Helper*> idle_;
    std::vector<Helper*> all_;
};

std::atomic<Pool*> pool{nullptr};

/// After fork the child has the forking thread only; the parent's helpers, and whatever lock they held, do not exist.
void forget_pool() { pool.store(nullptr); }

Pool& current_pool() {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
    static_cast<void>(registered);
    Pool* found = pool.load();
    if (found == nullptr) {
        auto fresh = std::make_unique<Pool>();
        if (pool.compare_exchange_strong(found, fresh.get())) found = fresh.release();
    }
    return *found;
}

}  // namespace

void run_parallel(int count, const std::function<void(int)>& task) {
    const std::function<void(int)> with_default_floats = [&task](int index) {
        const DefaultFloatState state;
        task(index);
    };
    if (count <= 1) return with_default_floats(0);
    Pool& home = current_pool();
    const std::vector<Helper*> helpers = home.take(count - 1);
    for (int i = 1; i < count; ++i) helpers[static_cast<std::size_t>(i - 1)]->start(with_default_floats, i);
    std::exception_ptr error;
    try {
        with_default_floats(0);
    } catch (...) {
        error = std::current_exception();
    }
    for (Helper* helper : helpers) {
        const std::exception_ptr theirs = helper->finish();
        if (error == nullptr) error = theirs;
    }
    home.give_back(helpers);
    if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace fag::cpu
