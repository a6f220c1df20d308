#include "control/controller.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "control/evaluation.h"
#include "control/process_memory.h"
#include "rollout/rollouts.h"

namespace bough {

namespace {

double seconds_between(Clock::Time begin, Clock::Time end) {
  return std::chrono::duration<double>(end - begin).count();
}

struct Moments {
  double mean = 0, deviation = 0;
};

Moments moments(const std::vector<double>& values) {
  if (values.empty()) return {};
  Moments out;
  for (const double value : values) out.mean += value / static_cast<double>(values.size());
  for (const double value : values)
    out.deviation += (value - out.mean) * (value - out.mean) / static_cast<double>(values.size());
  out.deviation = std::sqrt(out.deviation);
  return out;
}

}  // namespace

// What one step drew, sample by sample.
struct Controller::Sampled {
  std::vector<const Problem*> problems;   // [groups]
  std::vector<std::string> prompts;       // [groups]
  std::vector<GenerationResult> results;  // [groups]
  // [S]
  std::vector<int64_t> groups;
  std::vector<std::string> completions;
  std::vector<int64_t> lengths;  // generated tokens
  std::vector<uint8_t> truncated;
  std::vector<double> rewards;
  std::vector<std::string> messages;  // of failed rewards
};

Controller::Controller(const ControllerParts& parts)
    : parts_(parts),
      order_(parts.problems, static_cast<uint64_t>(parts.settings.seed),
             parts.settings.train_dataset.shuffle) {}

std::optional<Controller::Sampled> Controller::sample(const std::function<bool()>& stop,
                                                      const Activity& activity) {
  const RunSettings& settings = parts_.settings;
  Sampled sampled;
  std::vector<GenerationRequest> requests;
  for (int64_t i = 0; i < settings.train_dataset.batch_size; ++i) {
    const int64_t position = num_steps_ * settings.train_dataset.batch_size + i;
    const Problem& problem = parts_.problems[order_.index_at(position)];
    EncodedPrompt prompt = parts_.encoder.encode(problem);
    requests.push_back(make_request(settings.gconfig, static_cast<uint64_t>(position), std::move(prompt.ids),
                                    static_cast<uint64_t>(settings.seed)));
    sampled.problems.push_back(&problem);
    sampled.prompts.push_back(std::move(prompt.text));
  }
  SamplingOptions options;
  options.samples_in_flight = 2 * settings.rollout.max_concurrent_rollouts;
  options.stop = stop;
  if (activity) {
    options.on_progress = [&](int64_t done, int64_t total) { activity(str("rollout ", done, "/", total)); };
  }
  auto results = sample_all(parts_.engine, std::move(requests), options);
  if (!results) return std::nullopt;
  sampled.results = std::move(*results);
  for (size_t group = 0; group < sampled.results.size(); ++group) {
    for (const GeneratedSample& generated : sampled.results[group].samples) {
      sampled.groups.push_back(static_cast<int64_t>(group));
      sampled.completions.push_back(completion_text(parts_.encoder, generated, settings.gconfig.stop));
      sampled.lengths.push_back(static_cast<int64_t>(generated.token_ids.size()));
      sampled.truncated.push_back(generated.finish_reason == FinishReason::kLength);
    }
  }
  return sampled;
}

void Controller::score(Sampled& sampled, MetricValues& metrics) {
  std::vector<RewardRequest> requests;
  for (size_t s = 0; s < sampled.groups.size(); ++s) {
    const auto group = static_cast<size_t>(sampled.groups[s]);
    requests.push_back({sampled.prompts[group], sampled.completions[s], sampled.problems[group]});
  }
  const std::vector<RewardResult> results = parts_.reward.score_all(requests);
  BOUGH_CHECK(results.size() == requests.size(), "rewards ", results.size(), " for ", requests.size());
  bool told = false;
  for (const RewardResult& result : results) {
    sampled.rewards.push_back(result.reward);
    sampled.messages.push_back(result.failed ? result.message : "");
    if (result.failed && !std::exchange(told, true)) {
      log_warning(str("step ", num_steps_ + 1, ": ", count_failures(results), " of ", results.size(),
                      " rewards failed; the first: ", quoted(result.message, 300)));
    }
  }
  const Moments reward = moments(sampled.rewards);
  metrics["reward/mean"] = reward.mean;
  metrics["reward/std"] = reward.deviation;
  metrics["reward/failures"] = static_cast<double>(count_failures(results));
}

std::vector<Trajectory> Controller::make_batch(Sampled sampled, MetricValues& metrics) const {
  std::vector<Trajectory> batch;
  // A batch across the end of an epoch may have a problem twice: two groups.
  std::map<std::string, int64_t> drawn;
  size_t s = 0;
  double total_length = 0;
  for (size_t group = 0; group < sampled.results.size(); ++group) {
    const GenerationResult& result = sampled.results[group];
    const std::string& id = sampled.problems[group]->id;
    const int64_t times = ++drawn[id];
    const std::string name = times > 1 ? str(id, " (", times, ")") : id;
    for (size_t i = 0; i < result.samples.size(); ++i, ++s) {
      Trajectory rollout = to_rollout(result, i, name);
      rollout.reward = sampled.rewards[s];
      rollout.prompt = sampled.prompts[group];
      rollout.completion = sampled.completions[s];
      rollout.answer = sampled.problems[group]->answer;
      if (!sampled.messages[s].empty()) rollout.reward_failure = sampled.messages[s];
      batch.push_back(std::move(rollout));
      total_length += static_cast<double>(sampled.lengths[s]);
    }
  }
  const FilterResult filtered =
      set_advantages(batch, parts_.settings.actor, parts_.settings.gconfig.max_new_tokens);
  const auto samples = static_cast<double>(std::max<size_t>(1, s));
  metrics["rollout/length_mean"] = total_length / samples;
  metrics["rollout/truncated_fraction"] = static_cast<double>(filtered.truncated) / samples;
  metrics["rollout/zero_std_groups"] = static_cast<double>(filtered.zero_std_groups);
  metrics["rollout/groups_dropped"] = static_cast<double>(filtered.groups_dropped);
  metrics["rollout/sequences_dropped"] = static_cast<double>(filtered.sequences_dropped);
  return batch;
}

std::optional<StepRecord> Controller::step(const std::function<bool()>& stop, const Activity& activity) {
  const Clock::Time start = parts_.clock.now();
  // A fresh engine, whatever ran before: its cached prompts would change how passes are composed, and with it
  // the last bits of the logits.
  parts_.engine.update_weights(static_cast<int32_t>(num_steps_));
  const EngineStatistics before = parts_.engine.statistics();
  auto sampled = sample(stop, activity);
  if (!sampled) return std::nullopt;
  const EngineStatistics after = parts_.engine.statistics();
  const Clock::Time sampled_at = parts_.clock.now();

  StepRecord record;
  record.step = num_steps_ + 1;
  if (activity) activity("reward");
  score(*sampled, record.metrics);
  const Clock::Time scored_at = parts_.clock.now();
  if (stop && stop()) return std::nullopt;

  if (activity) activity("train");
  record.batch = make_batch(std::move(*sampled), record.metrics);
  record.metrics.merge(parts_.trainer.train(record.batch));
  const Clock::Time trained_at = parts_.clock.now();
  ++num_steps_;
  parts_.engine.update_weights(static_cast<int32_t>(num_steps_));
  const Clock::Time end = parts_.clock.now();

  MetricValues& metrics = record.metrics;
  metrics["staleness/mean"] = 0;  // every token was sampled by the weights that it trains
  metrics["staleness/max"] = 0;
  metrics["time/rollout"] = seconds_between(start, sampled_at);
  metrics["time/reward"] = seconds_between(sampled_at, scored_at);
  metrics["time/publish"] = seconds_between(trained_at, end);
  metrics["time/step"] = seconds_between(start, end);
  metrics.try_emplace("time/train", seconds_between(scored_at, trained_at));
  metrics["perf/generated_tokens_per_s"] = static_cast<double>(after.new_tokens - before.new_tokens) /
                                           std::max(1e-9, seconds_between(start, sampled_at));
  metrics["rollout/new_tokens"] = static_cast<double>(after.new_tokens - before.new_tokens);
  metrics["rollout/prefill_tokens"] = static_cast<double>(after.prefill_tokens - before.prefill_tokens);
  metrics["memory/peak"] = static_cast<double>(peak_process_memory());
  return record;
}

Json Controller::save() const {
  return {{"step", num_steps_}, {"problems", order_.save()}};
}

void Controller::restore(const Json& state) {
  order_.restore(state.at("problems"));
  num_steps_ = state.at("step").get<int64_t>();
}

}  // namespace bough
