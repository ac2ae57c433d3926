/// aarch64: thirty-two registers of four floats, any ARMv8-A.
#define FAG_LEVEL neon
#include "vec_neon-inl.hpp"

#include "level-inl.hpp"

namespace fag::cpu {

const Isa isa_neon = neon::make_isa("neon", neon::products_f32<4, 6, true>(),
                                    neon::products_f32<4, 6, true, neon::BinaryExp>(), {});

}  // namespace fag::cpu
