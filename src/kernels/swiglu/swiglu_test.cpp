#include "kernels/swiglu/swiglu.h"

#include "kernels/common/kernel_test.h"

namespace bough {
namespace {

TEST(Swiglu, MatchesReferenceInEveryDtype) {
  for (const auto type : kFloatTypes)
    for (const int64_t width : {1, 15, 512}) {
      auto x = (random_tensor({37, 2 * width}, type, 1) * 5).requires_grad_(true);
      const auto d_y = random_tensor({37, width}, type, 2);
      const auto y = swiglu(x);
      y.backward(d_y);
      EXPECT_CLOSE(y, swiglu_forward_reference(x.detach()), type);
      EXPECT_CLOSE(x.grad(), swiglu_backward_reference(d_y, x.detach()), type);
    }
}

TEST(Swiglu, BackwardIsTheDerivative) {
  check_gradient([](const at::Tensor& x) { return swiglu(x); }, random_tensor({3, 8}, at::kDouble, 1));
}

}  // namespace
}  // namespace bough
