/// Operands of the matrix products, packed from rows of the caller's arrays.
///
/// Two orders exist. "Rows" keep a row together (words along the head dim): the A operand of S = Q K^T. "Columns", its
/// transpose, serve as B. Reductions over the sequence need words along the sequence: transposed as A, as they are as B.
///
/// A masked pair must contribute nothing even if its operand is NaN or infinite, and 0 * NaN would. So operands that
/// are reduced over the sequence are cleaned: values that are not finite become 0, the tile remembers that there were
/// some, and careful.hpp adds their share for visible pairs only.
#pragma once

#include "arena.hpp"
#include "arrays.hpp"
#include "isa.hpp"

namespace fag::cpu {

/// Rows of a backward tile, of a forward block and keys of a tile or step, at most.
inline constexpr int kTile = 128;

/// How operands of width `cols` are laid out; constant during a call.
struct Layout2D {
    int cols;         ///< elements of a row
    int padded_cols;  ///< rounded up to kAlign
    int words;        ///< words along the row
    int row_words;    ///< the same, rounded up to kAlign: distance of packed rows
};

Layout2D layout_of(std::int64_t cols, const Products& products);

struct Packer {
    const Isa& isa;
    const Products& products;
    DType dtype;
    Word* scratch;  ///< as many words as rows x padded columns of the largest tile

    /// dst[row][word along the row], distance row_words; missing rows up to a multiple of kAlign are zero.
    void rows(const Rows& src, int num_rows, const Layout2D& shape, Word* dst) const;
    /// dst[col][word along the rows]; cleaned. False if something had to be cleaned.
    bool rows_transposed(const Rows& src, int num_rows, const Layout2D& shape, Word* dst, std::int64_t distance) const;
    /// B panels over the rows as columns: panel p at dst + p * panel * row_words, [word along the row][row].
    void columns(const Rows& src, int num_rows, const Layout2D& shape, Word* dst) const;
    /// B panels over the head dim: panel p at dst + p * panel * depth, [word along the rows][col]; cleaned.
    bool reduced_rows(const Rows& src, int num_rows, const Layout2D& shape, Word* dst, std::int64_t depth) const;
};

/// Value of one element.
float to_float(DType dtype, const std::byte* element);

/// Value `index` (0 .. packing - 1) of a word.
float word_value(Word word, int packing, int index);

}  // namespace fag::cpu
