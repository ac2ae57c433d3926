/// What the tiles of a backward leave out: rows and keys without gradient, and the gradient of the sinks.
#pragma once

#include <vector>

#include "backward.hpp"
#include "isa.hpp"

namespace fag::cpu {

/// One piece per kv head of a batch entry; pieces touch nothing that tiles or other pieces touch.
class Margins {
public:
    Margins(const BackwardArgs& args, const Isa& isa);

    std::int64_t count() const { return args_.problem.b * args_.problem.n2; }

    /// Zeros in rows and keys that no tile writes: padding, and whole tiles that see nothing. Then the sink gradient of
    /// the kv head's query heads in this batch entry.
    void run(std::int64_t piece);

    /// Adds up the sink gradients over the batch, in order. After all pieces.
    void finish();

private:
    void clear_queries(std::int64_t b, std::int64_t n1) const;
    void clear_keys(std::int64_t b, std::int64_t n2) const;
    double sink_gradient(std::int64_t b, std::int64_t n1) const;

    const BackwardArgs& args_;
    const Isa& isa_;
    std::vector<double> sink_gradients_;  ///< (b, n1), or empty
};

}  // namespace fag::cpu
