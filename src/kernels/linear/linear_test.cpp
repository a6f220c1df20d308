#include "kernels/linear/linear.h"

#include "kernels/common/kernel_test.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/rms_norm/rms_norm.h"

namespace bough {
namespace {

TEST(Linear, BackwardIsTheDerivative) {
  Parameter weight = random_parameter({5, 4}, at::kDouble, 1), bias = random_parameter({5}, at::kDouble, 2);
  const auto x = random_tensor({3, 4}, at::kDouble, 3);
  check_gradient([&](const at::Tensor& input) { return linear(input, weight, &bias); }, x);
  const auto function = [&] { return linear(x.detach().requires_grad_(true), weight, &bias); };
  check_parameter_gradient(function, weight);
  check_parameter_gradient(function, bias);
}

TEST(Linear, AddsAResidualAndPassesItsGradientOn) {
  Parameter weight = random_parameter({5, 4}, at::kDouble, 1), bias = random_parameter({5}, at::kDouble, 2);
  const auto x = random_tensor({3, 4}, at::kDouble, 3), r = random_tensor({3, 5}, at::kDouble, 4);
  EXPECT_CLOSE(linear(x, weight, &bias, false, r), linear(x, weight, &bias) + r, at::kDouble);
  check_gradient([&](const at::Tensor& input) { return linear(input, weight, &bias, false, r); }, x);
  check_gradient([&](const at::Tensor& residual) { return linear(x, weight, &bias, false, residual); }, r);
}

// Returns a frozen weight of `rows` rows with two rank-2 adapters: one on the first two rows, one on all rows
// from the fourth on.
Parameter adapted_weight(int64_t rows, int64_t columns, at::ScalarType type, uint64_t seed) {
  Parameter weight = random_parameter({rows, columns}, type, seed);
  weight.main_grad.reset();
  Parameter a = random_parameter({4, columns}, type, seed + 10);
  Parameter b = random_parameter({2 + rows - 3, 2}, type, seed + 11);
  a.parts = {{"a0", 0, 2}, {"a1", 2, 4}};
  b.parts = {{"b0", 0, 2}, {"b1", 2, 2 + rows - 3}};
  weight.adapter = {a, b};
  weight.adapter_slices = {{0, 2}, {3, rows}};
  weight.adapter_scale = 0.75;
  return weight;
}

// Returns W with the adapters added, as a plain weight.
Parameter merged_weight(const Parameter& weight) {
  Parameter merged{weight.value.clone()};
  const Parameter &a = weight.adapter[0], &b = weight.adapter[1];
  for (size_t i = 0; i < weight.adapter_slices.size(); ++i) {
    const auto& slice = weight.adapter_slices[i];
    merged.value.narrow(0, slice.begin, slice.end - slice.begin)
        .add_(at::mm(b.part_value(b.parts[i]), a.part_value(a.parts[i])) * weight.adapter_scale);
  }
  return merged;
}

TEST(Linear, AnAdapterIsATermOfTheProduct) {
  Parameter weight = adapted_weight(5, 4, at::kDouble, 1), bias = random_parameter({5}, at::kDouble, 2);
  bias.main_grad.reset();  // also frozen
  const auto x = random_tensor({3, 4}, at::kDouble, 3);
  EXPECT_CLOSE(linear(x, weight, &bias), linear(x, merged_weight(weight), &bias), at::kDouble);
  check_gradient([&](const at::Tensor& input) { return linear(input, weight, &bias); }, x);
  const auto function = [&] { return linear(x.detach().requires_grad_(true), weight, &bias); };
  for (Parameter& parameter : weight.adapter) check_parameter_gradient(function, parameter);
  EXPECT_FALSE(weight.main_grad.defined());
}

TEST(NormLinear, AnAdapterIsATermOfTheProduct) {
  Parameter norm = random_parameter({4}, at::kDouble, 5), weight = adapted_weight(5, 4, at::kDouble, 1);
  norm.main_grad.reset();
  const auto x = random_tensor({3, 4}, at::kDouble, 3);
  const auto f = [&](const at::Tensor& input) { return norm_linear(input, norm, {1e-6}, weight).y_RO; };
  EXPECT_CLOSE(f(x), norm_linear(x, norm, {1e-6}, merged_weight(weight)).y_RO, at::kDouble);
  check_gradient(f, x);
  for (Parameter& parameter : weight.adapter)
    check_parameter_gradient([&] { return f(x.detach().requires_grad_(true)); }, parameter);
}

TEST(Mlp, AdaptersAreTermsOfTheProducts) {
  Parameter norm = random_parameter({6}, at::kDouble, 5);
  norm.main_grad.reset();
  Parameter gate_up = adapted_weight(10, 6, at::kDouble, 1), down = adapted_weight(6, 5, at::kDouble, 2);
  const Parameter merged_gate_up = merged_weight(gate_up), merged_down = merged_weight(down);
  const auto x = random_tensor({3, 6}, at::kDouble, 3);
  for (const Parameter* normed :
       {static_cast<const Parameter*>(&norm), static_cast<const Parameter*>(nullptr)}) {
    const auto f = [&](const at::Tensor& input) { return mlp(input, {normed, gate_up, down, {1e-6}}); };
    EXPECT_CLOSE(f(x), mlp(x, {normed, merged_gate_up, merged_down, {1e-6}}), at::kDouble);
    check_gradient(f, x);
    for (Parameter* weight : {&gate_up, &down})
      for (Parameter& parameter : weight->adapter)
        check_parameter_gradient([&] { return f(x.detach().requires_grad_(true)); }, parameter);
  }
}

// Each of the 64 additions is 1/256 of the first one. A bf16 sum would not change.
TEST(Linear, Bf16GradientsAccumulateInFp32) {
  Parameter weight = random_parameter({1, 1}, at::kBFloat16, 1);
  const auto backward = [&](double d_y) {
    auto x = at::ones({1, 1}, at::kBFloat16).requires_grad_(true);
    linear(x, weight).backward(at::full({1, 1}, d_y, at::kBFloat16));
  };
  backward(1.0);
  for (int i = 0; i < 64; ++i) backward(1.0 / 512);
  EXPECT_FLOAT_EQ(weight.main_grad.item<float>(), 1.125f);
}

constexpr double kEps = 1e-6;

// Few rows are added by add_adapter_product_(), more by one product after the other.
TEST(Linear, AnAdaptersTermHasTheBitsOfItsProducts) {
  for (const auto& [outputs, inputs, rank] : {std::tuple{70, 40, 2}, {200, 96, 32}, {33, 1100, 8}}) {
    Parameter weight = random_parameter({outputs, inputs}, at::kBFloat16, 1);
    Parameter a = random_parameter({2 * rank, inputs}, at::kBFloat16, 2);
    Parameter b = random_parameter({outputs - 1, rank}, at::kBFloat16, 3);
    a.parts = {{"a0", 0, rank}, {"a1", rank, 2 * rank}};
    b.parts = {{"b0", 0, 13}, {"b1", 13, outputs - 1}};
    weight.adapter = {a, b};
    weight.adapter_slices = {{0, 13}, {14, outputs}};
    weight.adapter_scale = 0.75;
    for (const int64_t rows : {1, 3, 5, 8, 33, 70, 300})
      for (const bool batch_invariant : {false, true}) {
        if (batch_invariant && !has_tiles(at::kBFloat16)) continue;
        SCOPED_TRACE(testing::Message() << rows << " rows of " << inputs << ", " << batch_invariant);
        const auto x = random_tensor({rows, inputs}, at::kBFloat16, 4);
        const auto product = batch_invariant ? batch_invariant_product : matrix_product;
        const auto expected = product(x, weight.value.t(), std::nullopt, std::nullopt);
        const auto u = product(x, a.value.t(), std::nullopt, std::nullopt).mul_(weight.adapter_scale);
        for (size_t i = 0; i < 2; ++i) {
          const auto [begin, end] = weight.adapter_slices[i];
          const auto from = static_cast<int64_t>(i) * rank;
          add_matrix_product_(expected.narrow(1, begin, end - begin), u.narrow(1, from, rank),
                              b.part_value(b.parts[i]).t(), batch_invariant);
        }
        EXPECT_TRUE(at::equal(linear_forward(x, weight, nullptr, batch_invariant), expected));
      }
  }
}

struct Parts {
  Parameter norm, weight, bias;
  Parts(int64_t width, int64_t outputs, at::ScalarType type)
      : norm(random_parameter({width}, type, 1)),
        weight(random_parameter({outputs, width}, type, 2)),
        bias(random_parameter({outputs}, type, 3)) {}
  NormLinearOutput operator()(const at::Tensor& x) const { return norm_linear(x, norm, kEps, weight, &bias); }
};

// Values of bf16, so that fp64 has the same factors. The parts of a split gradient leave 2^-17 of an element.
TEST(Linear, AnFp32ResultOfBf16FactorsIsNotRoundedToBf16) {
  Parameter weight = adapted_weight(70, 40, at::kBFloat16, 1);
  weight.main_grad = at::zeros({70, 40}, at::kFloat);
  for (Parameter& parameter : weight.adapter)
    parameter.main_grad = at::zeros(parameter.value.sizes(), at::kFloat);
  const auto x = random_tensor({33, 40}, at::kBFloat16, 3);
  const auto d_y = random_tensor({33, 70}, at::kFloat, 4);
  const auto wide = [](const at::Tensor& tensor) { return tensor.to(at::kDouble); };
  const auto y = linear_forward(x, weight, nullptr, false, std::nullopt, at::kFloat);
  const auto d_x = linear_backward(d_y, x, weight);
  ASSERT_TRUE(y.scalar_type() == at::kFloat && d_x.scalar_type() == at::kFloat);
  const auto error = [](const at::Tensor& got, const at::Tensor& expected) {
    return ((got.to(at::kDouble) - expected).abs().max() / expected.abs().max()).item<double>();
  };
  // Rows 2 is without an adapter, whose inner product is rounded to bf16.
  const auto expected_y = at::mm(wide(x), wide(weight.value).t());
  EXPECT_LT(error(y.select(1, 2), expected_y.select(1, 2)), 1e-6);
  EXPECT_GT(error(linear_forward(x, weight, nullptr, false).select(1, 2), expected_y.select(1, 2)), 1e-4);
  EXPECT_LT(error(weight.main_grad, at::mm(wide(d_y).t(), wide(x))), 2e-5);

  weight.adapter.clear();
  weight.adapter_slices.clear();
  const auto plain_d_x = linear_backward(d_y, x, weight);
  EXPECT_LT(error(plain_d_x, at::mm(wide(d_y), wide(weight.value))), 2e-5);
  EXPECT_GT(error(linear_backward(d_y.to(at::kBFloat16), x, weight), at::mm(wide(d_y), wide(weight.value))),
            1e-4);
}

// The adapter's terms, against fp64, within the rounding of the inner products to bf16.
TEST(Linear, AnFp32ResultHasTheTermsOfAdapters) {
  Parameter weight = adapted_weight(70, 40, at::kBFloat16, 1);
  Parameter exact{weight.value.to(at::kDouble)};
  exact.adapter = weight.adapter;
  exact.adapter_slices = weight.adapter_slices;
  exact.adapter_scale = weight.adapter_scale;
  for (Parameter& parameter : exact.adapter) {
    parameter.value = parameter.value.to(at::kDouble);
    parameter.main_grad = at::zeros(parameter.value.sizes(), at::kDouble);
  }
  for (Parameter& parameter : weight.adapter)
    parameter.main_grad = at::zeros(parameter.value.sizes(), at::kFloat);
  const auto x = random_tensor({33, 40}, at::kBFloat16, 3);
  const auto d_y = random_tensor({33, 70}, at::kFloat, 4);
  const auto error = [](const at::Tensor& got, const at::Tensor& expected) {
    return ((got.to(at::kDouble) - expected).abs().max() / expected.abs().max()).item<double>();
  };
  EXPECT_LT(error(linear_forward(x, weight, nullptr, false, std::nullopt, at::kFloat),
                  linear_forward(x.to(at::kDouble), exact, nullptr, false)),
            1e-2);
  EXPECT_LT(
      error(linear_backward(d_y, x, weight), linear_backward(d_y.to(at::kDouble), x.to(at::kDouble), exact)),
      1e-2);
  for (size_t i = 0; i < 2; ++i)
    EXPECT_LT(error(weight.adapter[i].main_grad, exact.adapter[i].main_grad), 1e-2) << i;
}

TEST(NormLinear, IsTheTwoOpsWithOneBackward) {
  for (const auto type : kFloatTypes)
    for (const auto& [rows, width, outputs] : {std::tuple{1, 5, 3}, {70, 64, 96}, {130, 96, 33}}) {
      SCOPED_TRACE(testing::Message() << c10::toString(type) << " " << rows << " rows of " << width);
      const Parts one(width, outputs, type), two(width, outputs, type);
      auto x = random_tensor({rows, width}, type, 4).requires_grad_(true);
      auto x_two = x.detach().clone().requires_grad_(true);
      const auto d_y = random_tensor({rows, outputs}, type, 5), d_r = random_tensor({rows, width}, type, 6);
      const auto [y, residual] = one(x);
      const auto y_two = linear(rms_norm(x_two, two.norm, kEps), two.weight, &two.bias);
      EXPECT_TRUE(at::equal(y, y_two));
      EXPECT_TRUE(at::equal(residual, x));
      torch::autograd::backward({y, residual}, {d_y, d_r});
      torch::autograd::backward({y_two, x_two}, {d_y, d_r});
      EXPECT_CLOSE(x.grad(), x_two.grad(), type);
      EXPECT_CLOSE(one.norm.main_grad, two.norm.main_grad, type);
      EXPECT_TRUE(at::equal(one.weight.main_grad, two.weight.main_grad)) << "h again has other bits";
      EXPECT_CLOSE(one.bias.main_grad, two.bias.main_grad, type);
    }
}

TEST(NormLinear, BackwardIsTheDerivative) {
  Parts f(6, 5, at::kDouble);
  const auto x = random_tensor({4, 6}, at::kDouble, 4);
  check_gradient([&](const at::Tensor& input) { return f(input).y_RO; }, x);
  check_gradient(
      [&](const at::Tensor& input) {
        const auto [y, residual] = f(input);
        return at::cat({y, residual}, 1);
      },
      x);
  check_gradient([&](const at::Tensor& input) { return f(input).residual_RD * 2; }, x);
  for (Parameter* parameter : {&f.norm, &f.weight, &f.bias})
    check_parameter_gradient([&] { return f(x.detach().requires_grad_(true)).y_RO; }, *parameter);
}

struct Mlp {
  Parameter norm, gate_up, down;
  Mlp(int64_t width, int64_t inner, at::ScalarType type)
      : norm(random_parameter({width}, type, 1)),
        gate_up(random_parameter({2 * inner, width}, type, 2)),
        down(random_parameter({width, inner}, type, 3)) {
    // Weights are scaled so that gate, up and y are of order 1.
    gate_up.value.mul_(1 / std::sqrt(static_cast<double>(width)));
    down.value.mul_(1 / std::sqrt(static_cast<double>(inner)));
  }
  at::Tensor operator()(const at::Tensor& x) const { return mlp(x, {&norm, gate_up, down, kEps}); }
};

// The expected results of the sublayer, computed in fp64 with tensor ops and libtorch's autograd.
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

// h, gate and up, and the activation are rounded to bf16 on the way to the result. The errors of four and
// more roundings add up.
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

// A variant has features of other model families: no norm before, no residual, biases, GeGLU, norm weights
// around 1.
struct MlpVariant {
  bool norm, residual, bias, gelu;
};

TEST(Mlp, VariantsOfFamilies) {
  for (const auto type : kFloatTypes)
    for (const auto& v : {MlpVariant{false, false, false, false},
                          {true, false, false, true},
                          {true, true, true, false},
                          {false, true, true, true}}) {
      SCOPED_TRACE(testing::Message() << c10::toString(type) << " norm " << v.norm << " residual "
                                      << v.residual << " bias " << v.bias << " gelu " << v.gelu);
      const int64_t width = 64, inner = 96;
      Mlp f(width, inner, type);
      Parameter gate_up_bias = random_parameter({2 * inner}, type, 6),
                down_bias = random_parameter({width}, type, 7);
      const double offset = v.gelu ? 1 : 0;
      const auto run = [&](const at::Tensor& x) {
        return mlp(x, {.norm = v.norm ? &f.norm : nullptr,
                       .gate_up = f.gate_up,
                       .down = f.down,
                       .norm_settings = {kEps, offset},
                       .activation = v.gelu ? GateActivation::kGeluTanh : GateActivation::kSilu,
                       .gate_up_bias = v.bias ? &gate_up_bias : nullptr,
                       .down_bias = v.bias ? &down_bias : nullptr,
                       .residual = v.residual});
      };
      const auto leaf = [](const at::Tensor& t) {
        return t.detach().to(at::kDouble).clone().requires_grad_(true);
      };
      auto x = random_tensor({70, width}, type, 4).requires_grad_(true);
      const auto d_y = random_tensor({70, width}, type, 5);
      const auto xd = leaf(x), norm = leaf(f.norm.value), gate_up = leaf(f.gate_up.value),
                 down = leaf(f.down.value), b = leaf(gate_up_bias.value), c = leaf(down_bias.value);
      const auto h = v.norm ? xd * (xd.square().mean(-1, true) + kEps).rsqrt() * (norm + offset) : xd;
      auto products = at::mm(h, gate_up.t());
      if (v.bias) products = products + b;
      const auto parts = products.chunk(2, 1);
      auto expected = at::mm((v.gelu ? at::gelu(parts[0], "tanh") : at::silu(parts[0])) * parts[1], down.t());
      if (v.bias) expected = expected + c;
      if (v.residual) expected = expected + xd;
      expected.backward(d_y.to(at::kDouble));
      const auto y = run(x);
      EXPECT_LE(relative_error(y, expected), bound(type));
      y.backward(d_y);
      EXPECT_LE(relative_error(x.grad(), xd.grad()), bound(type));
      EXPECT_LE(relative_error(f.gate_up.main_grad, gate_up.grad()), bound(type));
      EXPECT_LE(relative_error(f.down.main_grad, down.grad()), bound(type));
      if (v.norm) {
        EXPECT_LE(relative_error(f.norm.main_grad, norm.grad()), bound(type));
      }
      if (!v.bias) continue;
      EXPECT_LE(relative_error(gate_up_bias.main_grad, b.grad()), bound(type));
      EXPECT_LE(relative_error(down_bias.main_grad, c.grad()), bound(type));
    }
}

TEST(Mlp, GivesTheSameBitsWithoutAutograd) {
  for (const auto type : kFloatTypes) {
    const Mlp f(64, 96, type);
    const auto x = random_tensor({40, 64}, type, 4);
    EXPECT_TRUE(at::equal(f(x), f(x.clone().requires_grad_(true))));
  }
}

// Backward overwrites the saved tensors, so a second backward is refused.
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
