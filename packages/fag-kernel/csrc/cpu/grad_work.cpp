/// Checks and reads the FAG block (backward).
#include <algorithm>
#include <string>

#include "arrays.hpp"
#include "mask.hpp"
#include "metadata.hpp"
#include "metadata_words.hpp"

namespace fag::cpu {
namespace {

/// Tile size along an axis whose length (or bound) is s.
std::int64_t tile_of(std::int64_t s) { return std::clamp<std::int64_t>(s, 1, words::kTile); }

TileGrid make_grid(const Problem& problem, const Words& block, std::int64_t slots) {
    const std::int64_t s1 = block.at_least("grad.s1", words::grad_s1(slots), 0);
    const std::int64_t s2 = block.at_least("grad.s2", words::grad_s1(slots) + 1, 0);
    const auto longest = [](const std::vector<std::int64_t>& lengths) {
        return lengths.empty() ? std::int64_t{0} : *std::max_element(lengths.begin(), lengths.end());
    };
    if (s1 < longest(problem.lengths_q)) block.refuse("grad.s1", "be at least the longest query sequence", s1);
    if (s2 < longest(problem.lengths_kv)) block.refuse("grad.s2", "be at least the longest key sequence", s2);

    TileGrid grid;
    grid.rows_per_tile = tile_of(s1);
    grid.keys_per_tile = tile_of(s2);
    const std::int64_t o1 = ceil_div(s1, grid.rows_per_tile);
    const std::int64_t o2 = ceil_div(s2, grid.keys_per_tile);
    block.expect("grad.o1", words::kGradO1, o1);
    block.expect("grad.o2", words::kGradO2, o2);
    grid.first_tile.push_back(0);
    for (std::int64_t i = 0; i < problem.b; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const bool own = problem.is_variable;
        grid.row_tiles.push_back(own ? ceil_div(problem.lengths_q[at], grid.rows_per_tile) : o1);
        grid.key_tiles.push_back(own ? ceil_div(problem.lengths_kv[at], grid.keys_per_tile) : o2);
        const std::int64_t tiles = checked_product("tiles of a batch entry", problem.n1, grid.row_tiles.back(),
                                                   grid.key_tiles.back());
        if (tiles > words::kMaxTiles - grid.total()) {
            throw std::invalid_argument("metadata: number of tiles must fit int32, this problem has more.");
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
    const Words head(metadata, 0, words::kHeadWords, "head");
    const std::int64_t offset = head.at_least("grad_offset", words::kHeadGradOffset, 0);
    if (offset == 0) {
        throw std::invalid_argument("metadata: is_grad_enabled must be True for the gradient, got metadata without it.");
    }
    const std::int64_t slots = static_cast<std::uint32_t>(head[words::kHeadBatchSlots]) >> 16;
    const Words block(metadata, offset, words::grad_words(slots), "grad_offset");

    GradWork work;
    work.grid = make_grid(problem, block, slots);
    const std::int64_t used = block.at_least("grad.used_cubes", words::kGradUsedCubes, 0);
    if (used > slots) block.refuse("grad.used_cubes", "be at most the cube slots", used);
    std::int64_t done = 0;
    for (std::int64_t core = 0; core < used; ++core) {
        const std::string index = "[" + std::to_string(core) + "]";
        const std::int64_t begin = block[words::kGradStart + core];
        const std::int64_t end = block[words::kGradStart + slots + core];
        if (begin != done) {
            block.refuse("grad.start" + index, "be " + std::to_string(done) + ", where the core before ends", begin);
        }
        if (end < begin || end > work.grid.total()) {
            block.refuse("grad.end" + index,
                         "be between its start and the number of tiles, " + std::to_string(work.grid.total()), end);
        }
        work.cores.push_back({begin, end});
        done = end;
    }
    if (done != work.grid.total() && (used > 0 || sees_anything(problem))) {
        block.refuse("grad.end", "end with the number of tiles, " + std::to_string(work.grid.total()), done);
    }
    return work;
}

}  // namespace fag::cpu
