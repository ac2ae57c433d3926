/// The two phases of an aclnn call, for every operator alike.

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

#include "json.hpp"
#include "operators.hpp"

namespace npu_stub {

namespace {

constexpr int kNullPointer = 161001;
/// What the workspace holds while an operator runs, and afterwards. Whoever takes that memory early finds it.
constexpr unsigned char kScratchByte = 0xEE;

struct Executors {
    std::mutex mutex;
    std::map<void*, Operator> live;
};

Executors& executors() {
    static Executors& instance = *new Executors;
    return instance;
}

/// Takes an executor out; false, with a violation, if there is none.
bool take(const char* symbol, void* executor, Operator& call) {
    const std::lock_guard lock(executors().mutex);
    const auto found = executors().live.find(executor);
    if (found == executors().live.end()) {
        violate("unknown or used executor: " + std::string(symbol));
        return false;
    }
    call = std::move(found->second);
    executors().live.erase(found);
    count_live("executors", -1);
    return true;
}

bool check_memory(const Operator& call, int device) {
    bool is_valid = true;
    for (const TensorArgument& argument : call.tensors) {
        if (argument.tensor == nullptr) continue;
        const std::string purpose = std::string(call.symbol) + " " + argument.name;
        is_valid &= check_range(argument.tensor->begin(), argument.tensor->extent_bytes(), device, purpose);
    }
    return is_valid;
}

std::string request(const Operator& call, int device) {
    std::string out = "{";
    append_member(out, "operator", call.symbol);
    append_member(out, "device", device);
    out += ",\"tensors\":{";
    for (const TensorArgument& argument : call.tensors) {
        if (out.back() != '{') out += ',';
        append_json(out, argument.name);
        out += ':';
        if (argument.tensor == nullptr) {
            out += "null";
            continue;
        }
        const Tensor& tensor = *argument.tensor;
        out += '{';
        append_member(out, "address", reinterpret_cast<uint64_t>(tensor.begin()));
        append_member(out, "dtype", name_of_type(tensor.type));
        out += ",\"shape\":";
        append_list(out, tensor.shape);
        out += ",\"strides\":";
        append_list(out, tensor.strides);
        out += '}';
    }
    out += "},\"attributes\":{";
    for (const auto& [name, attribute] : call.attributes) {
        std::visit([&out, name = name](const auto& value) { append_member(out, name, value); }, attribute);
    }
    return out + "}}";
}

Outcome run(const Operator& call, unsigned char* workspace, int device) {
    const std::string purpose = std::string(call.symbol) + " workspace";
    if (!check_memory(call, device) || !check_range(workspace, call.workspace_bytes, device, purpose)) {
        return {kKernelFault, std::string(call.symbol) + ": memory was freed before the operator ran"};
    }
    std::fill(workspace, workspace + call.workspace_bytes, kScratchByte);
    Outcome outcome = call.run != nullptr ? call.run(call) : execute_in_python(request(call, device));
    const bool is_untouched = std::all_of(workspace, workspace + call.workspace_bytes,
                                          [](unsigned char byte) { return byte == kScratchByte; });
    if (!is_untouched) violate("workspace written by others while in use: " + std::string(call.symbol));
    std::fill(workspace, workspace + call.workspace_bytes, kScratchByte);
    return outcome;
}

}  // namespace

int prepare(const char* phase_symbol, Operator call, uint64_t* workspace_bytes, void** executor) {
    const Entry entry(phase_symbol);
    if (entry.code != kOk) return entry.code;
    for (TensorArgument& argument : call.tensors) {
        const std::string purpose = std::string(phase_symbol) + " " + argument.name;
        if (argument.handle == nullptr && !argument.is_optional) return fail(kNullPointer, purpose + " is null");
        argument.tensor = tensor_of(argument.handle, purpose);
        if (argument.handle != nullptr && argument.tensor == nullptr) {
            return fail(kAclnnInvalidArgument, purpose + " is no live descriptor");
        }
    }
    *workspace_bytes = call.workspace_bytes;
    *executor = new char;
    const std::lock_guard lock(executors().mutex);
    executors().live[*executor] = std::move(call);
    count_live("executors", 1);
    return kOk;
}

int launch(const char* symbol, void* workspace, uint64_t workspace_bytes, void* executor, void* stream) {
    const Entry entry(symbol, stream, {{"workspace", static_cast<int64_t>(workspace_bytes)}});
    Operator call;
    const bool is_taken = take(symbol, executor, call);  // also where the call fails: the executor is used up
    if (entry.code != kOk) return entry.code;
    if (!is_taken) return fail(kInvalidHandle, "the executor does not exist");
    for (const TensorArgument& argument : call.tensors) {
        const std::string purpose = std::string(symbol) + " " + argument.name;
        if (argument.handle != nullptr && tensor_of(argument.handle, purpose) == nullptr) {
            return fail(kAclnnInvalidArgument, "a descriptor was destroyed between the phases");
        }
    }
    const int device = device_of_stream(stream, symbol);
    if (device < 0) return fail(kInvalidHandle, "the stream does not exist");
    if (workspace_bytes < call.workspace_bytes) {
        return fail(kAclnnInvalidArgument, "the workspace must have " + std::to_string(call.workspace_bytes) +
                                               " bytes, got " + std::to_string(workspace_bytes));
    }
    const std::string purpose = std::string(symbol) + " workspace";
    if (!check_memory(call, device) || !check_range(workspace, call.workspace_bytes, device, purpose)) {
        return fail(kAclnnInvalidArgument, "an address of the call is outside of the device's live memory");
    }
    return submit(stream, symbol, [call = std::move(call), workspace, device] {
        return run(call, static_cast<unsigned char*>(workspace), device);
    });
}

}  // namespace npu_stub

using namespace npu_stub;

EXPORT int aclDestroyAclOpExecutor(void* executor) {
    const Entry entry("aclDestroyAclOpExecutor");
    if (entry.code != kOk) return entry.code;
    Operator call;
    return take("aclDestroyAclOpExecutor", executor, call) ? kOk : fail(kInvalidHandle, "the executor does not exist");
}
