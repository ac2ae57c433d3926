/// Which calls were made, which of them made the host wait, and what was misused.

#include <unistd.h>

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <set>

#include "control.hpp"
#include "json.hpp"
#include "stub.hpp"

namespace npu_stub {

namespace {

constexpr size_t kMaxDetails = 6;
/// Older calls are dropped, so that a benchmark may run for long.
constexpr size_t kMaxCalls = 200'000;

struct Call {
    const char* symbol;
    int thread;
    int device;
    const void* stream;
    std::array<Detail, kMaxDetails> details;
    size_t num_details;
};

struct Log {
    std::mutex mutex;
    std::deque<Call> calls;
    std::map<std::string, int64_t> syncs;
    std::map<std::string, int64_t> live;
    std::vector<std::string> violations;
    std::set<std::string> known_violations;
};

std::atomic<int64_t> host_ns{0};

Log& log() {
    static Log& instance = *new Log;
    return instance;
}

}  // namespace

Entry::Entry(const char* symbol, const void* stream, std::initializer_list<Detail> details, Kind kind) {
    static thread_local const int thread = gettid();
    Call call{symbol, thread, current_device(), stream, {}, 0};
    for (const Detail& detail : details) {
        if (call.num_details < kMaxDetails) call.details[call.num_details++] = detail;
    }
    {
        const std::lock_guard lock(log().mutex);
        if (log().calls.size() == kMaxCalls) log().calls.pop_front();
        log().calls.push_back(call);
        if (kind == kBlocking) ++log().syncs[symbol];
    }
    code = due_fault(symbol);
}

Entry::~Entry() { host_ns += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start_).count(); }

double host_seconds() { return 1e-9 * static_cast<double>(host_ns); }

void violate(std::string description) {
    const std::lock_guard lock(log().mutex);
    if (log().known_violations.insert(description).second) log().violations.push_back(std::move(description));
}

void count_live(const char* kind, int64_t change) {
    const std::lock_guard lock(log().mutex);
    log().live[kind] += change;
}

std::string calls_json() {
    const std::lock_guard lock(log().mutex);
    std::string out;
    append_list(out, log().calls, [](std::string& text, const Call& call) {
        text += '{';
        append_member(text, "symbol", call.symbol);
        append_member(text, "thread", call.thread);
        append_member(text, "device", call.device);
        append_member(text, "stream", reinterpret_cast<uint64_t>(call.stream));
        text += ",\"detail\":{";
        for (size_t i = 0; i < call.num_details; ++i) {
            append_member(text, call.details[i].name, call.details[i].value);
        }
        text += "}}";
    });
    return out;
}

void clear_calls() {
    const std::lock_guard lock(log().mutex);
    log().calls.clear();
}

namespace {

std::string counts_json(const std::map<std::string, int64_t>& counts) {
    std::string out = "{";
    for (const auto& [name, count] : counts) append_member(out, name.c_str(), count);
    return out + "}";
}

}  // namespace

std::string syncs_json() {
    const std::lock_guard lock(log().mutex);
    return counts_json(log().syncs);
}

std::string live_json() {
    const std::lock_guard lock(log().mutex);
    return counts_json(log().live);
}

std::string violations_json() {
    check_guards();
    const std::lock_guard lock(log().mutex);
    std::string out;
    append_list(out, log().violations);
    return out;
}

void clear_violations() {
    const std::lock_guard lock(log().mutex);
    log().violations.clear();
    log().known_violations.clear();
}

}  // namespace npu_stub
