/// AVX-512 with the bfloat16 dot product, but products of bfloat16 on AMX tiles.
#define FAG_LEVEL amx_bf16
// gcc 12 takes the deliberately undefined operands inside its own intrinsics for ours (gcc bug 105593).
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include "vec_avx512-inl.hpp"

#include "bf16x2_avx512-inl.hpp"

#include "bf16x2-inl.hpp"
#include "gemm_amx-inl.hpp"
#include "level-inl.hpp"

namespace fag::cpu {
namespace amx_bf16 {

constexpr Products products_on_tiles() {
    Products products = products_bf16x2<4, 6>();
    products.gemm = gemm_tiles;
    return products;
}

}  // namespace amx_bf16

const Isa isa_amx_bf16 =
    amx_bf16::make_isa("amx_bf16", amx_bf16::products_f32<4, 6>(), {}, amx_bf16::products_on_tiles());

}  // namespace fag::cpu
