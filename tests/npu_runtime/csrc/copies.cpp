/// Copies and fills, blocking and queued. A queued one touches memory only when its turn comes.

#include <cstring>

#include "stub.hpp"

namespace npu_stub {

namespace {

enum CopyKind : int { kHostToHost = 0, kHostToDevice, kDeviceToHost, kDeviceToDevice, kDefault };

/// Where an end of a copy lies: a device, kHostMemory (pinned), or kPageable.
constexpr int kPageable = -2;

bool is_device(int place) { return place >= 0; }

/// A copy as it was asked for. The places were looked up then, and are checked again when it runs.
struct Copy {
    std::string symbol;
    void* destination;
    const void* source;
    size_t bytes;
    int destination_place;
    int source_place;

    bool check() const {
        bool is_valid = true;
        if (destination_place != kPageable) {
            is_valid &= check_range(destination, bytes, destination_place, symbol + " destination");
        }
        if (source_place != kPageable) is_valid &= check_range(source, bytes, source_place, symbol + " source");
        return is_valid;
    }
};

/// Looks up both ends, and refuses a kind that does not fit them.
int parse(const char* symbol, void* destination, size_t destination_bytes, const void* source, size_t bytes,
          int kind, Copy& copy) {
    if (bytes > destination_bytes) return fail(kInvalidArgument, "count must be at most the destination's size");
    copy = {symbol, destination, source, bytes, device_of(destination), device_of(source)};
    const bool to_device = kind == kHostToDevice || kind == kDeviceToDevice;
    const bool from_device = kind == kDeviceToHost || kind == kDeviceToDevice;
    const auto fits = [](bool wants_device, int place) { return wants_device == is_device(place); };
    if (bytes > 0 && kind != kDefault &&
        !(fits(to_device, copy.destination_place) && fits(from_device, copy.source_place))) {
        violate("wrong kind of memory: " + std::string(symbol) + " of kind " + std::to_string(kind) +
                " from place " + std::to_string(copy.source_place) + " to place " +
                std::to_string(copy.destination_place));
        return fail(kInvalidArgument, "the kind of the copy does not fit its addresses");
    }
    return copy.check() ? kOk : fail(kInvalidArgument, "an address of the copy is outside of live memory");
}

Outcome run(const Copy& copy) {
    if (!copy.check()) return {kKernelFault, copy.symbol + ": memory was freed before the copy ran"};
    if (copy.bytes > 0) std::memmove(copy.destination, copy.source, copy.bytes);
    return {};
}

int copy_now(const char* symbol, void* destination, size_t destination_bytes, const void* source, size_t bytes,
             int kind) {
    const Entry entry(symbol, nullptr, {{"bytes", int64_t(bytes)}, {"kind", kind}}, Entry::kBlocking);
    if (entry.code != kOk) return entry.code;
    Copy copy;
    if (const int code = parse(symbol, destination, destination_bytes, source, bytes, kind, copy)) return code;
    const Outcome outcome = run(copy);
    return outcome.code == kOk ? kOk : fail(outcome.code, outcome.message);
}

int copy_later(const char* symbol, void* destination, size_t destination_bytes, const void* source, size_t bytes,
               int kind, void* stream) {
    const Entry entry(symbol, stream, {{"bytes", int64_t(bytes)}, {"kind", kind}});
    if (entry.code != kOk) return entry.code;
    Copy copy;
    if (const int code = parse(symbol, destination, destination_bytes, source, bytes, kind, copy)) return code;
    return submit(stream, symbol, [copy] { return run(copy); });
}

}  // namespace

}  // namespace npu_stub

using namespace npu_stub;

EXPORT int aclrtMemcpy(void* destination, size_t limit, const void* source, size_t bytes, int kind) {
    return copy_now("aclrtMemcpy", destination, limit, source, bytes, kind);
}

EXPORT int aclrtMemcpyAsync(void* destination, size_t limit, const void* source, size_t bytes, int kind,
                            void* stream) {
    return copy_later("aclrtMemcpyAsync", destination, limit, source, bytes, kind, stream);
}

EXPORT int aclrtMemcpyAsyncWithCondition(void* destination, size_t limit, const void* source, size_t bytes, int kind,
                                         void* stream) {
    return copy_later("aclrtMemcpyAsyncWithCondition", destination, limit, source, bytes, kind, stream);
}

EXPORT int aclrtMemset(void* address, size_t limit, int32_t value, size_t bytes) {
    const Entry entry("aclrtMemset", nullptr, {{"bytes", int64_t(bytes)}}, Entry::kBlocking);
    if (entry.code != kOk) return entry.code;
    if (bytes > limit) return fail(kInvalidArgument, "count must be at most the size of the memory");
    if (!check_range(address, bytes, device_of(address), "aclrtMemset")) {
        return fail(kInvalidArgument, "the address is outside of live memory");
    }
    std::memset(address, value, bytes);
    return kOk;
}

EXPORT int aclrtMemsetAsync(void* address, size_t limit, int32_t value, size_t bytes, void* stream) {
    const Entry entry("aclrtMemsetAsync", stream, {{"bytes", int64_t(bytes)}});
    if (entry.code != kOk) return entry.code;
    if (bytes > limit) return fail(kInvalidArgument, "count must be at most the size of the memory");
    const int device = device_of_stream(stream, "aclrtMemsetAsync");
    if (device < 0) return fail(kInvalidHandle, "the stream does not exist");
    if (!check_range(address, bytes, device, "aclrtMemsetAsync")) {
        return fail(kInvalidArgument, "the address is outside of live memory");
    }
    return submit(stream, "aclrtMemsetAsync", [=]() -> Outcome {
        if (!check_range(address, bytes, device, "aclrtMemsetAsync")) {
            return {kKernelFault, "aclrtMemsetAsync: memory was freed before the fill ran"};
        }
        if (bytes > 0) std::memset(address, value, bytes);
        return {};
    });
}
