#include "kernels/qk_norm_rotary/qk_norm_rotary.h"

#include "kernels/common/kernel_test.h"

namespace bough {
namespace {

const QkvLayout kLayout{4, 2, 16};

RotaryTable table(int64_t num_tokens, at::ScalarType acc, int64_t head_dim = kLayout.head_dim) {
  return make_rotary_table(at::arange(num_tokens, at::kLong) * 3 + 1, head_dim, 1e4, acc);
}

TEST(QkNormRotary, MatchesReferenceInEveryDtype) {
  for (const auto type : kFloatTypes)
    for (const auto& [with_norm, head_dim, turned, offset] :
         std::vector<std::tuple<bool, int64_t, int64_t, double>>{{false, 16, 16, 0},
                                                                 {true, 16, 16, 0},
                                                                 {false, 64, 64, 0},
                                                                 {true, 64, 64, 1},
                                                                 {true, 96, 96, 0},
                                                                 {true, 128, 128, 1},
                                                                 {true, 256, 256, 1},
                                                                 {false, 128, 96, 0},
                                                                 {true, 64, 32, 1},
                                                                 {false, 128, 0, 0},
                                                                 {true, 64, 0, 1}}) {
      SCOPED_TRACE(testing::Message() << turned << " of " << head_dim << (with_norm ? ", with norms" : ""));
      const NormSettings norm_settings{1e-6, offset};
      const QkvLayout layout{10, 2, head_dim};
      auto qkv = random_tensor({70, layout.width()}, type, 1).requires_grad_(true);
      Parameter q_norm = random_parameter({head_dim}, type, 2),
                k_norm = random_parameter({head_dim}, type, 3);
      const auto rotary = table(70, accumulator_type(type), turned);
      const auto [q, k, v] = qk_norm_rotary(qkv, layout, rotary, with_norm ? &q_norm : nullptr,
                                            with_norm ? &k_norm : nullptr, norm_settings);
      const auto d_q = random_tensor({70, 10, head_dim}, type, 4),
                 d_k = random_tensor({70, 2, head_dim}, type, 5),
                 d_v = random_tensor({70, 2, head_dim}, type, 6);
      torch::autograd::backward({q, k, v}, {d_q, d_k, d_v});
      using Optional = std::optional<at::Tensor>;
      const auto norm = [&](const Parameter& p) { return with_norm ? Optional(p.value) : std::nullopt; };
      const auto [q_ref, k_ref, v_ref] = qk_norm_rotary_forward_reference(
          qkv.detach(), rotary.cos, rotary.sin, norm(q_norm), norm(k_norm), 10, 2, norm_settings);
      EXPECT_CLOSE(q, q_ref, type);
      EXPECT_CLOSE(k, k_ref, type);
      EXPECT_CLOSE(v, v_ref, type);
      auto d_q_norm = at::zeros_like(q_norm.main_grad), d_k_norm = at::zeros_like(k_norm.main_grad);
      const auto d_qkv = qk_norm_rotary_backward_reference(
          d_q, d_k, d_v, qkv.detach(), rotary.cos, rotary.sin, norm(q_norm), norm(k_norm), Optional(d_q_norm),
          Optional(d_k_norm), norm_settings);
      EXPECT_CLOSE(qkv.grad(), d_qkv, type);
      EXPECT_CLOSE(q_norm.main_grad, d_q_norm, type);
      EXPECT_CLOSE(k_norm.main_grad, d_k_norm, type);
    }
}

TEST(QkNormRotary, BackwardIsTheDerivative) {
  Parameter q_norm = random_parameter({16}, at::kDouble, 2), k_norm = random_parameter({16}, at::kDouble, 3);
  for (const int64_t turned : {16, 6, 0}) {
    const auto rotary = table(3, at::kDouble, turned);
    const NormSettings norm{1e-6, turned == 6 ? 1.0 : 0.0};
    const auto function = [&](const at::Tensor& x) {
      const auto [q, k, v] = qk_norm_rotary(x, kLayout, rotary, &q_norm, &k_norm, norm);
      return at::cat({q, k, v}, 1);
    };
    const auto qkv = random_tensor({3, kLayout.width()}, at::kDouble, 1);
    check_gradient(function, qkv);
    const auto again = [&] { return function(qkv.detach().requires_grad_(true)); };
    check_parameter_gradient(again, q_norm);
    check_parameter_gradient(again, k_norm);
  }
}

}  // namespace
}  // namespace bough
