/// AVX2 + FMA + F16C: sixteen registers of eight floats.
#define FAG_LEVEL avx2
#include "vec_avx2-inl.hpp"

#include "level-inl.hpp"

namespace fag::cpu {

const Isa isa_avx2 = avx2::make_isa("avx2", avx2::products_f32<2, 6, true>(),
                                    avx2::products_f32<2, 6, true, avx2::BinaryExp>(), {});

}  // namespace fag::cpu
