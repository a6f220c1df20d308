#include "rollout/cuda_attention.h"

#include <ATen/ops/empty.h>

#include "kernels/paged_attention/paged_attention.h"

namespace bough {

namespace {

constexpr int64_t kMaxHeadDim = 256;  // of the kernels
}  // namespace

at::Tensor CudaAttention::make_parts(const KvStorage& storage, int64_t num_parts, int64_t num_heads) {
  return at::empty({paged_parts_size(num_parts, num_heads, storage.head_dim())},
                   at::TensorOptions().dtype(at::kFloat).device(storage.device()));
}

bool CudaAttention::supports(const KvStorage& storage) {
  return storage.device().is_cuda() && storage.head_dim() <= kMaxHeadDim &&
         (storage.dtype() == at::kFloat || storage.dtype() == at::kBFloat16);
}

CudaAttention::CudaAttention(KvStorage& storage, const AttentionWork& work, int64_t num_heads)
    : CudaAttention(storage, work.layout(), static_cast<int64_t>(work.pages.size()),
                    make_parts(storage, work.num_parts, num_heads)) {
  set_work(work);
}

CudaAttention::CudaAttention(KvStorage& storage, const PagedLayout& capacities, int64_t max_pages,
                             at::Tensor parts)
    : storage_(storage),
      layout_(capacities),
      max_pages_(max_pages),
      work_(at::empty({capacities.pages() + max_pages},
                      at::TensorOptions().dtype(at::kInt).device(storage.device()))),
      parts_(std::move(parts)) {}

bool CudaAttention::set_work(const AttentionWork& work) {
  const auto num_pages = static_cast<int64_t>(work.pages.size());
  if (!work.fits(layout_) || num_pages > max_pages_) return false;
  const int64_t size = layout_.pages() + num_pages;
  // Pinned, so that nothing waits; libtorch keeps it until the copy is done.
  const at::Tensor host = at::empty({size}, at::TensorOptions().dtype(at::kInt).pinned_memory(true));
  work.write(static_cast<int32_t*>(host.mutable_data_ptr()), layout_);
  work_.narrow(0, 0, size).copy_(host, /*non_blocking=*/true);
  return true;
}

at::Tensor CudaAttention::attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                                 const at::Tensor& v_TGH) {
  return paged_attention({.q_TNH = q_TNH.contiguous(),
                          .k_TGH = k_TGH.contiguous(),
                          .v_TGH = v_TGH.contiguous(),
                          .keys = storage_.pages(layer).select(0, 0),
                          .values = storage_.pages(layer).select(0, 1),
                          .work = work_,
                          .parts = parts_,
                          .layout = layout_});
}

}  // namespace bough
