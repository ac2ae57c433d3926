#include "backward_job.hpp"

namespace fag::cpu {

QueryHead query_head(const BackwardArgs& args, std::int64_t b, std::int64_t n1) {
    const Problem& p = args.problem;
    const auto rows = [&](const Array& array) { return array.rows(p, p.starts_q, args.dtype, b, n1); };
    const std::int64_t lse_at = lse_offset(p, b, n1);
    return {b,
            n1,
            p.lengths_q[static_cast<std::size_t>(b)],
            rows(args.q),
            rows(args.dout),
            rows(args.out),
            rows(args.dq),
            args.lse + lse_at,
            args.dlse == nullptr ? nullptr : args.dlse + lse_at};
}

KeyHead key_head(const BackwardArgs& args, std::int64_t b, std::int64_t n2) {
    const Problem& p = args.problem;
    const std::int64_t s1 = p.lengths_q[static_cast<std::size_t>(b)], s2 = p.lengths_kv[static_cast<std::size_t>(b)];
    const auto rows = [&](const Array& array) { return array.rows(p, p.starts_kv, args.dtype, b, n2); };
    const Band band(p, s1, s2);
    const Interval seeing = band.rows_of_keys(0, s2);
    return {b,
            n2,
            s2,
            column_keys(p, b),
            band,
            {seeing.begin / kTile, ceil_div(seeing.end, kTile)},
            rows(args.k),
            rows(args.v),
            rows(args.dk),
            rows(args.dv)};
}

}  // namespace fag::cpu
