#include "rollout/sampler_cuda.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "kernels/common/host_to_device.h"
#include "kernels/log_prob/log_prob.h"
#include "kernels/parameter.h"

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

bool is_greedy(const SamplingTask& request) {
  return request.greedy || request.temperature == 0;
}
double temperature_of(const SamplingTask& request) {
  return request.temperature > 0 ? request.temperature : 1.0;
}
bool cuts_to_top_k(const SamplingTask& request, int64_t vocabulary) {
  return !is_greedy(request) && request.top_k > 0 && request.top_k < vocabulary;
}
bool cuts(const SamplingTask& request, int64_t vocabulary) {
  return cuts_to_top_k(request, vocabulary) ||
         (!is_greedy(request) && (request.top_p < 1 || request.min_p > 0));
}
bool penalises(const SamplingTask& request) {
  return request.repetition_penalty != 1 || request.presence_penalty != 0 || request.frequency_penalty != 0;
}
bool changes(const SamplingTask& request) {
  return penalises(request) || !request.excluded.empty();
}

// Samples for S requests, at most kSampledTogether if logits are copied. The logits of all S requests are
// copied to [S, V] if any of them has penalties or excluded tokens (it "changes" logits), truncation ("cuts")
// or top_logprobs.
class DeviceSampler {
 public:
  DeviceSampler(const at::Tensor& logits_RV, std::span<const SamplingTask> requests)
      : logits_RV_(logits_RV), requests_(requests), vocabulary_(logits_RV.size(1)) {
    for (const SamplingTask& request : requests) {
      cuts_ |= cuts(request, vocabulary_);
      changes_ |= changes(request);
      num_top_ = std::max(num_top_, std::min(request.top_logprobs, vocabulary_));
    }
  }

  void run(std::span<SampledToken> out) {
    at::Tensor whole = draw_token(logits_RV_.contiguous(), numbers(/*own_rows=*/false));
    std::vector<at::Tensor> results = {whole, whole};
    at::Tensor tokens_S1 = column(whole, kDrawnToken).to(at::kLong);
    if (cuts_ || changes_ || num_top_ > 0) {
      rows_SV_ =
          logits_RV_.index_select(0, upload_numbers([](const SamplingTask& r) { return r.row; }).view(-1))
              .to(accumulator_type(logits_RV_.scalar_type()));
      if (num_top_ > 0) std::tie(values_SV_, ids_SV_) = sorted(rows_SV_);
      if (cuts_ || changes_) {
        const at::Tensor kept_SV = cuts_ ? cut(changed()) : changed();
        results[1] = draw_token(kept_SV, numbers(/*own_rows=*/true));
        tokens_S1 = column(results[1], kDrawnToken).to(at::kLong);
        if (cuts_) tokens_S1 = at::where(by_rank_S1_, order_SV_.gather(1, tokens_S1), tokens_S1);
      }
      results.push_back(rows_SV_.gather(1, tokens_S1).to(at::kDouble));
    } else {
      results.push_back(column(whole, kDrawnLogit));
    }
    results.push_back(tokens_S1.to(at::kDouble));
    if (num_top_ > 0) {
      results.push_back(values_SV_.narrow(1, 0, num_top_).to(at::kDouble));
      results.push_back(ids_SV_.narrow(1, 0, num_top_).to(at::kDouble));
    }
    read(at::cat(results, 1).cpu(), out);
  }

 private:
  static at::Tensor column(const at::Tensor& sampled, DrawnNumber which) {
    return sampled.narrow(1, which, 1);
  }

  // Sorted by descending logit. Among equal logits, the lower id comes first.
  static std::tuple<at::Tensor, at::Tensor> sorted(const at::Tensor& x_SV) {
    return at::sort(x_SV, /*stable=*/true, /*dim=*/1, /*descending=*/true);
  }

  // Uploads one number per request as [S, 1].
  template <class Number>
  at::Tensor upload_numbers(Number&& number) const {
    std::vector<decltype(number(requests_[0]))> values;
    for (const SamplingTask& request : requests_) values.push_back(number(request));
    return upload(values, logits_RV_.device()).unsqueeze(1);
  }

  // The numbers per request that draw_token (kernels/log_prob) reads. own_rows: draw_token gets a matrix
  // whose row i has request i's logits. Else it gets logits_RV_, and request.row is the row.
  at::Tensor numbers(bool own_rows) const {
    std::vector<double> values;
    for (size_t i = 0; i < requests_.size(); ++i) {
      const SamplingTask& request = requests_[i];
      values.insert(values.end(), {static_cast<double>(own_rows ? static_cast<int64_t>(i) : request.row),
                                   temperature_of(request), request.uniform, is_greedy(request) ? 1.0 : 0.0});
    }
    return upload(values, logits_RV_.device()).view({-1, kDrawNumbers});
  }

  // Returns rows_SV_ with penalties applied and logits of excluded tokens set to minus infinity.
  at::Tensor changed() const {
    std::vector<int64_t> penalised, excluded;
    std::vector<double> factors, terms;
    for (size_t i = 0; i < requests_.size(); ++i) {
      const SamplingTask& request = requests_[i];
      const int64_t row = static_cast<int64_t>(i) * vocabulary_;
      for (const int32_t token : request.excluded) excluded.push_back(row + token);
      if (!penalises(request)) continue;
      std::unordered_map<int32_t, int64_t> times;  // token -> occurrences in the response
      for (const int32_t token : request.prompt) times.try_emplace(token, 0);
      for (const int32_t token : request.response) ++times[token];
      for (const auto& [token, count] : times) {
        penalised.push_back(row + token);
        factors.push_back(request.repetition_penalty);
        terms.push_back((count > 0 ? request.presence_penalty : 0) +
                        request.frequency_penalty * static_cast<double>(count));
      }
    }
    if (penalised.empty() && excluded.empty()) return rows_SV_;
    const auto here = [&](const auto& values) { return upload(values, logits_RV_.device()); };
    at::Tensor changed_SV = rows_SV_.clone();
    at::Tensor flat = changed_SV.view(-1);
    if (!penalised.empty()) {
      const at::Tensor index = here(penalised), factor = here(factors);
      const at::Tensor logits = flat.index_select(0, index).to(at::kDouble);
      const at::Tensor scaled = at::where(logits.gt(0), logits / factor, logits * factor);
      flat.index_copy_(0, index, (scaled - here(terms)).to(flat.scalar_type()));
    }
    if (!excluded.empty()) flat.index_fill_(0, here(excluded), -std::numeric_limits<double>::infinity());
    return changed_SV;
  }

  // Sets logits that a request's truncation removes to minus infinity. For requests with top_k, marked in
  // by_rank_S1_, the logits are returned in the order of order_SV_.
  at::Tensor cut(const at::Tensor& x_SV) {
    at::Tensor values_SV;
    std::tie(values_SV, order_SV_) =
        values_SV_.defined() && x_SV.is_same(rows_SV_) ? std::tuple(values_SV_, ids_SV_) : sorted(x_SV);
    const double infinity = std::numeric_limits<double>::infinity();
    const at::Tensor temperature_S1 = upload_numbers([](const SamplingTask& r) { return temperature_of(r); });
    const at::Tensor top_k_S1 = upload_numbers(
        [&](const SamplingTask& r) { return cuts_to_top_k(r, vocabulary_) ? r.top_k : vocabulary_; });
    const at::Tensor top_p_S1 = upload_numbers(
        [&](const SamplingTask& r) { return is_greedy(r) || r.top_p >= 1 ? infinity : r.top_p; });
    const at::Tensor min_p_S1 =
        upload_numbers([](const SamplingTask& r) { return is_greedy(r) ? 0.0 : r.min_p; });
    by_rank_S1_ = top_k_S1.lt(vocabulary_);
    const at::Tensor rank_V = at::arange(vocabulary_, top_k_S1.options());
    const at::Tensor weights_SV =  // the most likely token has weight 1
        (values_SV - values_SV.narrow(1, 0, 1))
            .div_(temperature_S1.to(x_SV.scalar_type()))
            .exp_()
            .to(at::kDouble);
    at::Tensor keeps_SV = rank_V < top_k_S1;
    const at::Tensor left_SV = weights_SV.masked_fill(keeps_SV.logical_not(), 0);
    const at::Tensor before_SV = left_SV.cumsum(1).sub_(left_SV);
    keeps_SV.logical_and_(before_SV < top_p_S1 * left_SV.sum(1, true));
    keeps_SV.logical_and_(weights_SV >= min_p_S1).logical_or_(rank_V.eq(0));
    const at::Tensor keeps_by_id_SV = at::empty_like(keeps_SV).scatter_(1, order_SV_, keeps_SV);
    return at::where(by_rank_S1_, values_SV.masked_fill(keeps_SV.logical_not(), -infinity),
                     x_SV.masked_fill(keeps_by_id_SV.logical_not(), -infinity))
        .contiguous();
  }

  // `results`, fp64 on the CPU: one matrix row per request, with the columns that run() concatenated.
  void read(const at::Tensor& results, std::span<SampledToken> out) const {
    for (size_t i = 0; i < requests_.size(); ++i) {
      const double* whole =
          static_cast<const double*>(results.const_data_ptr()) + static_cast<int64_t>(i) * results.size(1);
      const double *own = whole + kDrawnNumbers, *token = own + kDrawnNumbers, *top = token + 2;
      const double temperature = temperature_of(requests_[i]);
      const double raw_log_sum = log_of_sum(whole[kDrawnLargest], whole[kDrawnRawSum]);
      const double log_sum = log_of_sum(whole[kDrawnLargest], whole[kDrawnSum]);
      if (std::isinf(own[kDrawnLargest]))
        throw UserError("min_new_tokens excludes the stop tokens, and every other token has probability 0");
      const auto log_prob = [&](double logit) {
        return (logit - whole[kDrawnLargest]) / temperature - log_sum;
      };
      SampledToken& sampled = out[i];
      sampled = {};
      sampled.token = static_cast<int32_t>(token[1]);
      sampled.log_prob = log_prob(token[0]);
      sampled.raw_log_prob = token[0] - whole[kDrawnLargest] - raw_log_sum;
      const double below = (own[kDrawnLogit] - own[kDrawnLargest]) / temperature;
      sampled.sampling_log_prob =
          is_greedy(requests_[i]) ? 0 : std::min(0.0, below - std::log(own[kDrawnSum]));
      for (int64_t k = 0; k < std::min(requests_[i].top_logprobs, num_top_); ++k) {
        sampled.top_ids.push_back(static_cast<int32_t>(top[num_top_ + k]));
        sampled.top_log_probs.push_back(log_prob(top[k]));
      }
    }
  }

  const at::Tensor& logits_RV_;
  std::span<const SamplingTask> requests_;
  const int64_t vocabulary_;
  bool cuts_ = false, changes_ = false;
  int64_t num_top_ = 0;               // maximum top_logprobs of the requests
  at::Tensor rows_SV_;                // the requests' logits, accumulator type
  at::Tensor values_SV_, ids_SV_;     // rows_SV_ sorted; defined only if top_logprobs are requested
  at::Tensor order_SV_, by_rank_S1_;  // set by cut()
};

}  // namespace

// Requests with none of penalties, exclusion, truncation and top_logprobs are sampled together, apart from
// the other requests. Their logits are not copied.
void sample_on_device(const at::Tensor& logits_RV, std::span<const SamplingTask> requests,
                      std::span<SampledToken> out) {
  std::vector<size_t> plain, others;
  for (size_t i = 0; i < requests.size(); ++i) {
    const SamplingTask& request = requests[i];
    const bool leaves = !cuts(request, logits_RV.size(1)) && !changes(request) && request.top_logprobs == 0;
    (leaves ? plain : others).push_back(i);
  }
  const auto sample = [&](std::span<const size_t> which) {
    if (which.empty()) return;
    std::vector<SamplingTask> own;
    for (const size_t i : which) own.push_back(requests[i]);
    std::vector<SampledToken> sampled(own.size());
    DeviceSampler(logits_RV, own).run(sampled);
    for (size_t i = 0; i < which.size(); ++i) out[which[i]] = std::move(sampled[i]);
  };
  sample(plain);
  for (size_t begin = 0; begin < others.size(); begin += kSampledTogether)
    sample(std::span(others).subspan(begin, std::min(kSampledTogether, others.size() - begin)));
}

}  // namespace bough
