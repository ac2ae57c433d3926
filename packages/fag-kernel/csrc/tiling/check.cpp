#include "check.hpp"

#include <algorithm>

namespace fag::tiling {

namespace {

bool has_empty_sequence(const Problem& p) {
    if (!p.has_lengths()) return p.s1 == 0 || p.s2 == 0;  // also with b = 0, as fag_metadata has it
    const auto is_empty = [](std::int64_t length) { return length == 0; };
    return std::any_of(p.lengths_q.begin(), p.lengths_q.end(), is_empty) ||
           std::any_of(p.lengths_kv.begin(), p.lengths_kv.end(), is_empty);
}

std::string got(const char* rule, const char* name, std::int64_t value) {
    return std::string(rule) + ", got " + name + "=" + std::to_string(value);
}

std::string got(const char* rule, const char* a, std::int64_t value_a, const char* b, std::int64_t value_b) {
    return got(rule, a, value_a) + ", " + b + "=" + std::to_string(value_b);
}

/// Limits of both BN2 forms.
std::string why_infeasible_bn2(const Problem& p) {
    if (p.is_tnd()) return "layout must not be TND";
    if (p.n1 != p.n2) return got("n1 must be n2", "n1", p.n1, "n2", p.n2);
    if (p.d > kMaxHeadDimBn2) return got("d must be at most 128", "d", p.d);
    if (has_empty_sequence(p)) return "no sequence may be empty";
    return {};
}

}  // namespace

const char* route_name(Route route) {
    switch (route) {
        case Route::bn2gs1s2: return "BN2GS1S2";
        case Route::bn2_single: return "BN2_single";
        case Route::bn2_multiblk: return "BN2_multiblk";
    }
    return "unknown";
}

std::string why_infeasible(const Problem& p, Route route) {
    if (route == Route::bn2gs1s2) return {};
    if (route != Route::bn2_single && route != Route::bn2_multiblk) {
        return got("route must be 0, 1 or 2", "route", static_cast<std::int64_t>(route));
    }
    if (std::string why = why_infeasible_bn2(p); !why.empty()) return why;

    const std::int64_t longest = std::max(p.s1, p.s2);
    if (route == Route::bn2_single) {
        return longest > kMaxLengthBn2Single ? got("s1 and s2 must be at most 128", "s1", p.s1, "s2", p.s2) : "";
    }
    if (p.d != p.dv) return got("d must be dv", "d", p.d, "dv", p.dv);
    if (p.has_seqused()) return "seqused must be absent";
    if (longest <= kMaxLengthBn2Single) return got("s1 or s2 must be above 128", "s1", p.s1, "s2", p.s2);
    if (longest > kMaxLengthBn2Multiblk) return got("s1 and s2 must be at most 640", "s1", p.s1, "s2", p.s2);
    return {};
}

void check_route(const Problem& problem, Route route) {
    const std::string why = why_infeasible(problem, route);
    if (why.empty()) return;
    throw Unsupported(std::string("plan: route must be one whose kernel can run the problem, got ") + route_name(route) +
                      " (" + why + "). Plan with the route that fag_metadata selects.");
}

}  // namespace fag::tiling
