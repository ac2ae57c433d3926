#include "backward_margins.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backward_schedule.hpp"
#include "operands.hpp"

namespace fag::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

void clear(const Rows& out, std::int64_t begin, std::int64_t end, std::int64_t width, DType dtype) {
    const auto bytes = static_cast<std::size_t>(width * kDTypeBytes[static_cast<int>(dtype)]);
    for (std::int64_t i = begin; i < end; ++i) std::memset(out.row(i), 0, bytes);
}

/// Probability of the sink in a row that sees keys.
float sink_probability(float sink, float lse) {
    if (sink == kInfinity) return 1.0f;  // whatever inf - inf would say
    return std::exp(std::min(0.0f, sink - lse));
}

}  // namespace

Margins::Margins(const BackwardArgs& args, const Isa& isa) : args_(args), isa_(isa) {
    if (args.dsinks != nullptr && args.sinks != nullptr) {
        sink_gradients_.resize(static_cast<std::size_t>(args.problem.b * args.problem.n1));
    }
}

void Margins::run(std::int64_t piece) {
    const std::int64_t b = piece / args_.problem.n2, n2 = piece % args_.problem.n2;
    clear_keys(b, n2);
    for (std::int64_t n1 = n2 * args_.problem.g; n1 < (n2 + 1) * args_.problem.g; ++n1) {
        clear_queries(b, n1);
        if (!sink_gradients_.empty()) {
            sink_gradients_[static_cast<std::size_t>(b * args_.problem.n1 + n1)] = sink_gradient(b, n1);
        }
    }
}

void Margins::clear_queries(std::int64_t b, std::int64_t n1) const {
    const Problem& p = args_.problem;
    const std::int64_t s1 = p.lengths_q[static_cast<std::size_t>(b)], s2 = p.lengths_kv[static_cast<std::size_t>(b)];
    const Band band(p, s1, s2);
    const Rows dq = args_.dq.rows(p, p.starts_q, args_.dtype, b, n1);
    for (std::int64_t row = 0; row < s1; row += kTile) {
        const std::int64_t end = std::min<std::int64_t>(s1, row + kTile);
        if (band.keys_of_rows(row, end).empty()) clear(dq, row, end, p.d, args_.dtype);
    }
    clear(dq, s1, p.slot_q(b), p.d, args_.dtype);
}

void Margins::clear_keys(std::int64_t b, std::int64_t n2) const {
    const Problem& p = args_.problem;
    const std::int64_t s1 = p.lengths_q[static_cast<std::size_t>(b)], s2 = p.lengths_kv[static_cast<std::size_t>(b)];
    const Band band(p, s1, s2);
    const Rows dk = args_.dk.rows(p, p.starts_kv, args_.dtype, b, n2);
    const Rows dv = args_.dv.rows(p, p.starts_kv, args_.dtype, b, n2);
    const auto clear_both = [&](std::int64_t begin, std::int64_t end) {
        clear(dk, begin, end, p.d, args_.dtype);
        clear(dv, begin, end, p.dv, args_.dtype);
    };
    const std::int64_t width = column_keys(p, b);
    for (std::int64_t key = 0; key < s2; key += width) {
        const std::int64_t end = std::min(s2, key + width);
        if (band.rows_of_keys(key, end).empty()) clear_both(key, end);
    }
    clear_both(s2, p.slot_kv(b));
}

double Margins::sink_gradient(std::int64_t b, std::int64_t n1) const {
    const Problem& p = args_.problem;
    const float sink = args_.sinks[n1];
    if (sink == -kInfinity) return 0.0;
    const std::int64_t s1 = p.lengths_q[static_cast<std::size_t>(b)], s2 = p.lengths_kv[static_cast<std::size_t>(b)];
    const Band band(p, s1, s2);
    const Rows dout = args_.dout.rows(p, p.starts_q, args_.dtype, b, n1);
    const Rows out = args_.out.rows(p, p.starts_q, args_.dtype, b, n1);
    const std::int64_t lse_at = lse_offset(p, b, n1);
    double sum = 0.0;
    float sfmg[kTile];
    for (std::int64_t row = 0; row < s1; row += kTile) {
        const auto num_rows = static_cast<int>(std::min<std::int64_t>(kTile, s1 - row));
        isa_.dot_rows[static_cast<int>(args_.dtype)](dout.row(row), dout.stride_bytes, out.row(row), out.stride_bytes,
                                                     num_rows, static_cast<int>(p.dv), sfmg);
        for (int r = 0; r < num_rows; ++r) {
            const float dlse = args_.dlse == nullptr ? 0.0f : args_.dlse[lse_at + row + r];
            if (band.keys(row + r).empty()) {
                sum += dlse;  // only the sink is left: probability 1, output 0
                continue;
            }
            const float probability = sink_probability(sink, args_.lse[lse_at + row + r]);
            if (probability != 0.0f) sum += static_cast<double>(probability) * (dlse - sfmg[r]);
        }
    }
    return sum;
}

void Margins::finish() {
    if (args_.dsinks == nullptr) return;
    for (std::int64_t n1 = 0; n1 < args_.problem.n1; ++n1) {
        double sum = 0.0;
        for (std::int64_t b = 0; b < args_.problem.b && !sink_gradients_.empty(); ++b) {
            sum += sink_gradients_[static_cast<std::size_t>(b * args_.problem.n1 + n1)];
        }
        args_.dsinks[n1] = static_cast<float>(sum);
    }
}

}  // namespace fag::cpu
