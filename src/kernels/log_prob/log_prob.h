// Log-probability and entropy of rows of logits, forward and backward, over one chunk of rows. The caller
// never holds [rows, vocabulary] as a whole.
//
//   z = logits / temperature,  lse = log sum_v exp z[v],  p = exp(z - lse)
//   log_prob = z[label] - lse,  entropy H = lse - sum_v p[v] z[v]
// Backward, in place of the logits:
//   d_logits[v] = (d_log_prob · (1[v = label] - p[v]) - d_entropy · p[v] · (log p[v] + H)) / temperature
// Sums are in the accumulator type. d_logits are rounded once to the logits' dtype.
//
// A label of -1 is not among these columns: another rank has it (models/tensor_parallel.h). Its log_prob is
// -inf, and 1[v = label] is 0 everywhere.
#pragma once

#include <ATen/core/Tensor.h>

namespace bough {

struct LogProbOutput {
  at::Tensor log_probs_R, lse_R, entropies_R;  // accumulator type
};

// logits_RV: contiguous. labels_R: int64 in [-1, V), same device. temperature: above 0. Throws InternalError
// if a shape, dtype or temperature does not fit.
LogProbOutput log_prob_forward(const at::Tensor& logits_RV, const at::Tensor& labels_R, double temperature);

// Merges the outputs of S column parts of the same rows (tensors [S, R]) into the output over all columns.
// Each label is in one of the parts.
LogProbOutput merge_columns(const LogProbOutput& parts_SR);

// Overwrites logits_RV with their gradient. d_log_probs_R, d_entropies_R: contiguous, accumulator type.
// Throws InternalError as log_prob_forward, or if these do not fit.
void log_prob_backward_(const at::Tensor& logits_RV, const at::Tensor& labels_R, const LogProbOutput& output,
                        const at::Tensor& d_log_probs_R, const at::Tensor& d_entropies_R, double temperature);

// The k most likely tokens of each row (all if there are fewer), most likely first, with their
// log-probabilities.
struct TopLogProbs {
  at::Tensor ids_RK;        // int64
  at::Tensor log_probs_RK;  // accumulator type
};
TopLogProbs top_log_probs(const at::Tensor& logits_RV, const at::Tensor& lse_R, int64_t k,
                          double temperature);

// Log-probabilities of the top-k tokens ids_LK (int64). rows_L: the row of the logits for each of the L
// lists; several lists may share a row. 0 if an id is -1.
at::Tensor top_k_log_probs(const at::Tensor& logits_RV, const at::Tensor& lse_R, const at::Tensor& rows_L,
                           const at::Tensor& ids_LK, double temperature);
// Backward of top_k_log_probs, in two steps:
// 1. Before log_prob_backward_, the caller adds to d_log_probs_R the sum of d_top_k_LK over L and K of each
//    row. This gives the terms with -p[v].
// 2. After log_prob_backward_, add_top_k_gradient_ adds the remaining terms to its result:
//      d_logits[v] += (sum of d_given with id v - 1[v = label] · sum of all d_given of the row) / temperature
// An id or label of -1 is not among these columns.
void add_top_k_gradient_(const at::Tensor& d_logits_RV, const at::Tensor& labels_R, const at::Tensor& rows_L,
                         const at::Tensor& ids_LK, const at::Tensor& d_top_k_LK, double temperature);

// References of forward and backward, in tensor ops, on any device.
LogProbOutput log_prob_forward_reference(const at::Tensor& logits_RV, const at::Tensor& labels_R,
                                         double temperature);
void log_prob_backward_reference_(const at::Tensor& logits_RV, const at::Tensor& labels_R,
                                  const LogProbOutput& output, const at::Tensor& d_log_probs_R,
                                  const at::Tensor& d_entropies_R, double temperature);

// Samples tokens from full distributions on CUDA, so that logits stay on the device. Other devices use tensor
// ops. The rule is that of rollout/sampler.h without top_k, top_p, min_p, penalties and excluded tokens. A
// logit of -infinity is never sampled.
//
// logits_RV: fp32, fp64 or bf16. requests: fp64 [D, kDrawNumbers] on the same device, one row per token to
// sample:
//   row of the logits, temperature (above 0), uniform random number,
//   1 to take the most likely token instead (if several are equal, the lowest id), else 0
// Returns fp64 [D, kDrawnNumbers]:
//   token, its logit, the row's largest logit, sum of exp(logit - largest),
//   sum of exp((logit - largest) / temperature)
// If a sum or the largest logit is not finite, the token has no meaning. Exponentials are fp32 (fp64 for fp64
// logits), sums fp64. A row gives the same bits whatever the other requests are. Throws InternalError if a
// shape or dtype does not fit.
enum DrawNumber { kDrawRow, kDrawTemperature, kDrawUniform, kDrawGreedy, kDrawNumbers };
enum DrawnNumber { kDrawnToken, kDrawnLogit, kDrawnLargest, kDrawnRawSum, kDrawnSum, kDrawnNumbers };

at::Tensor draw_token(const at::Tensor& logits_RV, const at::Tensor& requests);

}  // namespace bough
