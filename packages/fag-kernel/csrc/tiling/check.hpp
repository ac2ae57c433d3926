/// What a plan needs of the problem beyond the operator's own rules: that the given route's kernel can run it.
///
/// The route is decided in fag_metadata.routes and only verified here.
#pragma once

#include <stdexcept>
#include <string>

#include "problem.hpp"

namespace fag::tiling {

/// Valid call that no kernel can run; fag_metadata.UnsupportedError in Python.
class Unsupported : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// Limits of a BN2 kernel: operands of 128 columns; one tile, or up to five a side. A test compares them with the
/// capability column of fag_metadata.routes.
inline constexpr std::int64_t kMaxHeadDimBn2 = 128;
inline constexpr std::int64_t kMaxLengthBn2Single = 128;
inline constexpr std::int64_t kMaxLengthBn2Multiblk = 640;

const char* route_name(Route route);

/// Why the kernel of `route` cannot run `problem`, with the values; empty if it can.
std::string why_infeasible(const Problem& problem, Route route);

/// Throws Unsupported with that reason.
void check_route(const Problem& problem, Route route);

}  // namespace fag::tiling
