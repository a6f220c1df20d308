#include <ATen/ATen.h>

#include "kernels/common/op.h"
#include "kernels/embedding/embedding.h"

namespace bough {

void add_embedding_gradient_reference_(const at::Tensor& sums_VD, const at::Tensor& tokens_T,
                                       const at::Tensor& rows_TD) {
  at::Tensor(sums_VD).index_add_(0, tokens_T, rows_TD.to(sums_VD.scalar_type()));
}

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("add_embedding_gradient_", TORCH_FN(bough::add_embedding_gradient_reference_));
}
