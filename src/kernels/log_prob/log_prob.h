// Log-probability and entropy of rows of logits, forward and backward. The caller passes one chunk of rows at
// a time, so that logits of all rows are never in memory together.
//
//   z = logits / temperature,  lse = log sum_v exp z[v],  p = exp(z - lse)
//   log_prob = z[label] - lse,  entropy H = lse - sum_v p[v] z[v]
// Backward overwrites the logits:
//   d_logits[v] = (d_log_prob · (1[v = label] - p[v]) - d_entropy · p[v] · (log p[v] + H)) / temperature
// Sums are in the accumulator type. d_logits are rounded once to the logits' dtype.
//
// With tensor parallelism, logits have the columns of one rank (models/tensor_parallel.h). A label of -1
// means that another rank has the label's column. Then log_prob is -inf, and 1[v = label] is 0 everywhere.
#pragma once

#include <ATen/core/Tensor.h>

namespace bough {

struct LogProbOutput {
  at::Tensor log_probs_R, lse_R, entropies_R;  // accumulator type
};

// logits_RV: contiguous. labels_R: int64 in [-1, V), same device. temperature: above 0. Throws InternalError
// if a shape, dtype or temperature does not fit.
LogProbOutput log_prob_forward(const at::Tensor& logits_RV, const at::Tensor& labels_R, double temperature);

// Merges the outputs for S parts of the columns, of the same rows (tensors [S, R]), into the output for all
// columns. Each row's label must be in one of the parts.
LogProbOutput merge_columns(const LogProbOutput& parts_SR);

// Overwrites logits_RV with their gradient. d_log_probs_R, d_entropies_R: contiguous, accumulator type.
// Throws InternalError if an argument does not fit.
void log_prob_backward_(const at::Tensor& logits_RV, const at::Tensor& labels_R, const LogProbOutput& output,
                        const at::Tensor& d_log_probs_R, const at::Tensor& d_entropies_R, double temperature);

// The k most likely tokens of each row (all if the vocabulary is smaller), most likely first, and their
// log-probabilities.
struct TopLogProbs {
  at::Tensor ids_RK;        // int64
  at::Tensor log_probs_RK;  // accumulator type
};
TopLogProbs top_log_probs(const at::Tensor& logits_RV, const at::Tensor& lse_R, int64_t k,
                          double temperature);

// Log-probabilities of L lists of K tokens, ids_LK (int64). rows_L: for each list, the row of the logits;
// several lists may name the same row. The log-probability of an id of -1 is 0.
at::Tensor top_k_log_probs(const at::Tensor& logits_RV, const at::Tensor& lse_R, const at::Tensor& rows_L,
                           const at::Tensor& ids_LK, double temperature);
// Backward of top_k_log_probs, in two steps:
// 1. Before log_prob_backward_, the caller adds to d_log_probs_R, for each row of the logits, the sum of
//    d_top_k_LK over all tokens of the lists that name the row. This gives the terms with -p[v].
// 2. After log_prob_backward_, add_top_k_gradient_ adds the remaining terms to d_logits_RV, which then holds
//    the gradient from log_prob_backward_:
//      d_logits[v] += (sum of d_top_k with id v - 1[v = label] · sum of all d_top_k of the row) / temperature
// An id or label of -1 has no term: its column is not in logits_RV.
void add_top_k_gradient_(const at::Tensor& d_logits_RV, const at::Tensor& labels_R, const at::Tensor& rows_L,
                         const at::Tensor& ids_LK, const at::Tensor& d_top_k_LK, double temperature);

// References of forward and backward, in tensor ops, on any device.
LogProbOutput log_prob_forward_reference(const at::Tensor& logits_RV, const at::Tensor& labels_R,
                                         double temperature);
void log_prob_backward_reference_(const at::Tensor& logits_RV, const at::Tensor& labels_R,
                                  const LogProbOutput& output, const at::Tensor& d_log_probs_R,
                                  const at::Tensor& d_entropies_R, double temperature);

// Samples tokens from full distributions. On CUDA, one kernel does this, so that logits stay on the device.
// On other devices, it uses tensor ops. The rule is that of rollout/sampler.h without top_k, top_p, min_p,
// penalties and excluded tokens. A logit of -infinity is never sampled.
//
// logits_RV: fp32, fp64 or bf16. requests: fp64 [D, kDrawNumbers] on the same device, for each token to
// sample:
//   row of the logits, temperature (above 0), uniform random number,
//   1 to take the most likely token instead (if several are equal, the lowest id), else 0
// Returns fp64 [D, kDrawnNumbers]:
//   token, its logit, the row's largest logit, sum of exp(logit - largest),
//   sum of exp((logit - largest) / temperature)
// If a sum or the largest logit is not finite, the token has no meaning. Exponentials are fp32 (fp64 for fp64
// logits), sums fp64. The bits of a result do not depend on the other requests. Throws InternalError if a
// shape or dtype does not fit.
enum DrawNumber { kDrawRow, kDrawTemperature, kDrawUniform, kDrawGreedy, kDrawNumbers };
enum DrawnNumber { kDrawnToken, kDrawnLogit, kDrawnLargest, kDrawnRawSum, kDrawnSum, kDrawnNumbers };

at::Tensor draw_token(const at::Tensor& logits_RV, const at::Tensor& requests);

}  // namespace bough
