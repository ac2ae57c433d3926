/// Events: marks in streams that other streams and the host wait for.
///
/// Recording an event again gives it a new mark; a wait that was queued before keeps the old one, as on a device.

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>

#include "stub.hpp"

namespace npu_stub {

namespace {

using Clock = std::chrono::steady_clock;

/// One recording of an event.
struct Mark {
    std::mutex mutex;
    std::condition_variable reached;
    bool is_reached = false;
    Clock::time_point time;

    void reach() {
        const std::lock_guard lock(mutex);
        is_reached = true;
        time = Clock::now();
        reached.notify_all();
    }

    bool check() {
        const std::lock_guard lock(mutex);
        return is_reached;
    }

    void wait() {
        std::unique_lock lock(mutex);
        reached.wait(lock, [this] { return is_reached; });
    }
};

struct Event {
    std::shared_ptr<Mark> mark;  // nullptr: never recorded
};

struct Events {
    std::mutex mutex;
    std::map<void*, Event> live;
};

Events& events() {
    static Events& instance = *new Events;
    return instance;
}

/// The latest mark of an event. False, with a violation, if there is no such event.
bool find(void* event, const char* name, std::shared_ptr<Mark>& mark) {
    const std::lock_guard lock(events().mutex);
    const auto found = events().live.find(event);
    if (found == events().live.end()) {
        violate("unknown or destroyed event: " + std::string(name));
        fail(kInvalidHandle, "the event does not exist");
        return false;
    }
    mark = found->second.mark;
    return true;
}

int create(const char* symbol, void** event) {
    const Entry entry(symbol);
    if (entry.code != kOk) return entry.code;
    *event = new char;  // never reused: the handle of a destroyed event stays taken
    const std::lock_guard lock(events().mutex);
    events().live[*event] = {};
    count_live("events", 1);
    return kOk;
}

}  // namespace

}  // namespace npu_stub

using namespace npu_stub;

EXPORT int aclrtCreateEvent(void** event) { return create("aclrtCreateEvent", event); }
EXPORT int aclrtCreateEventWithFlag(void** event, uint32_t) { return create("aclrtCreateEventWithFlag", event); }
EXPORT int aclrtCreateEventExWithFlag(void** event, uint32_t) { return create("aclrtCreateEventExWithFlag", event); }

EXPORT int aclrtDestroyEvent(void* event) {
    const Entry entry("aclrtDestroyEvent");
    if (entry.code != kOk) return entry.code;
    std::shared_ptr<Mark> mark;
    if (!find(event, "aclrtDestroyEvent", mark)) return kInvalidHandle;
    const std::lock_guard lock(events().mutex);
    events().live.erase(event);
    count_live("events", -1);
    return kOk;
}

EXPORT int aclrtRecordEvent(void* event, void* stream) {
    const Entry entry("aclrtRecordEvent", stream);
    if (entry.code != kOk) return entry.code;
    std::shared_ptr<Mark> mark;
    if (!find(event, "aclrtRecordEvent", mark)) return kInvalidHandle;
    mark = std::make_shared<Mark>();
    const int code = submit(stream, "aclrtRecordEvent", [mark] {
        mark->reach();
        return Outcome{};
    });
    if (code != kOk) return code;
    const std::lock_guard lock(events().mutex);
    events().live[event].mark = mark;
    return kOk;
}

EXPORT int aclrtResetEvent(void* event, void* stream) {
    const Entry entry("aclrtResetEvent", stream);
    if (entry.code != kOk) return entry.code;
    std::shared_ptr<Mark> mark;
    return find(event, "aclrtResetEvent", mark) ? kOk : kInvalidHandle;
}

EXPORT int aclrtStreamWaitEvent(void* stream, void* event) {
    const Entry entry("aclrtStreamWaitEvent", stream);
    if (entry.code != kOk) return entry.code;
    std::shared_ptr<Mark> mark;
    if (!find(event, "aclrtStreamWaitEvent", mark)) return kInvalidHandle;
    if (mark == nullptr) return kOk;
    return submit(stream, "aclrtStreamWaitEvent", [mark] {
        mark->wait();
        return Outcome{};
    });
}

EXPORT int aclrtSynchronizeEvent(void* event) {
    const Entry entry("aclrtSynchronizeEvent", nullptr, {}, Entry::kBlocking);
    if (entry.code != kOk) return entry.code;
    std::shared_ptr<Mark> mark;
    if (!find(event, "aclrtSynchronizeEvent", mark)) return kInvalidHandle;
    const WithoutGil without_gil;
    if (mark != nullptr) mark->wait();
    return kOk;
}

EXPORT int aclrtQueryEventStatus(void* event, int* status) {
    constexpr int kNotReady = 0;
    constexpr int kComplete = 1;
    const Entry entry("aclrtQueryEventStatus");
    if (entry.code != kOk) return entry.code;
    std::shared_ptr<Mark> mark;
    if (!find(event, "aclrtQueryEventStatus", mark)) return kInvalidHandle;
    *status = mark == nullptr || mark->check() ? kComplete : kNotReady;
    return kOk;
}

EXPORT int aclrtQueryEventWaitStatus(void* event, int* status) {
    constexpr int kComplete = 0;
    constexpr int kNotReady = 1;
    const Entry entry("aclrtQueryEventWaitStatus");
    if (entry.code != kOk) return entry.code;
    std::shared_ptr<Mark> mark;
    if (!find(event, "aclrtQueryEventWaitStatus", mark)) return kInvalidHandle;
    *status = mark == nullptr || mark->check() ? kComplete : kNotReady;
    return kOk;
}

EXPORT int aclrtEventElapsedTime(float* milliseconds, void* start, void* end) {
    const Entry entry("aclrtEventElapsedTime");
    if (entry.code != kOk) return entry.code;
    std::shared_ptr<Mark> first;
    std::shared_ptr<Mark> last;
    if (!find(start, "aclrtEventElapsedTime", first) || !find(end, "aclrtEventElapsedTime", last)) {
        return kInvalidHandle;
    }
    if (first == nullptr || last == nullptr || !first->check() || !last->check()) {
        constexpr int kNoTimestamp = 107006;
        return fail(kNoTimestamp, "both events must have been recorded and reached");
    }
    *milliseconds = std::chrono::duration<float, std::milli>(last->time - first->time).count();
    return kOk;
}
