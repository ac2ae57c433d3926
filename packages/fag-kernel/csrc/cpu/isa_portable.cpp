/// The portable level: any CPU. On x86-64 the base architecture has 16 vector registers, on aarch64 32.
#define FAG_LEVEL portable
#include "vec_portable-inl.hpp"

#include "level-inl.hpp"

namespace fag::cpu {

#if defined(__aarch64__)
inline constexpr int kRows = 6;
#else
inline constexpr int kRows = 2;
#endif

const Isa isa_portable = portable::make_isa("portable", portable::products_f32<4, kRows>(), {}, {});

}  // namespace fag::cpu
