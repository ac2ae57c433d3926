#include "swizzle.hpp"

#include <limits>

namespace fag::tiling {

// Published timings behind the thresholds (36 cores, D = 128, us linear / swizzle; N = heads, S1 x S2):
//   N8  1024x8192  237/250   N16 1024x8192  492/492   N32  512x8192  629/632
//   N12 8192x512   195/246   N12 8192x1024  330/353   N16 8192x512   277/264
//   N20 8192x1024  782/583   N24 8192x1024  995/699   N32 8192x512   726/523
//   8192x8192: N8 1556/1761, N10 1904/2007, N12 2833/2677, N16 4121/3550, N24 6483/4982
// Known miss: N16 8192x512 would gain 5 % but has too few columns (64 < 2 * 36).

namespace {

constexpr std::int64_t kInt64Max = std::numeric_limits<std::int64_t>::max();

std::int64_t saturating_product(std::int64_t a, std::int64_t b) {
    std::int64_t product = 0;
    return __builtin_mul_overflow(a, b, &product) ? kInt64Max : product;
}

std::int64_t saturating_sum(std::int64_t a, std::int64_t b) {
    std::int64_t sum = 0;
    return __builtin_add_overflow(a, b, &sum) ? kInt64Max : sum;
}

std::string values(const char* text, std::int64_t left, const char* between, std::int64_t right) {
    return text + std::to_string(left) + between + std::to_string(right);
}

/// Heads that cores work on at once when core c starts at tile c * per_core. Starts ascend, so a head is new when it
/// differs from the one before.
std::int64_t count_live_heads(const Facts& facts, const Schedule& schedule, const Platform& platform) {
    std::int64_t live = 0;
    std::int64_t last = -1;
    for (std::int64_t core = 0; core < platform.cube_cores; ++core) {
        const std::int64_t tile = saturating_product(core, schedule.per_core);
        if (tile >= schedule.fused) break;
        const std::int64_t head = tile / facts.tiles_head;
        if (head != last) ++live;
        last = head;
    }
    return live;
}

/// q, dout, dq of a head (16 bit) and its dq accumulator; its share of k, v, dk, dv and their accumulators.
std::int64_t head_bytes(const Problem& p) {
    const std::int64_t q_side = saturating_product(p.s1, p.d * (3 * 2 + 4));
    const std::int64_t kv_side = saturating_product(p.s2, p.d * (2 * 2 + 2 * 4));
    return saturating_sum(q_side, kv_side / p.g);
}

Swizzle cannot(std::string reason) { return {false, true, std::move(reason), 0, 0}; }

}  // namespace

Swizzle select_swizzle(const Problem& p, const Facts& facts, const Schedule& schedule, const Platform& platform,
                       const KeyFields& fields) {
    if (fields.template_id != static_cast<std::uint32_t>(Template::bn2gs1s2)) return cannot("template BN2 has no swizzle");
    if (p.is_tnd()) return cannot("layout TND has no swizzle");
    KeyFields with_swizzle = fields;
    with_swizzle.is_swizzle = 1;
    if (!is_valid(with_swizzle)) return cannot(why_invalid(with_swizzle));
    if (schedule.fused == 0) return cannot("there is no tile");
    if (schedule.used_cores < platform.cube_cores) {
        return cannot(values("not all cores are used: ", schedule.used_cores, " < ", platform.cube_cores));
    }

    Swizzle rejected;
    if (platform.l2_bytes == 0) {
        rejected.reason = "the size of L2 is not known";
        return rejected;
    }
    if (facts.s2_outer > facts.s1_outer) {
        rejected.reason = values("columns outnumber rows of tiles: ", facts.s2_outer, " > ", facts.s1_outer);
        return rejected;
    }
    rejected.live_heads = count_live_heads(facts, schedule, platform);
    rejected.live_bytes = saturating_product(rejected.live_heads, head_bytes(p));
    // 1.25 x L2 for tall problems, else 2 x L2: see the timings.
    const bool is_tall = facts.s1_outer / 2 >= facts.s2_outer;
    const std::int64_t threshold = saturating_sum(platform.l2_bytes, is_tall ? platform.l2_bytes / 4 : platform.l2_bytes);
    if (rejected.live_bytes <= threshold) {
        rejected.reason = values("live heads fit L2: ", rejected.live_bytes, " <= ", threshold);
        return rejected;
    }
    const std::int64_t columns = saturating_product(facts.heads, facts.s2_outer);
    if (columns < 2 * platform.cube_cores) {
        rejected.reason = values("too few columns: ", columns, " < ", 2 * platform.cube_cores);
        return rejected;
    }
    Swizzle chosen = rejected;
    chosen.is_chosen = true;
    chosen.reason = values("live heads exceed L2: ", rejected.live_bytes, " > ", threshold);
    return chosen;
}

}  // namespace fag::tiling
