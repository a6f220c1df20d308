// Log-probability and entropy of rows of logits, and the way back, over one chunk of rows (the caller never
// holds [rows, vocabulary] whole).
//
//   z = logits / temperature,  lse = log sum_v exp z[v],  p = exp(z - lse)
//   log_prob = z[label] - lse,  entropy H = lse - sum_v p[v] z[v]
// Backward, in place of the logits:
//   d_logits[v] = (d_log_prob · (1[v = label] - p[v]) - d_entropy · p[v] · (log p[v] + H)) / temperature
// Sums in the accumulator type; d_logits rounded once to the logits' dtype.
//
// A label of -1 is none of these columns (another rank has it, models/tensor_parallel.h): its log_prob is
// -inf, and 1[v = label] is 0 everywhere.
#pragma once

#include <ATen/core/Tensor.h>

namespace bough {

struct LogProbOutput {
  at::Tensor log_probs_R, lse_R, entropies_R;  // accumulator type
};

// logits_RV: contiguous. labels_R: int64 in [-1, V), same device.
LogProbOutput log_prob_forward(const at::Tensor& logits_RV, const at::Tensor& labels_R, double temperature);

// Of rows whose columns are cut into S parts, each of which was computed by itself (tensors [S, R]; a label
// is in one of them): that of all columns.
LogProbOutput merge_columns(const LogProbOutput& parts_SR);

// Overwrites logits_RV with their gradient. d_log_probs_R, d_entropies_R: accumulator type.
void log_prob_backward_(const at::Tensor& logits_RV, const at::Tensor& labels_R, const LogProbOutput& output,
                        const at::Tensor& d_log_probs_R, const at::Tensor& d_entropies_R, double temperature);

// The k most likely tokens of each row, in falling order of probability, with log-probabilities.
struct TopLogProbs {
  at::Tensor ids_RK;        // int64
  at::Tensor log_probs_RK;  // accumulator type
};
TopLogProbs top_log_probs(const at::Tensor& logits_RV, const at::Tensor& lse_R, int64_t k,
                          double temperature);

// log_prob of tokens that were not drawn: of ids_LK (int64) in the rows rows_L of the logits; several of L
// may share a row. 0 for an id of -1.
at::Tensor given_log_probs(const at::Tensor& logits_RV, const at::Tensor& lse_R, const at::Tensor& rows_L,
                           const at::Tensor& ids_LK, double temperature);
// Its way back, in two parts: to d_log_probs_R of log_prob_backward_ add the sum of d_given_LK over each
// row's L and K (the -p[v] of all of them); and afterwards add the rest of the gradient to what it left,
//   d_logits[v] += (sum of d_given where the id is v - (that sum where v is the label)) / temperature.
// An id or label of -1 is none of these columns.
void add_given_gradient_(const at::Tensor& d_logits_RV, const at::Tensor& labels_R, const at::Tensor& rows_L,
                         const at::Tensor& ids_LK, const at::Tensor& d_given_LK, double temperature);

// References of forward and backward, in tensor ops, any device.
LogProbOutput log_prob_forward_reference(const at::Tensor& logits_RV, const at::Tensor& labels_R,
                                         double temperature);
void log_prob_backward_reference_(const at::Tensor& logits_RV, const at::Tensor& labels_R,
                                  const LogProbOutput& output, const at::Tensor& d_log_probs_R,
                                  const at::Tensor& d_entropies_R, double temperature);

// Draws tokens from whole distributions on CUDA, so that logits stay on the device (elsewhere by tensor ops).
// Which token, from which sums: rollout/sampler.h, of which this is the case without cuts, penalties and
// excluded tokens. Logits of -infinity are not drawn.
//
// logits_RV: fp32, fp64 or bf16. requests: fp64 [D, kDrawNumbers] on the same device: row of the logits,
// temperature (above 0), the uniform number, and 1 for the most likely token instead (of equal ones that of
// the lowest id). Returns fp64 [D, kDrawnNumbers]: the token, its logit, the row's largest logit, and the
// sums over the row of exp(logit - largest) and of exp((logit - largest) / temperature); where these are not
// finite the token means nothing. Exponentials are fp32 (fp64 for fp64 logits), sums fp64; the same bits for
// the same row, whatever is drawn beside it.
enum DrawNumber { kDrawRow, kDrawTemperature, kDrawUniform, kDrawGreedy, kDrawNumbers };
enum DrawnNumber { kDrawnToken, kDrawnLogit, kDrawnLargest, kDrawnRawSum, kDrawnSum, kDrawnNumbers };

at::Tensor draw_token(const at::Tensor& logits_RV, const at::Tensor& requests);

}  // namespace bough
