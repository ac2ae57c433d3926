#include "row_cache.hpp"

#include <algorithm>

namespace fag::cpu {

RowCache::RowCache(Arena& arena, const BackwardJob& job) : job_(job) {
    const std::int64_t fitting =
        row_tiles_kept(job.shape, job.schedule.own_bytes, job.schedule.num_shared_queries > 0);
    const std::int64_t of_a_group = job.args.problem.g * job.row_tiles_of_column(job.longest_q);
    slots_.resize(static_cast<std::size_t>(std::clamp<std::int64_t>(of_a_group, 1, fitting)));
    for (Slot& slot : slots_) slot.tile = take_row_tile(arena, job.shape);
}

bool RowCache::holds(std::int64_t heads, std::int64_t s1) const {
    return heads * job_.row_tiles_of_column(s1) <= static_cast<std::int64_t>(slots_.size());
}

std::int64_t RowCache::most_tiles() const {
    return std::max(static_cast<std::int64_t>(slots_.size()), job_.row_tiles_of_column(job_.longest_q));
}

const RowTile& RowCache::get(const QueryHead& head, std::int64_t place, std::int64_t i, const Packer& packer) {
    const std::int64_t tiles = job_.row_tiles_of_column(head.s1);
    const std::int64_t last = static_cast<std::int64_t>(slots_.size()) - 1;
    const std::int64_t wanted = place * tiles + (holds(place + 1, head.s1) ? i % tiles : i);
    Slot& slot = slots_[static_cast<std::size_t>(std::min(wanted, last))];
    if (slot.b != head.b || slot.n1 != head.n1 || slot.index != i) {
        pack(head, i, packer, slot.tile);
        slot.b = head.b;
        slot.n1 = head.n1;
        slot.index = i;
    }
    return slot.tile;
}

void RowCache::pack(const QueryHead& head, std::int64_t i, const Packer& packer, RowTile& tile) const {
    const TileShape& shape = job_.shape;
    const std::int64_t row = i * kTile;
    tile.num_rows = static_cast<int>(std::min<std::int64_t>(head.s1 - row, kTile));
    tile.q_rows = {head.q.row(row), head.q.stride_bytes};
    tile.dout_rows = {head.dout.row(row), head.dout.stride_bytes};
    const std::int64_t distance = shape.words_along_rows();
    packer.rows(tile.q_rows, tile.num_rows, shape.d, tile.q);
    packer.rows(tile.dout_rows, tile.num_rows, shape.dv, tile.dout);
    tile.q_is_finite = packer.rows_transposed(tile.q_rows, tile.num_rows, shape.d, tile.q_t, distance);
    tile.dout_is_finite = packer.rows_transposed(tile.dout_rows, tile.num_rows, shape.dv, tile.dout_t, distance);
    shape.isa.dot_rows[static_cast<int>(shape.dtype)](tile.dout_rows.base, tile.dout_rows.stride_bytes,
                                                      head.out.row(row), head.out.stride_bytes, tile.num_rows,
                                                      shape.dv.cols, tile.shift);
    for (int r = 0; r < tile.num_rows; ++r) {
        tile.lse[r] = head.lse[row + r];
        if (head.dlse != nullptr) tile.shift[r] -= head.dlse[row + r];
    }
    tile.lse[tile.num_rows] = tile.shift[tile.num_rows] = 0.0f;  // partner of an odd last row
}

}  // namespace fag::cpu
