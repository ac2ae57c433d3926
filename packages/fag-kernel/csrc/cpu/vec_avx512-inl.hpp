/// Vector primitives of the AVX-512 levels (F, BW, DQ, VL): sixteen floats, tails by masks.
#pragma once

#include <immintrin.h>

#include "isa.hpp"

namespace fag::cpu::FAG_LEVEL {

struct Vec {
    using F = __m512;
    using M = __mmask16;
    static constexpr int lanes = 16;

    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static F set(float x) { return _mm512_set1_ps(x); }
    static F zero() { return _mm512_setzero_ps(); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    /// b where either is NaN.
    static F min(F a, F b) { return _mm512_min_ps(a, b); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    /// x * 2^n for integers -150 <= n <= 0.
    static F scale_by_pow2(F x, F n) { return _mm512_scalef_ps(x, n); }
    /// Lanes i with first <= at + i < last.
    static M between(int at, int first, int last) {
        return static_cast<M>(low_bits(last - at) & ~low_bits(first - at));
    }
    static M is_nan(F x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
    static F select(M m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
    static float sum(F x) { return _mm512_reduce_add_ps(x); }
    static float highest(F x) { return _mm512_reduce_max_ps(x); }

    template <DType type>
    static F load_as(const void* p) {
        if constexpr (type == DType::f32) {
            return load(static_cast<const float*>(p));
        } else {
            return widen<type>(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
        }
    }

    /// The first n lanes (0 < n <= lanes), zeros behind; reads nothing beyond them.
    template <DType type>
    static F load_part(const void* p, int n) {
        const auto m = static_cast<M>(low_bits(n));
        if constexpr (type == DType::f32) {
            return _mm512_maskz_loadu_ps(m, p);
        } else {
            return widen<type>(_mm256_maskz_loadu_epi16(m, p));
        }
    }

    /// Rounds to nearest even; a NaN must be that of isa.hpp.
    template <DType type>
    static void store_as(void* p, F x) {
        if constexpr (type == DType::f32) {
            store(static_cast<float*>(p), x);
        } else {
            _mm256_storeu_si256(static_cast<__m256i*>(p), narrow<type>(x));
        }
    }

    template <DType type>
    static void store_part(void* p, F x, int n) {
        const auto m = static_cast<M>(low_bits(n));
        if constexpr (type == DType::f32) {
            _mm512_mask_storeu_ps(p, m, x);
        } else {
            _mm256_mask_storeu_epi16(p, m, narrow<type>(x));
        }
    }

    /// dst[c][r] = src[r][c] for lanes x lanes words.
    static void transpose(const Word* src, std::int64_t ld_src, Word* dst, std::int64_t ld_dst) {
        __m512i a[lanes], b[lanes];
        for (int i = 0; i < lanes; ++i) a[i] = _mm512_loadu_si512(src + i * ld_src);
        for (int i = 0; i < lanes; i += 2) {
            b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        }
        for (int i = 0; i < lanes; i += 4) {
            a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
            a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
            a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
            a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
        }
        // a[4q + c] holds, for rows 4q..4q+3, column c of each 128-bit lane.
        for (int c = 0; c < 4; ++c) {
            const __m512i low02 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
            const __m512i low13 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
            const __m512i high02 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
            const __m512i high13 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
            _mm512_storeu_si512(dst + c * ld_dst, _mm512_shuffle_i32x4(low02, high02, 0x88));
            _mm512_storeu_si512(dst + (c + 4) * ld_dst, _mm512_shuffle_i32x4(low13, high13, 0x88));
            _mm512_storeu_si512(dst + (c + 8) * ld_dst, _mm512_shuffle_i32x4(low02, high02, 0xdd));
            _mm512_storeu_si512(dst + (c + 12) * ld_dst, _mm512_shuffle_i32x4(low13, high13, 0xdd));
        }
    }

private:
    /// The lowest n bits, for any n.
    static std::uint32_t low_bits(int n) {
        const int kept = n < 0 ? 0 : n > lanes ? lanes : n;
        return (1u << kept) - 1u;
    }

    template <DType type>
    static F widen(__m256i h) {
        if constexpr (type == DType::f16) return _mm512_cvtph_ps(h);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
    }

    template <DType type>
    static __m256i narrow(F x) {
        if constexpr (type == DType::f16) return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
    }
};

}  // namespace fag::cpu::FAG_LEVEL
