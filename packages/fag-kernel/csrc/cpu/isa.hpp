/// What an instruction-set level offers: one table of function pointers, filled once per level.
///
/// The drivers (backward*.cpp, forward*.cpp) are compiled once, for the base architecture, and reach everything fast
/// through this table. A level's own file (isa_<level>.cpp) includes the `-inl.hpp` templates into a namespace of its
/// own and instantiates no template of the standard library, so that no instruction of a higher level can end up in
/// code that other levels share.
///
/// Operands of matrix products are held in 32-bit words along the reduction: one float ("f32"), or two bfloat16
/// neighbours ("bf16x2", for CPUs with a bfloat16 dot product). k below counts words.
#pragma once

#include <cstdint>

namespace fag::cpu {

enum class DType : int { f16 = 0, bf16 = 1, f32 = 2 };
inline constexpr int kDTypes = 3;
inline constexpr std::int64_t kDTypeBytes[kDTypes] = {2, 2, 4};

using Word = std::uint32_t;

/// Widths and row counts of scratch buffers are multiples of this, whatever the level (16 floats = 64 bytes).
inline constexpr int kAlign = 16;

enum class Merge : int {
    replace,   ///< C = A B
    continue_, ///< C is the start of the sum. Its bits depend on where the reduction is cut only on amx_bf16, and there only
               ///< on cuts elsewhere than at multiples of 16 words; so a problem says where to cut, never its threads
    add,       ///< C = C + (A B summed from zero)
};

/// What a product fetches ahead of its use because it lies beyond the second-level cache. Changes no bits.
enum class Ahead : int {
    nothing,
    rows,   ///< the rows of A
    panel,  ///< the panel that follows B in memory
};

/// C[m x n] from A[m x k] and B[k x n], float32 accumulation in ascending k. B is one panel: n <= panel, rows of n words.
struct Gemm {
    const Word* a;
    std::int64_t lda;
    const Word* b;
    float* c;
    std::int64_t ldc;
    int m;
    int n;
    int k;
    Merge merge;
    Ahead ahead = Ahead::nothing;
    const float* start = nullptr;  ///< what the sums start from instead of zero, laid out like C; not with continue_
};

/// Which keys each row of a tile sees: [first[r], last[r]), relative to the tile's first key; both ascend with r.
struct Visible {
    const std::int32_t* first;
    const std::int32_t* last;
    bool all;  ///< every row sees every key of the tile and the tile fills whole vectors
};

/// P and dS of rows [row_begin, row_end) x keys [key_begin, key_begin + n): P = exp(scale S - lse), dS = P (dP - shift).
/// Rows from `rows` on count as masked. row_begin and row_end - row_begin are multiples of the words' packing.
struct SoftmaxGrad {
    const float* s;   ///< [row][n], row stride n, row 0 is row_begin
    const float* dp;
    int rows;
    int row_begin;
    int row_end;
    int key_begin;
    int n;
    Visible visible;
    const float* lse;
    const float* shift;
    float scale;
    Word* p;          ///< [row / packing][n], packed along rows; row 0 of the panel is row 0 of the tile
    Word* ds;         ///< likewise
    Word* ds_rows;    ///< [row][key / packing], packed along keys; element (0, 0) of the tile
    std::int64_t ld_ds_rows;
    float* residual;  ///< [row], added to: what the rounding of the row's dS took away (pairs only)
};

/// What rounding took away from the sum of a row's dS, spread evenly over the keys that the row sees:
/// start[row][column] = residual[row] * mean over those keys of K. Whatever the keys have in common then meets the
/// unrounded sum of dS, which is all but zero, and not the rounding errors of each dS: K = -960 in one column would
/// multiply them by 960. Rows whose first key is hidden start from zero.
struct ResidualShare {
    const float* residual;
    int rows;
    int keys;
    Visible visible;
    const Word* reduced;  ///< K, panels of columns [key pair][panel]
    std::int64_t depth;   ///< words along the keys of a panel
    int panel;
    float* start;         ///< [row][cols], row distance cols
    int cols;             ///< a multiple of kAlign
};

/// One step of the online softmax over a [rows x n] block of scores (n a multiple of kAlign).
struct SoftmaxStep {
    const float* s;   ///< [row][n]
    int rows;
    int n;
    Visible visible;
    float scale;
    float* row_max;   ///< running maximum of the exponents, in units of exp_unit; -inf before the first visible key
    float* row_sum;   ///< running sum of exp(exponent - row_max)
    float* out;       ///< [row][ld_out] running numerator, rescaled here where the maximum moved
    std::int64_t ld_out;
    int out_width;
    Word* p;          ///< [row][ld_p] packed along keys
    std::int64_t ld_p;
};

/// Everything that depends on how operands are packed.
struct Products {
    int packing;  ///< elements of the reduction in one word
    int panel;    ///< columns of a B panel
    float exp_unit;  ///< SoftmaxStep's row_max times this is a natural logarithm
    void (*gemm)(const Gemm&);
    void (*softmax_grad)(const SoftmaxGrad&);
    void (*softmax_step)(const SoftmaxStep&);
    void (*share_residual)(const ResidualShare&);  ///< null where dS is not rounded
    /// dst[row][column] words along columns (the last word of an odd row gets a zero).
    void (*pack_columns[kDTypes])(const void* src, std::int64_t stride_bytes, int rows, int cols, Word* dst,
                                  std::int64_t ld);
    /// dst[row / packing][column] words along rows (a missing last row is zero). False if a value is not finite.
    bool (*pack_rows[kDTypes])(const void* src, std::int64_t stride_bytes, int rows, int cols, Word* dst, std::int64_t ld);
};

struct Isa {
    const char* name;
    Products f32;
    Products widened;  ///< 16-bit operands in words of one float; gemm is null where that is as f32
    Products bf16x2;   ///< gemm is null where the level has no bfloat16 dot product
    /// dst[c][r] = src[r][c]; rows and cols are rounded up to kAlign on both sides.
    void (*transpose)(const Word* src, std::int64_t ld_src, int rows, int cols, Word* dst, std::int64_t ld_dst);
    /// out[r] = sum over columns of a[r][c] * b[r][c], float32.
    void (*dot_rows[kDTypes])(const void* a, std::int64_t a_stride_bytes, const void* b, std::int64_t b_stride_bytes,
                              int rows, int cols, float* out);
    /// dst[r] = scale[r * scale_step] * src[r], rounded once, to nearest even. Every NaN is the one without a sign and with
    /// one bit set: which of two NaNs a sum takes on is up to the code that adds them, and that is up to the threads.
    void (*store_rows[kDTypes])(const float* src, std::int64_t ld, int rows, int cols, const float* scale,
                                std::int64_t scale_step, void* dst, std::int64_t stride_bytes);

    const Products& products(DType dtype) const {
        if (dtype == DType::bf16 && bf16x2.gemm != nullptr) return bf16x2;
        return dtype != DType::f32 && widened.gemm != nullptr ? widened : f32;
    }
};

extern const Isa isa_portable;
#if defined(__x86_64__)
extern const Isa isa_avx2;
extern const Isa isa_avx512;
extern const Isa isa_avx512_bf16;
extern const Isa isa_amx_bf16;  // defined where the compiler knows AMX (FAG_AMX)
#elif defined(__aarch64__)
extern const Isa isa_neon;
extern const Isa isa_neon_bf16;
#endif

}  // namespace fag::cpu
