/// Products on pairs of bfloat16 (AVX512-BF16): vdpbf16ps multiplies 32 pairs and adds them to 16 float32 sums.
/// P and dS are rounded to bfloat16 only as operands; the elements of a word are neighbours along the reduction.
#pragma once

#include "gemm-inl.hpp"
#include "softmax-inl.hpp"

namespace fag::cpu::FAG_LEVEL {

struct DotBf16x2 {
    using F = Vec::F;
    static __m512bh load_b(const Word* b) { return (__m512bh)_mm512_loadu_si512(b); }
    static __m512bh broadcast_a(const Word* a) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(*a)); }
    static F dot(F sum, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sum, a, b); }
};

/// Sixteen words (low[i], high[i]) from the halves of a register that holds low in its lower and high in its upper half.
static inline __m512i interleave_halves(__m512i low_high) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, low_high);
}

/// Rounds two rows to bfloat16: `low` in the lower half.
static inline __m512i round_rows(Vec::F low, Vec::F high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

static inline Vec::F widen(__m256i bf16) {
    return (Vec::F)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
}

/// Two rows at a time, as the words of P and dS hold them. The partner of an odd last row sees nothing.
template <bool all>
static inline void softmax_grad_pair(const SoftmaxGrad& args, const BinaryExp& exp, int row) {
    const Vec::F minus_lse0 = Vec::set(-args.lse[row] / BinaryExp::kUnit), shift0 = Vec::set(args.shift[row]);
    const Vec::F minus_lse1 = Vec::set(-args.lse[row + 1] / BinaryExp::kUnit), shift1 = Vec::set(args.shift[row + 1]);
    const SeenColumns seen0 = seen_columns(args.visible, row, args.rows, args.key_begin, args.n);
    const SeenColumns seen1 = seen_columns(args.visible, row + 1, args.rows, args.key_begin, args.n);
    const std::int64_t panel_row = static_cast<std::int64_t>(row / 2) * args.n;
    auto* ds_row = reinterpret_cast<char*>(args.ds_rows + row * args.ld_ds_rows) + 2 * args.key_begin;
    Vec::F residual0 = Vec::zero(), residual1 = Vec::zero();
    for (int j = 0; j < args.n; j += Vec::lanes) {
        __m512i p = _mm512_setzero_si512(), ds = _mm512_setzero_si512();
        if (all || seen0.contains(j) || seen1.contains(j)) {
            const Gradient g0 = gradient<all>(args, exp, row, j, minus_lse0, shift0, seen0);
            const Gradient g1 = gradient<all>(args, exp, row + 1, j, minus_lse1, shift1, seen1);
            p = round_rows(g0.p, g1.p);
            ds = round_rows(g0.ds, g1.ds);
            residual0 = residual0 + (g0.ds - widen(_mm512_castsi512_si256(ds)));
            residual1 = residual1 + (g1.ds - widen(_mm512_extracti64x4_epi64(ds, 1)));
        }
        _mm512_storeu_si512(args.p + panel_row + j, interleave_halves(p));
        _mm512_storeu_si512(args.ds + panel_row + j, interleave_halves(ds));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(ds_row + 2 * j), _mm512_castsi512_si256(ds));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(ds_row + 4 * args.ld_ds_rows + 2 * j),
                            _mm512_extracti64x4_epi64(ds, 1));
    }
    args.residual[row] += Vec::sum(residual0);
    args.residual[row + 1] += Vec::sum(residual1);
}

static void softmax_grad_bf16x2(const SoftmaxGrad& args) {
    const BinaryExp exp(args.scale);
    for (int row = args.row_begin; row < args.row_end; row += 2) {
        if (args.visible.all && row + 1 < args.rows) {
            softmax_grad_pair<true>(args, exp, row);
        } else {
            softmax_grad_pair<false>(args, exp, row);
        }
    }
}

/// Sixteen columns at a time, with the running sum of K over the keys that the rows so far see.
static void share_residual_bf16x2(const ResidualShare& args) {
    for (int col = 0; col < args.cols; col += Vec::lanes) {
        const int panel_begin = col / args.panel * args.panel;
        const int panel = args.cols - panel_begin < args.panel ? args.cols - panel_begin : args.panel;
        const Word* k = args.reduced + panel_begin * args.depth + (col - panel_begin);
        Vec::F sum = Vec::zero();
        int key = 0;
        for (int row = 0; row < args.rows; ++row) {
            const int last = args.visible.all ? args.keys : args.visible.last[row];
            const bool sees_first = args.visible.all || args.visible.first[row] == 0;
            for (; key < last; ++key) {
                const __m512i pair = _mm512_loadu_si512(k + static_cast<std::int64_t>(key / 2) * panel);
                const __m512i low = _mm512_slli_epi32(pair, 16);
                const __m512i high = _mm512_andnot_si512(_mm512_set1_epi32(0xffff), pair);
                sum = sum + (Vec::F)_mm512_castsi512_ps(key % 2 == 0 ? low : high);
            }
            const float share = sees_first && last > 0 ? args.residual[row] / static_cast<float>(last) : 0.0f;
            Vec::store(args.start + static_cast<std::int64_t>(row) * args.cols + col, Vec::set(share) * sum);
        }
    }
}

/// Stores probabilities as bfloat16 neighbours.
struct StoreBf16x2 {
    static void store(Word* row, int j, Vec::F p) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + j / 2), (__m256i)_mm512_cvtneps_pbh(p));
    }
};

/// Bits of a bfloat16 that are all set exactly in infinities and NaNs.
static inline __m512i exponent_bits() { return _mm512_set1_epi16(0x7f80); }

static inline __mmask32 not_finite(__m512i words) {
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(words, exponent_bits()), exponent_bits());
}

/// Pairs along columns: the row as it is stored.
static bool pack_columns_bf16x2(const void* src, std::int64_t stride_bytes, int rows, int cols, Word* dst,
                                std::int64_t ld) {
    const int words = (cols + 1) / 2;
    __mmask32 bad = 0;
    for (int row = 0; row < rows; ++row) {
        const char* in = static_cast<const char*>(src) + row * stride_bytes;
        for (int at = 0; at < words; at += 16) {
            const int left = cols - 2 * at;
            const __mmask32 kept = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
            const __m512i x = _mm512_maskz_loadu_epi16(kept, in + 4 * at);
            bad |= not_finite(x);
            _mm512_storeu_si512(dst + row * ld + at, x);
        }
    }
    return bad == 0;
}

/// Pairs along rows: rows 2r and 2r + 1 interleaved.
static bool pack_rows_bf16x2(const void* src, std::int64_t stride_bytes, int rows, int cols, Word* dst,
                             std::int64_t ld) {
    __mmask32 bad = 0;
    for (int row = 0; row < rows; row += 2) {
        const char* in = static_cast<const char*>(src) + row * stride_bytes;
        const bool has_second = row + 1 < rows;
        for (int at = 0; at < cols; at += 16) {
            const int left = cols - at;
            const auto kept = static_cast<__mmask16>(left >= 16 ? 0xffffu : (1u << left) - 1u);
            const __m256i low = _mm256_maskz_loadu_epi16(kept, in + 2 * at);
            const __m256i high =
                has_second ? _mm256_maskz_loadu_epi16(kept, in + stride_bytes + 2 * at) : _mm256_setzero_si256();
            const __m512i x = interleave_halves(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
            bad |= not_finite(x);
            _mm512_storeu_si512(dst + row / 2 * ld + at, x);
        }
    }
    return bad == 0;
}

template <int width, int rows>
constexpr Products products_bf16x2() {
    return {
        .packing = 2,
        .panel = width * Vec::lanes,
        .exp_unit = BinaryExp::kUnit,
        .gemm = gemm<DotBf16x2, width, rows>,
        .softmax_grad = softmax_grad_bf16x2,
        .softmax_step = softmax_step<StoreBf16x2, BinaryExp>,
        .share_residual = share_residual_bf16x2,
        .pack_columns = {nullptr, pack_columns_bf16x2, nullptr},
        .pack_rows = {nullptr, pack_rows_bf16x2, nullptr},
    };
}

}  // namespace fag::cpu::FAG_LEVEL
