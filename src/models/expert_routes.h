// The experts that the tokens of one pass use in a mixture: those that were recorded when the tokens were
// first computed ("routing replay"), and the router's choice for tokens without a record. Contexts of
// attention (AttentionContext::route) hold one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace bough {

// Sums over passes: int64 on the model's device, so that counting does not wait for a GPU. Undefined: 0.
struct RouteCounts {
  at::Tensor records;             // recorded experts of one token in one layer
  at::Tensor different;           // those that are another set than the router's own choice
  at::Tensor tokens;              // with recorded experts
  at::Tensor different_tokens;    // with a difference in any layer
  std::vector<at::Tensor> loads;  // by layer with experts: tokens of each expert, [E]
};

class ExpertRoutes {
 public:
  // recorded_TLK: int64 [T, layers with experts, K] on the model's device, in each row -1 or experts.
  // Undefined: no token has a record. counts: nullptr if the pass is not counted.
  explicit ExpertRoutes(at::Tensor recorded_TLK = {}, RouteCounts* counts = nullptr)
      : recorded_TLK_(std::move(recorded_TLK)), counts_(counts) {}

  // AttentionContext::route(). If the layer's experts are known from an earlier call, returns them again.
  at::Tensor route(int64_t layer, const at::Tensor& logits_TE, int64_t num_chosen);

  bool has_records() const { return recorded_TLK_.defined(); }
  void stop_counting() { counts_ = nullptr; }
  // By layer: int64 [T, K]; undefined for layers without experts.
  const std::vector<at::Tensor>& used() const { return used_; }
  // The same of the first tokens: views, which are valid as long as used().
  std::vector<at::Tensor> used_of(int64_t num_tokens) const;
  // The experts that a recompute of the same pass uses.
  void use(std::vector<at::Tensor> used) { used_ = std::move(used); }
  // int64 [T, layers with experts, K] on the CPU. Undefined if no layer has experts.
  at::Tensor used_TLK() const;

 private:
  at::Tensor recorded_TLK_;
  RouteCounts* counts_;
  std::vector<at::Tensor> used_;
  at::Tensor different_T_;  // bool: tokens with a difference in a layer so far
};

}  // namespace bough
