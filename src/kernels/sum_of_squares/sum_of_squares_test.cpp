#include "kernels/sum_of_squares/sum_of_squares.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <limits>

#include "kernels/common/kernel_test.h"

namespace bough {
namespace {

TEST(SumOfSquares, MatchesReferenceInEveryDtype) {
  for (const auto type : kFloatTypes)
    for (const int64_t size :
         {int64_t{0}, int64_t{1}, int64_t{37}, kSumOfSquaresBlock, 3 * kSumOfSquaresBlock + 5}) {
      const auto x = random_tensor({size}, type, 7);
      EXPECT_NEAR(sum_of_squares(x).item<double>(), sum_of_squares_reference(x).item<double>(),
                  1e-13 * static_cast<double>(size));
    }
}

TEST(SumOfSquares, NoOverflowAndNoLossInFp32) {
  EXPECT_NEAR(sum_of_squares(at::full({100}, 1e30f)).item<double>() / 1e62, 1.0, 1e-6);
  EXPECT_NEAR(sum_of_squares(at::full({100}, 1e-30f)).item<double>() * 1e58, 1.0, 1e-6);
}

TEST(SumOfSquares, DoesNotDependOnThreads) {
  const auto x = random_tensor({10 * kSumOfSquaresBlock + 11}, at::kFloat, 3);
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const double one = sum_of_squares(x).item<double>();
  at::set_num_threads(3);
  const double three = sum_of_squares(x).item<double>();
  at::set_num_threads(before);
  EXPECT_EQ(one, three);
}

TEST(SumOfSquares, NotFiniteWhereAnElementIsNot) {
  for (const auto type : kFloatTypes)
    for (const double bad :
         {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
          std::numeric_limits<double>::quiet_NaN()}) {
      auto x = random_tensor({2 * kSumOfSquaresBlock}, type, 3);
      x[kSumOfSquaresBlock + 123] = bad;
      EXPECT_FALSE(std::isfinite(sum_of_squares(x).item<double>()));
    }
}

}  // namespace
}  // namespace bough
