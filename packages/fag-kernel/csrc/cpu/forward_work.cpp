/// Checks and reads the head and the FA and FD rows (forward).
#include <compare>
#include <string>

#include "../fag_metadata/layout.h"
#include "arrays.hpp"
#include "mask.hpp"
#include "metadata.hpp"
#include "metadata_words.hpp"

namespace fag::cpu {
namespace {

/// A place in the forward's order of work: batch-head, row block, column block.
struct BlockPosition {
    std::int64_t bn;
    std::int64_t row;
    std::int64_t col;

    auto operator<=>(const BlockPosition&) const = default;
};

std::string text(const BlockPosition& p) {
    std::string all = "(";
    all += std::to_string(p.bn);
    all += ", ";
    all += std::to_string(p.row);
    all += ", ";
    all += std::to_string(p.col);
    all += ')';
    return all;
}

[[noreturn]] void refuse(const std::string& field, const std::string& rule, const BlockPosition& got) {
    Words::refuse(field, rule, text(got));
}

/// Blocks of the problem as the metadata numbers them.
struct Blocks {
    const Problem& problem;
    std::int64_t rows_per_block;
    std::int64_t keys_per_block;

    std::int64_t heads() const { return problem.b * problem.n2; }

    /// True for the end of all work and for every block of a head, also one beyond a mask.
    bool contains(const BlockPosition& at) const {
        if (at.bn == heads()) return at.row == 0 && at.col == 0;
        if (at.bn < 0 || at.bn > heads() || at.row < 0 || at.col < 0) return false;
        const auto b = static_cast<std::size_t>(at.bn / problem.n2);
        const std::int64_t rows = ceil_div(problem.lengths_q[b] * problem.g, rows_per_block);
        const std::int64_t cols = ceil_div(problem.lengths_kv[b], keys_per_block);
        return (at.row < rows || at.row == 0) && (at.col < cols || at.col == 0);
    }
};

/// Rows of one section: FA of `aic` cores, FD of `aiv` vector cores.
class Section {
public:
    Section(const Metadata& metadata, std::int64_t index, std::int64_t num_sections, std::int64_t aic, std::int64_t aiv)
        : fa_(metadata, FAG_HEAD_WORDS + index * aic * FAG_ROW_WORDS, aic * FAG_ROW_WORDS, "FA rows"),
          fd_(metadata, FAG_HEAD_WORDS + (num_sections * aic + index * aiv) * FAG_ROW_WORDS,
              aiv * FAG_ROW_WORDS, "FD rows"),
          aic_(aic),
          aiv_(aiv),
          name_("section " + std::to_string(index) + ", core ") {}

    /// Moves `done`, where the work before ended, to where this section's work ends.
    void check_cores(const Blocks& blocks, BlockPosition& done) const {
        for (std::int64_t core = 0; core < aic_; ++core) {
            const std::int64_t at = core * FAG_ROW_WORDS;
            const BlockPosition begin{fa_[at + FAG_FA_START_BN], fa_[at + FAG_FA_START_ROW], fa_[at + FAG_FA_START_COL]};
            const BlockPosition end{fa_[at + FAG_FA_END_BN], fa_[at + FAG_FA_END_ROW], fa_[at + FAG_FA_END_COL]};
            const BlockPosition zero{0, 0, 0};
            if (end == zero) continue;  // unused: the end of a used core lies behind (0, 0, 0)
            const std::string field = name_ + std::to_string(core) + ": ";
            if (begin != done) {
                refuse(field + "FA start", "be " + text(done) + ", where the core before ends", begin);
            }
            if (!blocks.contains(end)) refuse(field + "FA end", "lie inside the problem", end);
            if (end < begin) {
                refuse(field + "FA end", "not lie before its start " + text(begin), end);
            }
            const std::int64_t slot = fa_[at + FAG_FA_FIRST_SLOT];
            if (slot < 0 || slot > 2 * aic_) {
                Words::refuse(field + "FA first_slot", "be at most twice the cores, " + std::to_string(2 * aic_), slot);
            }
            done = end;
        }
    }

    /// The merge tasks: the CPU merges by itself, in key order, but other devices act on these words.
    void check_merges(const Blocks& blocks) const {
        for (std::int64_t core = 0; core < aiv_; ++core) {
            const std::int64_t at = core * FAG_ROW_WORDS;
            const std::int64_t num_rows = fd_[at + FAG_FD_ROW_COUNT];
            if (num_rows == 0) continue;
            const std::string field = name_ + std::to_string(core) + ": FD ";
            const BlockPosition place{fd_[at + FAG_FD_BN], fd_[at + FAG_FD_ROW], 0};
            if (place.bn == blocks.heads() || !blocks.contains(place)) refuse(field + "row", "lie inside the problem", place);
            const std::int64_t first_slot = fd_[at + FAG_FD_FIRST_SLOT];
            const std::int64_t partials = fd_[at + FAG_FD_NUM_PARTIALS];
            const std::int64_t first_row = fd_[at + FAG_FD_ROW_START];
            if (partials < 1 || partials > aic_) Words::refuse(field + "num_partials", "be 1 to the cores", partials);
            if (first_slot < 0 || first_slot > 2 * aic_ - partials) {
                Words::refuse(field + "first_slot", "leave room for its partial results", first_slot);
            }
            if (num_rows < 0 || first_row < 0 || first_row > blocks.rows_per_block - num_rows) {
                Words::refuse(field + "row_start", "lie inside the row block with its row_count", first_row);
            }
        }
    }

private:
    Words fa_;
    Words fd_;
    std::int64_t aic_;
    std::int64_t aiv_;
    std::string name_;
};

}  // namespace

void check_forward_work(const Problem& problem, const Metadata& metadata) {
    const Words head(metadata, 0, FAG_HEAD_WORDS, "head");
    const std::int64_t num_sections = head.at_least("section_num", FAG_HEAD_SECTION_NUM, 1);
    const std::int64_t aic = head.at_least("aic", FAG_HEAD_AIC, 1);
    const std::int64_t aiv = head.at_least("aiv", FAG_HEAD_AIV, 0);
    const Blocks blocks{problem, head.at_least("m", FAG_HEAD_M, 1), head.at_least("k", FAG_HEAD_K, 1)};
    const std::int64_t room = (metadata.size - FAG_HEAD_WORDS) / FAG_ROW_WORDS;
    if (num_sections > room / aic || aiv > room / num_sections - aic) {
        Words::refuse("section_num", "leave all rows inside the tensor of " + std::to_string(metadata.size) + " words",
                      num_sections);
    }
    BlockPosition done{0, 0, 0};
    for (std::int64_t i = 0; i < num_sections; ++i) {
        const Section section(metadata, i, num_sections, aic, aiv);
        section.check_cores(blocks, done);
        section.check_merges(blocks);
    }
    const BlockPosition all{blocks.heads(), 0, 0};
    if (done != all) refuse("FA end of the last core", "be " + text(all) + ", the end of all rows", done);
}

}  // namespace fag::cpu
