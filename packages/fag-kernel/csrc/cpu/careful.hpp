/// The share of values that are not finite, added pair by pair for visible pairs only. Slow, exact, seldom run.
#pragma once

#include "backward_tile.hpp"

namespace fag::cpu {

struct Extent {
    int begin;
    int end;
};

struct Panel {
    int key;    ///< first key, relative to the tile
    int width;
};

/// out_t[c][key] += weights[row][key] * src[row][c] for the values of src that are not finite. `weights` is a panel of
/// P or dS, packed along rows.
void add_not_finite_rows(const TileShape& shape, const Rows& src, int cols, Extent rows, Panel panel,
                         const Visible& visible, const Word* weights, float* out_t);

/// out[row][c] += weights[row][key] * src[key][c] for the values of src that are not finite; dS with K, or P with V.
/// `weights` is packed along keys.
void add_not_finite_keys(const TileShape& shape, int num_rows, const Rows& src, int num_keys, const Layout2D& width,
                         const Visible& visible, const Word* weights, float* out);

}  // namespace fag::cpu
