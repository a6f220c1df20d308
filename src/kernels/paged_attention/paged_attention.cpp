#include "kernels/paged_attention/paged_attention.h"

#include "base/error.h"
#include "kernels/common/op.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def(
      "paged_attention_(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor work, "
      "Tensor(c!) parts, int[] capacities) -> Tensor");
}

namespace bough {

at::Tensor paged_attention(const PagedAttentionInput& in) {
  using Tensor = const at::Tensor&;
  using Op = at::Tensor(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, at::IntArrayRef);
  static const auto op = find_op<Op>("bough::paged_attention_");
  const int64_t T = in.q_TNH.size(0), N = in.q_TNH.size(1), H = in.q_TNH.size(2), G = in.k_TGH.size(1);
  BOUGH_CHECK(
      in.k_TGH.sizes() == at::IntArrayRef({T, G, H}) && in.v_TGH.sizes() == in.k_TGH.sizes() && N % G == 0,
      "paged_attention: q ", in.q_TNH.sizes(), ", k ", in.k_TGH.sizes(), ", v ", in.v_TGH.sizes());
  BOUGH_CHECK(in.keys.dim() == 4 && in.keys.sizes().slice(1) == at::IntArrayRef({G, kPagedPageTokens, H}) &&
                  in.values.sizes() == in.keys.sizes(),
              "paged_attention: pages of keys ", in.keys.sizes(), ", of values ", in.values.sizes(),
              ", expected [pages, ", G, ", ", kPagedPageTokens, ", ", H, "]");
  const PagedLayout& layout = in.layout;
  BOUGH_CHECK(in.work.scalar_type() == at::kInt && in.work.numel() >= layout.pages() &&
                  layout.max_tokens >= T && in.parts.scalar_type() == at::kFloat,
              "paged_attention: work of ", in.work.numel(), " numbers, expected at least ", layout.pages(),
              "; ", T, " tokens, capacity ", layout.max_tokens);
  return op.call(in.q_TNH, in.k_TGH, in.v_TGH, in.keys, in.values, in.work, in.parts,
                 {layout.max_large, layout.max_small, layout.max_rows, layout.max_merges, layout.max_tokens});
}

}  // namespace bough
