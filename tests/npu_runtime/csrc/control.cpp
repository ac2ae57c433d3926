/// The stand-in's own functions, for stub.py: nothing of CANN has these names.

#include "control.hpp"

#include <cstring>

#include "stub.hpp"

using namespace npu_stub;

/// JSON text of one of: calls, live, syncs, violations. Valid until the thread's next call.
EXPORT const char* fag_stub_report(const char* what) {
    static thread_local std::string text;
    if (std::strcmp(what, "calls") == 0) text = calls_json();
    else if (std::strcmp(what, "live") == 0) text = live_json();
    else if (std::strcmp(what, "syncs") == 0) text = syncs_json();
    else if (std::strcmp(what, "violations") == 0) text = violations_json();
    else return nullptr;
    return text.c_str();
}

EXPORT void fag_stub_clear_calls() { clear_calls(); }
EXPORT void fag_stub_clear_violations() { clear_violations(); }
EXPORT void fag_stub_fail(const char* symbol, int code, const char* message, int after, int times) {
    place_fault(symbol, code, message, after, times);
}
EXPORT void fag_stub_clear_failures() { clear_faults(); }
EXPORT void fag_stub_set_soc_name(const char* name) { set_soc_name(name); }
EXPORT void fag_stub_set_device_count(int count) { set_device_count(count); }
EXPORT void fag_stub_set_latency(int microseconds) { set_latency(microseconds); }
EXPORT double fag_stub_host_seconds() { return host_seconds(); }
EXPORT double fag_stub_work_seconds() { return work_seconds(); }

/// Waits for all work of all devices; not counted among the program's synchronisations.
EXPORT void fag_stub_wait() { wait_for_all_streams(); }

/// Bytes from an address to the end of its live allocation on a device (-1: aclrtMallocHost's); 0 if none.
EXPORT uint64_t fag_stub_bytes_from(uint64_t address, int device) {
    return bytes_from(reinterpret_cast<const void*>(address), device);
}

EXPORT void fag_stub_violate(const char* description) { violate(description); }
