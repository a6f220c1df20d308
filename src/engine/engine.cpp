#include "engine/engine.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>
#include <unordered_map>

#include "base/error.h"
#include "data/rollout_file.h"

namespace bough {

namespace {

// Returns the number that `digits` spell, at most 2^40, or -1 if they spell no such number.
int64_t number_of(std::string_view digits) {
  int64_t value = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  const bool is_number = error == std::errc() && end == digits.data() + digits.size();
  return is_number && value <= int64_t{1} << 40 ? value : -1;
}

int64_t blocks_of(int64_t tokens, int64_t block) {
  return (tokens + block - 1) / block;
}

// Returns the budget in tokens.
int64_t tokens_of_budget(std::string_view text, int64_t block) {
  const size_t times = text.find('x');
  const int64_t size = times == std::string_view::npos ? 1 : number_of(text.substr(0, times));
  const int64_t count = number_of(times == std::string_view::npos ? text : text.substr(times + 1));
  if (count < 0 || (size != 1 && size != 16 && size != block) || (size == 1) != (times == text.npos))
    throw UserError(str("rollout.sparse.budget is ", text, "; expected a number of tokens (512), 16xN or ",
                        block, "xN (N blocks of ", block, " tokens; 16x32 is 512), none, or a list that ",
                        "grows with the context ([512, 8192:1024])"));
  return count * size;
}

}  // namespace

SparseBudget SparseBudget::from_text(const std::string& text) {
  SparseBudget out;
  const size_t colon = text.find(':');
  out.budget = colon == std::string::npos ? text : text.substr(colon + 1);
  if (colon == std::string::npos) return out;
  out.from = number_of(std::string_view(text).substr(0, colon));
  if (out.from < 0)
    throw UserError(
        str("rollout.sparse.budget is ", text,
            "; expected a context length in tokens before the colon, from which the budget holds: "
            "8192:1024"));
  return out;
}

std::string SparseSettings::budget_text() const {
  std::string text;
  for (const SparseBudget& each : budget) text += (text.empty() ? "" : ", ") + *each.to_text();
  return budget.size() == 1 ? text : "[" + text + "]";
}

int64_t SparseSettings::first_blocks() const {
  return blocks_of(sink_tokens.value_or(16), block);
}

int64_t SparseSettings::last_blocks() const {
  return recent_tokens ? std::max<int64_t>(1, blocks_of(*recent_tokens, block))
                       : std::max<int64_t>(2, 32 / block);
}

std::map<int64_t, int64_t> SparseSettings::budget_blocks() const {
  if (budget.empty() || (budget.size() == 1 && budget[0].from == 0 && budget[0].budget == "none")) return {};
  if (block < 4 || block > 64 || (block & (block - 1)) != 0)
    throw UserError(str("rollout.sparse.block is ", block, "; expected 4, 8, 16, 32 or 64 tokens"));
  std::map<int64_t, int64_t> blocks;
  for (const SparseBudget& each : budget) {
    const int64_t own = blocks_of(tokens_of_budget(each.budget, block), block);
    const int64_t least = first_blocks() + last_blocks() + 1;
    if (own < least)
      throw UserError(str("rollout.sparse.budget is ", each.budget, ", ", own, " blocks of ", block,
                          " tokens; expected at least ", least, " blocks (", least * block,
                          " tokens): the first ", first_blocks(), " and the last ", last_blocks(),
                          " are always kept (rollout.sparse.sink_tokens, recent_tokens)"));
    if (blocks.empty() ? each.from != 0
                       : each.from <= blocks.rbegin()->first || own <= blocks.rbegin()->second)
      throw UserError(str(
          "rollout.sparse.budget is ", budget_text(),
          "; expected a budget for short contexts first, then larger budgets with growing context lengths: "
          "[512, 8192:1024, 32768:2048]"));
    blocks.emplace(each.from, own);
  }
  return blocks;
}

void SparseSettings::check() const {
  const bool has_budget = is_sparse();
  if (replay && !has_budget)
    throw UserError("rollout.sparse.replay is true, but rollout.sparse.budget is none; expected a budget");
  if (replay && summary == "exact")
    throw UserError(
        "rollout.sparse.replay is true, but rollout.sparse.summary is exact; expected mean or minmax");
}

const char* finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop: return "stop";
    case FinishReason::kLength: return "length";
    case FinishReason::kStopString: return "stop_string";
    case FinishReason::kCancelled: return "cancelled";
  }
  return "unknown";
}

std::vector<GenerationResult> Engine::drain() {
  std::vector<GenerationResult> results;
  while (!idle()) {
    auto finished = step();
    if (finished.empty() && paused())
      throw UserError("drain: the engine is paused, and requests are in flight; resume or cancel them first");
    for (GenerationResult& result : finished) results.push_back(std::move(result));
  }
  return results;
}

std::vector<GenerationResult> Engine::generate(std::vector<GenerationRequest> requests) {
  if (!idle())
    throw UserError("generate: other requests are in flight; drain the engine first, or use submit");
  std::unordered_map<uint64_t, size_t> index_of_id;
  for (size_t i = 0; i < requests.size(); ++i) {
    index_of_id[requests[i].id] = i;
  }
  std::vector<uint64_t> submitted;
  try {
    for (GenerationRequest& request : requests) {
      const uint64_t id = request.id;
      submit(std::move(request));
      submitted.push_back(id);
    }
  } catch (...) {  // all or none: requests queued before the invalid one must not run later
    for (const uint64_t id : submitted) cancel(id);
    drain();
    throw;
  }
  std::vector<GenerationResult> results(submitted.size());
  for (GenerationResult& result : drain()) results[index_of_id.at(result.id)] = std::move(result);
  return results;
}

namespace {

template <class... Args>
[[noreturn]] void refuse(const GenerationRequest& request, const Args&... what) {
  throw UserError(str("request ", request.id, ": ", what...));
}

void check_numbers(const GenerationRequest& request) {
  const SamplingParameters& sampling = request.sampling;
  if (request.id >= (uint64_t{1} << 44)) refuse(request, "id: expected a number below 2^44");
  if (sampling.n_samples < 1 || sampling.n_samples > 100000) {
    refuse(request, "n_samples: got ", sampling.n_samples, ", expected 1 to 100000");
  }
  if (sampling.max_new_tokens < 1) {
    refuse(request, "max_new_tokens: got ", sampling.max_new_tokens, ", expected 1 or more");
  }
  if (sampling.min_new_tokens < 0 || sampling.min_new_tokens > sampling.max_new_tokens) {
    refuse(request, "min_new_tokens: got ", sampling.min_new_tokens,
           ", expected 0 to max_new_tokens = ", sampling.max_new_tokens);
  }
  if (!std::isfinite(sampling.temperature) || sampling.temperature < 0) {
    refuse(request, "temperature: got ", sampling.temperature, ", expected 0 (greedy) or more");
  }
  if (!(sampling.top_p >= 0 && sampling.top_p <= 1)) {
    refuse(request, "top_p: got ", sampling.top_p, ", expected 0 to 1");
  }
  if (sampling.top_k < 0) refuse(request, "top_k: got ", sampling.top_k, ", expected 0 (off) or more");
  if (!(sampling.min_p >= 0 && sampling.min_p < 1)) {
    refuse(request, "min_p: got ", sampling.min_p, ", expected 0 (off) to below 1");
  }
  if (!(sampling.repetition_penalty > 0 && std::isfinite(sampling.repetition_penalty))) {
    refuse(request, "repetition_penalty: got ", sampling.repetition_penalty, ", expected above 0; 1: off");
  }
  if (!std::isfinite(sampling.presence_penalty)) {
    refuse(request, "presence_penalty: got ", sampling.presence_penalty, ", expected a number; 0: off");
  }
  if (!std::isfinite(sampling.frequency_penalty)) {
    refuse(request, "frequency_penalty: got ", sampling.frequency_penalty, ", expected a number; 0: off");
  }
}

}  // namespace

void check_request(const GenerationRequest& request, const ModelLimits& limits) {
  check_numbers(request);
  if (!request.adapter.empty())
    refuse(request, "adapter is ", quoted(request.adapter), ", but this engine has no adapters");
  const auto length = static_cast<int64_t>(request.prompt_ids.size());
  if (length == 0) {
    refuse(request,
           "the prompt is empty; expected at least one token, for example the model's begin-of-text token");
  }
  if (length >= limits.max_length) {
    refuse(request, "the prompt has ", length, " tokens, but the model is limited to ", limits.max_length,
           " tokens by ", limits.max_length_reason, ": no room for a response; shorten the prompt");
  }
  for (int64_t i = 0; i < length; ++i) {
    const int32_t token = request.prompt_ids[static_cast<size_t>(i)];
    if (token < 0 || token >= limits.vocab_size) {
      refuse(request, "prompt token ", token, " at position ", i, " is outside the vocabulary of ",
             limits.vocab_size, "; was the prompt written with another tokenizer?");
    }
  }
  if (static_cast<int64_t>(request.sampled.size()) > length)
    refuse(request, request.sampled.size(), " flags of sampled tokens for a prompt of ", length, " tokens");
  for (const int64_t token : request.sampling.stop_token_ids) {
    if (token < 0 || token >= limits.vocab_size) {
      refuse(request, "stop token ", token, " is outside the vocabulary of ", limits.vocab_size);
    }
  }
  if (static_cast<int64_t>(request.partial.size()) > request.sampling.n_samples)
    refuse(request, "got ", request.partial.size(),
           " partial rollouts, expected at most n_samples = ", request.sampling.n_samples);
  int64_t num_ended = 0;
  for (const auto& [sample, has_ended] : request.partial) {
    num_ended += has_ended;
    if (num_ended == request.sampling.n_samples) refuse(request, "all of its samples have already ended");
    const size_t size = sample.token_ids.size();
    const bool agrees = sample.logprobs.size() == size && sample.raw_logprobs.size() == size &&
                        sample.sampling_logprobs.size() == size && sample.versions.size() == size &&
                        sample.top_ids.size() == (request.sampling.top_logprobs > 0 ? size : 0) &&
                        sample.top_logprobs.size() == sample.top_ids.size();
    const bool fits = static_cast<int64_t>(size) <= request.sampling.max_new_tokens - (has_ended ? 0 : 1) &&
                      length + static_cast<int64_t>(size) <= limits.max_length - (has_ended ? 0 : 1);
    if (size == 0 || !agrees || !fits)
      refuse(request, "a partial rollout of ", size,
             " tokens: expected 1 to below max_new_tokens = ", request.sampling.max_new_tokens,
             ", each with its log-probabilities and version");
    for (const int32_t token : sample.token_ids)
      if (token < 0 || token >= limits.vocab_size)
        refuse(request, "a partial rollout has token ", token, ", outside the vocabulary of ",
               limits.vocab_size);
  }
  for (const std::string& stop : request.sampling.stop) {
    if (stop.empty()) refuse(request, "an empty stop string would stop everywhere; remove it");
  }
}

Json partial_rollout_to_json(const PartialRollout& partial) {
  const GeneratedSample& sample = partial.sample;
  Json json = {{"tokens", sample.token_ids},
               {"logprobs", sample.logprobs},
               {"raw_logprobs", sample.raw_logprobs},
               {"truncated_logprobs", sample.sampling_logprobs},
               {"versions", sample.versions},
               {"top_ids", sample.top_ids},
               {"top_logprobs", sample.top_logprobs},
               {"finish_reason", partial.has_ended ? Json(static_cast<int>(sample.finish_reason)) : Json()}};
  if (!sample.page_choices.positions.empty()) json["pages"] = to_json(sample.page_choices);
  if (!sample.routed_experts.empty()) json["routed_experts"] = to_json(sample.routed_experts);
  return json;
}

PartialRollout partial_rollout_from_json(const Json& json) {
  PartialRollout partial;
  GeneratedSample& sample = partial.sample;
  json.at("tokens").get_to(sample.token_ids);
  json.at("logprobs").get_to(sample.logprobs);
  json.at("raw_logprobs").get_to(sample.raw_logprobs);
  json.at("truncated_logprobs").get_to(sample.sampling_logprobs);
  json.at("versions").get_to(sample.versions);
  sample.top_ids = json.value("top_ids", sample.top_ids);
  sample.top_logprobs = json.value("top_logprobs", sample.top_logprobs);
  if (json.contains("pages")) sample.page_choices = page_choices_from_json(json.at("pages"));
  if (json.contains("routed_experts"))
    sample.routed_experts = routed_experts_from_json(json.at("routed_experts"));
  partial.has_ended = !json.at("finish_reason").is_null();
  if (partial.has_ended)
    sample.finish_reason = static_cast<FinishReason>(json.at("finish_reason").get<int>());
  return partial;
}

}  // namespace bough
