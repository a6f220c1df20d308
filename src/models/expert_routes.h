// The experts that the tokens of one pass use in a mixture: those that were recorded when the tokens were
// first computed ("routing replay"), and the router's choice for tokens without a record. Contexts of
// attention (AttentionContext::route) hold one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace bough {

// Sums over passes.
struct RouteCounts {
  int64_t records = 0;            // recorded experts of one token in one layer
  int64_t different = 0;          // those that are another set than the router's own choice
  int64_t tokens = 0;             // with recorded experts
  int64_t different_tokens = 0;   // with a difference in any layer
  std::vector<at::Tensor> loads;  // by layer with experts: tokens of each expert, int64 [E] on the CPU
};

class ExpertRoutes {
 public:
  // recorded_TLK: int64 [T, layers with experts, K] on the model's device, in each row -1 or experts.
  // Undefined: no token has a record. counts: nullptr if the pass is not counted.
  explicit ExpertRoutes(at::Tensor recorded_TLK = {}, RouteCounts* counts = nullptr)
      : recorded_TLK_(std::move(recorded_TLK)), counts_(counts) {}

  // AttentionContext::route(). If the layer's experts are known from an earlier call, returns them again.
  at::Tensor route(int64_t layer, const at::Tensor& logits_TE, int64_t num_chosen);

  void stop_counting() { counts_ = nullptr; }
  // By layer: int64 [T, K]; undefined for layers without experts.
  const std::vector<at::Tensor>& used() const { return used_; }
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
