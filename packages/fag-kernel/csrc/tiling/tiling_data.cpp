#include "tiling_data.hpp"

namespace fag::tiling {

namespace {

void set_view(const Problem& p, TilingData& data) {
    switch (p.layout) {
        case Layout::bsnd:
            data.view_d0_q = p.b;
            data.view_d0_kv = p.b;
            data.coef_b0_q = 1;
            data.coef_b0_kv = 1;
            break;
        case Layout::bnsd:
            data.view_d0_q = p.b * p.n1;
            data.view_d0_kv = p.b * p.n2;
            data.coef_b0_q = p.n1;
            data.coef_b0_kv = p.n2;
            break;
        case Layout::tnd:
            data.view_d0_q = 1;
            data.view_d0_kv = 1;
            data.coef_b0_q = 0;
            data.coef_b0_kv = 0;
            break;
    }
    const bool heads_outside = p.layout == Layout::bnsd;
    data.view_d2_q = heads_outside ? 1 : p.n1;
    data.view_d2_kv = heads_outside ? 1 : p.n2;
    data.coef_n0 = heads_outside ? 1 : 0;
    data.coef_n2 = heads_outside ? 0 : 1;
}

}  // namespace

TilingData make_tiling_data(const Problem& p, const Sparse& sparse, double softmax_scale) {
    TilingData data{};
    data.b = p.b;
    data.s1 = p.s1;
    data.s2 = p.s2;
    data.n1 = p.n1;
    data.n2 = p.n2;
    data.d = p.d;
    data.dv = p.dv;
    data.scale_value = static_cast<float>(softmax_scale);
    data.g_size = p.g;
    set_view(p, data);
    data.mask_mode = static_cast<std::int64_t>(p.mask_mode);
    data.win_left = p.win_left;
    data.win_right = p.win_right;
    data.sparse_type = static_cast<std::int64_t>(sparse.type);
    data.s1_token = sparse.s1_token;
    data.s2_token = sparse.s2_token;
    data.total_per_batch_num = sparse.total_per_batch_num;
    return data;
}

}  // namespace fag::tiling
