/// Arrays of the caller: addresses of rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../problem.hpp"
#include "isa.hpp"

namespace fag::cpu {

/// Rows of one head of one batch entry: row i lies at base + i * stride_bytes.
struct Rows {
    std::byte* base = nullptr;
    std::int64_t stride_bytes = 0;
    std::byte* row(std::int64_t i) const { return base + i * stride_bytes; }
};

/// A 4-D array with strides in elements; the head dim is contiguous. TND: the batch stride is not used.
struct Array {
    std::byte* data = nullptr;
    std::int64_t stride_b = 0;
    std::int64_t stride_s = 0;
    std::int64_t stride_n = 0;

    Rows rows(const Problem& problem, const std::vector<std::int64_t>& starts, DType dtype, std::int64_t b,
              std::int64_t head) const {
        const std::int64_t bytes = kDTypeBytes[static_cast<int>(dtype)];
        const std::int64_t entry =
            problem.is_tnd() ? starts[static_cast<std::size_t>(b)] * stride_s : b * stride_b;
        return {data + (entry + head * stride_n) * bytes, stride_s * bytes};
    }
};

/// Index of the first row of a head in a contiguous (b, n1, s1) or (n1, t1) array.
inline std::int64_t lse_offset(const Problem& problem, std::int64_t b, std::int64_t head) {
    return problem.is_tnd() ? head * problem.t1 + problem.starts_q[static_cast<std::size_t>(b)]
                            : (b * problem.n1 + head) * problem.s1;
}

inline std::int64_t round_up(std::int64_t x, std::int64_t unit) { return (x + unit - 1) / unit * unit; }
inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace fag::cpu
