#include "control/generator.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.h"
#include "base/random.h"
#include "engine/rollouts.h"

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

namespace {

// A baseline request (a task's greedily sampled response) has the task's id with this bit. Engines accept ids
// below 2^44.
constexpr uint64_t kBaselineId = uint64_t{1} << 43;

}  // namespace

Generator::Generator(const GeneratorParts& parts, TaskSource& tasks, GeneratorOptions options)
    : parts_(parts), tasks_(tasks), options_(std::move(options)) {
  BOUGH_CHECK((parts_.environment == nullptr) == (parts_.format == nullptr),
              "an environment needs a conversation format");
}

std::vector<FinishedGroup> Generator::step() {
  begin_tasks();
  std::vector<FinishedGroup> groups;
  if (parts_.environment) take_replies(groups);
  for (GenerationResult& result : parts_.engine.step()) {
    const auto turn = requests_.find(result.id);
    if (turn == requests_.end()) {
      if (auto group = finish(std::move(result))) groups.push_back(std::move(*group));
      continue;
    }
    const ConversationKey place = turn->second;
    requests_.erase(turn);
    in_flight_.at(place.group).conversations[place.sample].sampled(result.samples.at(0), result.temperature);
    go_on(place, groups);
  }
  return groups;
}

void Generator::begin_tasks() {
  while (samples_in_flight_ < options_.samples_in_flight && begin_task()) {
  }
}

// Returns false if there is no task.
bool Generator::begin_task() {
  std::optional<GroupTask> task = tasks_.next();
  if (!task) return false;
  const uint64_t id = task->id;
  BOUGH_CHECK(!in_flight_.contains(id), "two groups with id ", id);
  if (parts_.environment && task->problem) {
    begin_conversations(std::move(*task));
    return true;
  }
  GenerationRequest request{.id = id, .sampling = options_.sampling, .seed = options_.seed};
  std::string text;
  if (task->problem) {
    BOUGH_CHECK(parts_.codec, "a problem needs a codec for its prompt");
    EncodedPrompt prompt = parts_.codec->encode(*task->problem);
    request.prompt_ids = std::move(prompt.ids);
    text = std::move(prompt.text);
  } else {
    request.prompt_ids = std::move(task->prompt_ids);
  }
  if (options_.with_baseline) {
    BOUGH_CHECK(id < kBaselineId, "task id ", id, " is too large");
    GenerationRequest baseline = request;
    baseline.id |= kBaselineId;
    baseline.sampling.n_samples = 1;
    baseline.sampling.greedy = true;
    parts_.engine.submit(std::move(baseline));
  }
  request.partial = std::move(task->partial);
  parts_.engine.submit(std::move(request));
  in_flight_.emplace(id, InFlight{std::move(*task), std::move(text), {}, {}, 0, {}, {}});
  samples_in_flight_ += samples_of_task();
  return true;
}

// Returns nullopt while the group's other request (samples or baseline) still runs.
std::optional<FinishedGroup> Generator::finish(GenerationResult result) {
  const bool is_baseline = (result.id & kBaselineId) != 0;
  const auto found = in_flight_.find(result.id & ~kBaselineId);
  BOUGH_CHECK(found != in_flight_.end() && (!is_baseline || options_.with_baseline),
              "the engine returned request ", result.id, ", which was not submitted");
  InFlight& running = found->second;
  (is_baseline ? running.baseline : running.samples) = std::move(result);
  if (!running.samples || (options_.with_baseline && !running.baseline)) return std::nullopt;
  FinishedGroup group = finish(running);
  samples_in_flight_ -= samples_of_task();
  in_flight_.erase(found);
  return group;
}

FinishedGroup Generator::finish(const InFlight& running) {
  const GroupTask& task = running.task;
  FinishedGroup group{.id = task.id, .problem = task.problem, .samples = {}};
  for (const auto* result : {&running.samples, &running.baseline}) {
    if (!*result) continue;
    const std::vector<GeneratedSample>& generated = (*result)->samples;
    std::vector<Trajectory> rows;
    if (options_.all_logprobs) rows = to_rollouts(**result, task.name);
    else
      for (size_t i = 0; i < generated.size(); ++i) rows.push_back(to_rollout(**result, i, task.name));
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i].baseline = result == &running.baseline;
      rows[i].trained = !rows[i].baseline;
      if (task.problem) {
        rows[i].prompt = running.prompt;
        rows[i].completion = completion_text(*parts_.codec, generated[i], options_.sampling.stop);
        rows[i].answer = task.problem->answer;
      }
      group.samples.push_back(std::move(rows[i]));
    }
  }
  return group;
}

// ---- Conversations.

uint64_t Generator::request_id(const ConversationKey& place) const {
  return place.group * static_cast<uint64_t>(samples_of_task()) + place.sample;
}

// All conversations of a group get the same environment seed, because their rewards are compared.
void Generator::begin_conversations(GroupTask task) {
  if (!reply_queue_) reply_queue_ = std::make_shared<ReplyQueue>();
  const uint64_t id = task.id;
  InFlight& group = in_flight_[id];
  group.task = std::move(task);
  const auto count = static_cast<size_t>(samples_of_task());
  group.episodes.resize(count);
  for (size_t i = 0; i < count; ++i) {
    group.conversations.emplace_back(*parts_.format, *group.task.problem, options_.sampling);
    unopened_.push_back({id, i});
  }
  samples_in_flight_ += samples_of_task();
  open_conversations();
}

void Generator::open_conversations() {
  while (!unopened_.empty() && num_open_ < parts_.environment->max_open()) {
    const ConversationKey place = unopened_.front();
    unopened_.pop_front();
    InFlight& group = in_flight_.at(place.group);
    // Shifted so that a double holds the seed: some languages read JSON numbers as doubles only.
    const uint64_t seed = CounterRandom(options_.seed, Purpose::environment).bits(place.group, 0) >> 12;
    const uint64_t episode = parts_.environment->begin(*group.task.problem, seed, reply_queue_);
    group.episodes[place.sample] = episode;
    episodes_[episode] = place;
    ++num_open_;
  }
}

void Generator::take_replies(std::vector<FinishedGroup>& finished) {
  if (episodes_.empty()) return;
  const bool has_work = !parts_.engine.idle();
  // If the engine has nothing to generate: waits for the first answer, but only briefly, to notice a stop.
  constexpr std::chrono::milliseconds kWait{5};
  std::vector<EpisodeReply> replies = reply_queue_->take(has_work ? std::chrono::milliseconds(0) : kWait);
  const auto place_of = [&](const EpisodeReply& reply) -> const ConversationKey* {
    const auto found = episodes_.find(reply.episode);
    return found == episodes_.end() ? nullptr : &found->second;  // nullptr: the group was abandoned
  };
  std::erase_if(replies, [&](const EpisodeReply& reply) { return !place_of(reply); });
  if (options_.in_rounds) {
    for (EpisodeReply& reply : replies) held_.push_back(std::move(reply));
    if (has_work || held_.size() < episodes_.size()) return;
    replies = std::exchange(held_, {});
    std::sort(replies.begin(), replies.end(),
              [&](const EpisodeReply& a, const EpisodeReply& b) { return *place_of(a) < *place_of(b); });
  }
  for (EpisodeReply& reply : replies) {
    const ConversationKey place = *place_of(reply);
    episodes_.erase(reply.episode);
    in_flight_.at(place.group).conversations[place.sample].observe(std::move(reply));
    go_on(place, finished);
  }
}

// Passes the conversation to the environment or the engine, whichever it waits for, or finishes its group.
void Generator::go_on(const ConversationKey& place, std::vector<FinishedGroup>& finished) {
  InFlight& group = in_flight_.at(place.group);
  const ConversationRun& conversation = group.conversations[place.sample];
  const uint64_t episode = group.episodes[place.sample].value();
  switch (conversation.waits_for()) {
    case ConversationRun::Waits::kEnvironment:
      episodes_[episode] = place;
      parts_.environment->step(episode, conversation.action());
      return;
    case ConversationRun::Waits::kEngine: {
      // A turn is a function of seed, group, sample and turn. request_id() has group and sample.
      const uint64_t seed = CounterRandom(options_.seed, Purpose::sample)
                                .bits(request_id(place), static_cast<uint64_t>(conversation.turn()));
      GenerationRequest request{.id = request_id(place),
                                .prompt_ids = conversation.prompt(),
                                .sampled = conversation.sampled_tokens(),
                                .sampling = options_.sampling,
                                .seed = seed};
      request.sampling.n_samples = 1;
      request.sampling.greedy |= is_baseline(place);
      request.sampling.max_new_tokens = conversation.max_new_tokens();
      request.sampling.min_new_tokens =
          std::min(request.sampling.min_new_tokens, request.sampling.max_new_tokens);
      parts_.engine.submit(std::move(request));
      requests_[request_id(place)] = place;
      return;
    }
    case ConversationRun::Waits::kNothing:
      parts_.environment->end(episode);
      --num_open_;
      open_conversations();
      if (++group.num_ended == std::ssize(group.conversations))
        finished.push_back(finish_conversations(place.group));
      return;
  }
}

FinishedGroup Generator::finish_conversations(uint64_t id) {
  const auto found = in_flight_.find(id);
  const InFlight& group = found->second;
  FinishedGroup out{.id = id, .problem = group.task.problem, .samples = {}};
  for (size_t i = 0; i < group.conversations.size(); ++i)
    for (Trajectory& row :
         group.conversations[i].trajectory(group.task.name, std::to_string(i), options_.all_logprobs)) {
      row.baseline = is_baseline({id, i});
      row.trained = !row.baseline;
      out.samples.push_back(std::move(row));
    }
  samples_in_flight_ -= samples_of_task();
  in_flight_.erase(found);
  return out;
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
                  " groups are done, and no more may start");
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
  for (const auto& [id, running] : in_flight_) {
    if (running.conversations.empty())
      for (const uint64_t request : {id, id | kBaselineId}) parts_.engine.cancel(request);
    for (const auto& episode : running.episodes)
      if (episode) parts_.environment->end(*episode);
  }
  for (const auto& [id, place] : requests_) parts_.engine.cancel(id);
  in_flight_.clear();
  requests_.clear();
  unopened_.clear();
  num_open_ = 0;
  episodes_.clear();
  held_.clear();
  if (reply_queue_) reply_queue_ = std::make_shared<ReplyQueue>();
  samples_in_flight_ = 0;
  parts_.engine.drain();
}

void Generator::check_integrity() const {
  BOUGH_CHECK(samples_in_flight_ == static_cast<int64_t>(in_flight_.size()) * samples_of_task(),
              samples_in_flight_, " samples in flight for ", in_flight_.size(), " groups");
  size_t num_going_on = 0;
  for (const auto& [id, running] : in_flight_) {
    BOUGH_CHECK(running.task.id == id, "group ", running.task.id, " is stored as ", id);
    num_going_on += running.conversations.size() - static_cast<size_t>(running.num_ended);
    for (const ConversationRun& conversation : running.conversations) conversation.check_integrity();
  }
  BOUGH_CHECK(requests_.size() + episodes_.size() == static_cast<size_t>(num_open_) &&
                  num_going_on == static_cast<size_t>(num_open_) + unopened_.size(),
              num_going_on, " conversations are running, ", requests_.size(), " with the engine, ",
              episodes_.size(), " with the environment and ", unopened_.size(), " not opened, ", num_open_,
              " open");
}

namespace {

// The result for a row that needs no reward function: a failure if the row is not valid, or its environment's
// reward. nullopt: the reward function scores the row.
std::optional<RewardResult> given_reward(const Trajectory& row) {
  if (!row.valid) {
    RewardResult failed = failed_reward({}, row.reward_failure.value_or(""));
    return failed;
  }
  if (row.reward && is_conversation(row)) return RewardResult{.reward = *row.reward, .rewards = row.rewards};
  return std::nullopt;
}

}  // namespace

std::vector<RewardResult> score(std::span<const FinishedGroup> groups, RewardFunction& reward) {
  std::vector<RewardResult> results;
  std::vector<RewardRequest> requests;
  std::vector<std::pair<size_t, size_t>> scored;  // (result index, request index)
  for (const FinishedGroup& group : groups) {
    std::map<std::string_view, size_t> asked;  // by name, the group's conversations so far
    std::map<std::string_view, std::string_view> last_turns;
    for (const Trajectory& row : group.samples)
      if (is_conversation(row) && row.completion) last_turns[row.trajectory] = last_turn(row);
    for (const Trajectory& row : group.samples) {
      if (!group.problem) continue;
      results.emplace_back();
      if (auto given = given_reward(row)) {
        results.back() = std::move(*given);
      } else if (!is_conversation(row)) {
        scored.emplace_back(results.size() - 1, requests.size());
        requests.push_back({row.prompt.value(), row.completion.value(), group.problem});
      } else {
        const auto [found, is_new] = asked.try_emplace(row.trajectory, requests.size());
        if (is_new) requests.push_back({row.prompt.value(), last_turns.at(row.trajectory), group.problem});
        scored.emplace_back(results.size() - 1, found->second);
      }
    }
  }
  if (requests.empty()) return results;
  const std::vector<RewardResult> rewards = reward.score_all(requests);
  BOUGH_CHECK(rewards.size() == requests.size(), "got ", rewards.size(), " rewards for ", requests.size(),
              " requests");
  for (const auto& [result, request] : scored) results[result] = rewards[request];
  return results;
}

std::optional<GroupTask> DatasetTasks::next() {
  if (next_ == dataset_.size()) return std::nullopt;
  const Problem& problem = dataset_[next_];
  return GroupTask{.id = next_++, .name = problem.id, .problem = &problem};
}

}  // namespace bough
