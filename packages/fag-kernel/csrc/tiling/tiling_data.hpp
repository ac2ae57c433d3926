/// The 192 bytes that the device kernel reads; field order is memory layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "problem.hpp"
#include "sparse.hpp"

namespace fag::tiling {

struct TilingData {
    std::int64_t b;
    std::int64_t s1;
    std::int64_t s2;
    std::int64_t n1;
    std::int64_t n2;
    std::int64_t d;
    std::int64_t dv;
    float scale_value;
    std::uint32_t padding;  ///< always 0, so that equal plans have equal bytes
    std::int64_t g_size;
    std::int64_t view_d0_q;
    std::int64_t view_d2_q;
    std::int64_t coef_b0_q;
    std::int64_t view_d0_kv;
    std::int64_t view_d2_kv;
    std::int64_t coef_b0_kv;
    std::int64_t coef_n0;
    std::int64_t coef_n2;
    std::int64_t mask_mode;
    std::int64_t win_left;
    std::int64_t win_right;
    std::int64_t sparse_type;
    std::int64_t s1_token;
    std::int64_t s2_token;
    std::int64_t total_per_batch_num;
};

static_assert(std::is_trivially_copyable_v<TilingData> && std::is_standard_layout_v<TilingData>);
static_assert(sizeof(TilingData) == 192);
static_assert(offsetof(TilingData, b) == 0);
static_assert(offsetof(TilingData, s1) == 8);
static_assert(offsetof(TilingData, s2) == 16);
static_assert(offsetof(TilingData, n1) == 24);
static_assert(offsetof(TilingData, n2) == 32);
static_assert(offsetof(TilingData, d) == 40);
static_assert(offsetof(TilingData, dv) == 48);
static_assert(offsetof(TilingData, scale_value) == 56);
static_assert(offsetof(TilingData, padding) == 60);
static_assert(offsetof(TilingData, g_size) == 64);
static_assert(offsetof(TilingData, view_d0_q) == 72);
static_assert(offsetof(TilingData, view_d2_q) == 80);
static_assert(offsetof(TilingData, coef_b0_q) == 88);
static_assert(offsetof(TilingData, view_d0_kv) == 96);
static_assert(offsetof(TilingData, view_d2_kv) == 104);
static_assert(offsetof(TilingData, coef_b0_kv) == 112);
static_assert(offsetof(TilingData, coef_n0) == 120);
static_assert(offsetof(TilingData, coef_n2) == 128);
static_assert(offsetof(TilingData, mask_mode) == 136);
static_assert(offsetof(TilingData, win_left) == 144);
static_assert(offsetof(TilingData, win_right) == 152);
static_assert(offsetof(TilingData, sparse_type) == 160);
static_assert(offsetof(TilingData, s1_token) == 168);
static_assert(offsetof(TilingData, s2_token) == 176);
static_assert(offsetof(TilingData, total_per_batch_num) == 184);

/// All tensors are one compact view [view_d0, rows, view_d2, width]; batch entry b and head n lie at
/// index0 = b * coef_b0 + n * coef_n0, index2 = n * coef_n2.
///   BSND (B,S,N,D):           [B, S, N, D]     -> (b, s, n)
///   BNSD (B,N,S,D):           [B*N, S, 1, D]   -> (b*N + n, s, 0)
///   TND  (T,N,D):             [1, T, N, D]     -> (0, start of b + s, n)
TilingData make_tiling_data(const Problem& problem, const Sparse& sparse, double softmax_scale);

}  // namespace fag::tiling
