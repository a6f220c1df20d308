#include "rollout/sampler_cuda.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/error.h"
#include "kernels/draw_token/draw_token.h"
#include "rollout/upload.h"

namespace bough {

double log_of_sum(double largest, double sum) {
  if (!std::isfinite(sum) || !(sum > 0) || !std::isfinite(largest)) {
    throw UserError(
        str("the model's logits are not finite (largest ", largest, ", sum of exponentials ", sum,
            "): the weights have diverged; go back to an earlier checkpoint or lower the learning rate"));
  }
  return std::log(sum);
}

bool draws_from_all(const DrawRequest& request, int64_t vocabulary) {
  if (request.repetition_penalty != 1 || request.presence_penalty != 0 || request.frequency_penalty != 0 ||
      !request.excluded.empty())
    return false;
  if (request.greedy || request.temperature == 0) return true;
  return (request.top_k == 0 || request.top_k >= vocabulary) && request.top_p >= 1 && request.min_p == 0;
}

void draw_on_cuda(const at::Tensor& logits_RV, std::span<const DrawRequest> requests, std::span<Draw> draws) {
  const auto temperature_of = [](const DrawRequest& request) {
    return request.temperature > 0 ? request.temperature : 1.0;
  };
  std::vector<double> numbers;
  for (const DrawRequest& request : requests) {
    const bool is_greedy = request.greedy || request.temperature == 0;
    numbers.insert(numbers.end(), {static_cast<double>(request.row), temperature_of(request), request.uniform,
                                   is_greedy ? 1.0 : 0.0});
  }
  const at::Tensor on_device = upload(numbers, logits_RV.device()).view({-1, kDrawNumbers});
  const at::Tensor drawn = draw_token(logits_RV.contiguous(), on_device).cpu();
  const auto* values = static_cast<const double*>(drawn.const_data_ptr());
  for (size_t i = 0; i < requests.size(); ++i, values += kDrawnNumbers) {
    const double raw_log_sum = log_of_sum(values[kDrawnLargest], values[kDrawnRawSum]);
    const double log_sum = log_of_sum(values[kDrawnLargest], values[kDrawnSum]);
    const double below_largest = values[kDrawnLogit] - values[kDrawnLargest];
    Draw& draw = draws[i];
    draw.token = static_cast<int32_t>(values[kDrawnToken]);
    draw.log_prob = below_largest / temperature_of(requests[i]) - log_sum;
    draw.raw_log_prob = below_largest - raw_log_sum;
    const bool is_greedy = requests[i].greedy || requests[i].temperature == 0;
    draw.truncated_log_prob = is_greedy ? 0 : std::min(0.0, draw.log_prob);
  }
}

}  // namespace bough
