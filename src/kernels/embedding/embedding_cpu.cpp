#include "kernels/common/op.h"
#include "kernels/embedding/embedding.h"
#include "kernels/embedding/embedding_isa.h"

namespace bough {

namespace {
constexpr int64_t kColumns = 64;  // a thread's are a multiple: whole cache lines

// Each thread takes some columns of all rows, so that a token's rows are added in their order without atomics.
void add_embedding_gradient_cpu_(const at::Tensor& sums_VD, const at::Tensor& tokens_T,
                                 const at::Tensor& rows_TD) {
  const int64_t width = rows_TD.size(1), num_rows = rows_TD.size(0);
  dispatch_float_types(rows_TD.scalar_type(), "embedding", [&]<class T>() {
    auto* const sums = mutable_data<AccOf<T>>(sums_VD);
    at::parallel_for(0, (width + kColumns - 1) / kColumns, grain(num_rows * kColumns),
                     [&](int64_t begin, int64_t end) {
                       BOUGH_ISA_CALL(add_rows_of_tokens, sums, data<int64_t>(tokens_T), data<T>(rows_TD),
                                      num_rows, width, begin * kColumns, std::min(width, end * kColumns));
                     });
  });
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("add_embedding_gradient_", TORCH_FN(bough::add_embedding_gradient_cpu_));
}
