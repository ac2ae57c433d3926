#include "key.hpp"

#include <array>
#include <string>

namespace fag::tiling {

namespace {

struct BitField {
    const char* name;
    std::uint32_t KeyFields::* member;
    unsigned shift;
    unsigned bits;
};

constexpr std::array<BitField, 8> kBitFields = {{
    {"template_id", &KeyFields::template_id, 0, 2},
    {"is_tnd", &KeyFields::is_tnd, 2, 1},
    {"mask", &KeyFields::mask, 3, 2},
    {"is_swizzle", &KeyFields::is_swizzle, 5, 1},
    {"d_align", &KeyFields::d_align, 6, 2},
    {"dv_align", &KeyFields::dv_align, 8, 1},
    {"is_multiblk", &KeyFields::is_multiblk, 9, 1},
    {"needs_zero", &KeyFields::needs_zero, 10, 1},
}};

constexpr auto kBn2gs1s2 = static_cast<std::uint32_t>(Template::bn2gs1s2);
constexpr auto kBn2 = static_cast<std::uint32_t>(Template::bn2);
constexpr auto kD64 = static_cast<std::uint32_t>(DAlign::d64);
constexpr auto kD192 = static_cast<std::uint32_t>(DAlign::d192);
constexpr auto kDv128 = static_cast<std::uint32_t>(DvAlign::dv128);
constexpr auto kDv192 = static_cast<std::uint32_t>(DvAlign::dv192);
constexpr auto kWindow = static_cast<std::uint32_t>(KeyMask::window);

const char* why_invalid_bn2gs1s2(const KeyFields& f) {
    if (f.is_multiblk != 0 || f.needs_zero != 0) return "template BN2GS1S2 has no multi-block form";
    if (f.dv_align == kDv192 && f.d_align != kD192) return "dv_align must not exceed d_align";
    if (f.d_align == kD192 && f.is_tnd != 0) return "head dims above 128 need a dense layout";
    if (f.d_align == kD192 && f.mask != 0 && f.is_swizzle != 0) return "head dims above 128 with a mask have no swizzle";
    return "";
}

const char* why_invalid_bn2(const KeyFields& f) {
    if (f.is_tnd != 0) return "template BN2 needs a dense layout";
    if (f.is_swizzle != 0) return "template BN2 has no swizzle";
    if (f.d_align == kD192) return "template BN2 needs head dims up to 128";
    if (f.needs_zero != 0 && (f.is_multiblk == 0 || f.mask == 0)) return "needs_zero is for masked multi-block only";
    return "";
}

}  // namespace

std::uint64_t encode_key(const KeyFields& fields) {
    std::uint64_t key = 0;
    for (const BitField& field : kBitFields) {
        const std::uint32_t value = fields.*field.member;
        if (value >> field.bits != 0) fail(field.name, "fit " + std::to_string(field.bits) + " bits", value);
        key |= static_cast<std::uint64_t>(value) << field.shift;
    }
    return key;
}

KeyFields decode_key(std::uint64_t key) {
    if (key >= kKeyEnd) {
        throw std::invalid_argument("fag_kernel: tiling_key must be below 2048, got " + std::to_string(key) + ".");
    }
    KeyFields fields;
    for (const BitField& field : kBitFields) {
        fields.*field.member = static_cast<std::uint32_t>(key >> field.shift) & ((1U << field.bits) - 1U);
    }
    return fields;
}

const char* why_invalid(const KeyFields& f) {
    if (f.template_id != kBn2gs1s2 && f.template_id != kBn2) return "template must be BN2GS1S2 or BN2";
    if (f.mask > kWindow) return "mask must be none, causal or window";
    if (f.d_align > kD192) return "head dims end at 192";
    if (f.d_align == kD64 && f.dv_align != kDv128) return "d_align 64 goes with dv_align 128";
    return f.template_id == kBn2 ? why_invalid_bn2(f) : why_invalid_bn2gs1s2(f);
}

bool is_valid(const KeyFields& fields) { return why_invalid(fields)[0] == '\0'; }

std::vector<std::uint64_t> valid_keys() {
    std::vector<std::uint64_t> keys;
    for (std::uint64_t key = 0; key < kKeyEnd; ++key) {
        if (is_valid(decode_key(key))) keys.push_back(key);
    }
    return keys;
}

KeyFields make_key_fields(const Problem& problem, const Facts& facts, const Sparse& sparse, Route route) {
    KeyFields fields;
    fields.template_id = route == Route::bn2gs1s2 ? kBn2gs1s2 : kBn2;
    fields.is_tnd = problem.is_tnd() ? 1 : 0;
    switch (problem.mask_mode) {
        case MaskMode::none: fields.mask = static_cast<std::uint32_t>(KeyMask::none); break;
        case MaskMode::causal: fields.mask = static_cast<std::uint32_t>(KeyMask::causal); break;
        case MaskMode::window: fields.mask = kWindow; break;
    }
    fields.d_align = static_cast<std::uint32_t>(facts.d_align);
    fields.dv_align = static_cast<std::uint32_t>(facts.dv_align);
    fields.is_multiblk = route == Route::bn2_multiblk ? 1 : 0;
    fields.needs_zero = fields.is_multiblk != 0 && fields.mask != 0 && sparse.has_empty_tile_line ? 1 : 0;
    return fields;
}

}  // namespace fag::tiling
