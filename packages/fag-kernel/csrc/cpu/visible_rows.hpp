/// Products of a partly masked tile that leave out what the mask hides; shared by forward and backward.
#pragma once

#include "backward_tile.hpp"

namespace fag::cpu {

/// Rows handled together when each sees other keys: few, so that little hidden work is done, but enough to use a
/// panel of B while it is in the first-level cache. All of them reduce over the keys that one of them sees, the zeros of
/// masked pairs included; which rows those are must not depend on where a block of rows is cut.
inline constexpr int kMaskedRows = 24;

/// Rows [begin, end) of a tile.
struct RowSpan {
    int begin;
    int end;
};

/// Rows that see a key of [key_begin, key_end), relative to the tile.
RowSpan rows_seeing(const Visible& visible, int num_rows, int key_begin, int key_end);

/// P or dS of a tile as an A operand, packed along keys at distance words_along_keys(). What masked rows and keys hold
/// must be zero wherever another row of the same tile sees a key.
struct Weights {
    const Word* words;
    int num_rows;
    int num_keys;
    const Visible& visible;
};

/// out[row][col] (+)= sum over keys of weights[row][key] * reduced[key][col], B panels as of Packer::reduced_rows. The
/// sums start from `start` (laid out like out) unless it is null.
void add_reduced_keys(const TileShape& shape, const Weights& weights, const Word* reduced, const Layout2D& width,
                      float* out, Merge merge, Ahead ahead, const float* start = nullptr);

}  // namespace fag::cpu
