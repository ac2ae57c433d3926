#include "operands.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace fag::cpu {
namespace {

/// Sets the halves (or the whole) of each word that are not finite to zero.
void clean(Word* words, std::int64_t count, int packing) {
    for (std::int64_t i = 0; i < count; ++i) {
        if (packing == 1) {
            if ((words[i] & 0x7f800000u) == 0x7f800000u) words[i] = 0;
        } else {
            if ((words[i] & 0x7f80u) == 0x7f80u) words[i] &= 0xffff0000u;
            if ((words[i] & 0x7f800000u) == 0x7f800000u) words[i] &= 0x0000ffffu;
        }
    }
}

float half_to_float(std::uint16_t h) {
    const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
    const std::uint32_t exponent = (h >> 10) & 0x1fu;
    const std::uint32_t fraction = h & 0x3ffu;
    if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | fraction << 13);
    const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                          : std::bit_cast<float>((exponent + 112u) << 23 | fraction << 13);
    return std::copysign(magnitude, std::bit_cast<float>(sign));
}

}  // namespace

Layout2D layout_of(std::int64_t cols, const Products& products) {
    Layout2D shape;
    shape.cols = static_cast<int>(cols);
    shape.padded_cols = static_cast<int>(round_up(cols, kAlign));
    shape.words = static_cast<int>(ceil_div(cols, products.packing));
    shape.row_words = static_cast<int>(round_up(shape.words, kAlign));
    return shape;
}

void Packer::rows(const Rows& src, int num_rows, const Layout2D& shape, Word* dst) const {
    const auto pack = products.pack_columns[static_cast<int>(dtype)];
    pack(src.base, src.stride_bytes, num_rows, shape.cols, dst, shape.row_words);
    const std::int64_t missing = round_up(num_rows, kAlign) - num_rows;
    std::memset(dst + static_cast<std::int64_t>(num_rows) * shape.row_words, 0,
                static_cast<std::size_t>(missing * shape.row_words) * sizeof(Word));
}

bool Packer::rows_transposed(const Rows& src, int num_rows, const Layout2D& shape, Word* dst,
                             std::int64_t distance) const {
    const auto pack = products.pack_rows[static_cast<int>(dtype)];
    const bool is_finite = pack(src.base, src.stride_bytes, num_rows, shape.cols, scratch, shape.padded_cols);
    const std::int64_t word_rows = ceil_div(num_rows, products.packing);
    const std::int64_t missing = round_up(word_rows, kAlign) - word_rows;
    std::memset(scratch + word_rows * shape.padded_cols, 0,
                static_cast<std::size_t>(missing * shape.padded_cols) * sizeof(Word));
    if (!is_finite) clean(scratch, word_rows * shape.padded_cols, products.packing);
    isa.transpose(scratch, shape.padded_cols, static_cast<int>(word_rows), shape.cols, dst, distance);
    return is_finite;
}

void Packer::columns(const Rows& src, int num_rows, const Layout2D& shape, Word* dst) const {
    rows(src, num_rows, shape, scratch);
    const int padded_rows = static_cast<int>(round_up(num_rows, kAlign));
    for (int at = 0; at < padded_rows; at += products.panel) {
        const int width = std::min(products.panel, padded_rows - at);
        isa.transpose(scratch + static_cast<std::int64_t>(at) * shape.row_words, shape.row_words, width, shape.words,
                      dst + static_cast<std::int64_t>(at) * shape.row_words, width);
    }
}

bool Packer::reduced_rows(const Rows& src, int num_rows, const Layout2D& shape, Word* dst,
                          std::int64_t depth) const {
    const auto pack = products.pack_rows[static_cast<int>(dtype)];
    const std::int64_t element_bytes = kDTypeBytes[static_cast<int>(dtype)];
    const std::int64_t word_rows = ceil_div(num_rows, products.packing);
    bool is_finite = true;
    for (int at = 0; at < shape.padded_cols; at += products.panel) {
        const int width = std::min(products.panel, shape.padded_cols - at);
        Word* panel = dst + at * depth;
        const bool panel_is_finite = pack(src.base + at * element_bytes, src.stride_bytes, num_rows,
                                          std::min(width, shape.cols - at), panel, width);
        if (!panel_is_finite) clean(panel, word_rows * width, products.packing);
        is_finite = is_finite && panel_is_finite;
    }
    return is_finite;
}

float to_float(DType dtype, const std::byte* element) {
    if (dtype == DType::f32) {
        float value;
        std::memcpy(&value, element, sizeof value);
        return value;
    }
    std::uint16_t bits;
    std::memcpy(&bits, element, sizeof bits);
    return dtype == DType::bf16 ? std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16) : half_to_float(bits);
}

float word_value(Word word, int packing, int index) {
    if (packing == 1) return std::bit_cast<float>(word);
    return std::bit_cast<float>(index == 0 ? word << 16 : word & 0xffff0000u);
}

}  // namespace fag::cpu
