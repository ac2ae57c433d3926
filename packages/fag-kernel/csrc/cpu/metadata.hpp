/// Reads the work of a call out of the metadata tensor and refuses whatever does not fit the problem.
///
/// The tensor may hold anything. After these functions every number taken from it is inside its range, the ranges of
/// the cores follow each other without hole or overlap and end at the problem's last tile or row. Whether the tensor
/// was made for this very problem is the caller's check (fag_metadata.check_metadata).
#pragma once

#include <cstdint>
#include <vector>

#include "../problem.hpp"

namespace fag::cpu {

struct Metadata {
    const std::int32_t* words;
    std::int64_t size;
};

/// Tiles [begin, end) in the numbering of the FAG block.
struct TileRange {
    std::int64_t begin;
    std::int64_t end;
};

/// The numbering of the FAG block: batch entry, kv head, query head of it, key tile, query tile (fastest).
struct TileGrid {
    std::int64_t rows_per_tile = 1;
    std::int64_t keys_per_tile = 1;
    std::vector<std::int64_t> row_tiles;   ///< (b,) rectangle of one head, numbered tiles, real or beyond the length
    std::vector<std::int64_t> key_tiles;   ///< (b,)
    std::vector<std::int64_t> first_tile;  ///< (b + 1,) number of the first tile of each batch entry, then the total

    std::int64_t total() const { return first_tile.back(); }
};

struct GradWork {
    TileGrid grid;
    std::vector<TileRange> cores;  ///< in order, joined they are [0, grid.total()), or none where no pair is visible
};

/// Throws std::invalid_argument naming the field.
GradWork read_grad_work(const Problem& problem, const Metadata& metadata);

/// A place in the forward's order of work: batch-head, row block, column block.
struct BlockPosition {
    std::int64_t bn;
    std::int64_t row;
    std::int64_t col;
};

struct BlockRange {
    BlockPosition begin;
    BlockPosition end;
};

struct ForwardWork {
    std::int64_t rows_per_block = 1;     ///< rows are (query position x query head of the kv head)
    std::int64_t keys_per_block = 1;
    std::vector<BlockRange> cores;       ///< of all sections, in order; joined they are all blocks of the problem
};

/// Throws std::invalid_argument naming the field.
ForwardWork read_forward_work(const Problem& problem, const Metadata& metadata);

}  // namespace fag::cpu
