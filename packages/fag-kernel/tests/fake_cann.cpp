// A CANN runtime for the tests of csrc/cann: it writes down what it is called with, counts what it hands out, and fails on
// demand. Nothing is executed. Signatures are written out here by hand, after the ACL reference, the operator's documented
// argument order and triton-ascend's driver, so that a slip in ours shows.
//
// Compile with -DWITHOUT_<symbol> to leave out one of the symbols that some CANN release lacks.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

namespace {

std::mutex mutex;
std::string log_text;   // JSON objects, each followed by a comma
std::string log_copy;   // what fake_log() returned last
std::map<std::string, int> live;
std::string failing_symbol, failing_text;
int failing_code = 0;
thread_local std::string recent;

class Entry {
public:
    explicit Entry(const char* symbol) { line_ << "{\"symbol\": \"" << symbol << '"'; }
    Entry& number(const char* name, long long value) { return raw(name, std::to_string(value)); }
    Entry& real(const char* name, double value) {
        std::ostringstream text;
        text.precision(17);
        text << value;
        return raw(name, text.str());
    }
    Entry& text(const char* name, const char* value) { return raw(name, "\"" + std::string(value) + "\""); }
    Entry& numbers(const char* name, const std::int64_t* values, std::uint64_t count) {
        std::string list;
        for (std::uint64_t i = 0; i < count; ++i) list += (i ? ", " : "") + std::to_string(values[i]);
        return raw(name, "[" + list + "]");
    }
    Entry& bytes(const char* name, const void* data, std::size_t count) {
        std::string hex;
        const char digits[] = "0123456789abcdef";
        for (std::size_t i = 0; i < count; ++i) {
            const unsigned char byte = static_cast<const unsigned char*>(data)[i];
            hex += {digits[byte >> 4], digits[byte & 15]};
        }
        return text(name, hex.c_str());
    }
    Entry& raw(const char* name, const std::string& value) {
        line_ << ", \"" << name << "\": " << value;
        return *this;
    }
    ~Entry() {
        const std::lock_guard lock(mutex);
        log_text += line_.str() + "},";
    }

private:
    std::ostringstream line_;
};

/// The code that `symbol` is to return now.
int code_of(const char* symbol) {
    const std::lock_guard lock(mutex);
    if (failing_symbol != symbol) return 0;
    failing_symbol.clear();
    recent = failing_text;
    return failing_code;
}

void count(const char* what, int change) {
    const std::lock_guard lock(mutex);
    live[what] += change;
}

struct Tensor {
    int id;
};
Tensor* new_tensor() {
    static int next_id = 0;
    const std::lock_guard lock(mutex);
    ++live["tensors"];
    return new Tensor{next_id++};
}
/// Tensors go into the log by the order in which they were made.
long long id_of(const void* tensor) { return tensor == nullptr ? -1 : static_cast<const Tensor*>(tensor)->id; }

struct Binary {
    std::uint32_t magic, version;
    const void* data;
    std::uint64_t length;
};

constexpr std::uint64_t kWorkspaceBytes = 4096;
/// The first phase ends: an executor and the size of a workspace, or a failure.
int first_phase(const char* symbol, std::uint64_t* workspace_bytes, void** executor) {
    if (const int code = code_of(symbol)) return code;
    *workspace_bytes = kWorkspaceBytes;
    *executor = std::malloc(1);
    count("executors", 1);
    return 0;
}
int second_phase(const char* symbol, void* workspace, std::uint64_t bytes, void* executor, void* stream) {
    Entry(symbol)
        .number("workspace", reinterpret_cast<long long>(workspace))
        .number("bytes", static_cast<long long>(bytes))
        .number("stream", reinterpret_cast<long long>(stream));
    std::free(executor);
    count("executors", -1);
    return code_of(symbol);
}

}  // namespace

extern "C" {

// --- for the test ---
const char* fake_log() {
    const std::lock_guard lock(mutex);
    if (!log_text.empty()) log_text.pop_back();
    log_copy = "[" + log_text + "]";
    log_text.clear();
    return log_copy.c_str();
}
int fake_live(const char* what) { return live[what]; }
void fake_fail(const char* symbol, int code, const char* text) {
    const std::lock_guard lock(mutex);
    failing_symbol = symbol, failing_code = code, failing_text = text;
}

// --- libascendcl ---
const char* aclGetRecentErrMsg() {
    static thread_local std::string taken;
    taken = recent;
    recent.clear();
    return taken.empty() ? nullptr : taken.c_str();
}
const char* aclrtGetSocName() { return code_of("aclrtGetSocName") ? nullptr : "Ascend950PR_9599"; }
int aclrtGetDevice(std::int32_t* device) {
    const char* chosen = std::getenv("FAKE_DEVICE");
    *device = chosen == nullptr ? 0 : std::atoi(chosen);
    return code_of("aclrtGetDevice");
}
#ifndef WITHOUT_aclrtMemsetAsync
int aclrtMemsetAsync(void* address, std::size_t capacity, std::int32_t value, std::size_t bytes, void* stream) {
    Entry("aclrtMemsetAsync")
        .number("address", reinterpret_cast<long long>(address))
        .number("capacity", static_cast<long long>(capacity))
        .number("value", value)
        .number("bytes", static_cast<long long>(bytes))
        .number("stream", reinterpret_cast<long long>(stream));
    return code_of("aclrtMemsetAsync");
}
#endif

// --- libnnopbase ---
#ifndef WITHOUT_aclCreateTensor
void* aclCreateTensor(const std::int64_t* dims, std::uint64_t num_dims, int dtype, const std::int64_t* strides,
                      std::int64_t offset, int format, const std::int64_t* storage_dims, std::uint64_t num_storage_dims,
                      void* storage) {
    if (code_of("aclCreateTensor")) return nullptr;
    Tensor* tensor = new_tensor();
    Entry("aclCreateTensor")
        .number("id", tensor->id)
        .numbers("dims", dims, num_dims)
        .number("dtype", dtype)
        .numbers("strides", strides, num_dims)
        .number("offset", offset)
        .number("format", format)
        .numbers("storage_dims", storage_dims, num_storage_dims)
        .number("storage", reinterpret_cast<long long>(storage));
    return tensor;
}
#endif
int aclDestroyTensor(const void* tensor) {
    delete static_cast<const Tensor*>(tensor);
    count("tensors", -1);
    return 0;
}
#ifndef WITHOUT_aclDestroyAclOpExecutor
int aclDestroyAclOpExecutor(void* executor) {
    std::free(executor);
    count("executors", -1);
    return 0;
}
#endif

// --- libcust_opapi ---
#ifndef WITHOUT_aclnnInnerFlashAttnGrad
int aclnnInnerFlashAttnGradGetWorkspaceSize(const void* q, const void* k, const void* v, const void* dout,
                                            const void* attn_out, const void* softmax_lse, const void* cu_seqlens_q,
                                            const void* cu_seqlens_kv, const void* seqused_q, const void* seqused_kv,
                                            const void* sinks, const void* attn_mask, const void* metadata,
                                            double softmax_scale, std::int64_t mask_mode, std::int64_t win_left,
                                            std::int64_t win_right, std::int64_t max_seqlen_q, std::int64_t max_seqlen_kv,
                                            char* layout_q, char* layout_kv, char* layout_out, const void* dq,
                                            const void* dk, const void* dv, std::uint64_t* workspace_bytes,
                                            void** executor) {
    Entry("aclnnInnerFlashAttnGradGetWorkspaceSize")
        .number("q", id_of(q)).number("k", id_of(k)).number("v", id_of(v)).number("dout", id_of(dout))
        .number("attn_out", id_of(attn_out)).number("softmax_lse", id_of(softmax_lse))
        .number("cu_seqlens_q", id_of(cu_seqlens_q)).number("cu_seqlens_kv", id_of(cu_seqlens_kv))
        .number("seqused_q", id_of(seqused_q)).number("seqused_kv", id_of(seqused_kv)).number("sinks", id_of(sinks))
        .number("attn_mask", id_of(attn_mask)).number("metadata", id_of(metadata))
        .real("softmax_scale", softmax_scale).number("mask_mode", mask_mode).number("win_left", win_left)
        .number("win_right", win_right).number("max_seqlen_q", max_seqlen_q).number("max_seqlen_kv", max_seqlen_kv)
        .text("layout_q", layout_q).text("layout_kv", layout_kv).text("layout_out", layout_out)
        .number("dq", id_of(dq)).number("dk", id_of(dk)).number("dv", id_of(dv));
    return first_phase("aclnnInnerFlashAttnGradGetWorkspaceSize", workspace_bytes, executor);
}
int aclnnInnerFlashAttnGrad(void* workspace, std::uint64_t bytes, void* executor, void* stream) {
    return second_phase("aclnnInnerFlashAttnGrad", workspace, bytes, executor, stream);
}
#endif
int aclnnInnerFlashAttnGetWorkspaceSize(const void* q, const void* k, const void* v, const void* block_table,
                                        const void* cu_seqlens_q, const void* cu_seqlens_kv, const void* seqused_q,
                                        const void* seqused_kv, const void* sinks, const void* metadata,
                                        const void* attn_mask, double softmax_scale, std::int64_t mask_mode,
                                        std::int64_t win_left, std::int64_t win_right, std::int64_t max_seqlen_q,
                                        std::int64_t max_seqlen_kv, char* layout_q, char* layout_kv, char* layout_out,
                                        bool return_softmax_lse, const void* attn_out, const void* softmax_lse,
                                        std::uint64_t* workspace_bytes, void** executor) {
    Entry("aclnnInnerFlashAttnGetWorkspaceSize")
        .number("q", id_of(q)).number("k", id_of(k)).number("v", id_of(v)).number("block_table", id_of(block_table))
        .number("cu_seqlens_q", id_of(cu_seqlens_q)).number("cu_seqlens_kv", id_of(cu_seqlens_kv))
        .number("seqused_q", id_of(seqused_q)).number("seqused_kv", id_of(seqused_kv)).number("sinks", id_of(sinks))
        .number("metadata", id_of(metadata)).number("attn_mask", id_of(attn_mask))
        .real("softmax_scale", softmax_scale).number("mask_mode", mask_mode).number("win_left", win_left)
        .number("win_right", win_right).number("max_seqlen_q", max_seqlen_q).number("max_seqlen_kv", max_seqlen_kv)
        .text("layout_q", layout_q).text("layout_kv", layout_kv).text("layout_out", layout_out)
        .number("return_softmax_lse", return_softmax_lse)
        .number("attn_out", id_of(attn_out)).number("softmax_lse", id_of(softmax_lse));
    return first_phase("aclnnInnerFlashAttnGetWorkspaceSize", workspace_bytes, executor);
}
int aclnnInnerFlashAttn(void* workspace, std::uint64_t bytes, void* executor, void* stream) {
    return second_phase("aclnnInnerFlashAttn", workspace, bytes, executor, stream);
}

// --- libruntime ---
int rtDevBinaryRegister(const Binary* binary, void** module) {
    if (const int code = code_of("rtDevBinaryRegister")) return code;
    Entry("rtDevBinaryRegister")
        .number("magic", binary->magic)
        .number("version", binary->version)
        .bytes("object", binary->data, binary->length);
    *module = std::malloc(1);
    count("modules", 1);
    return 0;
}
#ifndef WITHOUT_rtDevBinaryUnRegister
int rtDevBinaryUnRegister(void* module) {
    std::free(module);
    count("modules", -1);
    return 0;
}
#endif
int rtFunctionRegister(void*, const void* stub, const char* stub_name, const void* symbol, std::uint32_t mode) {
    if (const int code = code_of("rtFunctionRegister")) return code;
    Entry("rtFunctionRegister")
        .number("stub", reinterpret_cast<long long>(stub))
        .text("stub_name", stub_name)
        .text("kernel", static_cast<const char*>(symbol))
        .number("mode", mode);
    count("functions", 1);
    return 0;
}
int rtGetC2cCtrlAddr(std::uint64_t* address, std::uint32_t* bytes) {
    *address = 0xff75, *bytes = 64;
    return code_of("rtGetC2cCtrlAddr");
}
#ifndef WITHOUT_rtKernelLaunch
int rtKernelLaunch(const void* stub, std::uint32_t blocks, void* arguments, std::uint32_t argument_bytes,
                   void* shared_memory, void* stream) {
    Entry("rtKernelLaunch")
        .number("stub", reinterpret_cast<long long>(stub))
        .number("blocks", blocks)
        .bytes("arguments", arguments, argument_bytes)
        .number("shared_memory", reinterpret_cast<long long>(shared_memory))
        .number("stream", reinterpret_cast<long long>(stream));
    return code_of("rtKernelLaunch");
}
#endif
}
