/// The one matrix-product micro-kernel, float32 words: C[m x n] (+)= A[m x k] B[k x n] for one panel of B.
///
/// `rows` x `width` vectors of C stay in registers over the whole reduction; a word of A is broadcast, a row of B is
/// loaded once. Every element of C is one chain of fused multiply-adds in ascending k, so its bits do not depend on how
/// m and n are blocked.
#pragma once

#include "isa.hpp"

namespace fag::cpu::FAG_LEVEL {

/// float32 operands. The bfloat16 level has a twin that multiplies pairs (bf16x2-inl.hpp).
struct DotF32 {
    using F = Vec::F;
    static F load_b(const Word* b) { return Vec::load(reinterpret_cast<const float*>(b)); }
    static F broadcast_a(const Word* a) { return Vec::set(*reinterpret_cast<const float*>(a)); }
    static F dot(F sum, F a, F b) { return Vec::fma(a, b, sum); }
};

/// C of the block at hand (or the next one) is on its way to the first-level cache while the reduction runs.
template <int rows, int width>
static inline void prefetch_c(const float* c, std::int64_t ldc) {
    constexpr int floats_per_line = 16;
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < width * Vec::lanes; j += floats_per_line) __builtin_prefetch(c + i * ldc + j, 1);
    }
}

/// Fetches the panel that follows B, part by part: one before each block of C.
class NextPanel {
public:
    NextPanel(const Gemm& args, int num_blocks)
        : at_(args.b + args.k * args.n), end_(at_ + args.k * args.n), part_(args.k * args.n / num_blocks + kWords) {}
    void prefetch_part() {
        for (const Word* const until = at_ + part_ < end_ ? at_ + part_ : end_; at_ < until; at_ += kWords) {
            __builtin_prefetch(at_);
        }
    }

private:
    static constexpr int kWords = 16;  ///< in a cache line
    const Word* at_;
    const Word* const end_;
    const int part_;
};

/// fetch_rows: the rows of A below the block are on their way to the first-level cache while the reduction runs.
template <class Dot, int rows, int width, bool fetch_rows>
static inline void gemm_block(const Gemm& args, const Word* a, float* c) {
    using F = Vec::F;
    constexpr int lanes = Vec::lanes;
    F sum[rows][width];
    if (args.merge == Merge::continue_) {
#pragma GCC unroll 16
        for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
            for (int j = 0; j < width; ++j) sum[i][j] = Vec::load(c + i * args.ldc + j * lanes);
        }
    } else if (args.start != nullptr) {
        const float* start = args.start + (c - args.c);
#pragma GCC unroll 16
        for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
            for (int j = 0; j < width; ++j) sum[i][j] = Vec::load(start + i * args.ldc + j * lanes);
        }
    } else {
#pragma GCC unroll 16
        for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
            for (int j = 0; j < width; ++j) sum[i][j] = Vec::zero();
        }
    }
    if (args.merge == Merge::add) prefetch_c<rows, width>(c, args.ldc);
    if (args.merge == Merge::continue_) prefetch_c<rows, width>(c + rows * args.ldc, args.ldc);
    const Word* b = args.b;
    int k = 0;
    do {
        int k_end = args.k;
        if constexpr (fetch_rows) {
            constexpr int words_per_line = 16;
            if (k_end - k > words_per_line) k_end = k + words_per_line;
#pragma GCC unroll 16
            for (int i = 0; i < rows; ++i) __builtin_prefetch(a + (rows + i) * args.lda + k);
        }
        for (; k < k_end; ++k) {
            decltype(Dot::load_b(b)) b_row[width];
#pragma GCC unroll 4
            for (int j = 0; j < width; ++j) b_row[j] = Dot::load_b(b + j * lanes);
#pragma GCC unroll 16
            for (int i = 0; i < rows; ++i) {
                const auto a_word = Dot::broadcast_a(a + i * args.lda + k);
#pragma GCC unroll 4
                for (int j = 0; j < width; ++j) sum[i][j] = Dot::dot(sum[i][j], a_word, b_row[j]);
            }
            b += width * lanes;
        }
    } while (fetch_rows && k < args.k);
    if (args.merge == Merge::add) {
#pragma GCC unroll 16
        for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
            for (int j = 0; j < width; ++j) sum[i][j] = Vec::load(c + i * args.ldc + j * lanes) + sum[i][j];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < width; ++j) Vec::store(c + i * args.ldc + j * lanes, sum[i][j]);
    }
}

/// gemm_block for a number of rows known at run time.
template <class Dot, int width, int max_rows, bool fetch_rows = false>
static inline void call_rows(const Gemm& args, const Word* a, float* c, int rows) {
    if (rows == max_rows) return gemm_block<Dot, max_rows, width, fetch_rows>(args, a, c);
    if constexpr (max_rows > 1) call_rows<Dot, width, max_rows - 1, fetch_rows>(args, a, c, rows);
}

/// All rows of C in blocks of max_rows; what is left over is spread so that no block is much smaller than the others.
template <class Dot, int width, int max_rows, bool fetches_ahead>
static inline void gemm_rows(const Gemm& args) {
    const Word* a = args.a;
    float* c = args.c;
    int left = args.m;
    [[maybe_unused]] NextPanel next(args, args.m / max_rows + 1);
    while (left > 0) {
        int rows = left < max_rows ? left : max_rows;
        if (left > max_rows && left < 2 * max_rows) rows = (left + 1) / 2;
        if constexpr (fetches_ahead) {
            if (args.ahead == Ahead::panel) next.prefetch_part();
        }
        if (fetches_ahead && args.ahead == Ahead::rows) {
            call_rows<Dot, width, max_rows, fetches_ahead>(args, a, c, rows);
        } else {
            call_rows<Dot, width, max_rows>(args, a, c, rows);
        }
        a += rows * args.lda;
        c += rows * args.ldc;
        left -= rows;
    }
}

/// max_width: vectors in a full panel; only levels with 16 lanes have narrower panels. fetches_ahead: whether the level
/// heeds Gemm::ahead.
template <class Dot, int max_width, int max_rows, bool fetches_ahead = false>
static void gemm(const Gemm& args) {
    if constexpr (Vec::lanes == kAlign) {
        switch (args.n / Vec::lanes) {
            case 1: return gemm_rows<Dot, 1, max_rows, fetches_ahead>(args);
            case 2: return gemm_rows<Dot, 2, max_rows, fetches_ahead>(args);
            case 3: return gemm_rows<Dot, 3, max_rows, fetches_ahead>(args);
            default: return gemm_rows<Dot, max_width, max_rows, fetches_ahead>(args);
        }
    } else {
        gemm_rows<Dot, max_width, max_rows, fetches_ahead>(args);
    }
}

}  // namespace fag::cpu::FAG_LEVEL
