#include "rollout/sampler_cuda.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "kernels/log_prob/log_prob.h"
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

namespace {

// Whether nothing is cut, penalised or excluded, or the most likely of all tokens is taken, and nothing more
// is asked for.
bool draws_from_all(const DrawRequest& request, int64_t vocabulary) {
  if (request.repetition_penalty != 1 || request.presence_penalty != 0 || request.frequency_penalty != 0 ||
      !request.excluded.empty() || request.top_logprobs > 0)
    return false;
  if (request.greedy || request.temperature == 0) return true;
  return (request.top_k == 0 || request.top_k >= vocabulary) && request.top_p >= 1 && request.min_p == 0;
}

// Makes draws for requests that all draw from all tokens.
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

}  // namespace

// Whole distributions are drawn from where they are; the rows of other requests are brought over.
void draw_from_device(const at::Tensor& logits_RV, std::span<const DrawRequest> requests,
                      std::span<Draw> draws) {
  std::vector<size_t> there, here;
  std::vector<DrawRequest> requests_there, requests_here;
  std::vector<int64_t> rows;  // brought over, each once
  std::unordered_map<int64_t, int64_t> place_of;
  for (size_t i = 0; i < requests.size(); ++i) {
    const bool stays = draws_from_all(requests[i], logits_RV.size(1));
    (stays ? there : here).push_back(i);
    DrawRequest& request = (stays ? requests_there : requests_here).emplace_back(requests[i]);
    if (stays) continue;
    const auto [place, is_new] = place_of.try_emplace(request.row, static_cast<int64_t>(rows.size()));
    if (is_new) rows.push_back(request.row);
    request.row = place->second;
  }
  std::vector<Draw> drawn(std::max(there.size(), here.size()));
  if (!there.empty()) {
    draw_on_cuda(logits_RV, requests_there, std::span(drawn).first(there.size()));
    for (size_t i = 0; i < there.size(); ++i) draws[there[i]] = drawn[i];
  }
  if (!here.empty()) {
    const at::Tensor brought = logits_RV.index_select(0, upload(rows, logits_RV.device())).cpu();
    draw_on_cpu(brought, requests_here, std::span(drawn).first(here.size()));
    for (size_t i = 0; i < here.size(); ++i) draws[here[i]] = drawn[i];
  }
}

}  // namespace bough
