/// Which keys a query row sees: all mask arithmetic of the kernels.
///
/// In every mask mode a row sees one interval of keys, and both of its ends grow with the row. All numbers are int64,
/// so windows up to 2^31 - 1 and lengths up to 2^40 cannot overflow.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../problem.hpp"

namespace fag::cpu {

struct Interval {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    bool empty() const { return begin >= end; }
};

/// Most blocks of `block` neighbouring rows that see one of `count` neighbouring keys, out of `blocks`; and vice versa.
inline std::int64_t blocks_in_band(const Problem& problem, std::int64_t count, std::int64_t block,
                                   std::int64_t blocks) {
    const bool is_bounded = problem.mask_mode == MaskMode::window && problem.win_left != kUnbounded &&
                            problem.win_right != kUnbounded;
    if (!is_bounded) return blocks;
    const std::int64_t width = count + problem.win_left + problem.win_right;
    return std::min(blocks, (width + block - 2) / block + 1);
}

/// The visible band of one batch entry with s1 query rows and s2 keys, aligned at the bottom right.
class Band {
public:
    Band(const Problem& problem, std::int64_t s1, std::int64_t s2) : s2_(s2) {
        const std::int64_t offset = s2 - s1;
        const bool is_window = problem.mask_mode == MaskMode::window;
        if (problem.mask_mode == MaskMode::causal) {
            ahead_ = offset;
        } else if (is_window && problem.win_right != kUnbounded) {
            ahead_ = offset + problem.win_right;
        }
        if (is_window && problem.win_left != kUnbounded) behind_ = problem.win_left - offset;
        // The first rows see no key if the band starts left of key 0; rows beyond the band's left end do not exist,
        // since a window always holds the row's own diagonal key or lies left of it.
        rows_.begin = std::clamp<std::int64_t>(-ahead_, 0, s1);
        rows_.end = s2 == 0 ? rows_.begin : std::clamp<std::int64_t>(s2 + behind_, rows_.begin, s1);
    }

    /// Keys that row i sees, clamped to [0, s2].
    Interval keys(std::int64_t i) const {
        return {std::clamp<std::int64_t>(i - behind_, 0, s2_), std::clamp<std::int64_t>(i + ahead_ + 1, 0, s2_)};
    }

    /// Union of the keys that rows [begin, end) see.
    Interval keys_of_rows(std::int64_t begin, std::int64_t end) const {
        const std::int64_t first = std::max(begin, rows_.begin);
        const std::int64_t last = std::min(end, rows_.end) - 1;
        if (first > last) return {};
        return {keys(first).begin, keys(last).end};
    }

    /// Rows that see at least one of the keys [begin, end).
    Interval rows_of_keys(std::int64_t begin, std::int64_t end) const {
        if (begin >= end) return {};
        return {std::max(rows_.begin, begin - ahead_), std::min(rows_.end, end + behind_)};
    }

    /// True if each of the rows [row, row_end) sees all keys [key, key_end).
    bool sees_all(std::int64_t row, std::int64_t row_end, std::int64_t key, std::int64_t key_end) const {
        return keys(row_end - 1).begin <= key && keys(row).end >= key_end;
    }

private:
    /// Far beyond every length (2^40), far below overflow.
    static constexpr std::int64_t kFar = std::int64_t{1} << 60;
    std::int64_t s2_;
    std::int64_t behind_ = kFar;  ///< row i sees keys from i - behind
    std::int64_t ahead_ = kFar;   ///< to i + ahead, inclusive
    Interval rows_;               ///< rows that see at least one key
};

}  // namespace fag::cpu
