#include "platform.hpp"

#include "problem.hpp"

namespace fag::tiling {

Platform parse_platform(std::int64_t cube_cores, std::int64_t vector_cores, std::int64_t l2_bytes,
                        std::int64_t libapi_reserve_bytes) {
    constexpr std::int64_t kMaxCores = 1 << 16;
    constexpr std::int64_t kMaxBytes = std::int64_t{1} << 62;
    if (cube_cores < 1 || cube_cores > kMaxCores) fail("cube_cores", "be between 1 and 65536", cube_cores);
    if (vector_cores < 1 || vector_cores > kMaxCores) fail("vector_cores", "be between 1 and 65536", vector_cores);
    if (l2_bytes < 0 || l2_bytes > kMaxBytes) fail("l2_bytes", "be between 0 (unknown) and 2^62", l2_bytes);
    if (libapi_reserve_bytes < 0 || libapi_reserve_bytes > kMaxBytes) {
        fail("libapi_reserve_bytes", "be between 0 and 2^62", libapi_reserve_bytes);
    }
    return {cube_cores, vector_cores, l2_bytes, libapi_reserve_bytes};
}

}  // namespace fag::tiling
