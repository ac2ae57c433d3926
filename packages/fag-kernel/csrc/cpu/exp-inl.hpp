/// The vectorised exponential, in two flavours that share one interface.
#pragma once

#include "isa.hpp"

namespace fag::cpu::FAG_LEVEL {

static inline float minus_infinity() { return -__builtin_inff(); }

/// e^x for x <= 0, within 1.1 ulp (all floats checked); NaN stays NaN. Below -104 the true value rounds to 0.
static inline Vec::F exp_negative(Vec::F x) {
    using F = Vec::F;
    const F kept = Vec::max(Vec::set(-104.0f), x);
    const F n = Vec::round(kept * Vec::set(0x1.715476p+0f));
    F r = Vec::fma(n, Vec::set(-0x1.62e4p-1f), kept);  // ln 2 in two parts; n times the first is exact
    r = Vec::fma(n, Vec::set(-0x1.7f7d1cp-20f), r);
    F poly = Vec::set(0x1.6ae6e0p-10f);
    poly = Vec::fma(poly, r, Vec::set(0x1.1267d8p-7f));
    poly = Vec::fma(poly, r, Vec::set(0x1.555824p-5f));
    poly = Vec::fma(poly, r, Vec::set(0x1.555418p-3f));
    poly = Vec::fma(poly, r, Vec::set(0x1.fffffcp-2f));
    poly = Vec::fma(poly, r, Vec::set(1.0f));
    poly = Vec::fma(poly, r, Vec::set(1.0f));
    return Vec::scale_by_pow2(poly, n);
}

/// 2^x for x <= 0, within 1.9 ulp (all floats checked); NaN stays NaN. Below -150 the true value rounds to 0.
static inline Vec::F exp2_negative(Vec::F x) {
    using F = Vec::F;
    const F kept = Vec::max(Vec::set(-150.0f), x);
    const F n = Vec::round(kept);
    const F r = kept - n;
    F poly = Vec::set(0x1.5ab438p-10f);
    poly = Vec::fma(poly, r, Vec::set(0x1.3ceca0p-7f));
    poly = Vec::fma(poly, r, Vec::set(0x1.c6baa2p-5f));
    poly = Vec::fma(poly, r, Vec::set(0x1.ebf9b2p-3f));
    poly = Vec::fma(poly, r, Vec::set(0x1.62e424p-1f));
    poly = Vec::fma(poly, r, Vec::set(1.0f));
    return Vec::scale_by_pow2(poly, n);
}

/// exp(scale * s - base) for scores s, never above 1: a late-training logit of 1e9 has ulps worth e^64.
/// `base` is in units of this class: base * kUnit is a natural logarithm.
class NaturalExp {
public:
    static constexpr float kUnit = 1.0f;
    explicit NaturalExp(float scale) : factor(scale), factors_(Vec::set(scale)) {}
    Vec::F operator()(Vec::F s, Vec::F minus_base) const {
        return exp_negative(Vec::min(Vec::zero(), Vec::fma(s, factors_, minus_base)));
    }
    static Vec::F of(Vec::F x) { return exp_negative(x); }
    const float factor;  ///< a score times this is an exponent, in units of this class

private:
    Vec::F factors_;
};

/// The same with powers of two: three operations less, but scale * log2(e) and base * log2(e) are rounded, an error of
/// 2^-23 * |exponent|. Where operands and results have 16 bits that is nothing: scores themselves are off by as much.
class BinaryExp {
public:
    static constexpr float kUnit = 0x1.62e43p-1f;  ///< ln 2
    explicit BinaryExp(float scale) : factor(scale * 0x1.715476p+0f), factors_(Vec::set(factor)) {}
    Vec::F operator()(Vec::F s, Vec::F minus_base) const {
        return exp2_negative(Vec::min(Vec::zero(), Vec::fma(s, factors_, minus_base)));
    }
    static Vec::F of(Vec::F x) { return exp2_negative(x); }
    const float factor;

private:
    Vec::F factors_;
};

}  // namespace fag::cpu::FAG_LEVEL
