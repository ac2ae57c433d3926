/// Fills the table of one level from the templates; the vector primitives `Vec` were included before.
#pragma once

#include "convert-inl.hpp"
#include "gemm-inl.hpp"
#include "softmax-inl.hpp"

namespace fag::cpu::FAG_LEVEL {

/// width: vectors in a B panel, rows: rows of C held in registers with it.
template <int width, int rows, bool fetches_ahead = false, class Exp = NaturalExp>
constexpr Products products_f32() {
    return {
        .packing = 1,
        .panel = width * Vec::lanes,
        .exp_unit = Exp::kUnit,
        .gemm = gemm<DotF32, width, rows, fetches_ahead>,
        .softmax_grad = softmax_grad_f32<Exp>,
        .softmax_step = softmax_step<StoreF32, Exp>,
        .share_residual = nullptr,
        .pack_columns = {pack_columns_f32<DType::f16>, pack_columns_f32<DType::bf16>, pack_columns_f32<DType::f32>},
        .pack_rows = {pack_rows_f32<DType::f16>, pack_rows_f32<DType::bf16>, pack_rows_f32<DType::f32>},
    };
}

constexpr Isa make_isa(const char* name, const Products& f32, const Products& widened, const Products& bf16x2) {
    return {
        .name = name,
        .f32 = f32,
        .widened = widened,
        .bf16x2 = bf16x2,
        .transpose = transpose,
        .dot_rows = {dot_rows<DType::f16>, dot_rows<DType::bf16>, dot_rows<DType::f32>},
        .store_rows = {store_rows<DType::f16>, store_rows<DType::bf16>, store_rows<DType::f32>},
    };
}

}  // namespace fag::cpu::FAG_LEVEL
