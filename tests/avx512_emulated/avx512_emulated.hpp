/// AVX-512 on a CPU that stops at AVX2: the intrinsics that csrc/cpu/*avx512* use, included before those files.
///
/// SIMDe has most of them. What its version 0.7.4 lacks, or does otherwise than the instruction, is written below after
/// the operations in Intel's manual (Software Developer's Manual, volume 2), on halves of 256 bits where AVX2 or F16C
/// have the same. These functions hide the compiler's, which are global: the kernels are in namespaces inside theirs.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

// Its functions take the names of the intrinsics, its types are the compiler's own.
#define SIMDE_X86_AVX512F_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512BW_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#undef _mm512_scalef_ps  // SIMDe rounds twice
#undef _mm512_dpbf16_ps  // SIMDe adds in another order, rounds the products and keeps subnormals

namespace fag::cpu {
namespace emulated {

template <class Half, class Whole>
static inline Half half(const Whole& x, int which) {
    Half part;
    std::memcpy(&part, reinterpret_cast<const char*>(&x) + which * sizeof part, sizeof part);
    return part;
}

template <class Whole, class Half>
static inline Whole join(Half low, Half high) {
    Whole x;
    std::memcpy(&x, &low, sizeof low);
    std::memcpy(reinterpret_cast<char*>(&x) + sizeof low, &high, sizeof high);
    return x;
}

/// Zeros of the same sign in place of subnormal numbers.
static inline __m256 flush(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), exponent = _mm256_set1_epi32(0x7f800000);
    const __m256i is_tiny = _mm256_cmpeq_epi32(_mm256_and_si256(bits, exponent), _mm256_setzero_si256());
    return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_srli_epi32(is_tiny, 1), bits));
}

/// An accumulation of vdpbf16ps: a fused multiply-add, subnormal numbers count as zero before and after.
static inline __m256 accumulate(__m256 sum, __m256i a, __m256i b) {
    return flush(_mm256_fmadd_ps(flush(_mm256_castsi256_ps(a)), flush(_mm256_castsi256_ps(b)), sum));
}

/// vdpbf16ps on half of the lanes: the upper values of the words first.
static inline __m256 dot(__m256 sum, __m256i a, __m256i b) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    sum = accumulate(flush(sum), _mm256_and_si256(a, upper), _mm256_and_si256(b, upper));
    return accumulate(sum, _mm256_slli_epi32(a, 16), _mm256_slli_epi32(b, 16));
}

/// A float as bfloat16: to nearest even, NaNs quiet, subnormal numbers to zero.
static inline std::uint16_t round_to_bf16(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude < 0x00800000u) return static_cast<std::uint16_t>((bits & 0x80000000u) >> 16);
    if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>((bits | 0x00400000u) >> 16);
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/// x * 2^floor(n), rounded once: the product is exact in double, where no float times 2^+-400 leaves the normal range.
static inline float scale(float x, float n) {
    if (!(n == n)) return x + n;
    const double whole = __builtin_floor(static_cast<double>(n));
    const auto power = static_cast<std::uint64_t>(1023 + (whole < -400.0 ? -400.0 : whole > 400.0 ? 400.0 : whole));
    double factor;
    const std::uint64_t bits = power << 52;
    std::memcpy(&factor, &bits, sizeof factor);
    return static_cast<float>(static_cast<double>(x) * factor);
}

/// Reads nothing where the mask has no bit, as the instructions do.
template <class Vector, class Lane, class Mask>
static inline Vector load(Mask mask, const void* p) {
    Lane lane[sizeof(Vector) / sizeof(Lane)] = {};
    for (unsigned i = 0; i < sizeof(Vector) / sizeof(Lane); ++i) {
        if ((mask >> i) & 1u) std::memcpy(&lane[i], static_cast<const Lane*>(p) + i, sizeof(Lane));
    }
    Vector x;
    std::memcpy(&x, lane, sizeof x);
    return x;
}

template <class Lane, class Mask, class Vector>
static inline void store(void* p, Mask mask, const Vector& x) {
    for (unsigned i = 0; i < sizeof(Vector) / sizeof(Lane); ++i) {
        if ((mask >> i) & 1u) std::memcpy(static_cast<Lane*>(p) + i, reinterpret_cast<const Lane*>(&x) + i, sizeof(Lane));
    }
}

}  // namespace emulated

static inline __m512 _mm512_maskz_loadu_ps(__mmask16 k, const void* p) { return emulated::load<__m512, std::uint32_t>(k, p); }
static inline __m512i _mm512_maskz_loadu_epi16(__mmask32 k, const void* p) {
    return emulated::load<__m512i, std::uint16_t>(k, p);
}
static inline __m256i _mm256_maskz_loadu_epi16(__mmask16 k, const void* p) {
    return emulated::load<__m256i, std::uint16_t>(k, p);
}
static inline void _mm512_mask_storeu_ps(void* p, __mmask16 k, __m512 x) { emulated::store<std::uint32_t>(p, k, x); }
static inline void _mm256_mask_storeu_epi16(void* p, __mmask16 k, __m256i x) { emulated::store<std::uint16_t>(p, k, x); }

static inline __m512i _mm512_cvtepu16_epi32(__m256i x) {
    return emulated::join<__m512i>(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)),
                                   _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1)));
}
/// The lower 16 bits of each lane.
static inline __m256i _mm512_cvtepi32_epi16(__m512i x) {
    std::uint32_t lane[16];
    std::uint16_t low[16];
    std::memcpy(lane, &x, sizeof lane);
    for (int i = 0; i < 16; ++i) low[i] = static_cast<std::uint16_t>(lane[i]);
    __m256i result;
    std::memcpy(&result, low, sizeof result);
    return result;
}
static inline __mmask32 _mm512_cmpeq_epi16_mask(__m512i a, __m512i b) {
    std::uint16_t lane_a[32], lane_b[32];
    std::memcpy(lane_a, &a, sizeof a);
    std::memcpy(lane_b, &b, sizeof b);
    __mmask32 equal = 0;
    for (int i = 0; i < 32; ++i) equal |= static_cast<__mmask32>(lane_a[i] == lane_b[i]) << i;
    return equal;
}

static inline __m512 _mm512_cvtph_ps(__m256i x) {
    return emulated::join<__m512>(_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
                                  _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
}
/// The kernels round to nearest even.
static inline __m256i _mm512_cvtps_ph(__m512 x, int) {
    return emulated::join<__m256i>(_mm256_cvtps_ph(emulated::half<__m256>(x, 0), _MM_FROUND_TO_NEAREST_INT),
                                   _mm256_cvtps_ph(emulated::half<__m256>(x, 1), _MM_FROUND_TO_NEAREST_INT));
}

static inline __m256i _mm512_cvtneps_pbh(__m512 x) {
    std::uint16_t lane[16];
    for (int i = 0; i < 16; ++i) lane[i] = emulated::round_to_bf16(x[i]);
    __m256i rounded;
    std::memcpy(&rounded, lane, sizeof rounded);
    return rounded;
}
/// b in the lower half.
static inline __m512i _mm512_cvtne2ps_pbh(__m512 a, __m512 b) {
    return emulated::join<__m512i>(_mm512_cvtneps_pbh(b), _mm512_cvtneps_pbh(a));
}
static inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    using emulated::half;
    return emulated::join<__m512>(
        emulated::dot(half<__m256>(sum, 0), half<__m256i>(a, 0), half<__m256i>(b, 0)),
        emulated::dot(half<__m256>(sum, 1), half<__m256i>(a, 1), half<__m256i>(b, 1)));
}

static inline __m512 _mm512_scalef_ps(__m512 x, __m512 n) {
    __m512 scaled;
    for (int i = 0; i < 16; ++i) scaled[i] = emulated::scale(x[i], n[i]);
    return scaled;
}

/// Sums of halves, in the order of the compilers: no instruction does this.
static inline float _mm512_reduce_add_ps(__m512 x) {
    const __m256 eight = _mm256_add_ps(emulated::half<__m256>(x, 1), emulated::half<__m256>(x, 0));
    const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    return (four[0] + four[2]) + (four[1] + four[3]);
}
static inline float _mm512_reduce_max_ps(__m512 x) {
    const __m256 eight = _mm256_max_ps(emulated::half<__m256>(x, 1), emulated::half<__m256>(x, 0));
    const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

}  // namespace fag::cpu

#include "amx_emulated.hpp"  // takes flush and accumulate from here
