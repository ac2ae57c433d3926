#include "backward.hpp"

#include <algorithm>

#include "backward_job.hpp"
#include "backward_margins.hpp"
#include "backward_worker.hpp"
#include "levels.hpp"
#include "pool.hpp"

namespace fag::cpu {
namespace {

/// One thread: pulls spans, then margins.
void work_until_done(BackwardJob& job, Margins& margins) {
    try {
        ScopedArena arena;
        SpanQueues::Place place;
        std::int64_t at = job.spans.next(place);
        if (at >= 0) {
            BackwardWorker worker(*arena, job);
            for (; at >= 0 && !job.failed.load(); at = job.spans.next(place)) {
                worker.run(job.schedule.spans[static_cast<std::size_t>(at)]);
            }
            worker.finish();
        }
        while ((at = job.next_margin.fetch_add(1)) < margins.count()) margins.run(at);
    } catch (const Abandoned&) {
        // The thread it waited for has reported its own failure.
    } catch (...) {
        job.failed.store(true);
        throw;
    }
}

}  // namespace

void backward(const BackwardArgs& args) {
    const Problem& p = args.problem;
    const std::int64_t longest_q = p.longest_q(), longest_kv = p.longest_kv();
    const TileShape shape =
        make_tile_shape(current_isa(), args.dtype, p.d, p.dv, args.softmax_scale, longest_q, longest_kv);
    const BackwardSchedule schedule = make_backward_schedule(p, shape, args.num_threads);
    BackwardJob job{
        .args = args, .shape = shape, .schedule = schedule, .longest_q = longest_q, .longest_kv = longest_kv};
    job.shared_queries = std::make_unique<SharedSum[]>(static_cast<std::size_t>(schedule.num_shared_queries));

    Margins margins(args, shape.isa);
    const auto spans = static_cast<std::int64_t>(schedule.spans.size());
    const auto threads = static_cast<int>(std::clamp<std::int64_t>(spans, 1, schedule.num_threads));
    run_parallel(threads, args.num_threads, [&](int) { work_until_done(job, margins); });
    margins.finish();
}

}  // namespace fag::cpu
