/// Device kernels: objects are registered, functions are found in them, and launches are queued.
///
/// An object here is the text that hivmc.py made: a first line, then `name: value` lines.

#include <cstring>
#include <map>
#include <mutex>

#include "json.hpp"
#include "operators.hpp"

namespace npu_stub {

namespace {

constexpr uint32_t kMagicElf = 0x43554245;        // runs on cube cores with their vector cores
constexpr uint32_t kMagicElfVector = 0x41415246;  // runs on vector cores alone
constexpr const char* kObjectHead = "FAG-STUB-OBJECT 1\n";
constexpr size_t kMaxNameLength = 49;  // of CANN's runtime

/// rtDevBinary_t
struct DeviceBinary {
    uint32_t magic;
    uint32_t version;
    const void* data;
    uint64_t length;
};

struct Object {
    int device;
    std::string kernel;
    bool is_vector;
};

struct Function {
    void* object;
    std::string kernel;
    int device;
};

struct Registry {
    std::mutex mutex;
    std::map<void*, Object> objects;
    std::map<const void*, Function> functions;
};

Registry& registry() {
    static Registry& instance = *new Registry;
    return instance;
}

/// Stands for the address through which cube and vector cores synchronise; kernels get it as first argument.
char core_sync_area[64];

/// The value of a `name: value` line; empty if there is none.
std::string field(const std::string& text, const std::string& name) {
    const std::string start = "\n" + name + ": ";
    const size_t found = text.find(start);
    if (found == std::string::npos) return "";
    const size_t begin = found + start.size();
    return text.substr(begin, text.find('\n', begin) - begin);
}

std::string hexadecimal(const std::string& bytes) {
    constexpr char digits[] = "0123456789abcdef";
    std::string out;
    out.reserve(2 * bytes.size());
    for (const char byte : bytes) {
        out += digits[static_cast<unsigned char>(byte) >> 4];
        out += digits[static_cast<unsigned char>(byte) & 15];
    }
    return out;
}

}  // namespace

}  // namespace npu_stub

using namespace npu_stub;

EXPORT int rtDevBinaryRegister(const DeviceBinary* binary, void** handle) {
    const Entry entry("rtDevBinaryRegister", nullptr, {{"length", int64_t(binary->length)}});
    if (entry.code != kOk) return entry.code;
    if (current_device() < 0) return fail(kNoContext, "the thread has no context; call rtSetDevice");
    const std::string text(static_cast<const char*>(binary->data), binary->length);
    if (text.rfind(kObjectHead, 0) != 0) return fail(kInvalidArgument, "the binary is no device object");
    const bool is_vector = field(text, "core") == "vector";
    const uint32_t wanted = is_vector ? kMagicElfVector : kMagicElf;
    if (binary->magic != wanted) {
        return fail(kInvalidArgument, "the magic number does not fit the object's kind of core");
    }
    *handle = new char;
    const std::lock_guard lock(registry().mutex);
    registry().objects[*handle] = {current_device(), field(text, "kernel"), is_vector};
    count_live("objects", 1);
    return kOk;
}

EXPORT int rtDevBinaryUnRegister(void* handle) {
    const Entry entry("rtDevBinaryUnRegister");
    if (entry.code != kOk) return entry.code;
    const std::lock_guard lock(registry().mutex);
    if (registry().objects.erase(handle) == 0) {
        violate("unknown or unregistered object: rtDevBinaryUnRegister");
        return fail(kInvalidHandle, "the object is not registered");
    }
    count_live("objects", -1);
    for (auto function = registry().functions.begin(); function != registry().functions.end();) {
        if (function->second.object != handle) {
            ++function;
            continue;
        }
        function = registry().functions.erase(function);
        count_live("functions", -1);
    }
    return kOk;
}

EXPORT int rtFunctionRegister(void* object, const void* stub, const char*, const void* name, uint32_t) {
    const Entry entry("rtFunctionRegister");
    if (entry.code != kOk) return entry.code;
    const std::string kernel = static_cast<const char*>(name);
    const std::lock_guard lock(registry().mutex);
    const auto found = registry().objects.find(object);
    if (found == registry().objects.end()) {
        violate("unknown or unregistered object: rtFunctionRegister");
        return fail(kInvalidHandle, "the object is not registered");
    }
    if (kernel != found->second.kernel || kernel.size() > kMaxNameLength) {
        return fail(kKernelLookup, "the object has no function " + kernel + ", it has " + found->second.kernel);
    }
    if (registry().functions.count(stub) != 0) {
        constexpr int kDuplicate = 507028;
        return fail(kDuplicate, "the stub function is registered already");
    }
    registry().functions[stub] = {object, kernel, found->second.device};
    count_live("functions", 1);
    return kOk;
}

EXPORT int rtGetC2cCtrlAddr(uint64_t* address, uint32_t* length) {
    const Entry entry("rtGetC2cCtrlAddr");
    if (entry.code != kOk) return entry.code;
    *address = reinterpret_cast<uint64_t>(core_sync_area);
    *length = sizeof core_sync_area;
    return kOk;
}

EXPORT int rtKernelLaunch(const void* stub, uint32_t num_blocks, void* arguments, uint32_t argument_bytes,
                          void* shared_memory, void* stream) {
    const Entry entry("rtKernelLaunch", stream, {{"blocks", num_blocks}, {"bytes", argument_bytes}});
    if (entry.code != kOk) return entry.code;
    if (num_blocks == 0 || shared_memory != nullptr) {
        return fail(kInvalidArgument, "a launch needs blocks and no smDesc");
    }
    Function function;
    {
        const std::lock_guard lock(registry().mutex);
        const auto found = registry().functions.find(stub);
        if (found == registry().functions.end()) {
            violate("unknown or unregistered function: rtKernelLaunch");
            return fail(kKernelLookup, "the stub function is not registered");
        }
        function = found->second;
    }
    const int device = device_of_stream(stream, "rtKernelLaunch");
    if (device < 0) return fail(kInvalidHandle, "the stream does not exist");
    if (function.device != device) {
        violate("wrong device: " + function.kernel + " was loaded on device " + std::to_string(function.device) +
                " and launched on device " + std::to_string(device));
        return fail(kInvalidArgument, "the kernel was loaded on another device");
    }
    const std::string packed(static_cast<const char*>(arguments), argument_bytes);
    return submit(stream, "rtKernelLaunch", [kernel = function.kernel, device, num_blocks, packed] {
        std::string request = "{";
        append_member(request, "kernel", kernel);
        append_member(request, "device", device);
        append_member(request, "num_blocks", static_cast<int64_t>(num_blocks));
        append_member(request, "core_sync_address", reinterpret_cast<uint64_t>(core_sync_area));
        append_member(request, "arguments", hexadecimal(packed));
        return execute_in_python(request + '}');
    });
}
