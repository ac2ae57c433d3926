/// Products on pairs of bfloat16, one word each. P and dS are rounded to bfloat16 only as operands; the elements of a word
/// are neighbours along the reduction. What an instruction set does its own way was included before: bf16x2_<set>-inl.hpp
/// has DotBf16x2, RoundedRows, StoreBf16x2, first_of_pairs, second_of_pairs and the packing.
#pragma once

#include "gemm-inl.hpp"
#include "softmax-inl.hpp"

namespace fag::cpu::FAG_LEVEL {

/// Two rows at a time, as the words of P and dS hold them. The partner of an odd last row sees nothing.
template <bool all>
static inline void softmax_grad_pair(const SoftmaxGrad& args, const BinaryExp& exp, int row) {
    const Vec::F minus_lse0 = Vec::set(-args.lse[row] / BinaryExp::kUnit), shift0 = Vec::set(args.shift[row]);
    const Vec::F minus_lse1 = Vec::set(-args.lse[row + 1] / BinaryExp::kUnit), shift1 = Vec::set(args.shift[row + 1]);
    const SeenColumns seen0 = seen_columns(args.visible, row, args.rows, args.key_begin, args.n);
    const SeenColumns seen1 = seen_columns(args.visible, row + 1, args.rows, args.key_begin, args.n);
    const std::int64_t panel_row = static_cast<std::int64_t>(row / 2) * args.n;
    Word* ds_row = args.ds_rows + row * args.ld_ds_rows + args.key_begin / 2;
    Vec::F residual0 = Vec::zero(), residual1 = Vec::zero();
    for (int j = 0; j < args.n; j += Vec::lanes) {
        RoundedRows p = RoundedRows::zero(), ds = p;
        if (all || seen0.contains(j) || seen1.contains(j)) {
            const Gradient g0 = gradient<all>(args, exp, row, j, minus_lse0, shift0, seen0);
            const Gradient g1 = gradient<all>(args, exp, row + 1, j, minus_lse1, shift1, seen1);
            p = RoundedRows::of(g0.p, g1.p);
            ds = RoundedRows::of(g0.ds, g1.ds);
            residual0 = residual0 + (g0.ds - ds.first());
            residual1 = residual1 + (g1.ds - ds.second());
        }
        p.store_pairs(args.p + panel_row + j);
        ds.store_pairs(args.ds + panel_row + j);
        ds.store_rows(ds_row + j / 2, ds_row + args.ld_ds_rows + j / 2);
    }
    args.residual[row] += Vec::sum(residual0);
    args.residual[row + 1] += Vec::sum(residual1);
}

static void softmax_grad_bf16x2(const SoftmaxGrad& args) {
    const BinaryExp exp(args.scale);
    for (int row = args.row_begin; row < args.row_end; row += 2) {
        if (args.visible.all && row + 1 < args.rows) {
            softmax_grad_pair<true>(args, exp, row);
        } else {
            softmax_grad_pair<false>(args, exp, row);
        }
    }
}

/// A cache line of columns at a time, with the running sum of K over the keys that the rows so far see.
static void share_residual_bf16x2(const ResidualShare& args) {
    constexpr int kVectors = kAlign / Vec::lanes;
    for (int col = 0; col < args.cols; col += kAlign) {
        const int panel_begin = col / args.panel * args.panel;
        const int panel = args.cols - panel_begin < args.panel ? args.cols - panel_begin : args.panel;
        const Word* k = args.reduced + panel_begin * args.depth + (col - panel_begin);
        Vec::F sum[kVectors];
        for (Vec::F& each : sum) each = Vec::zero();
        int key = 0;
        for (int row = 0; row < args.rows; ++row) {
            const int last = args.visible.all ? args.keys : args.visible.last[row];
            const bool sees_first = args.visible.all || args.visible.first[row] == 0;
            for (; key < last; ++key) {
                for (int i = 0; i < kVectors; ++i) {
                    const Word* pairs = k + static_cast<std::int64_t>(key / 2) * panel + i * Vec::lanes;
                    sum[i] = sum[i] + (key % 2 == 0 ? first_of_pairs(pairs) : second_of_pairs(pairs));
                }
            }
            const float share = sees_first && last > 0 ? args.residual[row] / static_cast<float>(last) : 0.0f;
            float* start = args.start + static_cast<std::int64_t>(row) * args.cols + col;
            for (int i = 0; i < kVectors; ++i) Vec::store(start + i * Vec::lanes, Vec::set(share) * sum[i]);
        }
    }
}

template <int width, int rows, bool fetches_ahead = false>
constexpr Products products_bf16x2() {
    return {
        .packing = 2,
        .panel = width * Vec::lanes,
        .exp_unit = BinaryExp::kUnit,
        .gemm = gemm<DotBf16x2, width, rows, fetches_ahead>,
        .softmax_grad = softmax_grad_bf16x2,
        .softmax_step = softmax_step<StoreBf16x2, BinaryExp>,
        .share_residual = share_residual_bf16x2,
        .pack_columns = {nullptr, pack_columns_bf16x2, nullptr},
        .pack_rows = {nullptr, pack_rows_bf16x2, nullptr},
    };
}

}  // namespace fag::cpu::FAG_LEVEL
