/// The element-wise part: P and dS of the backward, one online-softmax step of the forward.
///
/// Masked pairs are selected away, never multiplied by zero: S and dP may hold anything there.
#pragma once

#include "exp-inl.hpp"
#include "isa.hpp"

namespace fag::cpu::FAG_LEVEL {

/// Keys of a panel or step that a row sees, in columns of the block at hand.
struct SeenColumns {
    int first;
    int last;

    bool contains(int j) const { return first < j + Vec::lanes && j < last; }
};

/// Seen columns of a row in a block of n keys from key_begin on; rows from num_rows on see nothing.
static inline SeenColumns seen_columns(const Visible& visible, int row, int num_rows, int key_begin, int n) {
    if (row >= num_rows) return {n, 0};
    if (visible.all) return {0, n};
    return {visible.first[row] - key_begin, visible.last[row] - key_begin};
}

struct Gradient {
    Vec::F p;
    Vec::F ds;
};

/// P and dS of `lanes` keys of one row.
template <bool all, class Exp>
static inline Gradient gradient(const SoftmaxGrad& args, const Exp& exp, int row, int j, Vec::F minus_lse, Vec::F shift,
                                SeenColumns seen) {
    const std::int64_t at = static_cast<std::int64_t>(row - args.row_begin) * args.n + j;
    Vec::F p = exp(Vec::load(args.s + at), minus_lse);
    Vec::F ds = p * (Vec::load(args.dp + at) - shift);
    if constexpr (!all) {
        const auto visible = Vec::between(j, seen.first, seen.last);
        p = Vec::select(visible, p, Vec::zero());
        ds = Vec::select(visible, ds, Vec::zero());
    }
    return {p, ds};
}

template <bool all, class Exp>
static inline void softmax_grad_rows_f32(const SoftmaxGrad& args) {
    const Exp exp(args.scale);
    for (int row = args.row_begin; row < args.row_end; ++row) {
        const Vec::F minus_lse = Vec::set(-args.lse[row] / Exp::kUnit);
        const Vec::F shift = Vec::set(args.shift[row]);
        const SeenColumns seen = seen_columns(args.visible, row, args.rows, args.key_begin, args.n);
        auto* p = reinterpret_cast<float*>(args.p) + static_cast<std::int64_t>(row) * args.n;
        auto* ds = reinterpret_cast<float*>(args.ds) + static_cast<std::int64_t>(row) * args.n;
        auto* ds_row = reinterpret_cast<float*>(args.ds_rows) + row * args.ld_ds_rows + args.key_begin;
        for (int j = 0; j < args.n; j += Vec::lanes) {
            Gradient g{Vec::zero(), Vec::zero()};
            if (all || seen.contains(j)) g = gradient<all>(args, exp, row, j, minus_lse, shift, seen);
            Vec::store(p + j, g.p);
            Vec::store(ds + j, g.ds);
            Vec::store(ds_row + j, g.ds);
        }
    }
}

template <class Exp>
static void softmax_grad_f32(const SoftmaxGrad& args) {
    if (args.visible.all) {
        softmax_grad_rows_f32<true, Exp>(args);
    } else {
        softmax_grad_rows_f32<false, Exp>(args);
    }
}

/// Stores probabilities as float32 words.
struct StoreF32 {
    static void store(Word* row, int j, Vec::F p) { Vec::store(reinterpret_cast<float*>(row) + j, p); }
};

/// Largest exponent factor * s among the seen columns of a row; -inf if none is seen or all are NaN.
template <bool all, bool is_negative>
static inline float highest_exponent(const float* s, int n, SeenColumns seen, float factor) {
    using F = Vec::F;
    const F lowest = Vec::set(minus_infinity());
    F best = lowest;
    for (int j = 0; j < n; j += Vec::lanes) {
        if (!all && !seen.contains(j)) continue;
        F x = Vec::load(s + j);
        if constexpr (is_negative) x = Vec::zero() - x;
        if constexpr (!all) x = Vec::select(Vec::between(j, seen.first, seen.last), x, lowest);
        best = Vec::max(x, best);
    }
    const float highest = Vec::highest(best);
    return highest == minus_infinity() ? highest : highest * (is_negative ? -factor : factor);
}

/// Rows of a step that are handled together.
static constexpr int kStepRows = 128;

/// At most kStepRows rows: all maxima first, since each is a chain of shuffles that would hold up its row.
template <bool all, bool is_negative, class Store, class Exp>
static inline void softmax_step_rows(const SoftmaxStep& args, int row_begin, int row_end) {
    using F = Vec::F;
    constexpr int lanes = Vec::lanes;
    const Exp exp(args.scale);
    float highest[kStepRows];
    for (int row = row_begin; row < row_end; ++row) {
        const SeenColumns seen = seen_columns(args.visible, row, args.rows, 0, args.n);
        const float* s = args.s + static_cast<std::int64_t>(row) * args.n;
        highest[row - row_begin] = highest_exponent<all, is_negative>(s, args.n, seen, exp.factor);
    }
    for (int row = row_begin; row < row_end; ++row) {
        const SeenColumns seen = seen_columns(args.visible, row, args.rows, 0, args.n);
        const float* s = args.s + static_cast<std::int64_t>(row) * args.n;
        Word* p_row = args.p + row * args.ld_p;
        const float old_max = args.row_max[row];
        const float new_max = highest[row - row_begin] > old_max ? highest[row - row_begin] : old_max;
        // Where every seen score is -inf, so is the maximum; -inf - -inf would make a NaN of it.
        const F minus_base = Vec::set(new_max == minus_infinity() ? 0.0f : -new_max);
        F total = Vec::zero();
        for (int j = 0; j < args.n; j += lanes) {
            F p = Vec::zero();
            if (all || seen.contains(j)) {
                p = exp(Vec::load(s + j), minus_base);
                if constexpr (!all) p = Vec::select(Vec::between(j, seen.first, seen.last), p, Vec::zero());
                total = total + p;
            }
            Store::store(p_row, j, p);
        }
        float row_sum = args.row_sum[row];
        if (new_max > old_max && old_max > minus_infinity()) {
            const F factor = Exp::of(Vec::set(old_max - new_max));
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

template <class Store, class Exp>
static void softmax_step(const SoftmaxStep& args) {
    for (int begin = 0; begin < args.rows; begin += kStepRows) {
        const int end = begin + kStepRows < args.rows ? begin + kStepRows : args.rows;
        if (args.scale < 0.0f) {
            softmax_step_rows<false, true, Store, Exp>(args, begin, end);
        } else if (args.visible.all) {
            softmax_step_rows<true, false, Store, Exp>(args, begin, end);
        } else {
            softmax_step_rows<false, false, Store, Exp>(args, begin, end);
        }
    }
}

}  // namespace fag::cpu::FAG_LEVEL
