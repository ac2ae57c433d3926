/// Vector primitives of the AVX2 + FMA + F16C level: eight floats.
#pragma once

#include <immintrin.h>

#include "isa.hpp"
#include "vec_parts-inl.hpp"

namespace fag::cpu::FAG_LEVEL {

struct Vec {
    using F = __m256;
    using M = __m256;  ///< sign bit of each lane
    static constexpr int lanes = 8;

    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static F set(float x) { return _mm256_set1_ps(x); }
    static F zero() { return _mm256_setzero_ps(); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    /// b where either is NaN.
    static F min(F a, F b) { return _mm256_min_ps(a, b); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    /// x * 2^n for integers -150 <= n <= 0; below the normal range it becomes 0.
    static F scale_by_pow2(F x, F n) {
        const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        const __m256i kept = _mm256_max_epi32(biased, _mm256_setzero_si256());
        return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(kept, 23)));
    }
    /// Lanes i with first <= at + i < last.
    static M between(int at, int first, int last) {
        const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(at));
        const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
        const __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane);
        return _mm256_castsi256_ps(_mm256_andnot_si256(below, inside));
    }
    static M is_nan(F x) { return _mm256_cmp_ps(x, x, _CMP_UNORD_Q); }
    static F select(M m, F yes, F no) { return _mm256_blendv_ps(no, yes, m); }
    static float sum(F x) {
        const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
    }
    static float highest(F x) {
        const __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
    }

    template <DType type>
    static F load_as(const void* p) {
        if constexpr (type == DType::f32) {
            return load(static_cast<const float*>(p));
        } else {
            const __m128i h = _mm_loadu_si128(static_cast<const __m128i*>(p));
            if constexpr (type == DType::f16) return _mm256_cvtph_ps(h);
            return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
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
            _mm_storeu_si128(static_cast<__m128i*>(p), narrow<type>(x));
        }
    }

    template <DType type>
    static void store_part(void* p, F x, int n) {
        store_lanes<Vec, type>(p, x, n);
    }

    /// dst[c][r] = src[r][c] for lanes x lanes words.
    static void transpose(const Word* src, std::int64_t ld_src, Word* dst, std::int64_t ld_dst) {
        F row[lanes], pair[lanes];
        for (int i = 0; i < lanes; ++i) row[i] = load(reinterpret_cast<const float*>(src + i * ld_src));
        for (int i = 0; i < lanes; i += 2) {
            pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
            pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
        }
        for (int i = 0; i < lanes; i += 4) {
            row[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0x44);
            row[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0xee);
            row[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
            row[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0xee);
        }
        for (int i = 0; i < 4; ++i) {
            store(reinterpret_cast<float*>(dst + i * ld_dst), _mm256_permute2f128_ps(row[i], row[i + 4], 0x20));
            store(reinterpret_cast<float*>(dst + (i + 4) * ld_dst), _mm256_permute2f128_ps(row[i], row[i + 4], 0x31));
        }
    }

private:
    template <DType type>
    static __m128i narrow(F x) {
        if constexpr (type == DType::f16) return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        const __m256i words = _mm256_srli_epi32(rounded, 16);
        return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    }
};

}  // namespace fag::cpu::FAG_LEVEL
