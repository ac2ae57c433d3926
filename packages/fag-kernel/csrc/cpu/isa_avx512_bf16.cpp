/// AVX-512 with the bfloat16 dot product; float16 and float32 run as on the avx512 level.
#define FAG_LEVEL avx512_bf16
// gcc 12 takes the deliberately undefined operands inside its own intrinsics for ours (gcc bug 105593).
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include "vec_avx512-inl.hpp"

#include "bf16x2_avx512-inl.hpp"

#include "bf16x2-inl.hpp"
#include "level-inl.hpp"

namespace fag::cpu {

const Isa isa_avx512_bf16 = avx512_bf16::make_isa("avx512_bf16", avx512_bf16::products_f32<4, 6>(), {},
                                                  avx512_bf16::products_bf16x2<4, 6>());

}  // namespace fag::cpu
