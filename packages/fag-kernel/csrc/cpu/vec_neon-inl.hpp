/// Vector primitives of the aarch64 levels: four floats, thirty-two registers. Needs ARMv8.0-A only; where the level's
/// file is compiled for FEAT_BF16, float32 is rounded to bfloat16 by one instruction.
#pragma once

#include <arm_neon.h>

#include "isa.hpp"
#include "vec_parts-inl.hpp"

namespace fag::cpu::FAG_LEVEL {

struct Vec {
    using F = float32x4_t;
    using M = uint32x4_t;  ///< all ones where set
    static constexpr int lanes = 4;

    static F load(const float* p) { return vld1q_f32(p); }
    static void store(float* p, F x) { vst1q_f32(p, x); }
    static F set(float x) { return vdupq_n_f32(x); }
    static F zero() { return set(0.0f); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    /// b where either is NaN; fmin, fmax and their NM forms answer otherwise.
    static F min(F a, F b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
    static F max(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
    static F round(F x) { return vrndnq_f32(x); }
    /// x * 2^n for integers -150 <= n <= 0; below the normal range it becomes 0.
    static F scale_by_pow2(F x, F n) {
        const int32x4_t biased = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
        return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(vmaxq_s32(biased, vdupq_n_s32(0)), 23)));
    }
    /// Lanes i with first <= at + i < last.
    static M between(int at, int first, int last) {
        const int32x4_t lane = vaddq_s32(int32x4_t{0, 1, 2, 3}, vdupq_n_s32(at));
        return vandq_u32(vcgeq_s32(lane, vdupq_n_s32(first)), vcltq_s32(lane, vdupq_n_s32(last)));
    }
    static M is_nan(F x) { return vmvnq_u32(vceqq_f32(x, x)); }
    static F select(M m, F yes, F no) { return vbslq_f32(m, yes, no); }
    static float sum(F x) { return vaddvq_f32(x); }
    static float highest(F x) { return vmaxvq_f32(x); }

    template <DType type>
    static F load_as(const void* p) {
        if constexpr (type == DType::f32) {
            return load(static_cast<const float*>(p));
        } else {
            const uint16x4_t h = vld1_u16(static_cast<const std::uint16_t*>(p));
            if constexpr (type == DType::f16) return vcvt_f32_f16(vreinterpret_f16_u16(h));
            return vreinterpretq_f32_u32(vshll_n_u16(h, 16));
        }
    }

    template <DType type>
    static F load_part(const void* p, int n) {
        return load_lanes<Vec, type>(p, n);
    }

    /// Rounds to nearest even; a NaN must be that of isa.hpp.
    template <DType type>
    static void store_as(void* p, F x) {
        if constexpr (type == DType::f32) {
            store(static_cast<float*>(p), x);
        } else {
            vst1_u16(static_cast<std::uint16_t*>(p), narrow<type>(x));
        }
    }

    template <DType type>
    static void store_part(void* p, F x, int n) {
        store_lanes<Vec, type>(p, x, n);
    }

    /// dst[c][r] = src[r][c] for lanes x lanes words.
    static void transpose(const Word* src, std::int64_t ld_src, Word* dst, std::int64_t ld_dst) {
        const uint32x4_t row0 = vld1q_u32(src), row1 = vld1q_u32(src + ld_src);
        const uint32x4_t row2 = vld1q_u32(src + 2 * ld_src), row3 = vld1q_u32(src + 3 * ld_src);
        const uint64x2_t even01 = vreinterpretq_u64_u32(vtrn1q_u32(row0, row1));
        const uint64x2_t odd01 = vreinterpretq_u64_u32(vtrn2q_u32(row0, row1));
        const uint64x2_t even23 = vreinterpretq_u64_u32(vtrn1q_u32(row2, row3));
        const uint64x2_t odd23 = vreinterpretq_u64_u32(vtrn2q_u32(row2, row3));
        vst1q_u32(dst, vreinterpretq_u32_u64(vtrn1q_u64(even01, even23)));
        vst1q_u32(dst + ld_dst, vreinterpretq_u32_u64(vtrn1q_u64(odd01, odd23)));
        vst1q_u32(dst + 2 * ld_dst, vreinterpretq_u32_u64(vtrn2q_u64(even01, even23)));
        vst1q_u32(dst + 3 * ld_dst, vreinterpretq_u32_u64(vtrn2q_u64(odd01, odd23)));
    }

private:
    template <DType type>
    static uint16x4_t narrow(F x) {
        if constexpr (type == DType::f16) return vreinterpret_u16_f16(vcvt_f16_f32(x));
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
        return vreinterpret_u16_bf16(vcvt_bf16_f32(x));
#else
        const uint32x4_t bits = vreinterpretq_u32_f32(x);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        return vshrn_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd), 16);
#endif
    }
};

}  // namespace fag::cpu::FAG_LEVEL
