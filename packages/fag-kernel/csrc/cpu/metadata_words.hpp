/// Checked access to the words of a metadata tensor; their places are in fag_metadata/layout.h.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "metadata.hpp"

namespace fag::cpu {

/// A part of the tensor that is known to lie inside it.
class Words {
public:
    /// Throws std::invalid_argument unless words [offset, offset + count) lie inside the tensor; 0 <= offset, count.
    Words(const Metadata& metadata, std::int64_t offset, std::int64_t count, const std::string& field) {
        if (offset > metadata.size || count > metadata.size - offset) {
            refuse(field, "lie inside the tensor of " + std::to_string(metadata.size) + " words",
                   "words " + std::to_string(offset) + " to " + std::to_string(offset + count));
        }
        words_ = metadata.words + offset;
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
        refuse(field, rule, std::to_string(value));
    }

    [[noreturn]] static void refuse(const std::string& field, const std::string& rule, const std::string& value) {
        throw std::invalid_argument("metadata: " + field + " must " + rule + ", got " + value + ".");
    }

private:
    const std::int32_t* words_ = nullptr;
};

/// "name[index]".
inline std::string indexed(const std::string& name, std::int64_t index) {
    std::string text = name;
    text += '[';
    text += std::to_string(index);
    text += ']';
    return text;
}

}  // namespace fag::cpu
