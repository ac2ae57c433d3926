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

/// The numbering of the tiles: batch entry, query head, key tile, query tile (fastest). With lengths of their own the
/// entries have rectangles of their own, else all have that of the lengths in the block.
///
/// Returns their number.
std::int64_t count_tiles(const Problem& problem, const Words& block, std::int64_t slots) {
    const std::int64_t s1 = block.at_least("grad.s1", layout::grad_s1(slots), 0);
    const std::int64_t s2 = block.at_least("grad.s2", layout::grad_s2(slots), 0);
    if (s1 < problem.longest_q()) Words::refuse("grad.s1", "be at least the longest query sequence", s1);
    if (s2 < problem.longest_kv()) Words::refuse("grad.s2", "be at least the longest key sequence", s2);

    const std::int64_t rows = tile_of(s1), keys = tile_of(s2);
    const std::int64_t o1 = ceil_div(s1, rows), o2 = ceil_div(s2, keys);
    std::int64_t total = 0;
    block.expect("grad.o1", layout::grad_o1(slots), o1);
    block.expect("grad.o2", layout::grad_o2(slots), o2);
    for (std::size_t b = 0; b < static_cast<std::size_t>(problem.b); ++b) {
        const bool own = problem.is_variable;
        const std::int64_t row_tiles = own ? ceil_div(problem.lengths_q[b], rows) : o1;
        const std::int64_t key_tiles = own ? ceil_div(problem.lengths_kv[b], keys) : o2;
        std::int64_t tiles = 0;
        const bool overflows = __builtin_mul_overflow(row_tiles, key_tiles, &tiles) ||
                               __builtin_mul_overflow(tiles, problem.n1, &tiles);
        if (overflows || tiles > kMaxTiles - total) {
            throw std::invalid_argument("metadata: grad.s1 and grad.s2 must give less than 2^31 tiles, got " +
                                        std::to_string(s1) + " and " + std::to_string(s2) + ".");
        }
        total += tiles;
    }
    return total;
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

void check_grad_work(const Problem& problem, const Metadata& metadata) {
    const Words head(metadata, 0, FAG_HEAD_WORDS, "head");
    const std::int64_t offset = head.at_least("grad_offset", FAG_HEAD_GRAD_OFFSET, 0);
    if (offset == 0) {
        throw std::invalid_argument("metadata: is_grad_enabled must be True for the gradient, got metadata without it.");
    }
    const std::int64_t row_count = std::int64_t{head[FAG_HEAD_AIC]} + head[FAG_HEAD_AIV];
    std::int64_t row_words = 0;
    const bool overflows =
        __builtin_mul_overflow(std::int64_t{head[FAG_HEAD_SECTION_NUM]}, row_count * FAG_ROW_WORDS, &row_words);
    if (overflows || row_words != offset - FAG_HEAD_WORDS) {
        Words::refuse("grad_offset", "lie right behind the forward's rows", offset);
    }
    const std::int64_t slots = static_cast<std::uint32_t>(head[FAG_HEAD_BATCH_SLOTS]) >> FAG_ID_CUBE_SLOTS_SHIFT;
    const Words block(metadata, offset, layout::grad_words(slots), "grad_offset");

    const std::int64_t total = count_tiles(problem, block, slots);
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
        if (end < begin || end > total) {
            Words::refuse(indexed("grad.end", core),
                          "be between its start and the number of tiles, " + std::to_string(total), end);
        }
        done = end;
    }
    // No core at all is right where the mask hides every pair.
    if (done != total && (used > 0 || sees_anything(problem))) {
        Words::refuse("grad.end", "end with the number of tiles, " + std::to_string(total), done);
    }
}

}  // namespace fag::cpu
