/// Parts of a vector through an array of its lanes, for levels without masked loads and stores.
#pragma once

#include <type_traits>

#include "isa.hpp"

namespace fag::cpu::FAG_LEVEL {

template <DType type>
using Element = std::conditional_t<type == DType::f32, float, std::uint16_t>;

/// The first n lanes (0 < n <= lanes), zeros behind; reads nothing beyond them.
template <class Vec, DType type>
typename Vec::F load_lanes(const void* p, int n) {
    Element<type> lane[Vec::lanes] = {};
    for (int i = 0; i < n; ++i) lane[i] = static_cast<const Element<type>*>(p)[i];
    return Vec::template load_as<type>(lane);
}

/// The same to memory; writes nothing beyond them.
template <class Vec, DType type>
void store_lanes(void* p, typename Vec::F x, int n) {
    Element<type> lane[Vec::lanes];
    Vec::template store_as<type>(lane, x);
    for (int i = 0; i < n; ++i) static_cast<Element<type>*>(p)[i] = lane[i];
}

}  // namespace fag::cpu::FAG_LEVEL
