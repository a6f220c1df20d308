// Paged attention (paged_attention.h) by the CUDA kernels of kernels/paged_attention. The work of a pass is planned on
// the host (attention_work.h) and brought over by one copy before the first layer.
#pragma once

#include <ATen/core/Tensor.h>

#include "models/model.h"
#include "rollout/attention_work.h"
#include "rollout/kv_storage.h"

namespace bough {

class CudaAttention : public AttentionContext {
 public:
  // fp32 or bf16 on CUDA, heads not too wide: else the reference computes.
  static bool supports(const KvStorage& storage);

  // Uninitialised room for parts of rows that are cut.
  static at::Tensor make_parts(const KvStorage& storage, int64_t num_parts, int64_t num_heads);

  // One pass.
  CudaAttention(KvStorage& storage, const AttentionWork& work, int64_t num_heads);
  // Passes of up to these capacities one after the other, always at the same addresses. parts: for as many as there are
  // rows.
  CudaAttention(KvStorage& storage, const PagedLayout& capacities, int64_t max_pages, at::Tensor parts);

  // What the next pass computes. False, and nothing is changed, if it does not fit.
  bool set_work(const AttentionWork& work);
  at::Tensor attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                    const at::Tensor& v_TGH) override;

 private:
  KvStorage& storage_;
  PagedLayout layout_;
  int64_t max_pages_;
  at::Tensor work_, parts_;
};

}  // namespace bough
