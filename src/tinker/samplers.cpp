#include "tinker/samplers.h"

#include <limits>

#include "base/error.h"
#include "models/lora.h"
#include "tinker/training_model.h"

namespace bough {

namespace {

SampleResult::Sequence sequence_of(const GeneratedSample& sample, int64_t top_k) {
  SampleResult::Sequence sequence;
  sequence.stopped = sample.finish_reason != FinishReason::kLength;
  sequence.tokens = sample.token_ids;
  sequence.log_probs = {sample.logprobs.begin(), sample.logprobs.end()};
  sequence.top.k = top_k;
  for (size_t i = 0; i < sample.top_ids.size() && top_k > 0; ++i)
    for (int64_t k = 0; k < top_k; ++k) {
      const auto at = static_cast<size_t>(k);
      const bool is_there = at < sample.top_ids[i].size();
      sequence.top.ids.push_back(is_there ? sample.top_ids[i][at] : 0);
      sequence.top.log_probs.push_back(is_there ? sample.top_logprobs[i][at] : -99999.0F);
    }
  return sequence;
}

// The wire's layout: one entry for each prompt token, of which those that are not asked for are NaN.
void set_prompt_values(const SampleRequest& request, PromptValues values, SampleResult& result) {
  const size_t length = request.prompt.size();
  std::vector<float> log_probs(length, std::numeric_limits<float>::quiet_NaN());
  const size_t first =
      request.prompt_last_n > 0 ? length - static_cast<size_t>(request.prompt_last_n) : size_t{1};
  for (size_t i = std::max<size_t>(first, 1); i < length; ++i) log_probs[i] = values.log_probs[i - 1];
  result.prompt_log_probs = std::move(log_probs);
  if (request.prompt_top_k == 0) return;
  WireTopK& top = result.prompt_top;
  top.k = request.prompt_top_k;
  const auto k = static_cast<size_t>(top.k);
  top.ids.assign(length * k, 0);
  top.log_probs.assign(length * k, -99999.0F);
  for (size_t i = std::max<size_t>(first, 1); i < length; ++i)
    for (size_t j = 0; j < k; ++j) {
      top.ids[i * k + j] = values.top.ids[(i - 1) * k + j];
      top.log_probs[i * k + j] = values.top.log_probs[(i - 1) * k + j];
    }
}

}  // namespace

Samplers::Samplers(const Model& base, EmbeddedEngineOptions options)
    : base_(base), options_(std::move(options)) {}

// Drops the idle engine that was used longest ago. is_whole: and before, those with weights of their own,
// which take the most memory.
void Samplers::drop_idle(bool is_whole) {
  if (is_whole)
    std::erase_if(samplers_,
                  [](const auto& each) { return each.second.is_whole && each.second.engine->idle(); });
  if (samplers_.size() < kMostEngines) return;
  auto oldest = samplers_.end();
  for (auto each = samplers_.begin(); each != samplers_.end(); ++each)
    if (each->second.engine->idle() &&
        (oldest == samplers_.end() || each->second.last_use < oldest->second.last_use))
      oldest = each;
  if (oldest != samplers_.end()) samplers_.erase(oldest);
}

Samplers::Sampler& Samplers::sampler(const std::filesystem::path& adapter) {
  const auto known = samplers_.find(adapter);
  const bool is_whole = !adapter.empty() && !std::filesystem::exists(adapter / "adapter_config.json");
  if (known == samplers_.end() && (is_whole || samplers_.size() >= kMostEngines)) drop_idle(is_whole);
  Sampler& sampler = samplers_[adapter];
  sampler.last_use = ++num_uses_;
  if (sampler.engine) return sampler;
  try {
    sampler.is_whole = is_whole;
    sampler.model = is_whole ? load_model(adapter, base_.dtype(), base_.device()) : base_.share();
    if (!adapter.empty() && !is_whole) load_adapter(adapter, *sampler.model);
    sampler.engine = std::make_unique<EmbeddedEngine>(*sampler.model, options_);
  } catch (...) {
    samplers_.erase(adapter);
    throw;
  }
  return sampler;
}

void Samplers::submit(const std::string& future, SampleRequest request, Finish finish) {
  Sampler& sampler = this->sampler(request.adapter);
  Pending pending{future, request.adapter, {}, std::move(finish)};
  if (request.wants_prompt_log_probs || request.prompt_targets) {
    PromptValues values{{}, {}, request.prompt_targets};
    if (request.prompt.size() > 1)
      values = prompt_values(*sampler.model, request.prompt, request.prompt_top_k, request.prompt_targets);
    pending.result.prompt_targets = std::move(values.targets);
    if (request.wants_prompt_log_probs) set_prompt_values(request, std::move(values), pending.result);
  }
  const uint64_t id = next_id_++;
  GenerationRequest generation;
  generation.id = id;
  generation.prompt_ids = std::move(request.prompt);
  generation.sampling = std::move(request.sampling);
  generation.seed = request.seed;
  generation.sequence = 0;  // samples depend on the seed, the prompt and the sample's number
  sampler.engine->submit(std::move(generation));
  pending_[id] = std::move(pending);
}

void Samplers::forget(const std::filesystem::path& adapter) {
  const auto known = samplers_.find(adapter);
  if (known == samplers_.end()) return;
  if (known->second.engine->idle()) {
    samplers_.erase(known);
    return;
  }
  auto moved = samplers_.extract(known);  // under a name that no request has
  moved.key() = adapter / str("replaced-", ++num_uses_);
  samplers_.insert(std::move(moved));
}

bool Samplers::cancel(const std::string& future) {
  for (const auto& [id, pending] : pending_) {
    if (pending.future != future) continue;
    const auto sampler = samplers_.find(pending.adapter);
    if (sampler != samplers_.end() && sampler->second.engine->contains(id))
      sampler->second.engine->cancel(id);
    return true;
  }
  return false;
}

bool Samplers::step() {
  bool worked = false;
  for (auto& [adapter, sampler] : samplers_) {
    if (sampler.engine->idle()) continue;
    worked = true;
    for (const GenerationResult& done : sampler.engine->step()) {
      Pending pending = std::move(pending_.extract(done.id).mapped());
      for (const GeneratedSample& sample : done.samples) {
        const int64_t top_k = sample.top_ids.empty() ? 0 : std::ssize(sample.top_ids.front());
        pending.result.sequences.push_back(sequence_of(sample, top_k));
      }
      pending.finish(std::move(pending.result));
    }
  }
  return worked;
}

}  // namespace bough
