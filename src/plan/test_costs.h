// An artificial device for tests of plans. A pass has a fixed cost (`overhead`) plus a cost per token. Every
// field of PassShape changes a result, so tests notice a block whose counts are wrong.
#pragma once

#include <algorithm>

#include "plan/pass_costs.h"

namespace bough {

class TestCosts final : public PassCosts {
 public:
  // overhead: fixed cost of a pass, in tokens. has_host: host memory is separate from device memory.
  explicit TestCosts(double overhead = 40, bool has_host = false)
      : overhead_(overhead), has_host_(has_host) {}

  double forward_seconds(const PassShape& pass) const override {
    return pass.tokens == 0 ? 0 : kToken * of_tokens(pass) + attention_forward_seconds(pass);
  }
  double backward_seconds(const PassShape& pass) const override {
    return pass.tokens == 0 ? 0 : 2 * kToken * of_tokens(pass) + attention_backward_seconds(pass);
  }
  double attention_forward_seconds(const PassShape& pass) const override {
    return kPair * static_cast<double>(keys(pass));
  }
  double attention_backward_seconds(const PassShape& pass) const override {
    return 2.5 * kPair * static_cast<double>(keys(pass));
  }
  double head_forward_seconds(const PassShape& pass) const override {
    return kHeadRow * static_cast<double>(pass.head_rows);
  }
  double head_backward_seconds(const PassShape& pass) const override {
    return 2 * kHeadRow * static_cast<double>(pass.head_rows);
  }
  double recompute_seconds(const PassShape& pass, RecomputePolicy keep) const override {
    if (keep == RecomputePolicy::kActivations) return 0;
    const bool has_attention =
        keep == RecomputePolicy::kAttention || keep == RecomputePolicy::kLayerInputsAndAttention;
    return forward_seconds(pass) - (has_attention ? attention_forward_seconds(pass) : 0) -
           (recomputes_layers(keep) ? 0.2 * kToken * static_cast<double>(pass.tokens) : 0) +
           (keep == RecomputePolicy::kLayerInputsOnHost ? 0.1 * kToken * static_cast<double>(pass.tokens)
                                                        : 0);
  }

  int64_t stack_row_bytes() const override { return 1024; }
  int64_t kept_bytes(RecomputePolicy keep) const override {
    switch (keep) {
      case RecomputePolicy::kKeysValues: return 0;
      case RecomputePolicy::kAttention: return 544;
      case RecomputePolicy::kLayerInputs: return 900;
      case RecomputePolicy::kLayerInputsAndAttention: return 900 + 544;
      case RecomputePolicy::kLayerInputsOnHost: return has_host_ ? 300 : 900;
      case RecomputePolicy::kActivations: break;
    }
    return 6004;
  }
  int64_t boundary_bytes() const override { return 512; }
  int64_t row_bytes() const override { return 32; }
  int64_t temporary_bytes(const PassShape& pass, RecomputePolicy keep) const override {
    const int64_t loss_rows = pass.loss_rows >= 0 ? pass.loss_rows : pass.head_rows;
    const int64_t layer = !recomputes_layers(keep)                            ? 0
                          : keep == RecomputePolicy::kLayerInputsAndAttention ? 1200
                                                                              : 1300;
    return std::max(1456 * pass.head_rows + 120 * loss_rows,
                    (1100 + layer) * pass.tokens + 288 * pass.stack_rows);
  }

 private:
  static constexpr double kToken = 1.5e-5, kPair = 5e-8, kHeadRow = 4e-6;

  double of_tokens(const PassShape& pass) const { return static_cast<double>(pass.tokens) + overhead_; }
  // (query, key) pairs that determine the time. Pairs on the stack and further pieces count more.
  static int64_t keys(const PassShape& pass) {
    const int64_t stack_pairs =
        pass.stack_pairs >= 0 ? pass.stack_pairs : std::min(pass.pairs, pass.tokens * pass.stack_rows);
    return pass.pairs + stack_pairs / 4 + 16 * (pass.pieces - 1);
  }

  double overhead_;
  bool has_host_;
};

}  // namespace bough
