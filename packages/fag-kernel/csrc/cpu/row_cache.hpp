/// Packed row tiles, kept while a thread works on the same heads.
#pragma once

#include <vector>

#include "backward_job.hpp"

namespace fag::cpu {

/// As many row tiles as memory is for (backward_memory.hpp). If those that a column sees fit, each is packed once; of
/// more the last slot is packed anew for every column, at about 4 % of a tile's time.
class RowCache {
public:
    RowCache(Arena& arena, const BackwardJob& job);

    /// True if the row tiles that a column sees fit, for this many query heads of length s1.
    bool holds(std::int64_t heads, std::int64_t s1) const;

    /// Row tiles of heads in use at the same time, at most: those that are held, or all of one head.
    std::int64_t most_tiles() const;

    /// Row tile i of a head. `place` tells apart the heads that are in use at the same time: 0, 1, ...
    const RowTile& get(const QueryHead& head, std::int64_t place, std::int64_t i, const Packer& packer);

private:
    struct Slot {
        RowTile tile;
        std::int64_t b = -1;
        std::int64_t n1 = -1;
        std::int64_t index = -1;
    };

    void pack(const QueryHead& head, std::int64_t i, const Packer& packer, RowTile& tile) const;

    const BackwardJob& job_;
    std::vector<Slot> slots_;
};

}  // namespace fag::cpu
