#include "sparse.hpp"

#include <algorithm>
#include <limits>

namespace fag::tiling {

namespace {

constexpr std::int64_t kOpenTokens = std::numeric_limits<std::int32_t>::max();

struct TileRange {
    std::int64_t first;
    std::int64_t end;
    bool is_empty() const { return first >= end; }
};

/// Row tiles of column tile `column` with at least one visible pair.
TileRange valid_rows(const Problem& p, const Facts& facts, const Sparse& sparse, std::int64_t column) {
    const std::int64_t first_col = column * facts.tile_cols;
    const std::int64_t end_col = std::min(first_col + facts.tile_cols, p.s2);
    const std::int64_t first_row = std::max<std::int64_t>(0, first_col - sparse.s2_token);
    const std::int64_t end_row = std::min(p.s1, end_col + sparse.s1_token);
    if (first_row >= end_row) return {0, 0};
    return {first_row / facts.tile_rows, ceil_div(end_row, facts.tile_rows)};
}

/// Valid tiles, and whether a line of tiles is empty. Ranges move down with the column, so the rows that some column
/// covers have no hole if each range starts at or before the end of the union so far.
void count_tiles(const Problem& p, const Facts& facts, Sparse& sparse) {
    std::int64_t covered_end = 0;
    for (std::int64_t column = 0; column < facts.s2_outer; ++column) {
        const TileRange rows = valid_rows(p, facts, sparse, column);
        if (rows.is_empty()) {
            sparse.has_empty_tile_line = true;
            continue;
        }
        sparse.total_per_batch_num += rows.end - rows.first;
        if (rows.first > covered_end) sparse.has_empty_tile_line = true;
        covered_end = std::max(covered_end, rows.end);
    }
    if (covered_end < facts.s1_outer) sparse.has_empty_tile_line = true;
}

}  // namespace

Sparse parse_sparse(const Problem& p, const Facts& facts) {
    Sparse sparse;
    const auto open = [](std::int64_t window) { return window == kUnbounded ? kOpenTokens : window; };
    sparse.s1_token = p.mask_mode == MaskMode::causal ? kOpenTokens : open(p.win_left);
    sparse.s2_token = p.mask_mode == MaskMode::causal ? 0 : open(p.win_right);
    if (p.mask_mode == MaskMode::none) {
        if (!p.is_tnd()) sparse.total_per_batch_num = facts.tiles_head;
        return sparse;
    }
    sparse.type = SparseType::band;
    if (p.is_tnd()) return sparse;

    sparse.s1_token += p.s1 - p.s2;
    sparse.s2_token += p.s2 - p.s1;
    const bool is_causal = p.mask_mode == MaskMode::causal ? p.s1 <= p.s2
                                                           : sparse.s1_token >= p.s1 && sparse.s2_token == 0;
    if (is_causal) sparse.type = SparseType::causal;
    count_tiles(p, facts, sparse);
    return sparse;
}

}  // namespace fag::tiling
