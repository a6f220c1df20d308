#include "control/run_simulator.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>
#include <utility>

#include "plan/load_balance.h"

namespace bough {

namespace {

enum Stream : uint64_t { kLength, kReward, kFailure, kGroupFailure = 900 };

}  // namespace

int64_t LengthDistribution::draw(const CounterRandom& random, uint64_t id, int64_t sample) const {
  const uint64_t sequence = (id << 20) | static_cast<uint64_t>(sample);
  const double first = random.uniform(sequence, 2 * kLength),
               second = random.uniform(sequence, 2 * kLength + 1);
  if (!seen.empty())
    return seen[std::min(seen.size() - 1, static_cast<size_t>(first * static_cast<double>(seen.size())))];
  const double normal = std::sqrt(-2 * std::log(first)) * std::cos(2 * std::numbers::pi * second);
  const double length = std::exp(std::log(mean) - sigma * sigma / 2 + sigma * normal);
  return std::clamp<int64_t>(std::llround(std::min(length, 1e15)), 1, longest);
}

RunSimulator::RunSimulator(SimulationOptions options)
    : options_(std::move(options)),
      random_(options_.seed, Purpose::test),
      reward_free_at_(static_cast<size_t>(std::min<int64_t>(options_.rates.reward_workers, 4096))),
      controller_(*this, clock_, options_.controller, *options_.policy, observer_) {}

void RunSimulator::after(double seconds, std::function<void()> act) {
  planned_.push({now() + seconds, num_planned_++, std::move(act)});
}

void RunSimulator::post_after(double seconds, Event event) {
  auto shared = std::make_shared<Event>(std::move(event));
  after(seconds, [this, shared] { controller_.on(std::move(*shared)); });
}

SimulationResult RunSimulator::run(std::optional<double> stop_at) {
  if (stop_at) after(*stop_at, [this] { controller_.on(StopRequested{}); });
  controller_.start();
  while (!controller_.is_finished()) {
    BOUGH_CHECK(!planned_.empty(), "the simulation has no more events: ", controller_.activity());
    Planned next = planned_.top();
    planned_.pop();
    const double wait = std::max(0.0, next.time - now());
    if (running_.empty() && !is_evaluating_) engine_idle_ += wait;
    clock_.advance(std::chrono::duration_cast<Clock::Duration>(std::chrono::duration<double>(wait)));
    next.act();
    if (on_event) on_event();
  }
  result_.steps = controller_.num_steps();
  result_.seconds = now();
  result_.trainer_idle = result_.seconds > 0 ? 1 - trainer_busy_ / result_.seconds : 0;
  result_.engine_idle = result_.seconds > 0 ? engine_idle_ / result_.seconds : 0;
  size_t num_trained = 0;
  for (const std::vector<uint64_t>& ids : trained_groups_) num_trained += ids.size();
  result_.staleness_mean = staleness_total_ / static_cast<double>(std::max<size_t>(1, num_trained));
  return result_;
}

// ---- Engine.

double RunSimulator::pass_seconds() const {
  const double of_device = std::ceil(static_cast<double>(running_.size()) / devices());
  return options_.rates.pass_seconds + of_device * options_.rates.sample_seconds;
}

void RunSimulator::advance_engine() {
  const double from = std::max(engine_time_, std::min(engine_busy_until_, now()));
  const double seconds = is_evaluating_ ? 0 : std::max(0.0, now() - from);
  engine_time_ = now();
  if (seconds <= 0 || running_.empty()) return;
  const double passes = seconds / pass_seconds();
  progress_ += passes;
  new_tokens_ += passes * static_cast<double>(running_.size());
  statistics_.new_tokens = std::llround(new_tokens_);
}

std::vector<int32_t> RunSimulator::labels_of(const Sample& sample, bool is_running) const {
  std::vector<int32_t> labels = sample.labels;
  if (!is_running) return labels;
  const double sampled = std::floor(progress_ - sample.begins_at + 1e-6);
  const auto size = static_cast<size_t>(
      std::min(static_cast<double>(sample.length), static_cast<double>(labels.size()) + sampled));
  const double first = sample.begins_at - static_cast<double>(labels.size());
  // The version of the token that is sampled when progress passes `at`.
  auto version = std::upper_bound(versions_.begin(), versions_.end(), sample.begins_at + 1e-6,
                                  [](double at, const auto& mark) { return at < mark.first; });
  while (labels.size() < size) {
    const double at = first + static_cast<double>(labels.size()) + 1;
    while (version != versions_.end() && version->first + 1e-6 < at) ++version;
    labels.push_back(std::prev(version)->second);
  }
  return labels;
}

void RunSimulator::admit() {
  const auto most = static_cast<size_t>(options_.rates.max_running * options_.rates.rollout_devices);
  double prefill = 0;
  while (!waiting_.empty() && running_.size() < most) {
    const Reference reference = waiting_.front();
    waiting_.pop_front();
    // A prompt is computed once for all its samples: here with sample 0.
    Sample& sample = sample_of(reference);
    sample.begins_at = progress_;
    if (reference.second == 0) prefill += static_cast<double>(options_.prompt_tokens);
    prefill += static_cast<double>(sample.labels.size());
    const auto left = static_cast<double>(sample.length) - static_cast<double>(sample.labels.size());
    running_.emplace(progress_ + left, reference);
  }
  if (prefill <= 0) return;
  const double seconds = prefill / (options_.rates.prefill_tokens_per_s * devices());
  engine_busy_until_ = std::max(engine_busy_until_, now()) + seconds;
  statistics_.prefill_tokens += static_cast<int64_t>(prefill);
}

void RunSimulator::schedule_engine() {
  const uint64_t plan = ++engine_plan_;
  if (is_evaluating_) return;
  admit();
  if (running_.empty()) return;
  const double least = std::max(0.0, running_.begin()->first - progress_);
  const double busy = std::max(0.0, engine_busy_until_ - now());
  // Slightly longer than needed, so that rounding does not leave a fraction of a token.
  after(busy + least * pass_seconds() + 1e-8, [this, plan] {
    if (plan != engine_plan_) return;
    advance_engine();
    finish_samples();
    schedule_engine();
  });
}

void RunSimulator::finish_samples() {
  while (!running_.empty() && running_.begin()->first <= progress_ + 1e-6) {
    const Reference reference = running_.extract(running_.begin()).value().second;
    Group& group = groups_.at(reference.first);
    Sample& sample = group.samples[reference.second];
    sample.labels = labels_of(sample, true);
    sample.labels.resize(static_cast<size_t>(sample.length), static_cast<int32_t>(version_));
    sample.has_ended = true;
    if (--group.num_left > 0) continue;
    if (random_.uniform(reference.first, kGroupFailure) < options_.group_failure_rate) {
      groups_.erase(reference.first);
      controller_.on(GroupFailed{reference.first, "failed"});
      continue;
    }
    auto finished = std::make_shared<FinishedGroup>();
    finished->id = reference.first;
    for (Sample& done : group.samples) {
      Trajectory trajectory;
      trajectory.loss_mask.assign(done.labels.size(), 1);
      trajectory.versions = std::move(done.labels);
      finished->samples.push_back(std::move(trajectory));
    }
    groups_.erase(reference.first);
    controller_.on(GroupGenerated{std::move(finished)});
  }
}

void RunSimulator::begin(uint64_t id, std::vector<PartialRollout> partial) {
  ++num_begun_;
  Group& group = groups_[id];
  for (int64_t i = 0; i < options_.controller.group_size; ++i) {
    Sample& sample = group.samples.emplace_back();
    sample.length = options_.lengths.draw(random_, id, i);
    if (static_cast<size_t>(i) < partial.size())
      sample.labels = partial[static_cast<size_t>(i)].sample.versions;
    sample.has_ended = static_cast<int64_t>(sample.labels.size()) >= sample.length;
    if (sample.has_ended) continue;
    ++group.num_left;
    waiting_.emplace_back(id, static_cast<size_t>(i));
  }
  advance_engine();
  after(0, [this] {
    advance_engine();
    schedule_engine();
  });
}

void RunSimulator::take_weights() {
  after(pass_seconds(), [this] {
    advance_engine();
    version_ = published_;
    versions_.emplace_back(progress_, static_cast<int32_t>(version_));
    const double prompt =
        static_cast<double>(options_.prompt_tokens) / static_cast<double>(options_.controller.group_size);
    double tokens = 0;
    for (const auto& [ends_at, reference] : running_)
      tokens += prompt + static_cast<double>(sample_of(reference).length) - (ends_at - progress_);
    engine_busy_until_ = std::max(engine_busy_until_, now()) + options_.rates.swap_seconds +
                         tokens / (options_.rates.prefill_tokens_per_s * devices());
    statistics_.recomputed_tokens += static_cast<int64_t>(tokens);
    statistics_.prefill_tokens += static_cast<int64_t>(tokens);
    result_.interrupted_samples += static_cast<int64_t>(running_.size());
    controller_.on(WeightsTaken{version_, static_cast<int64_t>(running_.size())});
    schedule_engine();
  });
}

void RunSimulator::evaluate(Clock::Time deadline) {
  advance_engine();
  is_evaluating_ = true;
  ++engine_plan_;
  const double seconds = std::min(options_.rates.evaluation_seconds, seconds_between(clock_.now(), deadline));
  const bool in_time = seconds >= options_.rates.evaluation_seconds;
  after(seconds, [this, in_time] {
    if (!is_evaluating_) return;  // cancelled
    is_evaluating_ = false;
    engine_time_ = now();
    EvaluationDone done;
    if (in_time) done.metrics.emplace(MetricValues{{"eval/avg_at_k", 0.5}});
    controller_.on(std::move(done));
    schedule_engine();
  });
}

void RunSimulator::cancel_evaluation() {
  after(0, [this] {
    if (!std::exchange(is_evaluating_, false)) return;
    engine_time_ = now();
    controller_.on(EvaluationDone{});
    schedule_engine();
  });
}

void RunSimulator::save_running() {
  after(pass_seconds(), [this] {
    advance_engine();
    RunningSaved saved;
    for (const auto& [id, group] : groups_) {
      RunningRequest request{.id = id, .samples = {}};
      for (size_t i = 0; i < group.samples.size(); ++i) {
        const Sample& sample = group.samples[i];
        const double left = static_cast<double>(sample.length) - static_cast<double>(sample.labels.size());
        const bool is_running = running_.contains({sample.begins_at + left, {id, i}});
        PartialRollout partial{.sample = {}, .has_ended = sample.has_ended};
        partial.sample.versions = labels_of(sample, is_running);
        if (partial.sample.versions.empty()) break;
        request.samples.push_back(std::move(partial));
      }
      saved.requests.push_back(std::move(request));
    }
    controller_.on(std::move(saved));
    schedule_engine();
  });
}

// ---- Trainer, rewards, checkpoints.

void RunSimulator::score(GroupPointer group) {
  const SimulatedRates& rates = options_.rates;
  const double share = random_.uniform(group->id, 2 * kReward + 100);
  const double seconds =
      rates.reward_min_seconds + share * (rates.reward_max_seconds - rates.reward_min_seconds);
  double& free_at = *std::min_element(reward_free_at_.begin(), reward_free_at_.end());
  free_at = std::max(free_at, now()) + seconds;
  GroupScored scored{.id = group->id, .rewards = {}, .verdict = {}};
  for (size_t i = 0; i < group->samples.size(); ++i) {
    const bool fails = random_.uniform(group->id, 1000 + 3 * i + kFailure) < options_.reward_failure_rate;
    scored.rewards.push_back(fails ? failed_reward({}, "simulated") : RewardResult{.reward = 1});
  }
  post_after(free_at - now(), std::move(scored));
}

void RunSimulator::train(TrainOrder order) {
  const SimulatedRates& rates = options_.rates;
  std::vector<uint64_t> ids;
  TrainingDone done;
  done.record.step = order.step;
  const auto prompt = static_cast<double>(options_.prompt_tokens);
  std::vector<double> whole, added;  // tokens of a sample alone, and after another sample of its group
  for (const ScoredGroup& scored : order.groups) {
    const FinishedGroup& group = *scored.group;
    ids.push_back(group.id);
    bool is_first = true;
    for (size_t i = 0; i < group.samples.size(); ++i) {
      const size_t num_tokens = group.samples[i].versions.size();
      const auto length = static_cast<double>(num_tokens);
      whole.push_back(prompt + length);
      added.push_back(is_first || !options_.shares_prompts ? prompt + length : length);
      is_first = false;
      if (!scored.is_valid(i)) continue;
      result_.trained_lengths.push_back(static_cast<int64_t>(num_tokens));
      result_.trained_tokens += length;
    }
    const int64_t staleness = order.step - 1 - oldest_version(group).value_or(order.step - 1);
    staleness_total_ += static_cast<double>(staleness);
    result_.staleness_max = std::max(result_.staleness_max, staleness);
  }
  trained_groups_.push_back(std::move(ids));
  const double seconds = rates.step_seconds +
                         largest_balanced_cost(whole, added, rates.train_devices) / rates.train_tokens_per_s +
                         (order.publish ? rates.publish_seconds : 0);
  trainer_busy_ += seconds;
  const int64_t step = order.step;
  auto shared = std::make_shared<TrainingDone>(std::move(done));
  after(seconds, [this, shared, step, publishes = order.publish] {
    if (publishes) published_ = step;
    controller_.on(std::move(*shared));
  });
}

void RunSimulator::take_snapshot() {
  post_after(options_.rates.snapshot_seconds, SnapshotTaken{});
}

void RunSimulator::write_checkpoint(ControllerState state, bool) {
  auto shared = std::make_shared<ControllerState>(std::move(state));
  after(options_.rates.checkpoint_seconds, [this, shared] {
    checkpoint_ = *shared;
    controller_.on(CheckpointWritten{});
  });
}

std::vector<SplitResult> simulate_splits(const SimulationOptions& options, int64_t devices,
                                         const std::vector<int64_t>& max_staleness,
                                         const RatesOfSplit& rates_of, int64_t stride) {
  std::vector<SplitResult> results;
  const auto simulate = [&](int64_t eta, int64_t rollout, int64_t train) {
    SimulationOptions split = options;
    split.controller.max_staleness = eta;
    if (rates_of) {
      const std::optional<SimulatedRates> rates = rates_of(rollout, train);
      if (!rates) return;
      split.rates = *rates;
    } else {
      split.rates.rollout_devices = rollout;
      split.rates.train_devices = train;
    }
    results.push_back({rollout, train, eta, RunSimulator(split).run()});
  };
  for (const int64_t eta : max_staleness) {
    if (eta == 0) simulate(eta, devices, devices);
    else
      for (int64_t rollout = stride; rollout < devices; rollout += stride)
        simulate(eta, rollout, devices - rollout);
  }
  return results;
}

}  // namespace bough
