/// The element-wise part: exp, P and dS of the backward, one online-softmax step of the forward.
#pragma once

#include "isa.hpp"

namespace fag::cpu::FAG_LEVEL {

static inline float minus_infinity() { return -__builtin_inff(); }

/// e^x for x <= 0, within 2 ulp; NaN stays NaN. Below -104 the true value rounds to 0, and so does the result.
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

/// P and dS of one vector. A late-training logit of 1e9 has ulps worth e^64: the exponent is clamped at 0.
struct Gradient {
    Vec::F p;
    Vec::F ds;
};

static inline Gradient gradient(Vec::F s, Vec::F dp, Vec::F scale, Vec::F minus_lse, Vec::F shift) {
    const Vec::F p = exp_negative(Vec::min(Vec::zero(), Vec::fma(s, scale, minus_lse)));
    return {p, p * (dp - shift)};
}

/// Masked pairs are selected away, never multiplied by zero: S and dP may hold anything there.
template <bool all>
static inline Gradient masked_gradient(const SoftmaxGrad& args, int row, int j, Vec::F scale, Vec::F minus_lse,
                                       Vec::F shift, int first, int last) {
    const std::int64_t at = static_cast<std::int64_t>(row - args.row_begin) * args.n + j;
    Gradient g = gradient(Vec::load(args.s + at), Vec::load(args.dp + at), scale, minus_lse, shift);
    if constexpr (!all) {
        const auto visible = Vec::between(args.key_begin + j, first, last);
        g.p = Vec::select(visible, g.p, Vec::zero());
        g.ds = Vec::select(visible, g.ds, Vec::zero());
    }
    return g;
}

template <bool all>
static inline void softmax_grad_rows_f32(const SoftmaxGrad& args) {
    const Vec::F scale = Vec::set(args.scale);
    for (int row = args.row_begin; row < args.row_end; ++row) {
        const Vec::F minus_lse = Vec::set(-args.lse[row]);
        const Vec::F shift = Vec::set(args.shift[row]);
        const int first = all ? 0 : args.visible.first[row];
        const int last = all ? 0 : args.visible.last[row];
        auto* p = reinterpret_cast<float*>(args.p) + static_cast<std::int64_t>(row) * args.n;
        auto* ds = reinterpret_cast<float*>(args.ds) + static_cast<std::int64_t>(row) * args.n;
        auto* ds_row = reinterpret_cast<float*>(args.ds_rows) + row * args.ld_ds_rows + args.key_begin;
        for (int j = 0; j < args.n; j += Vec::lanes) {
            const Gradient g = masked_gradient<all>(args, row, j, scale, minus_lse, shift, first, last);
            Vec::store(p + j, g.p);
            Vec::store(ds + j, g.ds);
            Vec::store(ds_row + j, g.ds);
        }
    }
}

static void softmax_grad_f32(const SoftmaxGrad& args) {
    if (args.visible.all) {
        softmax_grad_rows_f32<true>(args);
    } else {
        softmax_grad_rows_f32<false>(args);
    }
}

/// Stores probabilities as float32 words.
struct StoreF32 {
    static void store(Word* row, int j, Vec::F p) { Vec::store(reinterpret_cast<float*>(row) + j, p); }
};

template <class Store>
static void softmax_step(const SoftmaxStep& args) {
    using F = Vec::F;
    constexpr int lanes = Vec::lanes;
    const F scale = Vec::set(args.scale);
    for (int row = 0; row < args.rows; ++row) {
        const float* s = args.s + static_cast<std::int64_t>(row) * args.n;
        Word* p_row = args.p + row * args.ld_p;
        const int first = args.visible.all ? 0 : args.visible.first[row];
        const int last = args.visible.all ? args.n : args.visible.last[row];
        if (first >= last) {
            for (int j = 0; j < args.n; j += lanes) Store::store(p_row, j, Vec::zero());
            continue;
        }
        const F lowest = Vec::set(minus_infinity());
        F best = lowest;
        for (int j = 0; j < args.n; j += lanes) {
            F x = Vec::load(s + j) * scale;
            if (!args.visible.all) x = Vec::select(Vec::between(j, first, last), x, lowest);
            best = Vec::max(x, best);
        }
        const float old_max = args.row_max[row];
        const float highest = Vec::highest(best);
        const float new_max = highest > old_max ? highest : old_max;
        const float base = new_max == minus_infinity() ? 0.0f : new_max;  // every visible score is -inf
        const F minus_base = Vec::set(-base);
        F total = Vec::zero();
        for (int j = 0; j < args.n; j += lanes) {
            F p = exp_negative(Vec::min(Vec::zero(), Vec::fma(Vec::load(s + j), scale, minus_base)));
            if (!args.visible.all) p = Vec::select(Vec::between(j, first, last), p, Vec::zero());
            total = total + p;
            Store::store(p_row, j, p);
        }
        float row_sum = args.row_sum[row];
        if (new_max > old_max && old_max > minus_infinity()) {
            const F factor = exp_negative(Vec::set(old_max - new_max));
            float* out = args.out + row * args.ld_out;
            for (int j = 0; j < args.out_width; j += lanes) Vec::store(out + j, Vec::load(out + j) * factor);
            float lane[lanes];
            Vec::store(lane, factor);
            row_sum *= lane[0];
        }
        args.row_sum[row] = row_sum + Vec::sum(total);
        args.row_max[row] = new_max;
    }
}

}  // namespace fag::cpu::FAG_LEVEL
