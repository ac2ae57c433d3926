/// Products on pairs of bfloat16 (FEAT_BF16): bfdot multiplies eight pairs and adds them to four float32 sums. The twin of
/// bf16x2-inl.hpp, with the same words and the same results but for rounding: bfdot rounds each of its steps to odd,
/// an error below one ulp of the sum instead of half of one, and flushes subnormals as vdpbf16ps does.
#pragma once

#include "gemm-inl.hpp"
#include "softmax-inl.hpp"

namespace fag::cpu::FAG_LEVEL {

struct DotBf16x2 {
    using F = Vec::F;
    static bfloat16x8_t load_b(const Word* b) { return vreinterpretq_bf16_u32(vld1q_u32(b)); }
    /// The word in lane 0, where bfdot broadcasts it from: a plain load, which keeps the vector units free.
    static bfloat16x4_t broadcast_a(const Word* a) {
        return vreinterpret_bf16_u32(vset_lane_u32(*a, vdup_n_u32(0), 0));
    }
    static F dot(F sum, bfloat16x4_t a, bfloat16x8_t b) { return vbfdotq_lane_f32(sum, b, a, 0); }
};

/// Four values rounded to bfloat16, in the lower half.
static inline uint16x8_t round_to_bf16(Vec::F x) { return vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(x)); }

static inline Vec::F widen(uint16x8_t bf16) { return vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bf16), 16)); }

/// Four words (low[i], high[i]) from the lower halves.
static inline void store_interleaved(Word* words, uint16x8_t low, uint16x8_t high) {
    vst1q_u32(words, vreinterpretq_u32_u16(vzip1q_u16(low, high)));
}

static inline void store_neighbours(Word* words, uint16x8_t x) { vst1_u32(words, vreinterpret_u32_u16(vget_low_u16(x))); }

/// Two rows at a time, as the words of P and dS hold them. The partner of an odd last row sees nothing.
template <bool all>
static inline void softmax_grad_pair(const SoftmaxGrad& args, const BinaryExp& exp, int row) {
    const Vec::F minus_lse0 = Vec::set(-args.lse[row] / BinaryExp::kUnit), shift0 = Vec::set(args.shift[row]);
    const Vec::F minus_lse1 = Vec::set(-args.lse[row + 1] / BinaryExp::kUnit), shift1 = Vec::set(args.shift[row + 1]);
    const SeenColumns seen0 = seen_columns(args.visible, row, args.rows, args.key_begin, args.n);
    const SeenColumns seen1 = seen_columns(args.visible, row + 1, args.rows, args.key_begin, args.n);
    const std::int64_t panel_row = static_cast<std::int64_t>(row / 2) * args.n;
    Word* ds_row = args.ds_rows + row * args.ld_ds_rows + args.key_begin / 2;
    Vec::F residual0 = Vec::zero(), residual1 = Vec::zero();
    for (int j = 0; j < args.n; j += Vec::lanes) {
        uint16x8_t p0 = vdupq_n_u16(0), p1 = p0, ds0 = p0, ds1 = p0;
        if (all || seen0.contains(j) || seen1.contains(j)) {
            const Gradient g0 = gradient<all>(args, exp, row, j, minus_lse0, shift0, seen0);
            const Gradient g1 = gradient<all>(args, exp, row + 1, j, minus_lse1, shift1, seen1);
            p0 = round_to_bf16(g0.p);
            p1 = round_to_bf16(g1.p);
            ds0 = round_to_bf16(g0.ds);
            ds1 = round_to_bf16(g1.ds);
            residual0 = residual0 + (g0.ds - widen(ds0));
            residual1 = residual1 + (g1.ds - widen(ds1));
        }
        store_interleaved(args.p + panel_row + j, p0, p1);
        store_interleaved(args.ds + panel_row + j, ds0, ds1);
        store_neighbours(ds_row + j / 2, ds0);
        store_neighbours(ds_row + args.ld_ds_rows + j / 2, ds1);
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

/// A cache line of columns at a time, with the running sum of K over the keys that the rows so far see.
static void share_residual_bf16x2(const ResidualShare& args) {
    constexpr int kVectors = kAlign / Vec::lanes;
    for (int col = 0; col < args.cols; col += kAlign) {
        const int panel_begin = col / args.panel * args.panel;
        const int panel = args.cols - panel_begin < args.panel ? args.cols - panel_begin : args.panel;
        const Word* k = args.reduced + panel_begin * args.depth + (col - panel_begin);
        Vec::F sum[kVectors] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
        int key = 0;
        for (int row = 0; row < args.rows; ++row) {
            const int last = args.visible.all ? args.keys : args.visible.last[row];
            const bool sees_first = args.visible.all || args.visible.first[row] == 0;
            for (; key < last; ++key) {
                for (int i = 0; i < kVectors; ++i) {
                    const uint32x4_t pair = vld1q_u32(k + static_cast<std::int64_t>(key / 2) * panel + i * Vec::lanes);
                    const uint32x4_t low = vshlq_n_u32(pair, 16);
                    const uint32x4_t high = vandq_u32(pair, vdupq_n_u32(0xffff0000u));
                    sum[i] = sum[i] + vreinterpretq_f32_u32(key % 2 == 0 ? low : high);
                }
            }
            const float share = sees_first && last > 0 ? args.residual[row] / static_cast<float>(last) : 0.0f;
            float* start = args.start + static_cast<std::int64_t>(row) * args.cols + col;
            for (int i = 0; i < kVectors; ++i) Vec::store(start + i * Vec::lanes, Vec::set(share) * sum[i]);
        }
    }
}

/// Stores probabilities as bfloat16 neighbours.
struct StoreBf16x2 {
    static void store(Word* row, int j, Vec::F p) { store_neighbours(row + j / 2, round_to_bf16(p)); }
};

/// The first n of eight bfloat16 (all from n = 8 on), zeros behind; reads nothing beyond them.
static inline uint16x8_t load_bf16(const char* p, int n) {
    if (n >= 8) return vld1q_u16(reinterpret_cast<const std::uint16_t*>(p));
    std::uint16_t lane[8] = {};
    for (int i = 0; i < n; ++i) lane[i] = reinterpret_cast<const std::uint16_t*>(p)[i];
    return vld1q_u16(lane);
}

/// All ones where a value is an infinity or a NaN: their exponents are all ones.
static inline uint16x8_t not_finite(uint16x8_t bf16) {
    const uint16x8_t exponent = vdupq_n_u16(0x7f80);
    return vceqq_u16(vandq_u16(bf16, exponent), exponent);
}

/// Pairs along columns: the row as it is stored.
static bool pack_columns_bf16x2(const void* src, std::int64_t stride_bytes, int rows, int cols, Word* dst,
                                std::int64_t ld) {
    const int padded_words = ((cols + 1) / 2 + kAlign - 1) / kAlign * kAlign;
    uint16x8_t bad = vdupq_n_u16(0);
    for (int row = 0; row < rows; ++row) {
        const char* in = static_cast<const char*>(src) + row * stride_bytes;
        for (int at = 0; at < padded_words; at += 4) {
            const uint16x8_t x = load_bf16(in + 4 * at, cols - 2 * at);
            bad = vorrq_u16(bad, not_finite(x));
            vst1q_u32(dst + row * ld + at, vreinterpretq_u32_u16(x));
        }
    }
    return vmaxvq_u16(bad) == 0;
}

/// Pairs along rows: rows 2r and 2r + 1 interleaved.
static bool pack_rows_bf16x2(const void* src, std::int64_t stride_bytes, int rows, int cols, Word* dst,
                             std::int64_t ld) {
    const int padded_cols = (cols + kAlign - 1) / kAlign * kAlign;
    uint16x8_t bad = vdupq_n_u16(0);
    for (int row = 0; row < rows; row += 2) {
        const char* in = static_cast<const char*>(src) + row * stride_bytes;
        const bool has_second = row + 1 < rows;
        for (int at = 0; at < padded_cols; at += 8) {
            const uint16x8_t low = load_bf16(in + 2 * at, cols - at);
            const uint16x8_t high = has_second ? load_bf16(in + stride_bytes + 2 * at, cols - at) : vdupq_n_u16(0);
            bad = vorrq_u16(bad, vorrq_u16(not_finite(low), not_finite(high)));
            Word* words = dst + row / 2 * ld + at;
            vst1q_u32(words, vreinterpretq_u32_u16(vzip1q_u16(low, high)));
            vst1q_u32(words + 4, vreinterpretq_u32_u16(vzip2q_u16(low, high)));
        }
    }
    return vmaxvq_u16(bad) == 0;
}

template <int width, int rows, bool fetches_ahead>
constexpr Products products_bf16x2() {
    return {
        .packing = 2,
        .panel = width * Vec::lanes,
        .exp_unit = BinaryExp::kUnit,
        .gemm = gemm<DotBf16x2, width, rows, fetches_ahead>,
        .softmax_grad = softmax_grad_bf16x2,
        .softmax_step = softmax_step<StoreBf16x2, BinaryExp>,
        .share_residual = share_residual_bf16x2,
        .pack_columns = {nullptr, pack_columns_bf16x2, nullptr},
        .pack_rows = {nullptr, pack_rows_bf16x2, nullptr},
    };
}

}  // namespace fag::cpu::FAG_LEVEL
