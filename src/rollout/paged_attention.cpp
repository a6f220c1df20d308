#include "rollout/paged_attention.h"

#include <cmath>

#include "base/error.h"
#include "rollout/cuda_attention.h"

namespace bough {

PagedAttention::PagedAttention(KvStorage& storage, std::vector<Segment> segments, AttentionPath path)
    : storage_(storage), segments_(std::move(segments)), path_(path) {
  for (const Segment& segment : segments_) {
    BOUGH_CHECK(segment.count > 0 && segment.begin >= 0, "segment of ", segment.count, " tokens at ",
                segment.begin);
    BOUGH_CHECK(pages_for(segment.begin + segment.count) <= static_cast<int64_t>(segment.pages.size()),
                "position ", segment.begin + segment.count - 1, " lies beyond ", segment.pages.size(),
                " pages");
    for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i) {
      slots_.push_back(segment.pages[static_cast<size_t>(i / kPageTokens)] * kPageTokens + i % kPageTokens);
    }
    num_tokens_ += segment.count;
  }
  if (path_ == AttentionPath::kFastest && storage_.device().is_cpu())
    schedule_ = schedule_attention_for_threads(segments_, storage_.num_kv_heads());
}

void PagedAttention::check_shapes(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                                  const at::Tensor& v_TGH) const {
  const int64_t G = storage_.num_kv_heads(), H = storage_.head_dim();
  BOUGH_CHECK(layer >= 0 && layer < storage_.num_layers(), "layer ", layer, " of ", storage_.num_layers());
  BOUGH_CHECK(
      q_TNH.dim() == 3 && q_TNH.size(0) == num_tokens_ && q_TNH.size(1) % G == 0 && q_TNH.size(2) == H,
      "q is ", q_TNH.sizes(), ", expected [", num_tokens_, ", multiple of ", G, ", ", H, "]");
  for (const at::Tensor* x : {&k_TGH, &v_TGH}) {
    BOUGH_CHECK(x->dim() == 3 && x->size(0) == num_tokens_ && x->size(1) == G && x->size(2) == H,
                "k or v is ", x->sizes(), ", expected [", num_tokens_, ", ", G, ", ", H, "]");
  }
  for (const at::Tensor* x : {&q_TNH, &k_TGH, &v_TGH}) {
    BOUGH_CHECK(x->stride(2) == 1 && x->scalar_type() == storage_.dtype() && x->device() == storage_.device(),
                "q, k, v: expected ", storage_.dtype(), " on ", storage_.device().str(),
                " with contiguous heads, got ", x->scalar_type(), " on ", x->device().str(), ", strides ",
                x->strides());
  }
}

at::Tensor PagedAttention::attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                                  const at::Tensor& v_TGH) {
  check_shapes(layer, q_TNH, k_TGH, v_TGH);
  if (path_ == AttentionPath::kFastest && q_TNH.is_cpu()) {
    return paged_attention_cpu(q_TNH, {k_TGH, v_TGH, slots_}, storage_.pages(layer), schedule_,
                               1 / std::sqrt(static_cast<double>(storage_.head_dim())));
  }
  if (path_ == AttentionPath::kFastest && CudaAttention::supports(storage_)) {
    if (!on_cuda_)
      on_cuda_ = std::make_shared<CudaAttention>(
          storage_, plan_attention_work(segments_, q_TNH.size(1), storage_.num_kv_heads()), q_TNH.size(1));
    return on_cuda_->attend(layer, q_TNH, k_TGH, v_TGH);
  }
  return attend_reference(layer, q_TNH, k_TGH, v_TGH);
}

}  // namespace bough
