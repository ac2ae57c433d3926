#include "schedule.hpp"

namespace fag::tiling {

Schedule parse_schedule(const Problem& problem, const Facts& facts, Route route, const Platform& platform) {
    Schedule schedule;
    schedule.fused = route == Route::bn2gs1s2 ? facts.tiles : facts.heads;
    schedule.per_core = ceil_div(schedule.fused, platform.cube_cores);
    schedule.is_linear = !problem.is_tnd() && problem.mask_mode == MaskMode::none && !problem.has_seqused();
    if (!schedule.is_linear) {
        schedule.used_cores = platform.cube_cores;
    } else if (schedule.fused == 0) {
        schedule.used_cores = 1;
    } else {
        schedule.used_cores = ceil_div(schedule.fused, schedule.per_core);
    }
    return schedule;
}

}  // namespace fag::tiling
