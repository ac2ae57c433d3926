/// Failures on demand, and the message that belongs to a failure.

#include <map>
#include <mutex>

#include "control.hpp"
#include "stub.hpp"

namespace npu_stub {

namespace {

struct Fault {
    int code;
    std::string message;
    int calls_before;
    int times;
};

struct Faults {
    std::mutex mutex;
    std::map<std::string, Fault> by_symbol;
};

Faults& faults() {
    static Faults& instance = *new Faults;
    return instance;
}

thread_local std::string recent_message;

/// Takes one failure from the symbol's fault, if it is due.
int take(const std::string& symbol, std::string& message) {
    const std::lock_guard lock(faults().mutex);
    const auto found = faults().by_symbol.find(symbol);
    if (found == faults().by_symbol.end()) return kOk;
    Fault& fault = found->second;
    if (fault.calls_before > 0) {
        --fault.calls_before;
        return kOk;
    }
    if (fault.times == 0) return kOk;
    --fault.times;
    message = fault.message;
    return fault.code;
}

}  // namespace

int fail(int code, std::string message) {
    recent_message = std::move(message);
    return code;
}

int due_fault(const char* symbol) {
    std::string message;
    const int code = take(symbol, message);
    return code == kOk ? kOk : fail(code, message);
}

int due_task_fault(const std::string& symbol, std::string& message) { return take(symbol + ":task", message); }

void place_fault(const char* symbol, int code, const char* message, int after, int times) {
    const std::lock_guard lock(faults().mutex);
    faults().by_symbol[symbol] = {code, message, after, times};
}

void clear_faults() {
    const std::lock_guard lock(faults().mutex);
    faults().by_symbol.clear();
}

}  // namespace npu_stub

/// The calling thread's message, which reading clears; nullptr if no call failed since.
EXPORT const char* aclGetRecentErrMsg() {
    using namespace npu_stub;
    static thread_local std::string shown;
    const Entry entry("aclGetRecentErrMsg");
    if (recent_message.empty()) return nullptr;
    shown.swap(recent_message);
    recent_message.clear();
    return shown.c_str();
}
