/// Packing, transposing and rounding of rows.
#pragma once

#include "isa.hpp"

namespace fag::cpu::FAG_LEVEL {

template <DType type>
static inline const char* element(const void* base, std::int64_t stride_bytes, int row, int col) {
    return static_cast<const char*>(base) + row * stride_bytes + col * kDTypeBytes[static_cast<int>(type)];
}

/// Rows widened to float32, zeros up to a multiple of kAlign. x * 0 is 0 unless x is not finite: that sums up the check,
/// in chains enough to hide the latency of the addition. Inlined, so that it costs nothing where nobody asks for it.
template <DType type>
[[gnu::always_inline]] static inline bool widen_rows(const void* src, std::int64_t stride_bytes, int rows, int cols,
                                                     Word* dst, std::int64_t ld) {
    using F = Vec::F;
    constexpr int kChains = 4;
    const int unrolled = cols / (kChains * Vec::lanes) * (kChains * Vec::lanes);
    const int whole = cols / Vec::lanes * Vec::lanes;
    const int padded = (cols + kAlign - 1) / kAlign * kAlign;
    F witness[kChains];
    for (F& chain : witness) chain = Vec::zero();
    for (int row = 0; row < rows; ++row) {
        auto* out = reinterpret_cast<float*>(dst) + row * ld;
        int col = 0;
        for (; col < unrolled; col += kChains * Vec::lanes) {
#pragma GCC unroll 4
            for (int i = 0; i < kChains; ++i) {
                const int at = col + i * Vec::lanes;
                const F x = Vec::load_as<type>(element<type>(src, stride_bytes, row, at));
                witness[i] = Vec::fma(x, Vec::zero(), witness[i]);
                Vec::store(out + at, x);
            }
        }
        for (; col < whole; col += Vec::lanes) {
            const F x = Vec::load_as<type>(element<type>(src, stride_bytes, row, col));
            witness[0] = Vec::fma(x, Vec::zero(), witness[0]);
            Vec::store(out + col, x);
        }
        if (col < cols) {
            const F x = Vec::load_part<type>(element<type>(src, stride_bytes, row, col), cols - col);
            witness[0] = Vec::fma(x, Vec::zero(), witness[0]);
            Vec::store(out + col, x);
            col += Vec::lanes;
        }
        for (; col < padded; col += Vec::lanes) Vec::store(out + col, Vec::zero());
    }
    return Vec::sum((witness[0] + witness[1]) + (witness[2] + witness[3])) == 0.0f;
}

/// With words of one value both orders are the same.
template <DType type>
static void pack_columns_f32(const void* src, std::int64_t stride_bytes, int rows, int cols, Word* dst,
                             std::int64_t ld) {
    widen_rows<type>(src, stride_bytes, rows, cols, dst, ld);
}

template <DType type>
static bool pack_rows_f32(const void* src, std::int64_t stride_bytes, int rows, int cols, Word* dst, std::int64_t ld) {
    return widen_rows<type>(src, stride_bytes, rows, cols, dst, ld);
}

static void transpose(const Word* src, std::int64_t ld_src, int rows, int cols, Word* dst, std::int64_t ld_dst) {
    constexpr int lanes = Vec::lanes;
    const int padded_rows = (rows + kAlign - 1) / kAlign * kAlign;
    const int padded_cols = (cols + kAlign - 1) / kAlign * kAlign;
    for (int r = 0; r < padded_rows; r += lanes) {
        for (int c = 0; c < padded_cols; c += lanes) {
            Vec::transpose(src + r * ld_src + c, ld_src, dst + c * ld_dst + r, ld_dst);
        }
    }
}

template <DType type>
static void dot_rows(const void* a, std::int64_t a_stride_bytes, const void* b, std::int64_t b_stride_bytes, int rows,
                     int cols, float* out) {
    using F = Vec::F;
    const int whole = cols / Vec::lanes * Vec::lanes;
    for (int row = 0; row < rows; ++row) {
        F sum = Vec::zero();
        for (int col = 0; col < whole; col += Vec::lanes) {
            sum = Vec::fma(Vec::load_as<type>(element<type>(a, a_stride_bytes, row, col)),
                           Vec::load_as<type>(element<type>(b, b_stride_bytes, row, col)), sum);
        }
        if (whole < cols) {
            sum = Vec::fma(Vec::load_part<type>(element<type>(a, a_stride_bytes, row, whole), cols - whole),
                           Vec::load_part<type>(element<type>(b, b_stride_bytes, row, whole), cols - whole), sum);
        }
        out[row] = Vec::sum(sum);
    }
}

template <DType type>
static void store_rows(const float* src, std::int64_t ld, int rows, int cols, const float* scale,
                       std::int64_t scale_step, void* dst, std::int64_t stride_bytes) {
    const int whole = cols / Vec::lanes * Vec::lanes;
    const Vec::F nan = Vec::set(__builtin_nanf(""));
    for (int row = 0; row < rows; ++row) {
        const Vec::F factor = Vec::set(scale[row * scale_step]);
        const float* in = src + row * ld;
        const auto scaled = [&](int col) {
            const Vec::F x = Vec::load(in + col) * factor;
            return Vec::select(Vec::is_nan(x), nan, x);
        };
        char* out = static_cast<char*>(dst) + row * stride_bytes;
        for (int col = 0; col < whole; col += Vec::lanes) {
            Vec::store_as<type>(out + col * kDTypeBytes[static_cast<int>(type)], scaled(col));
        }
        if (whole < cols) {
            Vec::store_part<type>(out + whole * kDTypeBytes[static_cast<int>(type)], scaled(whole), cols - whole);
        }
    }
}

}  // namespace fag::cpu::FAG_LEVEL
