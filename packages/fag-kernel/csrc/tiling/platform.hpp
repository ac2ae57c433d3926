/// The machine a plan is made for: per-core constants of the Ascend 950 family and the target's core counts and L2.
#pragma once

#include <cstdint>

namespace fag::tiling {

/// Rows and columns of a basic tile (S1 inner 64 x ratio 2; S2 inner 128 x ratio 1).
inline constexpr std::int64_t kTileRows = 128;
inline constexpr std::int64_t kTileCols = 128;

/// Bytes at the start of the workspace that CANN's libapi keeps for itself. 0 without CANN; a launch that runs under
/// libapi passes what GetLibApiWorkSpaceSize() says.
inline constexpr std::int64_t kDefaultLibapiReserveBytes = 0;

/// On-chip memory per core of dav-c310, as the vendor's public compiler describes it.
inline constexpr std::int64_t kUnifiedBufferBytes = 248 * 1024;
inline constexpr std::int64_t kL1Bytes = 512 * 1024;
inline constexpr std::int64_t kL0aBytes = 64 * 1024;
inline constexpr std::int64_t kL0bBytes = 64 * 1024;
inline constexpr std::int64_t kL0cBytes = 256 * 1024;

struct Platform {
    std::int64_t cube_cores = 0;
    std::int64_t vector_cores = 0;
    std::int64_t l2_bytes = 0;  ///< 0 = unknown
    std::int64_t libapi_reserve_bytes = kDefaultLibapiReserveBytes;
};

/// Validated platform; throws std::invalid_argument naming the field.
Platform parse_platform(std::int64_t cube_cores, std::int64_t vector_cores, std::int64_t l2_bytes,
                        std::int64_t libapi_reserve_bytes);

}  // namespace fag::tiling
