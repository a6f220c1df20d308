// Log-probability and entropy of rows of logits, and the way back, over one chunk of rows (the caller never holds
// [rows, vocabulary] whole).
//
//   z = logits / temperature,  lse = log sum_v exp z[v],  p = exp(z - lse)
//   log_prob = z[label] - lse,  entropy H = lse - sum_v p[v] z[v]
// Backward, in place of the logits:
//   d_logits[v] = (d_log_prob · (1[v = label] - p[v]) - d_entropy · p[v] · (log p[v] + H)) / temperature
// Sums in the accumulator type; d_logits rounded once to the logits' dtype.
#pragma once

#include <ATen/core/Tensor.h>

namespace bough {

struct LogProbOutput {
  at::Tensor log_probs_R, lse_R, entropies_R;  // accumulator type
};

// logits_RV: contiguous. labels_R: int64 in [0, V), same device.
LogProbOutput log_prob_forward(const at::Tensor& logits_RV, const at::Tensor& labels_R, double temperature);

// Overwrites logits_RV with their gradient. d_log_probs_R, d_entropies_R: accumulator type.
void log_prob_backward_(const at::Tensor& logits_RV, const at::Tensor& labels_R, const LogProbOutput& output,
                        const at::Tensor& d_log_probs_R, const at::Tensor& d_entropies_R, double temperature);

// References, in tensor ops, any device.
LogProbOutput log_prob_forward_reference(const at::Tensor& logits_RV, const at::Tensor& labels_R,
                                         double temperature);
void log_prob_backward_reference_(const at::Tensor& logits_RV, const at::Tensor& labels_R,
                                  const LogProbOutput& output, const at::Tensor& d_log_probs_R,
                                  const at::Tensor& d_entropies_R, double temperature);

}  // namespace bough
