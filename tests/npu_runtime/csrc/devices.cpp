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

EXPORT int aclInit(const char*) { return enter("aclInit"); }
EXPORT int aclFinalize() { return enter("aclFinalize"); }

EXPORT int aclrtGetDeviceCount(uint32_t* count) {
    if (const int code = enter("aclrtGetDeviceCount")) return code;
    *count = static_cast<uint32_t>(num_devices());
    return kOk;
}

EXPORT int aclrtSetDevice(int32_t device) {
    if (const int code = enter("aclrtSetDevice", nullptr, {{"device", device}})) return code;
    return use_device(device);
}

EXPORT int rtSetDevice(int32_t device) {
    if (const int code = enter("rtSetDevice", nullptr, {{"device", device}})) return code;
    return use_device(device);
}

EXPORT int aclrtGetDevice(int32_t* device) {
    if (const int code = enter("aclrtGetDevice")) return code;
    if (thread_device < 0) return fail(kNoContext, "the thread has no context; call aclrtSetDevice");
    *device = thread_device;
    return kOk;
}

EXPORT int aclrtResetDevice(int32_t device) { return enter("aclrtResetDevice", nullptr, {{"device", device}}); }

EXPORT int aclrtCreateContext(void** context, int32_t device) {
    if (const int code = enter("aclrtCreateContext", nullptr, {{"device", device}})) return code;
    if (const int code = use_device(device)) return code;
    *context = &contexts[device];
    return kOk;
}

EXPORT int aclrtDestroyContext(void*) { return enter("aclrtDestroyContext"); }

EXPORT int aclrtGetCurrentContext(void** context) {
    if (const int code = enter("aclrtGetCurrentContext")) return code;
    if (thread_device < 0) return fail(kNoContext, "the thread has no context; call aclrtSetDevice");
    *context = &contexts[thread_device];
    return kOk;
}

EXPORT int aclrtSetCurrentContext(void* context) {
    if (const int code = enter("aclrtSetCurrentContext")) return code;
    const auto device = static_cast<char*>(context) - contexts;
    if (device < 0 || device >= num_devices()) return fail(kInvalidArgument, "the context is none of ours");
    return use_device(static_cast<int>(device));
}

EXPORT int aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
    if (const int code = enter("aclrtGetPrimaryCtxState")) return code;
    *flags = 0;
    *active = 1;
    return kOk;
}

EXPORT const char* aclrtGetSocName() {
    static thread_local std::string name;
    if (enter("aclrtGetSocName") != kOk) return nullptr;
    const std::lock_guard lock(machine().mutex);
    name = machine().soc_name;
    return name.c_str();
}

EXPORT int aclrtGetRunMode(int* mode) {
    constexpr int kHost = 1;
    if (const int code = enter("aclrtGetRunMode")) return code;
    *mode = kHost;
    return kOk;
}

EXPORT int aclrtDeviceCanAccessPeer(int32_t* can_access, int32_t, int32_t) {
    if (const int code = enter("aclrtDeviceCanAccessPeer")) return code;
    *can_access = 1;
    return kOk;
}

EXPORT int aclsysGetVersionStr(char*, char* version) {
    if (const int code = enter("aclsysGetVersionStr")) return code;
    std::strcpy(version, "9.1.0");
    return kOk;
}

EXPORT int aclrtGetSysParamOpt(int, int64_t* value) {
    if (const int code = enter("aclrtGetSysParamOpt")) return code;
    *value = 0;
    return kOk;
}

/// Options of the operator compiler. The only one that torch_npu reads is whether operators are compiled on the
/// spot: they are not, so it uses aclnn.
EXPORT size_t aclGetCompileoptSize(int) { return 16; }

EXPORT int aclGetCompileopt(int, char* value, size_t length) {
    if (const int code = enter("aclGetCompileopt")) return code;
    std::strncpy(value, "disable", length);
    return kOk;
}
