#include "kernels/draw_token/draw_token.h"

#include "base/error.h"
#include "kernels/common/op.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def("draw_token(Tensor logits, Tensor requests) -> Tensor");
}

namespace bough {

at::Tensor draw_token(const at::Tensor& logits_RV, const at::Tensor& requests) {
  static const auto op = find_op<at::Tensor(const at::Tensor&, const at::Tensor&)>("bough::draw_token");
  BOUGH_CHECK(logits_RV.dim() == 2 && logits_RV.size(1) > 0 && requests.dim() == 2 &&
                  requests.size(1) == kDrawNumbers && requests.scalar_type() == at::kDouble,
              "draw_token: logits ", logits_RV.sizes(), ", requests ", requests.sizes(), " ",
              requests.scalar_type());
  return op.call(logits_RV, requests);
}

}  // namespace bough
