// What a generation pass answers when the model asks a token to attend: the pages of its sequence, the pass's own keys
// and values written to them first (kernels/paged_attention).
//
// On the CPU a token's result does not depend on what else is in the pass, on chunk borders or on thread count. On CUDA
// (cuda_attention.h) the parts of a token's keys, shared pages and its own, are computed side by side and joined by
// their log-sum-exp: the same pass gives the same bits, another pass may round otherwise.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/paged_attention/paged_attention_cpu.h"
#include "models/model.h"
#include "rollout/kv_storage.h"

namespace bough {

enum class AttentionPath { kFastest, kReference };  // kReference: tensor ops, any device

class PagedAttention : public AttentionContext {
 public:
  // The pass's tokens are those of the segments, in order. Storage and page tables must outlive this object
  // and not change while a pass runs.
  PagedAttention(KvStorage& storage, std::vector<Segment> segments,
                 AttentionPath path = AttentionPath::kFastest);

  at::Tensor attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                    const at::Tensor& v_TGH) override;

 private:
  void check_shapes(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                    const at::Tensor& v_TGH) const;
  at::Tensor attend_reference(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                              const at::Tensor& v_TGH);

  KvStorage& storage_;
  std::vector<Segment> segments_;
  AttentionPath path_;
  int64_t num_tokens_ = 0;
  std::vector<int64_t> slots_;  // where each token's keys and values go: page * kPageTokens + place in it
  AttentionSchedule schedule_;  // empty until the CPU path needs it
  std::shared_ptr<AttentionContext> on_cuda_;  // likewise for CUDA
};

}  // namespace bough
