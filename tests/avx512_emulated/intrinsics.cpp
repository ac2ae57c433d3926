/// The emulated intrinsics on arrays, for test_intrinsics.py; avx512_emulated.hpp is included before.
namespace fag::cpu {
namespace {

template <class T>
T get(const void* p) {
    T x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

template <class T>
void put(void* p, const T& x) {
    std::memcpy(p, &x, sizeof x);
}

using F = __m512;
using I = __m512i;
using Half = __m256i;

}  // namespace

extern "C" {

// ours
void dpbf16_ps(void* out, const void* sum, const void* a, const void* b) {
    put(out, _mm512_dpbf16_ps(get<F>(sum), get<__m512bh>(a), get<__m512bh>(b)));
}
void cvtneps_pbh(void* out, const void* x) { put(out, _mm512_cvtneps_pbh(get<F>(x))); }
void cvtne2ps_pbh(void* out, const void* a, const void* b) { put(out, _mm512_cvtne2ps_pbh(get<F>(a), get<F>(b))); }
void cvtph_ps(void* out, const void* x) { put(out, _mm512_cvtph_ps(get<Half>(x))); }
void cvtps_ph(void* out, const void* x) { put(out, _mm512_cvtps_ph(get<F>(x), _MM_FROUND_TO_NEAREST_INT)); }
void scalef_ps(void* out, const void* x, const void* n) { put(out, _mm512_scalef_ps(get<F>(x), get<F>(n))); }
void cvtepu16_epi32(void* out, const void* x) { put(out, _mm512_cvtepu16_epi32(get<Half>(x))); }
void cvtepi32_epi16(void* out, const void* x) { put(out, _mm512_cvtepi32_epi16(get<I>(x))); }
void cmpeq_epi16_mask(void* out, const void* a, const void* b) { put(out, _mm512_cmpeq_epi16_mask(get<I>(a), get<I>(b))); }
void reduce_add_ps(void* out, const void* x) { put(out, _mm512_reduce_add_ps(get<F>(x))); }
void reduce_max_ps(void* out, const void* x) { put(out, _mm512_reduce_max_ps(get<F>(x))); }
void maskz_loadu_ps(void* out, const void* p, unsigned mask) {
    put(out, _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p));
}
void maskz_loadu_epi16(void* out, const void* p, unsigned mask) { put(out, _mm512_maskz_loadu_epi16(mask, p)); }
void maskz_loadu_epi16_256(void* out, const void* p, unsigned mask) {
    put(out, _mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), p));
}
void mask_storeu_ps(void* out, const void* x, unsigned mask) {
    _mm512_mask_storeu_ps(out, static_cast<__mmask16>(mask), get<F>(x));
}
void mask_storeu_epi16_256(void* out, const void* x, unsigned mask) {
    _mm256_mask_storeu_epi16(out, static_cast<__mmask16>(mask), get<Half>(x));
}

// SIMDe's, where operands have an order or NaNs a rule
void min_ps(void* out, const void* a, const void* b) { put(out, _mm512_min_ps(get<F>(a), get<F>(b))); }
void max_ps(void* out, const void* a, const void* b) { put(out, _mm512_max_ps(get<F>(a), get<F>(b))); }
void roundscale_ps(void* out, const void* x) {
    put(out, _mm512_roundscale_ps(get<F>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
void fmadd_ps(void* out, const void* a, const void* b, const void* c) {
    put(out, _mm512_fmadd_ps(get<F>(a), get<F>(b), get<F>(c)));
}
void cmp_unordered(void* out, const void* a, const void* b) {
    put(out, _mm512_cmp_ps_mask(get<F>(a), get<F>(b), _CMP_UNORD_Q));
}
void mask_blend_ps(void* out, const void* a, const void* b, unsigned mask) {
    put(out, _mm512_mask_blend_ps(static_cast<__mmask16>(mask), get<F>(a), get<F>(b)));
}
void andnot_si512(void* out, const void* a, const void* b) { put(out, _mm512_andnot_si512(get<I>(a), get<I>(b))); }
void permutexvar_epi16(void* out, const void* order, const void* x) {
    put(out, _mm512_permutexvar_epi16(get<I>(order), get<I>(x)));
}
void shuffle_i32x4(void* out, const void* a, const void* b) { put(out, _mm512_shuffle_i32x4(get<I>(a), get<I>(b), 0xd8)); }
void unpacklo_epi32(void* out, const void* a, const void* b) { put(out, _mm512_unpacklo_epi32(get<I>(a), get<I>(b))); }
void unpackhi_epi32(void* out, const void* a, const void* b) { put(out, _mm512_unpackhi_epi32(get<I>(a), get<I>(b))); }
void unpacklo_epi64(void* out, const void* a, const void* b) { put(out, _mm512_unpacklo_epi64(get<I>(a), get<I>(b))); }
void unpackhi_epi64(void* out, const void* a, const void* b) { put(out, _mm512_unpackhi_epi64(get<I>(a), get<I>(b))); }
void inserti64x4(void* out, const void* x, const void* half) {
    put(out, _mm512_inserti64x4(get<I>(x), get<Half>(half), 1));
}
void extracti64x4(void* out, const void* x) { put(out, _mm512_extracti64x4_epi64(get<I>(x), 1)); }

}  // extern "C"
}  // namespace fag::cpu
