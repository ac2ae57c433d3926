#include "query_sums.hpp"

#include <algorithm>

#include "backward_memory.hpp"

namespace fag::cpu {
namespace {

constexpr std::int64_t kFewest = 8;
constexpr std::int64_t kMost = 64;

}  // namespace

void store_queries(const TileShape& shape, const float* total, int num_rows, const Rows& out) {
    shape.isa.store_rows[static_cast<int>(shape.dtype)](total, shape.d.padded_cols, num_rows, shape.d.cols, &shape.scale,
                                                        0, out.base, out.stride_bytes);
}

void pass_on(const TileShape& shape, const QueryShare& share) {
    if (share.is_last) {
        store_queries(shape, share.total, share.num_rows, share.out);
        share.sum->finish_tile();
    } else {
        share.sum->pass_on(share.tile, share.rank);
    }
}

ParkedQueries::ParkedQueries(Arena& arena, const TileShape& shape) : shape_(shape) {
    const std::int64_t floats = shape.tile_rows * shape.d.padded_cols;
    ring_.resize(static_cast<std::size_t>(std::clamp<std::int64_t>(kParkedBytes / query_tile_bytes(shape), kFewest, kMost)));
    for (Parked& parked : ring_) parked.values = arena.take<float>(floats);
}

float* ParkedQueries::make_room(const std::atomic<bool>& failed) {
    wait_until(failed, [this] {
        settle();
        return waiting_ < ring_.size();
    });
    return ring_[(oldest_ + waiting_) % ring_.size()].values;
}

void ParkedQueries::park(const QueryShare& share) {
    ring_[(oldest_ + waiting_) % ring_.size()].share = share;
    ++waiting_;
}

void ParkedQueries::settle() {
    for (; waiting_ > 0; --waiting_) {
        const Parked& parked = ring_[oldest_];
        const QueryShare& share = parked.share;
        if (!share.sum->is_turn(share.tile, share.rank)) return;
        const std::int64_t count = static_cast<std::int64_t>(share.num_rows) * shape_.d.padded_cols;
        if (share.rank == 0) {
            std::copy(parked.values, parked.values + count, share.total);
        } else {
            for (std::int64_t x = 0; x < count; ++x) share.total[x] += parked.values[x];
        }
        pass_on(shape_, share);
        oldest_ = (oldest_ + 1) % ring_.size();
    }
}

void ParkedQueries::settle_all(const std::atomic<bool>& failed) {
    wait_until(failed, [this] {
        settle();
        return waiting_ == 0;
    });
}

}  // namespace fag::cpu
