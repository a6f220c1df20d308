#include "kernels/qk_norm_rotary/qk_norm_rotary.h"

#include "kernels/common/device_test.h"
#include "kernels/common/kernel_test.h"

namespace bough {
namespace {

const QkvLayout kLayout{4, 2, 16};

RotaryTable table(int64_t num_tokens, at::ScalarType acc, int64_t head_dim = kLayout.head_dim) {
  return make_rotary_table(at::arange(num_tokens, at::kLong) * 3 + 1, head_dim, 1e4, acc);
}

struct Case {
  QkvLayout layout;
  int64_t num_tokens;
  bool with_norm;
  int64_t turned;  // elements of a head that are rotated
  double offset;   // weight_offset
};

std::vector<Case> cases() {
  std::vector<Case> result = {
      {{10, 2, 16}, 70, false, 16, 0},  {{10, 2, 16}, 70, true, 16, 0},   {{10, 2, 64}, 70, false, 64, 0},
      {{10, 2, 64}, 70, true, 64, 1},   {{10, 2, 96}, 70, true, 96, 0},   {{10, 2, 128}, 70, true, 128, 1},
      {{10, 2, 256}, 70, true, 256, 1}, {{10, 2, 128}, 70, false, 96, 0}, {{10, 2, 64}, 70, true, 32, 1},
      {{10, 2, 128}, 70, false, 0, 0},  {{10, 2, 64}, 70, true, 0, 1}};
  for (const bool with_norm : {false, true}) {
    result.push_back({{4, 2, 16}, 70, with_norm, 16, 0});
    result.push_back({{3, 1, 6}, 5, with_norm, 6, 0});         // halves of odd size
    result.push_back({{16, 8, 128}, 600, with_norm, 128, 0});  // all parts of the first stage on CUDA
    result.push_back({{2, 1, 1024}, 33, with_norm, 1024, 0});  // fewer warps per block
    for (const int64_t turned : {96, 94, 0}) result.push_back({{4, 2, 128}, 70, with_norm, turned, 1});
  }
  return result;
}

class QkNormRotaryOn : public OnDevice {};
BOUGH_ON_DEVICES(QkNormRotaryOn);

TEST_P(QkNormRotaryOn, MatchesReferenceInEveryDtype) {
  for (const auto type : kFloatTypes)
    for (const auto& [layout, num_tokens, with_norm, turned, offset] : cases()) {
      const int64_t n = layout.num_heads, g = layout.num_kv_heads, h = layout.head_dim;
      SCOPED_TRACE(testing::Message() << turned << " of " << h << (with_norm ? ", with norms" : ""));
      const NormSettings norm_settings{1e-6, offset};
      const auto qkv = random_tensor({num_tokens, layout.width()}, type, 1);
      const Parameter q_norm = random_parameter({h}, type, 2), k_norm = random_parameter({h}, type, 3);
      const auto rotary = table(num_tokens, accumulator_type(type), turned);
      const auto d_q = random_tensor({num_tokens, n, h}, type, 4),
                 d_k = random_tensor({num_tokens, g, h}, type, 5),
                 d_v = random_tensor({num_tokens, g, h}, type, 6);
      using Optional = std::optional<at::Tensor>;
      const auto norm = [with = with_norm](const Parameter& p) {
        return with ? Optional(p.value) : std::nullopt;
      };
      const auto [q_ref, k_ref, v_ref] = qk_norm_rotary_forward_reference(
          qkv, rotary.cos, rotary.sin, norm(q_norm), norm(k_norm), n, g, norm_settings);
      auto d_q_norm = at::zeros_like(q_norm.main_grad), d_k_norm = at::zeros_like(k_norm.main_grad);
      const auto d_qkv = qk_norm_rotary_backward_reference(d_q, d_k, d_v, qkv, rotary.cos, rotary.sin,
                                                           norm(q_norm), norm(k_norm), Optional(d_q_norm),
                                                           Optional(d_k_norm), norm_settings);

      const auto copy = [this](const auto& x) { return copy_to(device(), x); };
      const Parameter q_weight = copy(q_norm), k_weight = copy(k_norm);
      auto input = copy(qkv).requires_grad_(true);
      const auto [q, k, v] =
          qk_norm_rotary(input, layout, {copy(rotary.cos), copy(rotary.sin)}, with_norm ? &q_weight : nullptr,
                         with_norm ? &k_weight : nullptr, norm_settings);
      torch::autograd::backward({q, k, v}, {copy(d_q), copy(d_k), copy(d_v)});
      EXPECT_CLOSE(q.cpu(), q_ref, type);
      EXPECT_CLOSE(k.cpu(), k_ref, type);
      EXPECT_CLOSE(v.cpu(), v_ref, type);
      EXPECT_CLOSE(input.grad().cpu(), d_qkv, type);
      EXPECT_CLOSE(q_weight.main_grad.cpu(), d_q_norm, type);
      EXPECT_CLOSE(k_weight.main_grad.cpu(), d_k_norm, type);
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

BOUGH_HAS_CUDA_KERNELS(QkNormRotary, "qk_norm_rotary_forward", "qk_norm_rotary_backward")

}  // namespace
}  // namespace bough
