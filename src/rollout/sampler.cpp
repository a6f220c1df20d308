#include "rollout/sampler.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "base/error.h"
#include "kernels/log_prob/softmax_blocks.h"
#include "rollout/sampler_cuda.h"

namespace bough {

namespace {

// Number of histogram buckets between the largest logit and the smallest logit that top_p can keep.
constexpr int64_t kBuckets = 1024;

// Samples from the logits of one matrix row. Buffers are reused between calls. A block is kSoftmaxBlock
// tokens of the vocabulary. A weight is exp((logit - sampling_maximum_) / temperature).
template <class T>
class RowSampler {
 public:
  using Acc = typename simd::Types<T>::Acc;

  explicit RowSampler(int64_t vocabulary)
      : size_(vocabulary), maxima_(num_blocks()), sums_(num_blocks()), weights_(kSoftmaxBlock) {}

  SampledToken sample(const T* row, const SamplingTask& request) {
    row_ = row;
    request_ = &request;
    const double temperature = request.temperature > 0 ? request.temperature : 1.0;
    inverse_temperature_ = static_cast<Acc>(1.0 / temperature);
    softmax_maxima(row, size_, maxima_.data());
    maximum_ = *std::max_element(maxima_.begin(), maxima_.end());
    softmax_sums(row, size_, maximum_, Acc{1}, sums_.data(), nullptr);
    const double raw_log_sum = log_sum();
    double log_sum_at_temperature = raw_log_sum;
    if (inverse_temperature_ != 1) {
      softmax_sums(row, size_, maximum_, inverse_temperature_, sums_.data(), nullptr);
      log_sum_at_temperature = log_sum();
    }
    SampledToken sampled;
    SampledToken top;  // sample_penalised fills its own SampledToken
    if (request.top_logprobs > 0) find_top(top, temperature, log_sum_at_temperature);
    if (request.repetition_penalty != 1 || request.presence_penalty != 0 || request.frequency_penalty != 0)
      sampled = sample_penalised();
    else sample_truncated(sampled);
    const double logit = simd::widen(row[sampled.token]);
    sampled.log_prob = log_probability(logit, maximum_, temperature, log_sum_at_temperature);
    sampled.raw_log_prob = log_probability(logit, maximum_, 1, raw_log_sum);
    sampled.top_ids = std::move(top.top_ids);
    sampled.top_log_probs = std::move(top.top_log_probs);
    return sampled;
  }

 private:
  struct Candidate {
    Acc logit;
    int32_t token;
    bool operator<(const Candidate& other) const {  // the more likely token comes first
      return logit != other.logit ? logit > other.logit : token < other.token;
    }
  };
  struct Weighted {
    Candidate candidate;
    double weight;
    bool operator<(const Weighted& other) const { return candidate < other.candidate; }
  };

  size_t num_blocks() const { return static_cast<size_t>(softmax_blocks(size_)); }
  bool is_excluded(int32_t token) const {
    return std::binary_search(request_->excluded.begin(), request_->excluded.end(), token);
  }

  double log_sum() const {
    double sum = 0;
    for (const double block : sums_) sum += block;
    return log_of_sum(static_cast<double>(maximum_), sum);
  }

  // Finds the top_logprobs tokens in the whole distribution, before tokens are excluded.
  void find_top(SampledToken& sampled, double temperature, double log_sum_at_temperature) {
    const auto count = static_cast<size_t>(std::min(request_->top_logprobs, size_));
    const Acc bound = largest_block_bound(count);
    std::vector<Candidate> candidates;
    for (size_t block = 0; block < maxima_.size(); ++block) {
      if (maxima_[block] < bound) continue;
      const int64_t begin = static_cast<int64_t>(block) * kSoftmaxBlock;
      for (int64_t i = begin; i < std::min(size_, begin + kSoftmaxBlock); ++i)
        if (const Acc logit = static_cast<Acc>(simd::widen(row_[i])); logit >= bound)
          candidates.push_back({logit, static_cast<int32_t>(i)});
    }
    std::partial_sort(candidates.begin(), candidates.begin() + static_cast<int64_t>(count), candidates.end());
    for (size_t i = 0; i < count; ++i) {
      sampled.top_ids.push_back(candidates[i].token);
      sampled.top_log_probs.push_back(log_probability(static_cast<double>(candidates[i].logit),
                                                      static_cast<double>(maximum_), temperature,
                                                      log_sum_at_temperature));
    }
  }

  void sample_truncated(SampledToken& sampled) {
    if (request_->greedy || request_->temperature == 0) {
      sampled.token = most_likely();
      sampled.sampling_log_prob = 0;
      return;
    }
    exclude();
    if (request_->top_k > 0 && request_->top_k < size_) sampled.token = sample_from_top_k();
    else if (request_->top_p < 1) sampled.token = sample_from_top_p();
    else if (request_->min_p > 0) sampled.token = sample_above(min_p_bound());
    else sampled.token = sample_from_all();
    const double below_maximum =
        static_cast<double>(simd::widen(row_[sampled.token])) - static_cast<double>(sampling_maximum_);
    sampled.sampling_log_prob =
        std::min(0.0, below_maximum * static_cast<double>(inverse_temperature_) - std::log(kept_mass_));
  }

  // Samples from a copy of the logits, in the accumulator type, with penalties.
  SampledToken sample_penalised() {
    if (!penalised_) penalised_ = std::make_unique<RowSampler<Acc>>(size_);
    auto& logits = penalised_row_;
    logits.resize(static_cast<size_t>(size_));
    for (int64_t i = 0; i < size_; ++i)
      logits[static_cast<size_t>(i)] = static_cast<Acc>(simd::widen(row_[i]));
    const auto once = [](std::vector<int32_t> tokens) {
      std::sort(tokens.begin(), tokens.end());
      tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
      return tokens;
    };
    std::vector<int32_t> seen(request_->response.begin(), request_->response.end());
    const auto in_response = once(seen);
    seen.insert(seen.end(), request_->prompt.begin(), request_->prompt.end());
    const auto factor = static_cast<Acc>(request_->repetition_penalty);
    for (const int32_t token : once(seen)) {
      Acc& logit = logits[static_cast<size_t>(token)];
      logit = logit > 0 ? logit / factor : logit * factor;
    }
    for (const int32_t token : in_response)
      logits[static_cast<size_t>(token)] -= static_cast<Acc>(request_->presence_penalty);
    for (const int32_t token : request_->response)
      logits[static_cast<size_t>(token)] -= static_cast<Acc>(request_->frequency_penalty);
    SamplingTask request = *request_;
    request.repetition_penalty = 1;
    request.presence_penalty = request.frequency_penalty = 0;
    request.top_logprobs = 0;  // they use the distribution before penalties, and are already found
    return penalised_->sample(logits.data(), request);
  }

  // Returns the logit of a token that is min_p times as likely as the most likely token.
  Acc min_p_bound() const {
    if (request_->min_p <= 0) return -std::numeric_limits<Acc>::infinity();
    return static_cast<Acc>(static_cast<double>(sampling_maximum_) +
                            std::log(request_->min_p) / static_cast<double>(inverse_temperature_));
  }

  // Writes the weights of one block to weights_, 0 for excluded tokens. Returns the block's number of tokens.
  int64_t fill_weights(int64_t block) {
    const int64_t begin = block * kSoftmaxBlock, count = std::min(kSoftmaxBlock, size_ - begin);
    softmax_weights(row_ + begin, count, sampling_maximum_, inverse_temperature_, weights_.data());
    const auto& excluded = request_->excluded;
    for (auto it = std::lower_bound(excluded.begin(), excluded.end(), begin);
         it != excluded.end() && *it < begin + count; ++it) {
      weights_[static_cast<size_t>(*it - begin)] = 0;
    }
    return count;
  }

  // Recomputes maxima and sums without the excluded tokens, and relative to the largest remaining logit.
  // Relative to an excluded logit that is far larger, the remaining exponentials would underflow.
  void exclude() {
    sampling_maximum_ = maximum_;
    const auto& excluded = request_->excluded;
    if (excluded.empty()) return;
    std::vector<int64_t> blocks;
    for (const int32_t token : excluded) {
      const int64_t block = token / kSoftmaxBlock;
      if (!blocks.empty() && blocks.back() == block) continue;
      blocks.push_back(block);
      Acc& maximum = maxima_[static_cast<size_t>(block)] = -std::numeric_limits<Acc>::infinity();
      for (int64_t i = block * kSoftmaxBlock; i < std::min(size_, (block + 1) * kSoftmaxBlock); ++i) {
        if (!is_excluded(static_cast<int32_t>(i)))
          maximum = std::max(maximum, static_cast<Acc>(simd::widen(row_[i])));
      }
    }
    sampling_maximum_ = *std::max_element(maxima_.begin(), maxima_.end());
    if (!std::isfinite(sampling_maximum_)) {
      throw UserError("min_new_tokens excludes the stop tokens, and every other token has probability 0");
    }
    if (sampling_maximum_ < maximum_)
      softmax_sums(row_, size_, sampling_maximum_, inverse_temperature_, sums_.data(), nullptr);
    for (const int64_t block : blocks) {
      const int64_t count = fill_weights(block);
      sums_[static_cast<size_t>(block)] = std::accumulate(weights_.begin(), weights_.begin() + count, 0.0);
    }
  }

  int32_t most_likely() {
    exclude();
    const int64_t block = std::max_element(maxima_.begin(), maxima_.end()) - maxima_.begin();
    for (int64_t i = block * kSoftmaxBlock;; ++i) {
      const auto token = static_cast<int32_t>(i);
      if (static_cast<Acc>(simd::widen(row_[i])) == sampling_maximum_ && !is_excluded(token)) return token;
    }
  }

  // Samples from the tokens with a logit of at least `bound`, in order of id.
  int32_t sample_above(Acc bound) {
    kept_mass_ = 0;
    for_each_above(bound, [&](const Candidate&, Acc weight) {
      kept_mass_ += static_cast<double>(weight);
      return false;
    });
    return token_at_uniform(bound, [](const Candidate&) { return true; });
  }

  // Returns the kept token at which the cumulative weight exceeds uniform · kept_mass_. Kept tokens have a
  // logit of at least `bound` and satisfy is_kept. They are in order of id.
  template <class IsKept>
  int32_t token_at_uniform(Acc bound, IsKept&& is_kept) {
    double target = request_->uniform * kept_mass_;
    int32_t token = 0;
    for_each_above(bound, [&](const Candidate& candidate, Acc weight) {
      if (!(weight > 0) || !is_kept(candidate)) return false;
      token = candidate.token;
      target -= static_cast<double>(weight);
      return target < 0;
    });
    return token;
  }

  int32_t sample_from_all() {
    const double total = std::accumulate(sums_.begin(), sums_.end(), 0.0);
    kept_mass_ = total;
    double target = request_->uniform * total;
    size_t block = 0, last_possible = 0;
    for (; block < sums_.size(); ++block) {
      if (sums_[block] > 0) last_possible = block;
      if (target < sums_[block]) break;
      target -= sums_[block];
    }
    if (block == sums_.size()) block = last_possible;  // only after rounding, since uniform is below 1
    const int64_t count = fill_weights(static_cast<int64_t>(block));
    int64_t last = 0;
    for (int64_t i = 0; i < count; ++i) {
      const double weight = static_cast<double>(weights_[static_cast<size_t>(i)]);
      if (weight > 0) last = i;
      if (target < weight) break;
      target -= weight;
    }
    return static_cast<int32_t>(static_cast<int64_t>(block) * kSoftmaxBlock + last);
  }

  // Returns a logit that is at most each of the `count` largest logits: the count-th largest block maximum.
  // -infinity if there are fewer blocks.
  Acc largest_block_bound(size_t count) const {
    if (count > maxima_.size()) return -std::numeric_limits<Acc>::infinity();
    std::vector<Acc> maxima = maxima_;
    std::nth_element(maxima.begin(), maxima.begin() + static_cast<int64_t>(count) - 1, maxima.end(),
                     std::greater<Acc>());
    return maxima[count - 1];
  }

  // Calls use(candidate, weight) for the tokens with a logit of at least `bound`, in order of id, until use()
  // returns true. Weights of excluded tokens are 0.
  template <class Use>
  void for_each_above(Acc bound, Use&& use) {
    for (size_t block = 0; block < maxima_.size(); ++block) {
      if (maxima_[block] < bound) continue;
      const int64_t begin = static_cast<int64_t>(block) * kSoftmaxBlock,
                    count = fill_weights(static_cast<int64_t>(block));
      for (int64_t i = 0; i < count; ++i) {
        const Acc logit = static_cast<Acc>(simd::widen(row_[begin + i]));
        if (logit < bound) continue;
        if (use(Candidate{logit, static_cast<int32_t>(begin + i)}, weights_[static_cast<size_t>(i)])) return;
      }
    }
  }

  // top_k leaves few tokens. They are sorted, and the token is sampled in order of probability.
  int32_t sample_from_top_k() {
    candidates_.clear();
    for_each_above(largest_block_bound(static_cast<size_t>(request_->top_k)),
                   [&](const Candidate& candidate, Acc weight) {
                     if (!is_excluded(candidate.token))
                       candidates_.push_back({candidate, static_cast<double>(weight)});
                     return false;
                   });
    const auto top_k = std::min(static_cast<size_t>(request_->top_k), candidates_.size());
    std::partial_sort(candidates_.begin(), candidates_.begin() + static_cast<int64_t>(top_k),
                      candidates_.end());
    candidates_.resize(top_k);
    double total = 0;
    for (const Weighted& candidate : candidates_) total += candidate.weight;
    size_t num_kept = 0;
    double mass = 0;
    do {
      mass += candidates_[num_kept++].weight;
    } while (num_kept < top_k && mass < request_->top_p * total);
    const Acc least = min_p_bound();
    while (num_kept > 1 && candidates_[num_kept - 1].candidate.logit < least)
      mass -= candidates_[--num_kept].weight;
    kept_mass_ = mass;
    double target = request_->uniform * mass;
    size_t i = 0;
    for (; i + 1 < num_kept; ++i) {
      target -= candidates_[i].weight;
      if (target < 0) break;
    }
    return candidates_[i].candidate.token;
  }

  // top_p may leave many tokens. A histogram of weights over the logits finds the narrow bucket in which the
  // kept mass reaches top_p, and only that bucket is sorted. The token is sampled in order of id.
  int32_t sample_from_top_p() {
    const double total = std::accumulate(sums_.begin(), sums_.end(), 0.0);
    // The tokens with weights below w weigh less than V w together. If V w is 1 - top_p of the total, top_p
    // keeps none of them. The bound is slightly lower, since sums are rounded.
    const double weight_bound = 0.99 * (1 - request_->top_p) * total / static_cast<double>(size_);
    const Acc bound =
        std::min(sampling_maximum_,
                 static_cast<Acc>(static_cast<double>(sampling_maximum_) +
                                  std::log(weight_bound) / static_cast<double>(inverse_temperature_)));
    const Acc scale =
        bound < sampling_maximum_ ? static_cast<Acc>(kBuckets) / (sampling_maximum_ - bound) : Acc{0};
    const auto bucket_of = [&](const Candidate& candidate) {
      return std::min(kBuckets - 1, static_cast<int64_t>((sampling_maximum_ - candidate.logit) * scale));
    };
    masses_.assign(kBuckets, 0.0);
    for_each_above(bound, [&](const Candidate& candidate, Acc weight) {
      if (weight > 0) masses_[static_cast<size_t>(bucket_of(candidate))] += static_cast<double>(weight);
      return false;
    });
    const double wanted = request_->top_p * total;
    double mass = 0;  // mass of the buckets above bucket `cut`
    int64_t cut = 0;
    // the first nonempty bucket holds the most likely token
    while (masses_[static_cast<size_t>(cut)] == 0) ++cut;
    for (int64_t next = cut; next < kBuckets && mass + masses_[static_cast<size_t>(cut)] < wanted; ++next) {
      if (next == cut || masses_[static_cast<size_t>(next)] == 0) continue;
      mass += masses_[static_cast<size_t>(cut)];
      cut = next;
    }
    candidates_.clear();
    for_each_above(bound, [&](const Candidate& candidate, Acc weight) {
      if (weight > 0 && bucket_of(candidate) == cut)
        candidates_.push_back({candidate, static_cast<double>(weight)});
      return false;
    });
    std::sort(candidates_.begin(), candidates_.end());
    size_t num_kept = 0;
    do {
      mass += candidates_[num_kept++].weight;
    } while (num_kept < candidates_.size() && mass < wanted);
    const Candidate last_kept = candidates_[num_kept - 1].candidate;
    if (last_kept.logit < min_p_bound()) return sample_above(min_p_bound());
    kept_mass_ = mass;
    return token_at_uniform(bound, [&](const Candidate& candidate) { return !(last_kept < candidate); });
  }

  int64_t size_;
  std::vector<Acc> maxima_;   // per block
  std::vector<double> sums_;  // per block
  std::vector<Acc> weights_;  // weights of one block
  std::vector<Weighted> candidates_;
  std::vector<double> masses_;  // mass per bucket of logits, largest logits first
  const T* row_ = nullptr;
  const SamplingTask* request_ = nullptr;
  Acc inverse_temperature_ = 1, maximum_ = 0, sampling_maximum_ = 0;
  double kept_mass_ = 0;  // total weight of the tokens sampled from
  std::unique_ptr<RowSampler<Acc>> penalised_;
  std::vector<Acc> penalised_row_;
};

template <class T>
void sample_rows(const at::Tensor& logits_RV, std::span<const SamplingTask> requests,
                 std::span<SampledToken> out) {
  const int64_t V = logits_RV.size(1);
  const T* logits = static_cast<const T*>(logits_RV.const_data_ptr());
  const int64_t grain = std::max<int64_t>(1, 16384 / V);
  at::parallel_for(0, static_cast<int64_t>(requests.size()), grain, [&](int64_t begin, int64_t end) {
    RowSampler<T> sampler(V);
    for (int64_t i = begin; i < end; ++i) {
      const SamplingTask& request = requests[static_cast<size_t>(i)];
      out[static_cast<size_t>(i)] = sampler.sample(logits + request.row * V, request);
    }
  });
}

}  // namespace

void sample_on_cpu(const at::Tensor& logits_RV, std::span<const SamplingTask> requests,
                   std::span<SampledToken> out) {
  switch (logits_RV.scalar_type()) {
    case at::kFloat: return sample_rows<float>(logits_RV, requests, out);
    case at::kDouble: return sample_rows<double>(logits_RV, requests, out);
    case at::kBFloat16: return sample_rows<BFloat16Bits>(logits_RV, requests, out);
    default: BOUGH_CHECK(false, "logits: expected fp32, bf16 or fp64, got ", logits_RV.scalar_type());
  }
}

void sample_tokens(const at::Tensor& logits_RV, std::span<const SamplingTask> requests,
                   std::span<SampledToken> out) {
  BOUGH_CHECK(logits_RV.dim() == 2 && logits_RV.size(1) > 0, "logits are ", logits_RV.sizes(),
              ", expected [R, V]");
  BOUGH_CHECK(out.size() == requests.size(), out.size(), " results for ", requests.size(), " requests");
  for (const SamplingTask& request : requests) {
    BOUGH_CHECK(request.row >= 0 && request.row < logits_RV.size(0), "row ", request.row, " of ",
                logits_RV.size(0));
    BOUGH_CHECK(request.uniform > 0 && request.uniform < 1, "uniform=", request.uniform);
    BOUGH_CHECK(request.excluded.empty() ||
                    (request.excluded.front() >= 0 && request.excluded.back() < logits_RV.size(1)),
                "an excluded token is outside the vocabulary");
    BOUGH_CHECK(request.min_p >= 0 && request.min_p < 1 && request.repetition_penalty > 0,
                "min_p=", request.min_p, ", repetition_penalty=", request.repetition_penalty);
  }
  if (logits_RV.is_cuda()) sample_on_device(logits_RV, requests, out);
  else sample_on_cpu(logits_RV.contiguous(), requests, out);
}

}  // namespace bough
