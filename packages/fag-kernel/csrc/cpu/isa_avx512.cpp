/// AVX-512 F/BW/DQ/VL: thirty-two registers of sixteen floats.
#define FAG_LEVEL avx512
// gcc 12 takes the deliberately undefined operands inside its own intrinsics for ours (gcc bug 105593).
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include "vec_avx512-inl.hpp"

#include "level-inl.hpp"

namespace fag::cpu {

const Isa isa_avx512 = avx512::make_isa("avx512", avx512::products_f32<4, 6>(), {}, {});

}  // namespace fag::cpu
