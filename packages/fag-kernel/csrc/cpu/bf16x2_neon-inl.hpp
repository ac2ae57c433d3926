/// Pairs of bfloat16 with FEAT_BF16: bfdot multiplies eight values and adds them to four float32 sums. It rounds each of
/// its steps to odd, an error below one ulp of the sum instead of half of one, and flushes subnormals as vdpbf16ps does.
/// See bf16x2-inl.hpp.
#pragma once

#include "isa.hpp"

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

static inline void store_neighbours(Word* words, uint16x8_t x) { vst1_u32(words, vreinterpret_u32_u16(vget_low_u16(x))); }

/// Four columns of two rows, rounded to bfloat16, in the lower halves.
struct RoundedRows {
    uint16x8_t low, high;

    static RoundedRows zero() { return {vdupq_n_u16(0), vdupq_n_u16(0)}; }
    static RoundedRows of(Vec::F first, Vec::F second) { return {round_to_bf16(first), round_to_bf16(second)}; }
    Vec::F first() const { return widen(low); }
    Vec::F second() const { return widen(high); }
    /// Words (first[i], second[i]).
    void store_pairs(Word* words) const { vst1q_u32(words, vreinterpretq_u32_u16(vzip1q_u16(low, high))); }
    /// Words of neighbours, row by row.
    void store_rows(Word* first, Word* second) const {
        store_neighbours(first, low);
        store_neighbours(second, high);
    }

private:
    static Vec::F widen(uint16x8_t bf16) { return vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bf16), 16)); }
};

/// The lower values of as many words as a vector has lanes.
static inline Vec::F first_of_pairs(const Word* words) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vld1q_u32(words), 16));
}

/// The upper ones.
static inline Vec::F second_of_pairs(const Word* words) {
    return vreinterpretq_f32_u32(vandq_u32(vld1q_u32(words), vdupq_n_u32(0xffff0000u)));
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
static void pack_columns_bf16x2(const void* src, std::int64_t stride_bytes, int rows, int cols, Word* dst,
                                std::int64_t ld) {
    const int padded_words = ((cols + 1) / 2 + kAlign - 1) / kAlign * kAlign;
    for (int row = 0; row < rows; ++row) {
        const char* in = static_cast<const char*>(src) + row * stride_bytes;
        for (int at = 0; at < padded_words; at += 4) {
            vst1q_u32(dst + row * ld + at, vreinterpretq_u32_u16(load_bf16(in + 4 * at, cols - 2 * at)));
        }
    }
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

}  // namespace fag::cpu::FAG_LEVEL
