#include "plan.hpp"

#include "check.hpp"

namespace fag::tiling {

// The order is fixed: swizzle needs the launched cores and the rest of the key, the key needs the mask's facts, and
// nothing before the route check may assume limits of the kernel.
Plan make_plan(const Problem& problem, Route route, const Platform& platform, double softmax_scale) {
    check_route(problem, route);
    Plan plan;
    plan.facts = parse_facts(problem);
    plan.sparse = parse_sparse(problem, plan.facts);
    plan.schedule = parse_schedule(problem, plan.facts, route, platform);
    plan.key_fields = make_key_fields(problem, plan.facts, plan.sparse, route);
    plan.swizzle = select_swizzle(problem, plan.facts, plan.schedule, platform, plan.key_fields);
    plan.key_fields.is_swizzle = plan.swizzle.is_chosen ? 1 : 0;
    plan.key = encode_key(plan.key_fields);
    plan.key_problem = why_invalid(plan.key_fields);
    plan.workspace = parse_workspace(problem, route, platform);
    plan.tiling_data = make_tiling_data(problem, plan.sparse, softmax_scale);
    return plan;
}

}  // namespace fag::tiling
