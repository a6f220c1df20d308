
#include <ATen/ATen.h>

#include <utility>

#include "kernels/common/closeness.h"
#include "kernels/common/cuda_library.h"
#include "kernels/log_prob/log_prob.h"
#include "kernels/parameter.h"
#include "kernels/quantized_product/quantized_product.h"
#include "kernels/self_test/op_check.h"
#include "kernels/swiglu/swiglu.h"

namespace bough {

namespace {
constexpr at::ScalarType kTestedTypes[] = {at::kFloat, at::kBFloat16, at::kDouble};
constexpr const char* kReference = "its reference in tensor ops";
const c10::IValue kNone;

// Rows and widths: several thread blocks, packs of 16 bytes and none, more rows than a block has warps.
const std::vector<std::pair<int64_t, int64_t>> kTestedRows = {{3, 7}, {70, 512}, {300, 130}};

SelfTest op_test(const char* op, std::function<void(at::Device, at::ScalarType)> run) {
  return {op, {{op, kReference}}, [run](at::Device device) {
            for (const auto type : kTestedTypes) run(device, type);
          }};
}

at::Tensor labels_below(int64_t width, int64_t count) {
  return (at::arange(count, at::kLong) * 7 + 3).remainder(width);
}

SelfTest rms_norm_forward_test() {
  return op_test("rms_norm_forward", [](at::Device device, at::ScalarType type) {
    for (const auto& [rows, width] : kTestedRows)
      check_op("rms_norm_forward",
               {random_tensor({rows, width}, type, 1), random_tensor({width}, type, 2), 1e-6, 0.0}, device);
  });
}

SelfTest rms_norm_backward_test() {
  return op_test("rms_norm_backward", [](at::Device device, at::ScalarType type) {
    const auto acc = accumulator_type(type);
    for (const auto& [rows, width] : kTestedRows) {
      const auto x = random_tensor({rows, width}, type, 1), weight = random_tensor({width}, type, 2),
                 d_y = random_tensor({rows, width}, type, 3),
                 residual = random_tensor({rows, width}, type, 4);
      const auto rstd = x.to(at::kDouble).square().mean(-1).add(1e-6).rsqrt().to(acc);
      check_op("rms_norm_backward",
               {d_y, x, weight, rstd, residual, random_tensor({width}, acc, 5), at::zeros_like(x), 0.0},
               device);
      check_op("rms_norm_backward", {d_y, x, weight, rstd, kNone, at::zeros({width}, acc), kNone, 1.0},
               device);
    }
  });
}

SelfTest swiglu_forward_test() {
  return op_test("swiglu_forward", [](at::Device device, at::ScalarType type) {
    for (const auto activation : {GateActivation::kSilu, GateActivation::kGeluTanh})
      for (const auto& [rows, width] : kTestedRows)
        check_op("swiglu_forward",
                 {random_tensor({rows, 2 * width}, type, 1), static_cast<int64_t>(activation)}, device);
  });
}

SelfTest swiglu_backward_test() {
  return op_test("swiglu_backward", [](at::Device device, at::ScalarType type) {
    for (const auto activation : {GateActivation::kSilu, GateActivation::kGeluTanh})
      for (const auto& [rows, width] : kTestedRows) {
        const auto d_y = random_tensor({rows, width}, type, 1),
                   gate_up = random_tensor({rows, 2 * width}, type, 2);
        check_op(
            "swiglu_backward",
            {d_y, gate_up, at::zeros_like(d_y), at::zeros_like(gate_up), static_cast<int64_t>(activation)},
            device);
      }
  });
}

SelfTest adamw_test() {
  return op_test("adamw_", [](at::Device device, at::ScalarType type) {
    const auto acc = accumulator_type(type);
    for (const int64_t size : {5, 5000}) {
      const auto master = random_tensor({size}, acc, 1);
      check_op("adamw_",
               {master.to(type), type == acc ? kNone : c10::IValue(master), random_tensor({size}, acc, 2),
                random_tensor({size}, acc, 3).square(), random_tensor({size}, acc, 4), 1e-2, 0.9, 0.95, 1e-8,
                0.1, 0.5, int64_t{3}},
               device);
    }
  });
}

SelfTest sum_of_squares_test() {
  return op_test("sum_of_squares", [](at::Device device, at::ScalarType type) {
    for (const int64_t size : {5, 300000})
      check_op("sum_of_squares", {random_tensor({size}, type, 1)}, device, {.precision = at::kFloat});
  });
}

SelfTest log_prob_forward_test() {
  return op_test("log_prob_forward", [](at::Device device, at::ScalarType type) {
    for (const auto& [rows, width] : kTestedRows)
      check_op("log_prob_forward", {random_tensor({rows, width}, type, 1), labels_below(width, rows), 0.7},
               device);
  });
}

SelfTest log_prob_backward_test() {
  return op_test("log_prob_backward_", [](at::Device device, at::ScalarType type) {
    const auto acc = accumulator_type(type);
    for (const auto& [rows, width] : kTestedRows) {
      const auto logits = random_tensor({rows, width}, type, 1), labels = labels_below(width, rows);
      const auto forward = call_on_cpu("log_prob_forward", {logits.to(at::kDouble), labels, 0.7});
      check_op("log_prob_backward_",
               {logits, labels, forward[1].to(acc), forward[2].to(acc), random_tensor({rows}, acc, 2),
                random_tensor({rows}, acc, 3), 0.7},
               device);
    }
  });
}

SelfTest draw_token_test() {
  return op_test("draw_token", [](at::Device device, at::ScalarType type) {
    const int64_t width = 1000;
    const auto logits = random_tensor({5, width}, type, 1);
    at::Tensor requests = at::zeros({20, kDrawNumbers}, at::kDouble);
    for (int64_t i = 0; i < requests.size(0); ++i) {
      requests[i][kDrawRow] = i % 5;
      requests[i][kDrawTemperature] = i % 2 == 0 ? 1.0 : 0.6;
      requests[i][kDrawUniform] = (static_cast<double>(i) + 0.37) / 20;
      requests[i][kDrawGreedy] = i % 7 == 0 ? 1 : 0;
    }
    const at::Tensor got = draw_token(logits.to(device), requests.to(device)).cpu(),
                     expected = draw_token(logits.to(at::kDouble), requests);
    check_equal("draw_token: the tokens", got.select(1, kDrawnToken), expected.select(1, kDrawnToken));
    for (int64_t number = kDrawnLogit; number < kDrawnNumbers; ++number)
      check_close("draw_token: a sum", got.select(1, number), expected.select(1, number),
                  accumulator_type(type));
  });
}

SelfTest qk_norm_rotary_forward_test() {
  return op_test("qk_norm_rotary_forward", [](at::Device device, at::ScalarType type) {
    const auto acc = accumulator_type(type);
    for (const int64_t head : {64, 128})
      for (const bool with_norm : {false, true}) {
        const auto norm = [&](uint64_t seed) {
          return with_norm ? c10::IValue(random_tensor({head}, type, seed)) : kNone;
        };
        const auto angles = random_tensor({70, head / 2}, at::kDouble, 2);
        check_op("qk_norm_rotary_forward",
                 {random_tensor({70, 8 * head}, type, 1), angles.cos().to(acc), angles.sin().to(acc), norm(3),
                  norm(4), int64_t{4}, int64_t{2}, 1e-6, 0.0},
                 device);
      }
  });
}

SelfTest qk_norm_rotary_backward_test() {
  return op_test("qk_norm_rotary_backward", [](at::Device device, at::ScalarType type) {
    const auto acc = accumulator_type(type);
    for (const int64_t head : {64, 128})
      for (const bool with_norm : {false, true}) {
        const auto norm = [&](at::ScalarType as, uint64_t seed) {
          return with_norm ? c10::IValue(random_tensor({head}, as, seed)) : kNone;
        };
        const auto angles = random_tensor({70, head / 2}, at::kDouble, 2);
        check_op("qk_norm_rotary_backward",
                 {random_tensor({70, 4, head}, type, 5), random_tensor({70, 2, head}, type, 6),
                  random_tensor({70, 2, head}, type, 7), random_tensor({70, 8 * head}, type, 1),
                  angles.cos().to(acc), angles.sin().to(acc), norm(type, 3), norm(type, 4), norm(acc, 8),
                  norm(acc, 9), 1e-6, 0.0},
                 device);
      }
  });
}

SelfTest embedding_test() {
  return op_test("add_embedding_gradient_", [](at::Device device, at::ScalarType type) {
    check_op("add_embedding_gradient_",
             {random_tensor({50, 130}, accumulator_type(type), 1), labels_below(30, 200),
              random_tensor({200, 130}, type, 2)},
             device);
  });
}

SelfTest quantize_rows_test() {
  return op_test("quantize_rows_", [](at::Device device, at::ScalarType type) {
    const auto weight = random_tensor({70, 96}, type, 1);
    const auto quantize = [](const at::Tensor& w, const auto& function) {
      const at::Tensor weight_OK = at::zeros(w.sizes(), w.options().dtype(at::kChar)),
                       scale_O = at::zeros({w.size(0)}, w.options().dtype(at::kFloat));
      function(weight_OK, scale_O, w);
      return std::pair(weight_OK, scale_O);
    };
    const auto got = quantize(weight.to(device), quantize_rows_),
               expected = quantize(weight, quantize_rows_reference_);
    check_close("quantize_rows_: the scales", got.second, expected.second, at::kFloat);
    // A quotient that is nearly halfway between two integers may be rounded to either: 1/127.
    check_close("quantize_rows_: the weights", got.first, expected.first, at::kBFloat16);
  });
}

// A few rows, as in decoding, and many.
SelfTest quantized_product_test() {
  return {"quantized_product",
          {{"quantized_product", kReference, /*is_much_faster=*/true}},
          [](at::Device device) {
            for (const auto type : kTestedTypes)
              for (const int64_t rows : {1, 5, 33, 70}) {
                const auto weight = at::randint(-127, 128, {96, 256}, at::detail::createCPUGenerator(1),
                                                at::kChar),
                           scale = random_tensor({96}, at::kFloat, 2).abs().add(0.1) / 256;
                check_op("quantized_product",
                         {random_tensor({rows, 256}, type, 3), weight, scale, random_tensor({96}, type, 4),
                          random_tensor({rows, 96}, type, 5)},
                         device);
                check_op("quantized_product",
                         {random_tensor({rows, 256}, type, 6), weight, scale, kNone, kNone}, device);
              }
          }};
}

SelfTest matrix_product_test() {
  return {"matrix_product", {{"matrix_product", "libtorch's product"}}, [](at::Device device) {
            for (const auto type : kTestedTypes)
              for (const int64_t rows : {1, 70}) {
                const auto a = random_tensor({rows, 96}, type, 1), b = random_tensor({96, 136}, type, 2),
                           bias = random_tensor({136}, type, 3),
                           residual = random_tensor({rows, 136}, type, 4);
                check_op("matrix_product", {a, b, kNone, kNone}, device);
                const auto b_T = random_tensor({136, 96}, type, 5).t();  // as the weight of a layer
                check_op("matrix_product", {a, b_T, bias, kNone}, device);
                check_op("matrix_product", {a, b_T, bias, residual}, device);
              }
          }};
}

SelfTest add_matrix_product_test() {
  return {"add_matrix_product_",
          {{"add_matrix_product_", "libtorch's product in fp32", /*is_much_faster=*/true}},
          [](at::Device device) {
            for (const auto type : kTestedTypes)
              check_op("add_matrix_product_",
                       {random_tensor({96, 136}, accumulator_type(type), 1),
                        random_tensor({70, 96}, type, 2).t(), random_tensor({70, 136}, type, 3), false},
                       device);
          }};
}
}  // namespace

std::vector<SelfTest> row_op_tests() {
  return {rms_norm_forward_test(),
          rms_norm_backward_test(),
          swiglu_forward_test(),
          swiglu_backward_test(),
          qk_norm_rotary_forward_test(),
          qk_norm_rotary_backward_test(),
          embedding_test(),
          log_prob_forward_test(),
          log_prob_backward_test(),
          draw_token_test(),
          adamw_test(),
          sum_of_squares_test()};
}

std::vector<SelfTest> product_tests() {
  return {matrix_product_test(), add_matrix_product_test(), quantize_rows_test(), quantized_product_test()};
}

std::vector<SelfTest> graph_tests() {
  return {{"cuda_graphs", {{"cuda_graphs", "launches of single kernels"}}, [](at::Device device) {
             const auto graphs = make_device_graphs();
             if (!graphs) return;
             const auto x = random_tensor({70, 64}, at::kBFloat16, 1).to(device),
                        weight = random_tensor({64, 96}, at::kBFloat16, 2).to(device),
                        sum = at::zeros({70, 96}, x.options());
             const auto graph = graphs->capture([&] { sum.add_(at::mm(x, weight)); });
             x.copy_(random_tensor({70, 64}, at::kBFloat16, 3));  // replays read the new values
             sum.zero_();
             graph->replay();
             graph->replay();
             const at::Tensor expected = at::mm(random_tensor({70, 64}, at::kBFloat16, 3).to(at::kDouble),
                                                weight.cpu().to(at::kDouble));
             check_close("cuda_graphs: two replays", sum, 2 * expected, at::kBFloat16);
           }}};
}

std::vector<SelfTest> self_tests() {
  std::vector<SelfTest> all;
  for (auto& tests : {row_op_tests(), product_tests(), experts_tests(), attention_tests(), graph_tests()})
    all.insert(all.end(), tests.begin(), tests.end());
  return all;
}

void test_libtorch(at::Device device) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const auto a = random_tensor({128, 96}, type, 1), b = random_tensor({96, 64}, type, 2);
    check_close("libtorch's product on the device", at::mm(a.to(device), b.to(device)),
                at::mm(a.to(at::kDouble), b.to(at::kDouble)), type);
    check_equal("a copy to the device and back", a.to(device).cpu(), a);
  }
}

}  // namespace bough
