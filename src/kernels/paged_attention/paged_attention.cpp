#include "kernels/paged_attention/paged_attention.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include "base/error.h"
#include "kernels/common/op.h"
#include "kernels/parameter.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def(
      "paged_attention_(Tensor q, Tensor? k, Tensor? v, Tensor(a!) pages, Tensor work, Tensor(b!)? parts, "
      "int[] capacities, float scale, Tensor(c!)? lse) -> Tensor");
}

namespace bough {

namespace {
constexpr int64_t kMaxCudaHeadDim = 256;  // limit of the CUDA kernels

std::optional<at::Tensor> some(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

int64_t pair_size(const at::Tensor& pages) {
  return pages.is_cpu() && pages.scalar_type() == at::kBFloat16 ? 2 : 1;
}

void check(const PagedAttentionInput& in, const at::Tensor* lse_TN) {
  const at::Tensor& q = in.q_TNH;
  const bool on_cuda = in.pages.is_cuda();
  BOUGH_CHECK(q.dim() == 3 && in.pages.dim() == (on_cuda ? 5 : 4), "paged_attention: q ", q.sizes(),
              ", pages ", in.pages.sizes());
  const int64_t T = q.size(0), N = q.size(1), H = q.size(2), G = in.pages.size(on_cuda ? 2 : 1);
  const PagedShape shape{N, G, H, q.scalar_type(), q.device()};
  BOUGH_CHECK(in.pages.sizes() == at::IntArrayRef(page_sizes(shape, in.pages.size(on_cuda ? 1 : 0))) &&
                  in.pages.is_contiguous() && N % G == 0,
              "paged_attention: q ", q.sizes(), ", pages ", in.pages.sizes());
  BOUGH_CHECK(in.k_TGH.defined() == in.v_TGH.defined() && (in.k_TGH.defined() || !on_cuda),
              "paged_attention: expected both k and v or neither; CUDA needs both");
  for (const at::Tensor* x : {&in.k_TGH, &in.v_TGH})
    BOUGH_CHECK(!x->defined() || x->sizes() == at::IntArrayRef({T, G, H}), "paged_attention: k or v is ",
                x->sizes(), ", expected [", T, ", ", G, ", ", H, "]");
  for (const at::Tensor* x : {&q, &in.k_TGH, &in.v_TGH})
    BOUGH_CHECK(!x->defined() || (x->stride(2) == 1 && x->scalar_type() == in.pages.scalar_type() &&
                                  x->device() == in.pages.device()),
                "paged_attention: q, k, v: expected ", in.pages.scalar_type(), " on ",
                in.pages.device().str(), " with contiguous heads, got ", x->scalar_type(), " on ",
                x->device().str(), ", strides ", x->strides());
  const int64_t planned = in.plan.num_tokens();
  const bool has_room = in.plan.layout().max_tokens > 0;
  BOUGH_CHECK(in.plan.work().defined() && (has_room ? T <= planned : T == planned), "paged_attention: q ",
              q.sizes(), ", planned for ", planned, " tokens");
  BOUGH_CHECK(!lse_TN || (lse_TN->sizes() == at::IntArrayRef({T, N}) && lse_TN->is_contiguous() &&
                          lse_TN->scalar_type() == accumulator_type(q.scalar_type())),
              "paged_attention: expected lse as contiguous [", T, ", ", N, "] in the accumulator type");
}
}  // namespace

std::vector<int64_t> page_sizes(const PagedShape& shape, int64_t num_pages) {
  if (shape.device.is_cuda()) return {2, num_pages, shape.num_kv_heads, kPageTokens, shape.head_dim};
  return {num_pages, shape.num_kv_heads, 2, kPageTokens * padded_head_dim(shape.head_dim)};
}

at::Tensor keys_of_pages(const at::Tensor& pages, int64_t head_dim) {
  if (pages.is_cuda()) return pages.select(0, 0).transpose(2, 3).unsqueeze(-1);
  const int64_t pair = pair_size(pages), padded_H = padded_head_dim(head_dim);
  return pages.select(2, 0).view({pages.size(0), pages.size(1), padded_H / pair, kPageTokens, pair});
}
at::Tensor values_of_pages(const at::Tensor& pages, int64_t head_dim) {
  if (pages.is_cuda()) return pages.select(0, 1).unsqueeze(-1);
  const int64_t pair = pair_size(pages), padded_H = padded_head_dim(head_dim);
  return pages.select(2, 1).view({pages.size(0), pages.size(1), kPageTokens / pair, padded_H, pair});
}

bool PagedPlan::on_cuda(const PagedShape& shape) {
  return shape.device.is_cuda() && has_cuda_kernel("bough::paged_attention_") &&
         shape.head_dim <= kMaxCudaHeadDim && (shape.dtype == at::kFloat || shape.dtype == at::kBFloat16);
}

at::Tensor PagedPlan::make_parts(const PagedShape& shape, int64_t num_parts) {
  // A part (paged_work.h) has for each head H sums, the largest score, and the sum of weights.
  return at::empty({num_parts * shape.num_heads * (shape.head_dim + 2)},
                   at::TensorOptions().dtype(at::kFloat).device(shape.device));
}

PagedPlan::PagedPlan(std::span<const PagedSegment> segments, const PagedShape& shape,
                     const PageSelection* selection, AttentionPath path) {
  if (path == AttentionPath::kFastest && on_cuda(shape)) {
    const PagedWork work = plan_paged_work(segments, shape.num_heads, shape.num_kv_heads, selection);
    *this = PagedPlan(shape, work.layout(), static_cast<int64_t>(work.pages.size()),
                      make_parts(shape, work.num_parts));
    set_work(work);
    return;
  }
  by_reference_ = path == AttentionPath::kReference || !shape.device.is_cpu();
  const PagedSchedule schedule = schedule_paged_for_threads(segments, shape.num_kv_heads, selection);
  num_tokens_ = static_cast<int64_t>(schedule.slots.size());
  work_ = schedule.as_tensor();
}

PagedPlan::PagedPlan(const PagedShape& shape, const PagedLayout& capacities, int64_t max_pages,
                     at::Tensor parts)
    : num_tokens_(capacities.max_tokens),
      max_pages_(max_pages),
      work_(at::empty({capacities.pages() + max_pages},
                      at::TensorOptions().dtype(at::kInt).device(shape.device))),
      parts_(std::move(parts)),
      layout_(capacities) {}

bool PagedPlan::set_work(const PagedWork& work) {
  const auto num_pages = static_cast<int64_t>(work.pages.size());
  if (!work.fits(layout_) || num_pages > max_pages_) return false;
  const int64_t size = layout_.pages() + num_pages;
  // The memory is pinned, so that the copy does not block. libtorch keeps the memory until the copy is done.
  const at::Tensor host = at::empty({size}, at::TensorOptions().dtype(at::kInt).pinned_memory(true));
  work.write(static_cast<int32_t*>(host.mutable_data_ptr()), layout_);
  work_.narrow(0, 0, size).copy_(host, /*non_blocking=*/true);
  return true;
}

at::Tensor paged_attention(const PagedAttentionInput& in, at::Tensor* lse_TN) {
  using Tensor = const at::Tensor&;
  using Optional = const std::optional<at::Tensor>&;
  using Op =
      at::Tensor(Tensor, Optional, Optional, Tensor, Tensor, Optional, at::IntArrayRef, double, Optional);
  static const auto op = find_op<Op>("bough::paged_attention_");
  check(in, lse_TN);
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto k = some(in.k_TGH), v = some(in.v_TGH), parts = some(in.plan.parts());
  const auto lse = lse_TN ? std::optional(*lse_TN) : std::nullopt;
  if (in.plan.by_reference())
    return paged_attention_reference(in.q_TNH, k, v, in.pages, in.plan.work(), in.scale, lse);
  const PagedLayout& layout = in.plan.layout();
  return op.call(in.q_TNH, k, v, in.pages, in.plan.work(), parts,
                 {layout.max_large, layout.max_small, layout.max_rows, layout.max_merges, layout.max_tokens,
                  layout.per_head},
                 in.scale, lse);
}

}  // namespace bough
