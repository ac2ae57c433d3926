/// Pairs of bfloat16 on AVX512-BF16: vdpbf16ps multiplies 32 values and adds them to 16 float32 sums. See bf16x2-inl.hpp.
#pragma once

#include "isa.hpp"

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

/// Sixteen columns of two rows, rounded to bfloat16: the first row in the lower half.
struct RoundedRows {
    __m512i values;

    static RoundedRows zero() { return {_mm512_setzero_si512()}; }
    static RoundedRows of(Vec::F first, Vec::F second) { return {(__m512i)_mm512_cvtne2ps_pbh(second, first)}; }
    Vec::F first() const { return widen(lower()); }
    Vec::F second() const { return widen(upper()); }
    /// Words (first[i], second[i]).
    void store_pairs(Word* words) const { _mm512_storeu_si512(words, interleave_halves(values)); }
    /// Words of neighbours, row by row.
    void store_rows(Word* first, Word* second) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(first), lower());
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(second), upper());
    }

private:
    __m256i lower() const { return _mm512_castsi512_si256(values); }
    __m256i upper() const { return _mm512_extracti64x4_epi64(values, 1); }
    static Vec::F widen(__m256i bf16) {
        return (Vec::F)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
    }
};

/// The lower values of as many words as a vector has lanes.
static inline Vec::F first_of_pairs(const Word* words) {
    return (Vec::F)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(words), 16));
}

/// The upper ones.
static inline Vec::F second_of_pairs(const Word* words) {
    return (Vec::F)_mm512_castsi512_ps(_mm512_andnot_si512(_mm512_set1_epi32(0xffff), _mm512_loadu_si512(words)));
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
static void pack_columns_bf16x2(const void* src, std::int64_t stride_bytes, int rows, int cols, Word* dst,
                                std::int64_t ld) {
    const int words = (cols + 1) / 2;
    for (int row = 0; row < rows; ++row) {
        const char* in = static_cast<const char*>(src) + row * stride_bytes;
        for (int at = 0; at < words; at += 16) {
            const int left = cols - 2 * at;
            const __mmask32 kept = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
            _mm512_storeu_si512(dst + row * ld + at, _mm512_maskz_loadu_epi16(kept, in + 4 * at));
        }
    }
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

}  // namespace fag::cpu::FAG_LEVEL
