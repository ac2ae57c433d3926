/// One thread's part of a backward call.
#pragma once

#include <optional>
#include <vector>

#include "backward_job.hpp"
#include "query_sums.hpp"
#include "row_cache.hpp"

namespace fag::cpu {

/// Runs spans: columns of a kv head, each for all query heads of the group.
///
/// dK and dV of a column are one sum over the query heads and their rows, in that order. If the packed rows of all
/// query heads fit the cache, or if several threads do the head, a column is done for all heads before the next one
/// begins. Else each head runs through all columns, and the sums of all columns wait in memory for the next head.
class BackwardWorker {
public:
    BackwardWorker(Arena& arena, BackwardJob& job);

    void run(const BackwardSpan& span);

    /// After the last span: what still waits for other threads.
    void finish();

private:
    void run_columns_for_all_heads(const BackwardSpan& span, const KeyHead& head);
    void run_heads_for_all_columns(const BackwardSpan& span, const KeyHead& head);
    /// Packs a column; dK and dV are summed up at the given places. False if no row sees it.
    bool open_column(const KeyHead& head, std::int64_t column, float* dk_t, float* dv_t);
    /// Adds the rows of one query head to the open column and the column to their dQ.
    void run_rows(const BackwardSpan& span, const KeyHead& head, std::int64_t column, std::int64_t g);
    void run_tile(const BackwardSpan& span, const KeyHead& head, std::int64_t column, std::int64_t g, std::int64_t i);
    /// Rounds the open column's dK and dV into the caller's arrays.
    void store_column(const KeyHead& head, std::int64_t column);
    void store_keys(const float* gradient_t, const Layout2D& width, float scale, const Rows& out);

    BackwardJob& job_;
    const TileShape& shape_;
    Arena& arena_;
    TileBuffers buffers_;
    KeyTile keys_;
    float* own_dk_t_;  ///< of one column
    float* own_dv_t_;
    Packer packer_;
    float* transposed_;
    RowCache rows_;
    std::optional<ParkedQueries> parked_;
    std::vector<QueryHead> heads_;  ///< of the span at hand
    float* own_dq_ = nullptr;       ///< of heads that no other thread works on
    float* column_sums_ = nullptr;  ///< dK and dV of all columns of a head
    std::vector<StartedPanels> column_started_;
    std::int64_t packed_b_ = -1;
    std::int64_t packed_n2_ = -1;
    std::int64_t packed_column_ = -1;
};

}  // namespace fag::cpu
