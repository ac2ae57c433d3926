/// The bfloat16 product on AMX tiles: C[m x n] (+)= A[m x k] B[k x n] for one panel of B, k in words of two values.
///
/// A tile is up to 16 rows of 16 words. A and B lie as TDPBF16PS wants them: 16 rows of A by 16 words of the reduction, 16
/// words of the reduction by 16 columns of B. Two by two tiles of C stay where they are over the whole reduction, so that
/// each tile loaded serves two products.
///
/// Of each group of up to 16 words, TDPBF16PS sums the first and the second values apart, from zero in ascending order,
/// and adds the sum of both to C. So the bits of C do not depend on how m and n are blocked. They depend on where groups
/// begin, and groups count from where the call begins: see Merge::continue_. Gemm::ahead is not heeded.
#pragma once

#include "isa.hpp"

namespace fag::cpu::FAG_LEVEL {

static constexpr int kTileSide = 16;              ///< rows of a tile, words of a row
static constexpr int kBlockSide = 2 * kTileSide;  ///< rows and columns of C in four tiles

/// What LDTILECFG reads, in its order.
struct TileConfig {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};

    void set(int tile, int num_rows, int words) {
        row_bytes[tile] = static_cast<std::uint16_t>(words * sizeof(Word));
        rows[tile] = static_cast<std::uint8_t>(num_rows);
    }
};
static_assert(sizeof(TileConfig) == 64);

/// The tiles of one call: 0 to 3 are C, row by row, 4 and 5 A, 6 and 7 B. Afterwards they are as if never used: the system
/// need not save them when it switches threads, and code that runs next meets no configuration.
class Tiles {
public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
    ~Tiles() { _tile_release(); }

    /// For blocks of num_rows rows and groups of `words` words; zeroes the tiles. Slow, so done only where it differs.
    void configure(int num_rows, int words) {
        if (num_rows == num_rows_ && words == words_) return;
        num_rows_ = num_rows;
        words_ = words;
        TileConfig config;
        const int upper = num_rows < kTileSide ? num_rows : kTileSide;
        for (int half = 0; half < 2; ++half) {
            const int rows = half == 0 ? upper : num_rows - upper;
            if (rows > 0) {  // a tile without rows must be without columns, too
                config.set(2 * half, rows, kTileSide);
                config.set(2 * half + 1, rows, kTileSide);
                config.set(4 + half, rows, words);
            }
            config.set(6 + half, words, kTileSide);
        }
        // gcc's intrinsics do not say that they read memory (gcc 12): what they read must have been stored.
        __asm__ volatile("" : : "r"(&config) : "memory");
        _tile_loadconfig(&config);
    }

private:
    int num_rows_ = 0;
    int words_ = 0;
};

/// Where the sums of a product come from and go to.
struct Sums {
    const float* from;  ///< null: zero
    std::int64_t ld_from;
    float* to;
    std::int64_t ld_to;
};

/// A block of C, down x across tiles, over `groups` groups of words.
template <int down, int across>
static inline void multiply_block(const Word* a, std::int64_t lda, const Word* b, int n, int groups, const Sums& sums) {
    constexpr std::int64_t kBytes = sizeof(Word);
    if (sums.from == nullptr) {
        _tile_zero(0);
        if constexpr (across == 2) _tile_zero(1);
        if constexpr (down == 2) _tile_zero(2);
        if constexpr (down == 2 && across == 2) _tile_zero(3);
    } else {
        const float* below = sums.from + kTileSide * sums.ld_from;
        _tile_loadd(0, sums.from, kBytes * sums.ld_from);
        if constexpr (across == 2) _tile_loadd(1, sums.from + kTileSide, kBytes * sums.ld_from);
        if constexpr (down == 2) _tile_loadd(2, below, kBytes * sums.ld_from);
        if constexpr (down == 2 && across == 2) _tile_loadd(3, below + kTileSide, kBytes * sums.ld_from);
    }
    for (int group = 0; group < groups; ++group) {
        _tile_loadd(4, a, kBytes * lda);
        _tile_loadd(6, b, kBytes * n);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (across == 2) {
            _tile_loadd(7, b + kTileSide, kBytes * n);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (down == 2) {
            _tile_loadd(5, a + kTileSide * lda, kBytes * lda);
            _tile_dpbf16ps(2, 5, 6);
        }
        if constexpr (down == 2 && across == 2) _tile_dpbf16ps(3, 5, 7);
        a += kTileSide;
        b += kTileSide * n;
    }
    float* below = sums.to + kTileSide * sums.ld_to;
    _tile_stored(0, sums.to, kBytes * sums.ld_to);
    if constexpr (across == 2) _tile_stored(1, sums.to + kTileSide, kBytes * sums.ld_to);
    if constexpr (down == 2) _tile_stored(2, below, kBytes * sums.ld_to);
    if constexpr (down == 2 && across == 2) _tile_stored(3, below + kTileSide, kBytes * sums.ld_to);
}

/// Rows [row, row_end) of C in blocks of `height` rows, over `groups` groups from `word` on.
static void multiply_groups(const Gemm& args, int row, int row_end, int height, int word, int groups,
                            const Sums& sums) {
    for (; row < row_end; row += height) {
        for (int col = 0; col < args.n; col += kBlockSide) {
            const Word* a = args.a + row * args.lda + word;
            const Word* b = args.b + static_cast<std::int64_t>(word) * args.n + col;
            const Sums here{sums.from == nullptr ? nullptr : sums.from + row * sums.ld_from + col, sums.ld_from,
                            sums.to + row * sums.ld_to + col, sums.ld_to};
            const bool is_tall = height > kTileSide, is_wide = args.n - col > kTileSide;
            if (is_tall && is_wide) multiply_block<2, 2>(a, args.lda, b, args.n, groups, here);
            if (is_tall && !is_wide) multiply_block<2, 1>(a, args.lda, b, args.n, groups, here);
            if (!is_tall && is_wide) multiply_block<1, 2>(a, args.lda, b, args.n, groups, here);
            if (!is_tall && !is_wide) multiply_block<1, 1>(a, args.lda, b, args.n, groups, here);
        }
    }
}

/// Rows [row, row_end) of C in blocks of `height` rows: the full groups, then the words that are left.
static void multiply_rows(Tiles& tiles, const Gemm& args, int row, int row_end, int height, const Sums& sums) {
    const int full_groups = args.k / kTileSide, words_left = args.k % kTileSide;
    if (full_groups > 0 || words_left == 0) {
        tiles.configure(height, kTileSide);
        multiply_groups(args, row, row_end, height, 0, full_groups, sums);
    }
    if (words_left > 0) {
        const Sums so_far = full_groups == 0 ? sums : Sums{sums.to, sums.ld_to, sums.to, sums.ld_to};
        tiles.configure(height, words_left);
        multiply_groups(args, row, row_end, height, full_groups * kTileSide, 1, so_far);
    }
}

/// The blocks of full height, then the rows that are left.
static void multiply(Tiles& tiles, const Gemm& args, const Sums& sums) {
    const int rows_left = args.m % kBlockSide, full = args.m - rows_left;
    if (full > 0) multiply_rows(tiles, args, 0, full, kBlockSide, sums);
    if (rows_left > 0) multiply_rows(tiles, args, full, args.m, rows_left, sums);
}

/// Products::gemm. What is added to C must be summed apart first: a block of rows at a time, while it is near.
static void gemm_tiles(const Gemm& args) {
    constexpr int kMostCols = 4 * kTileSide;
    const float* start = args.merge == Merge::continue_ ? args.c : args.start;
    Tiles tiles;
    if (args.merge != Merge::add) return multiply(tiles, args, {start, args.ldc, args.c, args.ldc});
    float sum[kBlockSide * kMostCols];
    for (int row = 0; row < args.m; row += kBlockSide) {
        Gemm rows = args;
        rows.a += row * args.lda;
        rows.m = args.m - row < kBlockSide ? args.m - row : kBlockSide;
        multiply(tiles, rows, {start == nullptr ? nullptr : start + row * args.ldc, args.ldc, sum, args.n});
        for (int i = 0; i < rows.m; ++i) {
            float* c = args.c + (row + i) * args.ldc;
            const float* more = sum + i * args.n;
            for (int j = 0; j < args.n; j += Vec::lanes) Vec::store(c + j, Vec::load(c + j) + Vec::load(more + j));
        }
    }
}

}  // namespace fag::cpu::FAG_LEVEL
