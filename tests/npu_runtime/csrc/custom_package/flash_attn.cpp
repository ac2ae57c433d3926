/// libcust_opapi.so: what CANN's custom package with flash attention exports.
///
/// The argument order of the gradient is documented. The forward's pair is not: its order is an assumption by
/// analogy, and the same one that fag-kernel makes (csrc/cann).

#include "../operators.hpp"

using namespace npu_stub;

namespace {

/// Not zero, and no multiple of an allocator's granule: a caller that forgets it, or rounds it down, shows.
constexpr uint64_t kWorkspaceBytes = 5000;

constexpr bool kOptional = true;

std::string text(const char* value) { return value == nullptr ? "" : value; }

}  // namespace

EXPORT int aclnnInnerFlashAttnGradGetWorkspaceSize(
    const void* q, const void* k, const void* v, const void* dout, const void* attn_out, const void* softmax_lse,
    const void* cu_seqlens_q, const void* cu_seqlens_kv, const void* seqused_q, const void* seqused_kv,
    const void* sinks, const void* attn_mask, const void* metadata, double softmax_scale, int64_t mask_mode,
    int64_t win_left, int64_t win_right, int64_t max_seqlen_q, int64_t max_seqlen_kv, const char* layout_q,
    const char* layout_kv, const char* layout_out, void* dq, void* dk, void* dv, uint64_t* workspace_bytes,
    void** executor) {
    return prepare("aclnnInnerFlashAttnGradGetWorkspaceSize",
                   {"aclnnInnerFlashAttnGrad",
                    {{"q", q},
                     {"k", k},
                     {"v", v},
                     {"dout", dout},
                     {"attn_out", attn_out},
                     {"softmax_lse", softmax_lse},
                     {"cu_seqlens_q", cu_seqlens_q, kOptional},
                     {"cu_seqlens_kv", cu_seqlens_kv, kOptional},
                     {"seqused_q", seqused_q, kOptional},
                     {"seqused_kv", seqused_kv, kOptional},
                     {"sinks", sinks, kOptional},
                     {"attn_mask", attn_mask, kOptional},
                     {"metadata", metadata, kOptional},
                     {"dq", dq},
                     {"dk", dk},
                     {"dv", dv}},
                    {{"softmax_scale", softmax_scale},
                     {"mask_mode", mask_mode},
                     {"win_left", win_left},
                     {"win_right", win_right},
                     {"max_seqlen_q", max_seqlen_q},
                     {"max_seqlen_kv", max_seqlen_kv},
                     {"layout_q", text(layout_q)},
                     {"layout_kv", text(layout_kv)},
                     {"layout_out", text(layout_out)}},
                    kWorkspaceBytes},
                   workspace_bytes, executor);
}

EXPORT int aclnnInnerFlashAttnGrad(void* workspace, uint64_t bytes, void* executor, void* stream) {
    return launch("aclnnInnerFlashAttnGrad", workspace, bytes, executor, stream);
}

EXPORT int aclnnInnerFlashAttnGetWorkspaceSize(
    const void* q, const void* k, const void* v, const void* block_table, const void* cu_seqlens_q,
    const void* cu_seqlens_kv, const void* seqused_q, const void* seqused_kv, const void* sinks, const void* metadata,
    const void* attn_mask, double softmax_scale, int64_t mask_mode, int64_t win_left, int64_t win_right,
    int64_t max_seqlen_q, int64_t max_seqlen_kv, const char* layout_q, const char* layout_kv, const char* layout_out,
    bool return_softmax_lse, void* attn_out, void* softmax_lse, uint64_t* workspace_bytes, void** executor) {
    return prepare("aclnnInnerFlashAttnGetWorkspaceSize",
                   {"aclnnInnerFlashAttn",
                    {{"q", q},
                     {"k", k},
                     {"v", v},
                     {"block_table", block_table, kOptional},
                     {"cu_seqlens_q", cu_seqlens_q, kOptional},
                     {"cu_seqlens_kv", cu_seqlens_kv, kOptional},
                     {"seqused_q", seqused_q, kOptional},
                     {"seqused_kv", seqused_kv, kOptional},
                     {"sinks", sinks, kOptional},
                     {"metadata", metadata, kOptional},
                     {"attn_mask", attn_mask, kOptional},
                     {"attn_out", attn_out},
                     {"softmax_lse", softmax_lse}},
                    {{"softmax_scale", softmax_scale},
                     {"mask_mode", mask_mode},
                     {"win_left", win_left},
                     {"win_right", win_right},
                     {"max_seqlen_q", max_seqlen_q},
                     {"max_seqlen_kv", max_seqlen_kv},
                     {"layout_q", text(layout_q)},
                     {"layout_kv", text(layout_kv)},
                     {"layout_out", text(layout_out)},
                     {"return_softmax_lse", return_softmax_lse}},
                    kWorkspaceBytes},
                   workspace_bytes, executor);
}

EXPORT int aclnnInnerFlashAttn(void* workspace, uint64_t bytes, void* executor, void* stream) {
    return launch("aclnnInnerFlashAttn", workspace, bytes, executor, stream);
}
