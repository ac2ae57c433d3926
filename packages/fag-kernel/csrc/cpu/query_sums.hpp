/// dQ of heads that several threads share.
#pragma once

#include <vector>

#include "backward_tile.hpp"
#include "shared_sum.hpp"

namespace fag::cpu {

/// What one tile adds to the dQ of its rows: contribution `rank`, the last one if is_last.
struct QueryShare {
    SharedSum* sum;
    std::int64_t tile;
    std::int64_t rank;
    bool is_last;
    float* total;  ///< the accumulators of these rows
    int num_rows;
    Rows out;
};

/// Rounds dQ of a row tile into the caller's array.
void store_queries(const TileShape& shape, const float* total, int num_rows, const Rows& out);

/// After a contribution is in: lets the next one in, or rounds the complete sum.
void pass_on(const TileShape& shape, const QueryShare& share);

/// Contributions of one thread that wait for those of other threads before them.
///
/// A thread whose predecessor is behind does not wait for it: its contribution is parked and added later, in order.
/// The threads of a head thus keep working when the system takes the core away from one of them for a while.
class ParkedQueries {
public:
    ParkedQueries(Arena& arena, const TileShape& shape);

    /// True if this contribution may go straight to its total.
    bool may_add_now(const QueryShare& share) const { return waiting_ == 0 && share.sum->is_turn(share.tile, share.rank); }

    /// Room for the values of a contribution, [row][d.padded_cols]. Waits for a predecessor if all room is taken.
    float* make_room(const std::atomic<bool>& failed);

    /// Parks the contribution whose values were put where make_room said.
    void park(const QueryShare& share);

    /// Adds what can be added.
    void settle();

    /// Adds everything, waiting for predecessors.
    void settle_all(const std::atomic<bool>& failed);

private:
    struct Parked {
        QueryShare share{};
        float* values = nullptr;
    };

    const TileShape& shape_;
    std::vector<Parked> ring_;
    std::size_t oldest_ = 0;
    std::size_t waiting_ = 0;
};

}  // namespace fag::cpu
