/// Devices and contexts: how many there are, which one a thread uses, and what the machine says about itself.

#include <cstring>
#include <mutex>

#include "control.hpp"
#include "stub.hpp"

namespace npu_stub {

namespace {

constexpr int kMaxDevices = 16;

struct Machine {
    std::mutex mutex;
    std::string soc_name = "Ascend950PR_9589";
    int num_devices = 2;
};

Machine& machine() {
    static Machine& instance = *new Machine;
    return instance;
}

/// A context is the address of its device's byte: one primary context per device.
char contexts[kMaxDevices];

thread_local int thread_device = -1;

int use_device(int device) {
    if (device < 0 || device >= num_devices()) {
        return fail(kInvalidDevice, "device " + std::to_string(device) + " does not exist");
    }
    thread_device = device;
    return kOk;
}

}  // namespace

int current_device() { return thread_device; }

int num_devices() {
    const std::lock_guard lock(machine().mutex);
    return machine().num_devices;
}

void set_soc_name(const char* name) {
    const std::lock_guard lock(machine().mutex);
    machine().soc_name = name;
}

void set_device_count(int count) {
    const std::lock_guard lock(machine().mutex);
    machine().num_devices = count;
}

}  // namespace npu_stub

using namespace npu_stub;

EXPORT int aclInit(const char*) { return Entry("aclInit").code; }
EXPORT int aclFinalize() { return Entry("aclFinalize").code; }

EXPORT int aclrtGetDeviceCount(uint32_t* count) {
    const Entry entry("aclrtGetDeviceCount");
    if (entry.code != kOk) return entry.code;
    *count = static_cast<uint32_t>(num_devices());
    return kOk;
}

EXPORT int aclrtSetDevice(int32_t device) {
    const Entry entry("aclrtSetDevice", nullptr, {{"device", device}});
    if (entry.code != kOk) return entry.code;
    return use_device(device);
}

EXPORT int rtSetDevice(int32_t device) {
    const Entry entry("rtSetDevice", nullptr, {{"device", device}});
    if (entry.code != kOk) return entry.code;
    return use_device(device);
}

EXPORT int aclrtGetDevice(int32_t* device) {
    const Entry entry("aclrtGetDevice");
    if (entry.code != kOk) return entry.code;
    if (thread_device < 0) return fail(kNoContext, "the thread has no context; call aclrtSetDevice");
    *device = thread_device;
    return kOk;
}

EXPORT int aclrtResetDevice(int32_t device) { return Entry("aclrtResetDevice", nullptr, {{"device", device}}).code; }

EXPORT int aclrtCreateContext(void** context, int32_t device) {
    const Entry entry("aclrtCreateContext", nullptr, {{"device", device}});
    if (entry.code != kOk) return entry.code;
    if (const int code = use_device(device)) return code;
    *context = &contexts[device];
    return kOk;
}

EXPORT int aclrtDestroyContext(void*) { return Entry("aclrtDestroyContext").code; }

EXPORT int aclrtGetCurrentContext(void** context) {
    const Entry entry("aclrtGetCurrentContext");
    if (entry.code != kOk) return entry.code;
    if (thread_device < 0) return fail(kNoContext, "the thread has no context; call aclrtSetDevice");
    *context = &contexts[thread_device];
    return kOk;
}

EXPORT int aclrtSetCurrentContext(void* context) {
    const Entry entry("aclrtSetCurrentContext");
    if (entry.code != kOk) return entry.code;
    const auto device = static_cast<char*>(context) - contexts;
    if (device < 0 || device >= num_devices()) return fail(kInvalidArgument, "the context is none of ours");
    return use_device(static_cast<int>(device));
}

EXPORT int aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
    const Entry entry("aclrtGetPrimaryCtxState");
    if (entry.code != kOk) return entry.code;
    *flags = 0;
    *active = 1;
    return kOk;
}

EXPORT const char* aclrtGetSocName() {
    static thread_local std::string name;
    const Entry entry("aclrtGetSocName");
    if (entry.code != kOk) return nullptr;
    const std::lock_guard lock(machine().mutex);
    name = machine().soc_name;
    return name.c_str();
}

EXPORT int aclrtGetRunMode(int* mode) {
    constexpr int kHost = 1;
    const Entry entry("aclrtGetRunMode");
    if (entry.code != kOk) return entry.code;
    *mode = kHost;
    return kOk;
}

EXPORT int aclrtDeviceCanAccessPeer(int32_t* can_access, int32_t, int32_t) {
    const Entry entry("aclrtDeviceCanAccessPeer");
    if (entry.code != kOk) return entry.code;
    *can_access = 1;
    return kOk;
}

EXPORT int aclsysGetVersionStr(char*, char* version) {
    const Entry entry("aclsysGetVersionStr");
    if (entry.code != kOk) return entry.code;
    std::strcpy(version, "9.1.0");
    return kOk;
}

EXPORT int aclrtGetSysParamOpt(int, int64_t* value) {
    const Entry entry("aclrtGetSysParamOpt");
    if (entry.code != kOk) return entry.code;
    *value = 0;
    return kOk;
}

/// Options of the operator compiler. The only one that torch_npu reads is whether operators are compiled on the
/// spot: they are not, so it uses aclnn.
EXPORT size_t aclGetCompileoptSize(int) { return 16; }

EXPORT int aclGetCompileopt(int, char* value, size_t length) {
    const Entry entry("aclGetCompileopt");
    if (entry.code != kOk) return entry.code;
    std::strncpy(value, "disable", length);
    return kOk;
}
