/// The problem as native code sees it: a plain mirror of fag_metadata.AttentionProblem.
///
/// Every argument rule lives in fag_metadata.problem; what is checked here (problem.cpp) is only what memory safety and
/// int64 arithmetic of the stages below rely on. Nobody writes to a Problem after it was made.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace pybind11 {
class module_;
}

namespace fag {

enum class Layout : int { bsnd = 0, bnsd = 1, tnd = 2 };

/// Values as in the operator's mask_mode argument.
enum class MaskMode : int { none = 0, causal = 3, window = 4 };

/// Values as in metadata head word 9.
enum class Route : int { bn2gs1s2 = 0, bn2_single = 1, bn2_multiblk = 2 };

/// A window side without bound.
inline constexpr std::int64_t kUnbounded = -1;

struct Problem {
    Layout layout = Layout::bsnd;
    std::int64_t b = 0;
    std::int64_t n1 = 0;
    std::int64_t n2 = 0;
    std::int64_t g = 0;  ///< n1 / n2
    std::int64_t d = 0;
    std::int64_t dv = 0;
    std::int64_t s1 = 0;  ///< dense: slot length; TND: longest sequence
    std::int64_t s2 = 0;
    std::int64_t t1 = 0;  ///< tokens in the tensor: b * s1, or cu_seqlens_q[b]
    std::int64_t t2 = 0;
    MaskMode mask_mode = MaskMode::none;
    std::int64_t win_left = kUnbounded;
    std::int64_t win_right = kUnbounded;
    bool has_cu_seqlens_q = false;
    bool has_cu_seqlens_kv = false;
    bool has_seqused_q = false;
    bool has_seqused_kv = false;
    bool is_variable = false;  ///< lengths differ between batch entries, after the uniform-TND rule
    std::int64_t max_seqlen_q = -1;  ///< bound given by the caller, or -1; never changes a result
    std::int64_t max_seqlen_kv = -1;
    std::vector<std::int64_t> lengths_q;   ///< (b,) effective lengths, 0 <= length <= slot
    std::vector<std::int64_t> lengths_kv;
    std::vector<std::int64_t> starts_q;    ///< (b,) first token of each batch entry
    std::vector<std::int64_t> starts_kv;

    bool is_tnd() const { return layout == Layout::tnd; }
    bool has_seqused() const { return has_seqused_q || has_seqused_kv; }
    bool has_lengths() const { return has_seqused() || has_cu_seqlens_q || has_cu_seqlens_kv; }
    /// Tokens that belong to batch entry `i`, used or not.
    std::int64_t slot_q(std::int64_t i) const;
    std::int64_t slot_kv(std::int64_t i) const;
    /// Longest effective length, 0 without batch entries.
    std::int64_t longest_q() const;
    std::int64_t longest_kv() const;
    /// Throws std::invalid_argument if a stage below could overflow or index outside its tensors.
    void check() const;
};

/// `fag_kernel: <name> must <rule>, got <value>.` as std::invalid_argument (ValueError in Python).
[[noreturn]] void fail(const std::string& name, const std::string& rule, std::int64_t value);

/// Product of non-negative factors; throws std::overflow_error (OverflowError in Python) that names `what`.
template <typename... Factors>
std::int64_t checked_product(const char* what, Factors... factors) {
    std::int64_t product = 1;
    bool overflowed = false;
    ((overflowed |= __builtin_mul_overflow(product, static_cast<std::int64_t>(factors), &product)), ...);
    if (overflowed) throw std::overflow_error(std::string("fag_kernel: ") + what + " must fit int64, it overflows.");
    return product;
}

void bind_problem(pybind11::module_& m);

}  // namespace fag
