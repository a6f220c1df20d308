#include "control/generator.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "rollout/rollouts.h"

namespace bough {

std::string completion_text(const TextCodec& codec, const GeneratedSample& sample,
                            const std::vector<std::string>& stop_strings) {
  std::span<const int32_t> ids(sample.token_ids);
  if (sample.finish_reason == FinishReason::kStop) ids = ids.first(ids.size() - 1);
  std::string text = codec.decode(ids);
  if (sample.finish_reason == FinishReason::kStopString) {
    size_t cut = text.size();
    for (const std::string& stop : stop_strings) cut = std::min(cut, text.find(stop));
    text.resize(cut);
  }
  return text;
}

Generator::Generator(const GeneratorParts& parts, TaskSource next_task, GeneratorOptions options)
    : parts_(parts), next_task_(std::move(next_task)), options_(std::move(options)) {}

std::vector<FinishedGroup> Generator::step() {
  begin_tasks();
  std::vector<FinishedGroup> groups;
  for (const GenerationResult& result : parts_.engine.step()) groups.push_back(finish(result));
  return groups;
}

void Generator::begin_tasks() {
  while (samples_in_flight_ < options_.samples_in_flight && begin_task()) {
  }
}

// False: there is no task.
bool Generator::begin_task() {
  std::optional<GroupTask> task = next_task_();
  if (!task) return false;
  const uint64_t id = task->id;
  BOUGH_CHECK(!in_flight_.contains(id), "two groups with id ", id);
  GenerationRequest request{.id = id, .sampling = options_.sampling, .seed = options_.seed};
  std::string text;
  if (task->problem) {
    BOUGH_CHECK(parts_.codec, "a problem, and nothing to encode it with");
    EncodedPrompt prompt = parts_.codec->encode(*task->problem);
    request.prompt_ids = std::move(prompt.ids);
    text = std::move(prompt.text);
  } else {
    request.prompt_ids = std::move(task->prompt_ids);
  }
  request.begun = std::move(task->begun);
  parts_.engine.submit(std::move(request));
  in_flight_.emplace(id, InFlight{std::move(*task), std::move(text)});
  samples_in_flight_ += options_.sampling.n_samples;
  return true;
}

FinishedGroup Generator::finish(const GenerationResult& result) {
  const auto found = in_flight_.find(result.id);
  BOUGH_CHECK(found != in_flight_.end(), "the engine returned request ", result.id,
              ", which nobody submitted");
  const auto& [task, prompt] = found->second;
  FinishedGroup group{.id = result.id, .problem = task.problem, .samples = {}};
  if (options_.all_logprobs) group.samples = to_rollouts(result, task.name);
  else
    for (size_t i = 0; i < result.samples.size(); ++i)
      group.samples.push_back(to_rollout(result, i, task.name));
  if (task.problem) {
    for (size_t i = 0; i < result.samples.size(); ++i) {
      Trajectory& sample = group.samples[i];
      sample.prompt = prompt;
      sample.completion = completion_text(*parts_.codec, result.samples[i], options_.sampling.stop);
      sample.answer = task.problem->answer;
    }
  }
  samples_in_flight_ -= options_.sampling.n_samples;
  in_flight_.erase(found);
  return group;
}

std::optional<std::vector<FinishedGroup>> Generator::collect(int64_t count, const CollectOptions& options) {
  std::vector<FinishedGroup> groups;
  const auto num_done = [&] { return static_cast<int64_t>(groups.size()); };
  const auto give_up = [&] { abandon(); };
  try {
    while (num_done() < count) {
      if (options.stop && options.stop()) {
        give_up();
        return std::nullopt;
      }
      const int64_t before = num_done();
      for (FinishedGroup& group : step()) {
        groups.push_back(std::move(group));
        if (options.on_progress) options.on_progress(num_done(), count);
      }
      if (options.on_step) options.on_step();
      BOUGH_CHECK(num_done() > before || !idle(), num_done(), " of ", count,
                  " groups, and no more may begin");
    }
  } catch (...) {
    give_up();
    throw;
  }
  std::sort(groups.begin(), groups.end(),
            [](const FinishedGroup& a, const FinishedGroup& b) { return a.id < b.id; });
  return groups;
}

void Generator::abandon() {
  for (const auto& [id, running] : in_flight_) parts_.engine.cancel(id);
  in_flight_.clear();
  samples_in_flight_ = 0;
  parts_.engine.drain();
}

void Generator::check_integrity() const {
  BOUGH_CHECK(samples_in_flight_ == static_cast<int64_t>(in_flight_.size()) * options_.sampling.n_samples,
              samples_in_flight_, " samples in flight of ", in_flight_.size(), " groups");
  for (const auto& [id, running] : in_flight_)
    BOUGH_CHECK(running.task.id == id, "group ", running.task.id, " is ", id);
}

std::vector<RewardResult> score(std::span<const FinishedGroup> groups, RewardFunction& reward) {
  std::vector<RewardRequest> requests;
  for (const FinishedGroup& group : groups)
    for (const Trajectory& sample : group.samples)
      if (group.problem)
        requests.push_back({sample.prompt.value(), sample.completion.value(), group.problem});
  if (requests.empty()) return {};
  std::vector<RewardResult> results = reward.score_all(requests);
  BOUGH_CHECK(results.size() == requests.size(), "rewards ", results.size(), " for ", requests.size());
  return results;
}

Generator::TaskSource tasks_of(const Dataset& dataset) {
  return [&dataset, next = size_t{0}]() mutable -> std::optional<GroupTask> {
    if (next == dataset.size()) return std::nullopt;
    const Problem& problem = dataset[next];
    return GroupTask{.id = next++, .name = problem.id, .problem = &problem};
  };
}

}  // namespace bough
