/// aarch64 with FEAT_BF16 (ARMv8.6, optional from 8.2 on); float16 and float32 run as on the neon level.
#define FAG_LEVEL neon_bf16
#include "vec_neon-inl.hpp"

#include "bf16x2_neon-inl.hpp"

#include "bf16x2-inl.hpp"
#include "level-inl.hpp"

namespace fag::cpu {

const Isa isa_neon_bf16 = neon_bf16::make_isa("neon_bf16", neon_bf16::products_f32<4, 6, true>(),
                                              neon_bf16::products_f32<4, 6, true, neon_bf16::BinaryExp>(),
                                              neon_bf16::products_bf16x2<4, 6, true>());

}  // namespace fag::cpu
