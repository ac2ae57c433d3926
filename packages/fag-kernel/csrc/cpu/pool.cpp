#include "pool.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include <pthread.h>

#include "borrowed_threads.hpp"
#include "float_state.hpp"

namespace fag::cpu {
namespace {

using Clock = std::chrono::steady_clock;

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

/// One helper thread. It waits for `started` to move, runs its share (which must not throw), then moves `finished`.
class Helper {
public:
    Helper() : thread_([this] { work(); }) { thread_.detach(); }

    void start(const std::function<void(int)>& task, int index) {
        task_ = &task;
        index_ = index;
        started_.fetch_add(1);  // in total order with the look for sleepers in notify_one: else it may come first
        started_.notify_one();
    }

    void wait() {
        const std::uint32_t target = started_.load(std::memory_order_relaxed);
        std::uint32_t seen = finished_.load(std::memory_order_acquire);
        while (seen != target) seen = wait_for_change(finished_, seen);
    }

private:
    [[noreturn]] void work() {
        std::uint32_t seen = 0;
        for (;;) {
            while (started_.load(std::memory_order_acquire) == seen) wait_for_change(started_, seen);
            ++seen;
            (*task_)(index_);
            finished_.store(seen);  // the same
            finished_.notify_one();
        }
    }

    const std::function<void(int)>* task_ = nullptr;
    int index_ = 0;
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

    int size() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return static_cast<int>(all_.size());
    }

private:
    std::mutex mutex_;
    std::vector<Helper*> idle_;
    std::vector<Helper*> all_;
};

std::atomic<Pool*> pool{nullptr};

/// After fork the child has the forking thread only; the parent's helpers, and whatever lock they held, do not exist.
void forget_threads() {
    pool.store(nullptr);
    forget_borrowed_threads();
}

const int fork_handler = pthread_atfork(nullptr, nullptr, forget_threads);

Pool& current_pool() {
    Pool* found = pool.load();
    if (found == nullptr) {
        auto fresh = std::make_unique<Pool>();
        if (pool.compare_exchange_strong(found, fresh.get())) found = fresh.release();
    }
    return *found;
}

/// When the last call ended.
std::atomic<Clock::time_point> last_end{};

/// Keeps the first exception of several tasks.
class FirstError {
public:
    template <typename Task>
    void guard(const Task& task) noexcept {
        try {
            task();
        } catch (...) {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (error_ == nullptr) error_ = std::current_exception();
        }
    }

    void rethrow() const {
        if (error_ != nullptr) std::rethrow_exception(error_);
    }

private:
    std::mutex mutex_;
    std::exception_ptr error_;
};

void run_on_own_threads(int count, const std::function<void(int)>& task) {
    Pool& home = current_pool();
    const std::vector<Helper*> helpers = home.take(count - 1);
    for (int i = 1; i < count; ++i) helpers[static_cast<std::size_t>(i - 1)]->start(task, i);
    task(0);
    for (Helper* helper : helpers) helper->wait();
    home.give_back(helpers);
}

}  // namespace

bool threads_are_awake(int allowed) {
    constexpr auto kPause = std::chrono::milliseconds{1};
    return Clock::now() - last_end.load(std::memory_order_relaxed) < kPause && borrows_spinning_threads(allowed);
}

int num_own_threads() {
    Pool* found = pool.load();
    return found == nullptr ? 0 : found->size();
}

void run_parallel(int count, int allowed, const std::function<void(int)>& task) {
    FirstError error;
    const std::function<void(int)> guarded = [&](int index) {
        error.guard([&] {
            const DefaultFloatState state;
            task(index);
        });
    };
    if (count <= 1) {
        guarded(0);
    } else if (!run_on_borrowed_threads(count, allowed, guarded)) {
        run_on_own_threads(count, guarded);
    }
    last_end.store(Clock::now(), std::memory_order_relaxed);
    error.rethrow();
}

}  // namespace fag::cpu
