#include "kernels/mlp/mlp.h"

#include "kernels/common/kernel_test.h"

namespace bough {
namespace {

constexpr double kEps = 1e-6;

struct Mlp {
  Parameter norm, gate_up, down;
  Mlp(int64_t width, int64_t inner, at::ScalarType type)
      : norm(random_parameter({width}, type, 1)),
        gate_up(random_parameter({2 * inner, width}, type, 2)),
        down(random_parameter({width, inner}, type, 3)) {
    // So that gate and up are of order 1, and y is.
    gate_up.value.mul_(1 / std::sqrt(static_cast<double>(width)));
    down.value.mul_(1 / std::sqrt(static_cast<double>(inner)));
  }
  at::Tensor operator()(const at::Tensor& x) const { return mlp(x, {norm, gate_up, down, kEps}); }
};

// The sublayer in tensor ops under libtorch's own autograd, in fp64.
struct Expected {
  at::Tensor y, d_x, d_norm, d_gate_up, d_down;
  Expected(const Mlp& f, const at::Tensor& x, const at::Tensor& d_y) {
    const auto leaf = [](const at::Tensor& t) {
      return t.detach().to(at::kDouble).clone().requires_grad_(true);
    };
    const auto xd = leaf(x), norm = leaf(f.norm.value), gate_up = leaf(f.gate_up.value),
               down = leaf(f.down.value);
    const auto h = xd * (xd.square().mean(-1, true) + kEps).rsqrt() * norm;
    const auto parts = at::mm(h, gate_up.t()).chunk(2, 1);
    y = xd + at::mm(at::silu(parts[0]) * parts[1], down.t());
    y.backward(d_y.to(at::kDouble));
    y = y.detach();
    d_x = xd.grad();
    d_norm = norm.grad();
    d_gate_up = gate_up.grad();
    d_down = down.grad();
  }
};

// A bf16 result passes through h, gate and up, and the activation, each rounded: errors of four roundings and more add up.
double bound(at::ScalarType type) {
  return type == at::kBFloat16 ? 8 * 3.9e-3 : tolerance(type);
}

TEST(Mlp, EqualsTheSublayerInFp64) {
  for (const auto type : kFloatTypes)
    for (const auto& [tokens, width, inner] :
         {std::tuple{1, 5, 3}, {3, 64, 96}, {70, 96, 33}, {300, 64, 160}}) {
      SCOPED_TRACE(testing::Message()
                   << c10::toString(type) << " " << tokens << " x " << width << " x " << inner);
      const Mlp f(width, inner, type);
      auto x = random_tensor({tokens, width}, type, 4).requires_grad_(true);
      const auto d_y = random_tensor({tokens, width}, type, 5);
      const Expected expected(f, x, d_y);
      const auto y = f(x);
      EXPECT_LE(relative_error(y, expected.y), bound(type));
      y.backward(d_y);
      EXPECT_LE(relative_error(x.grad(), expected.d_x), bound(type));
      EXPECT_LE(relative_error(f.norm.main_grad, expected.d_norm), bound(type));
      EXPECT_LE(relative_error(f.gate_up.main_grad, expected.d_gate_up), bound(type));
      EXPECT_LE(relative_error(f.down.main_grad, expected.d_down), bound(type));
    }
}

TEST(Mlp, BackwardIsTheDerivative) {
  Mlp f(6, 5, at::kDouble);
  const auto x = random_tensor({4, 6}, at::kDouble, 4);
  check_gradient([&](const at::Tensor& input) { return f(input); }, x);
  for (Parameter* parameter : {&f.norm, &f.gate_up, &f.down})
    check_parameter_gradient([&] { return f(x.detach().requires_grad_(true)); }, *parameter);
}

TEST(Mlp, WithoutAGraphTheSameBits) {
  for (const auto type : kFloatTypes) {
    const Mlp f(64, 96, type);
    const auto x = random_tensor({40, 64}, type, 4);
    EXPECT_TRUE(at::equal(f(x), f(x.clone().requires_grad_(true))));
  }
}

// Backward works in the memory of what was kept.
TEST(Mlp, ASecondBackwardIsRefused) {
  const Mlp f(8, 4, at::kFloat);
  const auto y = f(random_tensor({3, 8}, at::kFloat, 4).requires_grad_(true));
  const auto d_y = at::ones_like(y);
  y.backward(d_y, /*retain_graph=*/true);
  EXPECT_THROW(y.backward(d_y), std::exception);
}

TEST(Mlp, NoTokens) {
  const Mlp f(8, 4, at::kFloat);
  EXPECT_EQ(f(at::empty({0, 8})).size(0), 0);
}

}  // namespace
}  // namespace bough
