/// Checks and reads the FAG block (backward).
#include <algorithm>
#include <limits>
#include <string>

#include "../fag_metadata/layout.h"
#include "arrays.hpp"
#include "mask.hpp"
#include "metadata.hpp"
#include "metadata_words.hpp"

namespace fag::cpu {
namespace {

/// Tile numbers are int32 words.
constexpr std::int64_t kMaxTiles = std::numeric_limits<std::int32_t>::max();

/// Tile size along an axis whose length (or bound) is s.
std::int64_t tile_of(std::int64_t s) { return std::clamp<std::int64_t>(s, 1, FAG_TILE); }

TileGrid make_grid(const Problem& problem, const Words& block, std::int64_t slots) {
    const std::int64_t s1 = block.at_least("grad.s1", layout::grad_s1(slots), 0);
    const std::int64_t s2 = block.at_least("grad.s2", layout::grad_s2(slots), 0);
    const auto longest = [](const std::vector<std::int64_t>& lengths) {
        return lengths.empty() ? std::int64_t{0} : *std::max_element(lengths.begin(), lengths.end());
    };
    if (s1 < longest(problem.lengths_q)) Words::refuse("grad.s1", "be at least the longest query sequence", s1);
    if (s2 < longest(problem.lengths_kv)) Words::refuse("grad.s2", "be at least the longest key sequence", s2);

    TileGrid grid;
    grid.rows_per_tile = tile_of(s1);
    grid.keys_per_tile = tile_of(s2);
    const std::int64_t o1 = ceil_div(s1, grid.rows_per_tile);
    const std::int64_t o2 = ceil_div(s2, grid.keys_per_tile);
    block.expect("grad.o1", layout::grad_o1(slots), o1);
    block.expect("grad.o2", layout::grad_o2(slots), o2);
    grid.first_tile.push_back(0);
    for (std::int64_t i = 0; i < problem.b; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const bool own = problem.is_variable;
        grid.row_tiles.push_back(own ? ceil_div(problem.lengths_q[at], grid.rows_per_tile) : o1);
        grid.key_tiles.push_back(own ? ceil_div(problem.lengths_kv[at], grid.keys_per_tile) : o2);
        std::int64_t tiles = 0;
        const bool overflows = __builtin_mul_overflow(grid.row_tiles.back(), grid.key_tiles.back(), &tiles) ||
                               __builtin_mul_overflow(tiles, problem.n1, &tiles);
        if (overflows || tiles > kMaxTiles - grid.total()) {
            throw std::invalid_argument("metadata: grad.s1 and grad.s2 must give less than 2^31 tiles, got " +
                                        std::to_string(s1) + " and " + std::to_string(s2) + ".");
        }
        grid.first_tile.push_back(grid.total() + tiles);
    }
    return grid;
}

bool sees_anything(const Problem& problem) {
    for (std::int64_t i = 0; i < problem.b; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const Band band(problem, problem.lengths_q[at], problem.lengths_kv[at]);
        if (!band.keys_of_rows(0, problem.lengths_q[at]).empty()) return true;
    }
    return false;
}

}  // namespace

GradWork read_grad_work(const Problem& problem, const Metadata& metadata) {
    const Words head(metadata, 0, FAG_HEAD_WORDS, "head");
    const std::int64_t offset = head.at_least("grad_offset", FAG_HEAD_GRAD_OFFSET, 0);
    if (offset == 0) {
        throw std::invalid_argument("metadata: is_grad_enabled must be True for the gradient, got metadata without it.");
    }
    const std::int64_t rows = std::int64_t{head[FAG_HEAD_AIC]} + head[FAG_HEAD_AIV];
    std::int64_t row_words = 0;
    const bool overflows = __builtin_mul_overflow(std::int64_t{head[FAG_HEAD_SECTION_NUM]}, rows * FAG_ROW_WORDS, &row_words);
    if (overflows || row_words != offset - FAG_HEAD_WORDS) Words::refuse("grad_offset", "lie right behind the forward's rows", offset);
    const std::int64_t slots = static_cast<std::uint32_t>(head[FAG_HEAD_BATCH_SLOTS]) >> FAG_ID_CUBE_SLOTS_SHIFT;
    const Words block(metadata, offset, layout::grad_words(slots), "grad_offset");

    GradWork work;
    work.grid = make_grid(problem, block, slots);
    const std::int64_t used = block.at_least("grad.used_cubes", layout::grad_used_cubes(slots), 0);
    if (used > slots) Words::refuse("grad.used_cubes", "be at most the cube slots", used);
    std::int64_t done = 0;
    for (std::int64_t core = 0; core < used; ++core) {
        const std::int64_t begin = block[layout::grad_start(slots) + core];
        const std::int64_t end = block[layout::grad_end(slots) + core];
        if (begin != done) {
            Words::refuse(indexed("grad.start", core), "be " + std::to_string(done) + ", where the core before ends",
                          begin);
        }
        if (end < begin || end > work.grid.total()) {
            Words::refuse(indexed("grad.end", core),
                          "be between its start and the number of tiles, " + std::to_string(work.grid.total()), end);
        }
        work.cores.push_back({begin, end});
        done = end;
    }
    if (done != work.grid.total() && (used > 0 || sees_anything(problem))) {
        Words::refuse("grad.end", "end with the number of tiles, " + std::to_string(work.grid.total()), done);
    }
    return work;
}

}  // namespace fag::cpu
