/// Hands out the spans of a schedule to threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "mask.hpp"

namespace fag::cpu {

/// Spans in a row, `heads[i]` those of one head. A thread takes a head and keeps to it, so that what it has packed stays
/// of use; when no head is left it helps with the one of which most is left. Spans of a head are handed out in order,
/// and a thread leaves a head only when all of them are: whoever waits for an earlier span never waits in vain.
class SpanQueues {
public:
    explicit SpanQueues(const std::vector<Interval>& heads)
        : heads_(heads), taken_(std::make_unique<std::atomic<std::int64_t>[]>(heads.size())) {
        for (std::size_t i = 0; i < heads.size(); ++i) {
            taken_[i].store(heads[i].begin, std::memory_order_relaxed);
            if (heads[i].end - heads[i].begin > 1) cut_.push_back(i);
        }
    }

    /// Where a thread is: at a head, or at none.
    struct Place {
        std::size_t head = std::numeric_limits<std::size_t>::max();
    };

    /// The next span for the thread at `place`, or -1: then and from then on.
    std::int64_t next(Place& place) {
        std::int64_t span = take(place.head);
        if (span < 0) {
            place.head = next_head_.fetch_add(1);
            span = take(place.head);
        }
        while (span < 0 && find_fullest(place.head)) span = take(place.head);
        return span;
    }

private:
    /// The next span of the head, or -1 if it has none left or there is no such head.
    std::int64_t take(std::size_t head) {
        if (head >= heads_.size() || taken_[head].load(std::memory_order_relaxed) >= heads_[head].end) return -1;
        const std::int64_t span = taken_[head].fetch_add(1);
        return span < heads_[head].end ? span : -1;
    }

    /// False if nothing is left.
    bool find_fullest(std::size_t& fullest) const {
        std::int64_t most = 0;
        for (const std::size_t head : cut_) {
            const std::int64_t left = heads_[head].end - taken_[head].load(std::memory_order_relaxed);
            if (left > most) {
                most = left;
                fullest = head;
            }
        }
        return most > 0;
    }

    const std::vector<Interval>& heads_;
    std::unique_ptr<std::atomic<std::int64_t>[]> taken_;  ///< the next span of each head
    std::vector<std::size_t> cut_;                        ///< heads of several spans
    std::atomic<std::size_t> next_head_{0};
};

}  // namespace fag::cpu
