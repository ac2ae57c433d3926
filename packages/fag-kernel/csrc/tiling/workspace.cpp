#include "workspace.hpp"

#include <algorithm>

namespace fag::tiling {

namespace {

constexpr std::int64_t kAccumulatorBytes = 4;

/// A tile at the end of a tensor is written whole: up to 128 rows beyond the last accumulator.
std::int64_t padding_bytes(const Problem& p) {
    return checked_product("workspace padding", kTileRows, std::max(p.d, p.dv), kAccumulatorBytes);
}

/// `offset` moves behind a section of `bytes`; returns where the section starts.
std::int64_t take(std::int64_t& offset, std::int64_t bytes) {
    const std::int64_t start = offset;
    if (__builtin_add_overflow(offset, bytes, &offset)) {
        throw std::overflow_error("fag_kernel: workspace bytes must fit int64, it overflows.");
    }
    return start;
}

}  // namespace

Workspace parse_workspace(const Problem& p, Route route, const Platform& platform) {
    Workspace workspace;
    std::int64_t offset = platform.libapi_reserve_bytes;
    const bool has_accumulators = route == Route::bn2gs1s2;
    const auto section = [&](std::int64_t rows, std::int64_t heads, std::int64_t width) {
        const std::int64_t bytes = checked_product("workspace bytes", rows, heads, width, kAccumulatorBytes);
        return take(offset, has_accumulators ? bytes : 0);
    };
    // Rows are tokens: b * s1 for dense layouts; a packed batch has cu_seqlens[b], not b times its longest sequence.
    workspace.dq_offset = section(p.t1, p.n1, p.d);
    workspace.dk_offset = section(p.t2, p.n2, p.d);
    workspace.dv_offset = section(p.t2, p.n2, p.dv);
    take(offset, has_accumulators ? padding_bytes(p) : 0);
    workspace.bytes = offset;
    return workspace;
}

}  // namespace fag::tiling
