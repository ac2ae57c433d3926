#include "parse.hpp"

#include <algorithm>

#include "platform.hpp"

namespace fag::tiling {

namespace {

std::int64_t tile_extent(std::int64_t length, std::int64_t basic) {
    return std::max<std::int64_t>(1, std::min(length, basic));
}

DAlign align_d(std::int64_t d) {
    if (d <= 64) return DAlign::d64;
    if (d <= 128) return DAlign::d128;
    return d <= 192 ? DAlign::d192 : DAlign::above;
}

}  // namespace

Facts parse_facts(const Problem& problem) {
    Facts facts;
    facts.tile_rows = tile_extent(problem.s1, kTileRows);
    facts.tile_cols = tile_extent(problem.s2, kTileCols);
    facts.s1_outer = ceil_div(problem.s1, facts.tile_rows);
    facts.s2_outer = ceil_div(problem.s2, facts.tile_cols);
    facts.heads = checked_product("b * n1", problem.b, problem.n1);
    facts.tiles_head = checked_product("tiles of a head", facts.s1_outer, facts.s2_outer);
    facts.tiles = checked_product("tiles of the batch", facts.heads, facts.tiles_head);
    facts.d_align = align_d(problem.d);
    facts.dv_align = facts.d_align != DAlign::d64 && problem.dv > 128 ? DvAlign::dv192 : DvAlign::dv128;
    return facts;
}

}  // namespace fag::tiling
