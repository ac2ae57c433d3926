/// AVX-512 F/BW/DQ/VL: thirty-two registers of sixteen floats.
#define FAG_LEVEL avx512
#include "vec_avx512-inl.hpp"

#include "level-inl.hpp"

namespace fag::cpu {

const Isa isa_avx512 = avx512::make_isa("avx512", avx512::products_f32<4, 6>(), {});

}  // namespace fag::cpu
