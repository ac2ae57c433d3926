/// Vector primitives of the portable level: four floats in the compiler's own vector type, no intrinsics.
/// Serves x86-64 without AVX2 and every other architecture (on aarch64 it becomes NEON).
#pragma once

#include "isa.hpp"
#include "vec_parts-inl.hpp"

namespace fag::cpu::FAG_LEVEL {

struct Vec {
    using F = float __attribute__((vector_size(16)));
    using I = std::int32_t __attribute__((vector_size(16)));
    using M = I;  ///< all ones where set
    static constexpr int lanes = 4;

    // Copied, since floats need not be aligned as vectors are; clang does not heed a lesser alignment in the type.
    static F load(const float* p) {
        F x;
        __builtin_memcpy(&x, p, sizeof x);
        return x;
    }
    static void store(float* p, F x) { __builtin_memcpy(p, &x, sizeof x); }
    static F set(float x) { return F{x, x, x, x}; }
    static I set_int(std::int32_t x) { return I{x, x, x, x}; }
    static F zero() { return set(0.0f); }
    static F fma(F a, F b, F c) { return a * b + c; }
    /// b where either is NaN.
    static F min(F a, F b) { return a < b ? a : b; }
    static F max(F a, F b) { return a > b ? a : b; }
    /// To the nearest integer, for |x| < 2^22.
    static F round(F x) { return (x + set(12582912.0f)) - set(12582912.0f); }
    /// x * 2^n for integers -150 <= n <= 0; below the normal range it becomes 0.
    static F scale_by_pow2(F x, F n) {
        const I biased = __builtin_convertvector(n, I) + set_int(127);
        return x * as_float((biased > set_int(0) ? biased : set_int(0)) << 23);
    }
    /// Lanes i with first <= at + i < last.
    static M between(int at, int first, int last) {
        const I lane = I{0, 1, 2, 3} + set_int(at);
        return (lane >= set_int(first)) & (lane < set_int(last));
    }
    static M is_nan(F x) { return x != x; }
    static F select(M m, F yes, F no) { return m ? yes : no; }
    static float sum(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
    static float highest(F x) {
        const float a = x[0] > x[1] ? x[0] : x[1];
        const float b = x[2] > x[3] ? x[2] : x[3];
        return a > b ? a : b;
    }

    template <DType type>
    static F load_as(const void* p) {
        if constexpr (type == DType::f32) {
            return load(static_cast<const float*>(p));
        } else {
            const auto* h = static_cast<const std::uint16_t*>(p);
            const I bits = {h[0], h[1], h[2], h[3]};
            return type == DType::bf16 ? as_float(bits << 16) : half_to_float(bits);
        }
    }

    template <DType type>
    static F load_part(const void* p, int n) {
        return load_lanes<Vec, type>(p, n);
    }

    /// Rounds to nearest even; a NaN must be that of isa.hpp.
    template <DType type>
    static void store_part(void* p, F x, int n) {
        if constexpr (type == DType::f32) {
            for (int i = 0; i < n; ++i) static_cast<float*>(p)[i] = x[i];
        } else {
            const I bits = type == DType::bf16 ? float_to_bf16(x) : float_to_half(x);
            for (int i = 0; i < n; ++i) static_cast<std::uint16_t*>(p)[i] = static_cast<std::uint16_t>(bits[i]);
        }
    }

    template <DType type>
    static void store_as(void* p, F x) {
        store_part<type>(p, x, lanes);
    }

    /// dst[c][r] = src[r][c] for lanes x lanes words.
    static void transpose(const Word* src, std::int64_t ld_src, Word* dst, std::int64_t ld_dst) {
        for (int r = 0; r < lanes; ++r) {
            for (int c = 0; c < lanes; ++c) dst[c * ld_dst + r] = src[r * ld_src + c];
        }
    }

private:
    static F as_float(I x) { return __builtin_bit_cast(F, x); }
    static I as_int(F x) { return __builtin_bit_cast(I, x); }

    static F half_to_float(I h) {
        const I magnitude = (h & set_int(0x7fff)) << 13;
        const F value = as_float(magnitude) * set(0x1p112f);  // moves the exponent bias; exact, subnormals too
        const I special = as_int(value) | set_int(0x7f800000);
        const I bits = magnitude >= set_int(0x0f800000) ? special : as_int(value);
        return as_float(bits | ((h & set_int(0x8000)) << 16));
    }

    static I float_to_bf16(F x) {
        const I bits = as_int(x);
        return ((bits + set_int(0x7fff) + ((bits >> 16) & set_int(1))) >> 16) & set_int(0xffff);
    }

    static I float_to_half(F x) {
        const I sign = as_int(x) & set_int(static_cast<std::int32_t>(0x80000000u));
        const I a = as_int(x) ^ sign;
        const F subnormal_sum = as_float(a) + set(0.5f);  // the adder rounds to multiples of 2^-24
        const I subnormal = as_int(subnormal_sum) - as_int(set(0.5f));
        const I normal = (a - set_int(112 << 23) + set_int(0xfff) + ((a >> 13) & set_int(1))) >> 13;
        const I finite = a < set_int(113 << 23) ? subnormal : normal;
        const I special = a > set_int(0x7f800000) ? set_int(0x7e00) : set_int(0x7c00);
        return ((a >= set_int(0x477ff000) ? special : finite) | ((sign >> 16) & set_int(0x8000))) & set_int(0xffff);
    }
};

}  // namespace fag::cpu::FAG_LEVEL
