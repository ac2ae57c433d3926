/// Streams: queues of tasks, each with a worker thread of its own, so that nothing runs before it must.

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "control.hpp"
#include "stub.hpp"

namespace npu_stub {

namespace {

std::atomic<int> latency_us{0};
std::atomic<int64_t> work_ns{0};

/// A stream's queue and worker. Destroyed ones stay in memory, so that their handles are never given out again.
class Queue {
  public:
    Queue(int device_index, int stream_id) : device(device_index), id(stream_id) {
        std::thread([this] { work(); }).detach();
    }

    const int device;
    const int id;

    void push(const char* name, Task task) {
        const std::lock_guard lock(mutex_);
        tasks_.push_back({name, std::move(task)});
        changed_.notify_all();
    }

    bool is_idle() {
        const std::lock_guard lock(mutex_);
        return tasks_.empty() && !is_busy_;
    }

    /// Waits until all tasks so far have run; false after the timeout (milliseconds; negative: none).
    bool wait(int timeout_ms) {
        std::unique_lock lock(mutex_);
        const auto is_done = [this] { return tasks_.empty() && !is_busy_; };
        if (timeout_ms >= 0) return changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), is_done);
        changed_.wait(lock, is_done);
        return true;
    }

    /// First failure since the last call; a stream reports it once.
    Outcome take_failure() {
        const std::lock_guard lock(mutex_);
        return std::exchange(failure_, {});
    }

    /// Ends the worker behind the tasks queued so far, or at once without them.
    void stop(bool drops_tasks) {
        const std::lock_guard lock(mutex_);
        if (drops_tasks) tasks_.clear();
        is_stopping_ = true;
        changed_.notify_all();
    }

  private:
    struct Entry {
        const char* name;
        Task task;
    };

    void work() {
        while (true) {
            Entry entry;
            {
                std::unique_lock lock(mutex_);
                changed_.wait(lock, [this] { return is_stopping_ || !tasks_.empty(); });
                if (tasks_.empty()) return;
                entry = std::move(tasks_.front());
                tasks_.pop_front();
                is_busy_ = true;
            }
            if (const int microseconds = latency_us) {
                std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
            }
            Outcome outcome = run(entry);
            entry.task = nullptr;
            const std::lock_guard lock(mutex_);
            if (outcome.code != kOk && failure_.code == kOk) failure_ = std::move(outcome);
            is_busy_ = false;
            changed_.notify_all();
        }
    }

    static Outcome run(const Entry& entry) {
        Outcome fault;
        fault.code = due_task_fault(entry.name, fault.message);
        if (fault.code != kOk) return fault;
        const auto start = std::chrono::steady_clock::now();
        Outcome outcome = entry.task();
        work_ns += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
        return outcome;
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Entry> tasks_;
    bool is_busy_ = false;
    bool is_stopping_ = false;
    Outcome failure_;
};

struct Streams {
    std::mutex mutex;
    std::set<Queue*> live;
    std::set<const void*> destroyed;
    std::map<int, Queue*> defaults;
    int next_id = 0;
};

Streams& streams() {
    static Streams& instance = *new Streams;
    return instance;
}

/// The queue of a handle; nullptr stands for the default stream of the thread's device. Nullptr if there is none.
Queue* find(void* stream, const char* name) {
    const std::lock_guard lock(streams().mutex);
    if (stream == nullptr) {
        const int device = current_device();
        if (device < 0) return nullptr;
        Queue*& queue = streams().defaults[device];
        if (queue == nullptr) queue = new Queue(device, streams().next_id++);
        return queue;
    }
    auto* queue = static_cast<Queue*>(stream);
    if (streams().live.count(queue) != 0) return queue;
    violate((streams().destroyed.count(stream) != 0 ? "destroyed stream: " : "unknown stream: ") + std::string(name));
    return nullptr;
}

std::vector<Queue*> queues_of(int device) {
    const std::lock_guard lock(streams().mutex);
    std::vector<Queue*> found;
    for (Queue* queue : streams().live) {
        if (device < 0 || queue->device == device) found.push_back(queue);
    }
    for (const auto& [owner, queue] : streams().defaults) {
        if (device < 0 || owner == device) found.push_back(queue);
    }
    return found;
}

int report(Queue& queue) {
    Outcome failure = queue.take_failure();
    return failure.code == kOk ? kOk : fail(failure.code, std::move(failure.message));
}

int synchronize(void* stream, const char* name, int timeout_ms) {
    constexpr int kTimeout = 507046;
    Queue* queue = find(stream, name);
    if (queue == nullptr) return fail(kInvalidHandle, "the stream does not exist");
    const WithoutGil without_gil;
    if (!queue->wait(timeout_ms)) return fail(kTimeout, "the stream has not finished in time");
    return report(*queue);
}

int synchronize_device() {
    const WithoutGil without_gil;
    int code = kOk;
    for (Queue* queue : queues_of(current_device())) {
        queue->wait(-1);
        if (const int failure = report(*queue)) code = failure;
    }
    return code;
}

int create(const char* symbol, void** stream) {
    const Entry entry(symbol);
    if (entry.code != kOk) return entry.code;
    if (current_device() < 0) return fail(kNoContext, "the thread has no context; call aclrtSetDevice");
    const std::lock_guard lock(streams().mutex);
    auto* queue = new Queue(current_device(), streams().next_id++);
    streams().live.insert(queue);
    count_live("streams", 1);
    *stream = queue;
    return kOk;
}

int destroy(const char* symbol, void* stream, bool drops_tasks) {
    const Entry entry(symbol, stream);
    if (entry.code != kOk) return entry.code;
    Queue* queue = stream == nullptr ? nullptr : find(stream, symbol);
    if (queue == nullptr) return fail(kInvalidHandle, "the stream does not exist");
    {
        const std::lock_guard lock(streams().mutex);
        streams().live.erase(queue);
        streams().destroyed.insert(queue);
    }
    count_live("streams", -1);
    queue->stop(drops_tasks);
    return kOk;
}

}  // namespace

int submit(void* stream, const char* name, Task task) {
    Queue* queue = find(stream, name);
    if (queue == nullptr) return fail(kInvalidHandle, "the stream does not exist");
    if (queue->device != current_device()) {
        violate("wrong device: " + std::string(name) + " on a stream of device " + std::to_string(queue->device) +
                " while the thread uses device " + std::to_string(current_device()));
        return fail(kWrongStream, "the stream is not in the current context");
    }
    queue->push(name, std::move(task));
    return kOk;
}

int device_of_stream(void* stream, const char* name) {
    const Queue* queue = find(stream, name);
    return queue == nullptr ? -1 : queue->device;
}

WithoutGil::WithoutGil() {
    static const auto holds = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static const auto is_running = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
    static const auto release = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    if (holds != nullptr && is_running() && holds()) state_ = release();
}

WithoutGil::~WithoutGil() {
    static const auto acquire = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    if (state_ != nullptr) acquire(state_);
}

void set_latency(int microseconds) { latency_us = microseconds; }

double work_seconds() { return 1e-9 * static_cast<double>(work_ns); }

void wait_for_all_streams() {
    for (Queue* queue : queues_of(-1)) queue->wait(-1);
}

}  // namespace npu_stub

using namespace npu_stub;

EXPORT int aclrtCreateStream(void** stream) { return create("aclrtCreateStream", stream); }
EXPORT int aclrtCreateStreamWithConfig(void** stream, uint32_t, uint32_t) {
    return create("aclrtCreateStreamWithConfig", stream);
}
EXPORT int aclrtDestroyStream(void* stream) { return destroy("aclrtDestroyStream", stream, false); }
EXPORT int aclrtDestroyStreamForce(void* stream) { return destroy("aclrtDestroyStreamForce", stream, true); }

EXPORT int aclrtSynchronizeStream(void* stream) {
    const Entry entry("aclrtSynchronizeStream", stream, {}, Entry::kBlocking);
    if (entry.code != kOk) return entry.code;
    return synchronize(stream, "aclrtSynchronizeStream", -1);
}

EXPORT int aclrtSynchronizeStreamWithTimeout(void* stream, int32_t timeout_ms) {
    const Entry entry("aclrtSynchronizeStreamWithTimeout", stream, {}, Entry::kBlocking);
    if (entry.code != kOk) return entry.code;
    return synchronize(stream, "aclrtSynchronizeStreamWithTimeout", timeout_ms);
}

EXPORT int aclrtSynchronizeDevice() {
    const Entry entry("aclrtSynchronizeDevice", nullptr, {}, Entry::kBlocking);
    if (entry.code != kOk) return entry.code;
    return synchronize_device();
}

EXPORT int aclrtSynchronizeDeviceWithTimeout(int32_t) {
    const Entry entry("aclrtSynchronizeDeviceWithTimeout", nullptr, {}, Entry::kBlocking);
    if (entry.code != kOk) return entry.code;
    return synchronize_device();
}

EXPORT int aclrtStreamQuery(void* stream, int* status) {
    constexpr int kComplete = 0;
    constexpr int kNotReady = 1;
    const Entry entry("aclrtStreamQuery", stream);
    if (entry.code != kOk) return entry.code;
    Queue* queue = find(stream, "aclrtStreamQuery");
    if (queue == nullptr) return fail(kInvalidHandle, "the stream does not exist");
    *status = queue->is_idle() ? kComplete : kNotReady;
    return kOk;
}

EXPORT int aclrtStreamGetId(void* stream, int32_t* id) {
    const Entry entry("aclrtStreamGetId", stream);
    if (entry.code != kOk) return entry.code;
    const Queue* queue = find(stream, "aclrtStreamGetId");
    if (queue == nullptr) return fail(kInvalidHandle, "the stream does not exist");
    *id = queue->id;
    return kOk;
}

EXPORT int aclrtLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
    const Entry entry("aclrtLaunchHostFunc", stream);
    if (entry.code != kOk) return entry.code;
    return submit(stream, "aclrtLaunchHostFunc", [function, argument] {
        function(argument);
        return Outcome{};
    });
}
