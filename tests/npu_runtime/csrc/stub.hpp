/// What the parts of the stand-in share: error codes, the call log, faults, devices, memory, streams, JSON.
///
/// Nothing here is CANN's: prototypes and numbers are the documented interface, everything behind them is ours.
/// All state lives until the process ends (it is never destroyed), since worker threads may outlive main().

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

/// A function that the stand-in exports under a name of CANN, or as its own control (fag_stub_*).
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace npu_stub {

// ---- codes, as acl/error_codes/rt_error_codes.h documents them ----

constexpr int kOk = 0;
constexpr int kInvalidArgument = 107000;
constexpr int kInvalidDevice = 107001;
constexpr int kNoContext = 107002;
constexpr int kWrongStream = 107003;
constexpr int kInvalidHandle = 107017;
constexpr int kUnsupported = 207000;
constexpr int kOutOfMemory = 207001;
constexpr int kKernelFault = 507015;
constexpr int kKernelLookup = 507027;
constexpr int kAclnnInvalidArgument = 161002;

// ---- log.cpp, faults.cpp ----

/// A number worth recording with a call.
struct Detail {
    const char* name;
    int64_t value;
};

/// Every exported function begins with one: records the call, takes its time, fails if a test asked for that.
class Entry {
  public:
    enum Kind { kQueuing, kBlocking };

    /// A blocking call makes the host wait; it is also counted under its name in syncs().
    explicit Entry(const char* symbol, const void* stream = nullptr, std::initializer_list<Detail> details = {},
                   Kind kind = kQueuing);
    ~Entry();
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

    /// 0, or the code of the fault, whose message fail() has then recorded.
    int code;

  private:
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// Code of the fault that a test placed on `symbol` and that is due now, or 0.
int due_fault(const char* symbol);

/// Whether a fault is due on the execution of `symbol`, and what it says; the task then does nothing.
int due_task_fault(const std::string& symbol, std::string& message);

/// Sets the calling thread's error message and returns `code`.
int fail(int code, std::string message);

/// A misuse that the stand-in saw: what no correct program does, whatever the call returned.
void violate(std::string description);

// ---- devices.cpp ----

/// Device of the calling thread's context; -1 before aclrtSetDevice.
int current_device();
int num_devices();

// ---- memory.cpp ----

constexpr int kHostMemory = -1;

/// True if [address, address + bytes) lies in one live allocation of `device`; else records a violation.
///
/// `purpose` says in the violation's text who wanted it, e.g. "aclrtMemcpyAsync destination".
bool check_range(const void* address, size_t bytes, int device, const std::string& purpose);

/// Device that holds the address, kHostMemory for aclrtMallocHost, or -2 if it lies in no live allocation.
int device_of(const void* address);

/// Bytes from the address to the end of its live allocation on `device`; 0 if there is none.
size_t bytes_from(const void* address, int device);

// ---- streams.cpp ----

/// How a task ended.
struct Outcome {
    int code = kOk;
    std::string message;
};

using Task = std::function<Outcome()>;

/// Queues a task behind all earlier ones of the stream. `name` is the symbol that it came from.
///
/// Returns 0, or the code of a refused stream (destroyed, or of another device than the thread's context).
int submit(void* stream, const char* name, Task task);

/// Device of a live stream (nullptr: the thread's device); -1 and a violation if there is none.
int device_of_stream(void* stream, const char* name);

/// Lets Python run while the calling thread waits for a worker, which may need the interpreter.
///
/// A device needs no GIL, so a host that waits for one while holding it is no error; here it would hang.
class WithoutGil {
  public:
    WithoutGil();
    ~WithoutGil();
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

  private:
    void* state_ = nullptr;
};

// ---- accounting for fag_stub_report ----

/// Objects that exist now, by kind. Each part adds its own.
void count_live(const char* kind, int64_t change);

}  // namespace npu_stub
