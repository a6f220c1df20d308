#include "kernels/common/closeness.h"
#include "kernels/experts/expert_pairs.h"
#include "kernels/parameter.h"
#include "kernels/self_test/op_check.h"

namespace bough {

namespace {
// 70 tokens that choose two of six experts. Expert 1 has all tokens, expert 5 one, experts 2 and 4 none.
at::Tensor uneven_experts() {
  const auto experts_TK = at::empty({70, 2}, at::kLong);
  experts_TK.select(1, 0).fill_(1);
  experts_TK.select(1, 1).copy_(at::arange(70).remainder(2).mul(3));
  experts_TK[40][1] = 5;
  return experts_TK;
}

SelfTest row_test(const char* op, std::function<void(at::Device, at::ScalarType)> run) {
  return {op, {{op, "its reference in tensor ops"}}, [run](at::Device device) {
            for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble}) run(device, type);
          }};
}

SelfTest sort_pairs_test() {
  return {"sort_pairs", {{"sort_pairs", "libtorch's sort"}}, [](at::Device device) {
            const at::Tensor experts_TK = uneven_experts();
            const SortedPairs got = sort_pairs(experts_TK.to(device), 6),
                              expected = sort_pairs(experts_TK, 6);
            check_equal("sort_pairs: the pairs", got.pairs_P, expected.pairs_P);
            check_equal("sort_pairs: the places", got.places_TK, expected.places_TK);
            check_equal("sort_pairs: the ends", got.ends_E, expected.ends_E);
          }};
}

SelfTest grouped_product_test() {
  return {"grouped_product", {{"grouped_product", "a product for each expert"}}, [](at::Device device) {
            const at::Tensor ends_E = sort_pairs(uneven_experts(), 6).ends_E;
            for (const bool is_transposed : {true, false})
              check_op("grouped_product",
                       {random_tensor({140, is_transposed ? 64 : 96}, at::kBFloat16, 1),
                        random_tensor({6 * 96, 64}, at::kBFloat16, 2), ends_E, is_transposed},
                       device);
          }};
}

SelfTest add_weighted_rows_test() {
  return row_test("add_weighted_rows", [](at::Device device, at::ScalarType type) {
    const at::Tensor places_TK = sort_pairs(uneven_experts(), 6).places_TK;
    for (const int64_t width : {7, 512}) {
      const auto rows = random_tensor({140, width}, type, 1);
      check_op("add_weighted_rows",
               {rows, places_TK, random_tensor({70, 2}, accumulator_type(type), 2),
                random_tensor({70, width}, type, 3)},
               device);
      check_op("add_weighted_rows", {rows, places_TK, c10::IValue(), c10::IValue()}, device);
    }
  });
}

SelfTest weigh_rows_test() {
  return row_test("weigh_rows_", [](at::Device device, at::ScalarType type) {
    for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{3, 7}, {70, 512}, {300, 130}})
      check_op("weigh_rows_",
               {random_tensor({rows, width}, type, 1), random_tensor({rows, 2 * width}, type, 2),
                random_tensor({rows, width}, type, 3), random_tensor({rows}, accumulator_type(type), 4)},
               device);
  });
}
}  // namespace

std::vector<SelfTest> experts_tests() {
  return {sort_pairs_test(), grouped_product_test(), add_weighted_rows_test(), weigh_rows_test()};
}

}  // namespace bough
