/// The tiling key: which compiled kernel runs. Bit fields, and the one rule that says which keys exist.
#pragma once

#include <cstdint>
#include <vector>

#include "parse.hpp"
#include "problem.hpp"
#include "sparse.hpp"

namespace fag::tiling {

enum class Template : std::uint32_t { bn2gs1s2 = 0, bn2 = 1, unused = 2, reserved = 3 };
/// The mask field; the kernel's mask_mode is 0 / 3 / 4.
enum class KeyMask : std::uint32_t { none = 0, causal = 1, window = 2 };

struct KeyFields {
    std::uint32_t template_id = 0;   ///< bits 1:0
    std::uint32_t is_tnd = 0;        ///< bit 2
    std::uint32_t mask = 0;          ///< bits 4:3
    std::uint32_t is_swizzle = 0;    ///< bit 5
    std::uint32_t d_align = 0;       ///< bits 7:6
    std::uint32_t dv_align = 0;      ///< bit 8
    std::uint32_t is_multiblk = 0;   ///< bit 9
    std::uint32_t needs_zero = 0;    ///< bit 10
};

inline constexpr std::uint64_t kKeyEnd = std::uint64_t{1} << 11;

/// Throws std::invalid_argument naming a field that does not fit its bits.
std::uint64_t encode_key(const KeyFields& fields);
/// Throws std::invalid_argument if a bit above the fields is set.
KeyFields decode_key(std::uint64_t key);

/// Why no kernel exists for these fields; "" if one does. The only place that knows; the set of compiled kernels, the
/// binary JSON and the plan follow from it.
const char* why_invalid(const KeyFields& fields);
bool is_valid(const KeyFields& fields);

/// All valid keys, ascending: 32 of template 0 and 24 of template 1.
std::vector<std::uint64_t> valid_keys();

/// The fields that follow from the problem, with swizzle off.
KeyFields make_key_fields(const Problem& problem, const Facts& facts, const Sparse& sparse, Route route);

}  // namespace fag::tiling
