/// Checks the work that the metadata tensor hands out, and refuses whatever does not fit the problem.
///
/// The tensor may hold anything. What passes says of every tile and every row block who computes it, exactly once: the
/// ranges of the cores follow each other without hole or overlap from the first to the last. That is all the kernels
/// need to know. Where one core ends and the next begins decides nothing on a CPU: joined, the ranges are all work, and
/// the schedules cut it anew for the threads at hand, at places where no sum notices. So a result has the same bits for
/// the metadata of any target, and a plan that leaves something out is an error here and not a wrong number.
///
/// Whether the tensor was made for this very problem is the caller's check (fag_metadata.check_metadata).
#pragma once

#include <cstdint>

#include "../problem.hpp"

namespace fag::cpu {

struct Metadata {
    const std::int32_t* words;
    std::int64_t size;
};

/// Checks the FAG block. Throws std::invalid_argument naming the field.
void check_grad_work(const Problem& problem, const Metadata& metadata);

/// Checks the FA and FD rows. Throws std::invalid_argument naming the field.
void check_forward_work(const Problem& problem, const Metadata& metadata);

}  // namespace fag::cpu
