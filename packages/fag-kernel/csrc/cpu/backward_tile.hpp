/// One backward tile (at most 128 query rows x 128 keys of one head) and the operands that outlive it.
///
///     S  = Q K^T      dP = dO V^T      P = exp(scale S - lse)      dS = P (dP - sfmg + dlse)
///     dV^T += dO^T P     dK^T += Q^T dS     dQ += dS K            (the factor `scale` of dQ and dK comes at the end)
///
/// in the forms that never transpose what was computed: each product is C[m x n] (+)= A[m x k] B[k x n], with the
/// operands of operands.hpp. Packed per life time: a RowTile per head, a KeyTile per key column, P and dS per tile.
#pragma once

#include <array>

#include "mask.hpp"
#include "operands.hpp"

namespace fag::cpu {

/// Query-side operands of one row tile.
struct RowTile {
    Word* q = nullptr;     ///< rows of Q: A of S
    Word* dout = nullptr;  ///< rows of dO: A of dP
    Word* q_t = nullptr;   ///< Q^T: A of dK^T
    Word* dout_t = nullptr;
    float* lse = nullptr;
    float* shift = nullptr;  ///< sfmg - dlse
    int num_rows = 0;
    bool q_is_finite = true;
    bool dout_is_finite = true;
    Rows q_rows;     ///< where the values lie that are not finite
    Rows dout_rows;
};

/// Which panels of a key column hold a sum, by the panel's first key / kAlign.
using StartedPanels = std::array<bool, kTile / kAlign>;

/// Key-side operands of one key column, and its gradients until they are complete.
struct KeyTile {
    Word* k_cols = nullptr;    ///< K^T: B of S
    Word* v_cols = nullptr;    ///< V^T: B of dP
    Word* k_reduced = nullptr; ///< K: B of dQ
    float* dk_t = nullptr;     ///< dK^T, panels of keys: [d][panel]
    float* dv_t = nullptr;
    StartedPanels panel_started{};
    int num_keys = 0;
    bool k_is_finite = true;
    Rows k_rows;

    int padded_keys() const { return static_cast<int>(round_up(num_keys, kAlign)); }
};

/// P and dS of the tile at hand, and the scores they come from.
struct TileBuffers {
    float* s = nullptr;
    float* dp = nullptr;
    Word* p = nullptr;
    Word* ds = nullptr;
    Word* ds_rows = nullptr;
    float* residual = nullptr;  ///< of each row: what rounding took away from the sum of its dS
    float* dq_start = nullptr;  ///< that, spread over the keys: see ResidualShare
    std::int32_t* first = nullptr;
    std::int32_t* last = nullptr;
};

/// Everything constant during a call.
struct TileShape {
    const Isa& isa;
    const Products& products;
    DType dtype;
    Layout2D d;
    Layout2D dv;
    float scale;
    std::int64_t tile_rows;  ///< most rows of a tile in this call, rounded up for packing
    std::int64_t tile_keys;  ///< most keys of a tile, likewise

    /// Distance of operands packed along the rows, or along the keys, of a tile.
    std::int64_t words_along_rows() const { return tile_rows / products.packing; }
    std::int64_t words_along_keys() const { return tile_keys / products.packing; }
};

/// `longest_rows` and `longest_keys`: of any sequence of the call.
TileShape make_tile_shape(const Isa& isa, DType dtype, std::int64_t d, std::int64_t dv, float scale,
                          std::int64_t longest_rows, std::int64_t longest_keys);

RowTile take_row_tile(Arena& arena, const TileShape& shape);
std::int64_t row_tile_bytes(const TileShape& shape);
KeyTile take_key_tile(Arena& arena, const TileShape& shape);
TileBuffers take_tile_buffers(Arena& arena, const TileShape& shape);

/// Which keys of the tile its rows see. Fills buffers.first and last unless all see all.
Visible tile_visibility(const Band& band, std::int64_t row, int num_rows, std::int64_t key, int num_keys,
                        const TileBuffers& buffers);

/// P, dS, and their share of dV^T and dK^T.
void add_to_keys(const TileShape& shape, const RowTile& rows, KeyTile& keys, const Visible& visible,
                 const TileBuffers& buffers);

/// dQ rows (distance d.padded_cols) from the dS that add_to_keys left.
void add_to_queries(const TileShape& shape, const RowTile& rows, const KeyTile& keys, const Visible& visible,
                    const TileBuffers& buffers, float* dq, Merge merge);

}  // namespace fag::cpu
