// Draws tokens from whole distributions on CUDA, so that logits stay on the device. Which token, from which sums:
// rollout/sampler.h, of which this is the case without cuts, penalties and excluded tokens.
//
// logits_RV: fp32, fp64 or bf16. requests: fp64 [D, kDrawNumbers] on the same device: row of the logits, temperature
// (above 0), the uniform number, and 1 for the most likely token instead (of equal ones that of the lowest id). Returns
// fp64 [D, kDrawnNumbers]: the token, its logit, the row's largest logit, and the sums over the row of exp(logit -
// largest) and of exp((logit - largest) / temperature); where these are not finite the token means nothing.
// Exponentials are fp32 (fp64 for fp64 logits), sums fp64; the same bits for the same row, whatever is drawn beside it.
#pragma once

#include <ATen/core/Tensor.h>

namespace bough {

enum DrawNumber { kDrawRow, kDrawTemperature, kDrawUniform, kDrawGreedy, kDrawNumbers };
enum DrawnNumber { kDrawnToken, kDrawnLogit, kDrawnLargest, kDrawnRawSum, kDrawnSum, kDrawnNumbers };

at::Tensor draw_token(const at::Tensor& logits_RV, const at::Tensor& requests);

}  // namespace bough
