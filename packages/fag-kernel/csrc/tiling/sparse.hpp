/// What the mask hides, for one head of the longest sequence: corrected tokens, kind of sparsity, valid tiles.
#pragma once

#include <cstdint>

#include "parse.hpp"
#include "problem.hpp"

namespace fag::tiling {

/// Values as in the tiling data.
enum class SparseType : std::int64_t { dense = 0, causal = 1, band = 2 };

/// A row i sees the keys i - s1_token .. i + s2_token. Not TND: corrected by s1 - s2 so that rows and keys count from
/// the same corner. TND: uncorrected, since every sequence has its own correction.
struct Sparse {
    SparseType type = SparseType::dense;
    std::int64_t s1_token = 0;
    std::int64_t s2_token = 0;
    std::int64_t total_per_batch_num = 0;  ///< valid tiles of a head; 0 for TND, where heads differ
    bool has_empty_tile_line = false;      ///< some row or column of tiles has no valid tile (false for TND)
};

/// With seqused the facts describe the slots; a kernel derives those of the used lengths itself.
Sparse parse_sparse(const Problem& problem, const Facts& facts);

}  // namespace fag::tiling
