/// Places of the words this part reads, and checked access to them. See spec: metadata layout.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "metadata.hpp"

namespace fag::cpu {

namespace words {
inline constexpr std::int64_t kTile = 128;
inline constexpr std::int64_t kMaxTiles = std::numeric_limits<std::int32_t>::max();

inline constexpr std::int64_t kHeadWords = 16;
inline constexpr std::int64_t kRowWords = 16;
inline constexpr std::int64_t kHeadSectionNum = 0;
inline constexpr std::int64_t kHeadM = 2;
inline constexpr std::int64_t kHeadK = 3;
inline constexpr std::int64_t kHeadAic = 4;
inline constexpr std::int64_t kHeadAiv = 5;
inline constexpr std::int64_t kHeadGradOffset = 7;
inline constexpr std::int64_t kHeadBatchSlots = 11;

// Of the FAG block; from kGradStart on arrays of one word per cube slot.
inline constexpr std::int64_t kGradUsedCubes = 1;
inline constexpr std::int64_t kGradO1 = 3;
inline constexpr std::int64_t kGradO2 = 4;
inline constexpr std::int64_t kGradStart = 8;
/// Behind the arrays: mask_mode, win_left, win_right, s1, s2.
inline constexpr std::int64_t grad_s1(std::int64_t slots) { return kGradStart + 3 * slots + 3; }
inline constexpr std::int64_t grad_words(std::int64_t slots) { return 8 + 3 * slots + 5 + 3 + 4 * 2 * slots; }
}  // namespace words

/// A part of the tensor that is known to lie inside it.
class Words {
public:
    Words(const Metadata& metadata, std::int64_t offset, std::int64_t count, const std::string& field)
        : words_(metadata.words + offset) {
        if (offset > metadata.size || count > metadata.size - offset) {
            throw std::invalid_argument("metadata: " + field + " must lie inside the tensor of " +
                                        std::to_string(metadata.size) + " words, got words " + std::to_string(offset) +
                                        " to " + std::to_string(offset + count) + ".");
        }
    }

    std::int32_t operator[](std::int64_t i) const { return words_[i]; }

    std::int64_t at_least(const std::string& field, std::int64_t i, std::int64_t low) const {
        if (words_[i] < low) refuse(field, "be at least " + std::to_string(low), words_[i]);
        return words_[i];
    }

    void expect(const std::string& field, std::int64_t i, std::int64_t value) const {
        if (words_[i] != value) refuse(field, "be " + std::to_string(value), words_[i]);
    }

    [[noreturn]] static void refuse(const std::string& field, const std::string& rule, std::int64_t value) {
        throw std::invalid_argument("metadata: " + field + " must " + rule + ", got " + std::to_string(value) + ".");
    }

private:
    const std::int32_t* words_;
};

}  // namespace fag::cpu
