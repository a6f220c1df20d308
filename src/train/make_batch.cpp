#include "train/make_batch.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "algo/aggregation.h"
#include "base/error.h"
#include "train/sequence_steps.h"

namespace bough {

namespace {

// Numbers distinct keys by their first appearance.
template <class Key>
class Numbering {
 public:
  int64_t operator[](const Key& key) {
    return known_.try_emplace(key, static_cast<int64_t>(known_.size())).first->second;
  }
  int64_t size() const { return static_cast<int64_t>(known_.size()); }

 private:
  std::map<Key, int64_t> known_;
};

// Key that is equal for the rows of one conversation. If `trajectory` has no name, `row` makes the key
// unique.
using TrajectoryKey = std::pair<std::pair<std::string_view, std::string_view>, size_t>;
TrajectoryKey trajectory_key(const Trajectory& trajectory, size_t row) {
  return {{trajectory.group, trajectory.trajectory}, trajectory.trajectory.empty() ? row + 1 : 0};
}

// Positions of the tokens that the loss trains.
std::vector<int32_t> trained_positions(const Trajectory& row) {
  std::vector<int32_t> positions;
  for (size_t i = 1; i < row.input_ids.size(); ++i)
    if (row.trains(i)) positions.push_back(static_cast<int32_t>(i));
  return positions;
}

std::vector<const Trajectory*> pointers(const std::vector<Trajectory>& trajectories) {
  std::vector<const Trajectory*> out;
  for (const Trajectory& trajectory : trajectories) out.push_back(&trajectory);
  return out;
}

void check_lengths(const Trajectory& trajectory) {
  const size_t length = trajectory.input_ids.size();
  BOUGH_CHECK(trajectory.loss_mask.size() == length, "a sequence of ", length, " tokens has ",
              trajectory.loss_mask.size(), " loss_mask values");
  BOUGH_CHECK(trajectory.logprobs.empty() || trajectory.logprobs.size() == length, "a sequence of ", length,
              " tokens has ", trajectory.logprobs.size(), " logprobs");
  BOUGH_CHECK(trajectory.advantage.size() <= 1 || trajectory.advantage.size() == length, "a sequence of ",
              length, " tokens has ", trajectory.advantage.size(), " advantages");
  BOUGH_CHECK(trajectory.versions.empty() || trajectory.versions.size() == length, "a sequence of ", length,
              " tokens has ", trajectory.versions.size(), " versions");
}

// The weight of each row of the batch: 1/N, with N the number of its conversation's rows that train a token.
std::vector<double> row_shares(const std::vector<const Trajectory*>& rows,
                               const std::vector<int64_t>& trained_tokens) {
  Numbering<TrajectoryKey> numbers;
  std::vector<int64_t> number_of, count;
  for (size_t s = 0; s < rows.size(); ++s) {
    number_of.push_back(numbers[trajectory_key(*rows[s], s)]);
    count.resize(static_cast<size_t>(numbers.size()));
    count[static_cast<size_t>(number_of.back())] += trained_tokens[s] > 0;
  }
  std::vector<double> shares;
  for (const int64_t number : number_of)
    shares.push_back(1.0 / static_cast<double>(std::max<int64_t>(1, count[static_cast<size_t>(number)])));
  return shares;
}

// The column's entries of all trained tokens, [num_rows]. Undefined unless each trained token has one.
at::Tensor column_of(const std::vector<const Trajectory*>& rows, const char* name, int64_t num_rows,
                     at::ScalarType dtype) {
  std::vector<double> values;
  for (const Trajectory* row : rows) {
    const std::vector<double> own = trained_column(*row, name);
    values.insert(values.end(), own.begin(), own.end());
  }
  if (std::ssize(values) != num_rows) return {};
  return at::tensor(values, at::kDouble).to(dtype);
}

}  // namespace

TrainBatch make_batch(const std::vector<const Trajectory*>& trajectories,
                      const AggregationSettings& aggregation, at::ScalarType dtype) {
  TrainBatch batch;
  batch.row_offset.push_back(0);
  std::vector<const Trajectory*> rows;
  bool has_behaviour = false, has_advantages = false;
  for (const Trajectory* trajectory : trajectories) {
    if (!trajectory->in_loss()) continue;
    check_lengths(*trajectory);
    rows.push_back(trajectory);
    has_behaviour |= !trajectory->logprobs.empty();
    has_advantages |= !trajectory->advantage.empty();
  }
  if (!rows.empty()) batch.temperature = rows.front()->temperature;

  std::vector<int64_t> row_sequences, trained_tokens;
  std::vector<float> advantages, behaviour;
  std::vector<int32_t> versions;
  for (const Trajectory* row : rows) {
    BOUGH_CHECK(row->temperature == batch.temperature, "one batch has temperatures ", batch.temperature,
                " and ", row->temperature);
    std::vector<int32_t> positions = trained_positions(*row);
    for (const int32_t position : positions) {
      const auto i = static_cast<size_t>(position);
      if (has_behaviour) {
        BOUGH_CHECK(!row->logprobs.empty(), "some sequences of a batch have logprobs, others have none");
        behaviour.push_back(row->logprobs[i]);
      }
      if (!row->versions.empty() && row->versions[i] >= 0) versions.push_back(row->versions[i]);
      const std::vector<float>& own = row->advantage;
      if (has_advantages) advantages.push_back(own.empty() ? 0.0f : own[own.size() == 1 ? 0 : i]);
    }
    const auto count = static_cast<int64_t>(positions.size());
    row_sequences.insert(row_sequences.end(), positions.size(), static_cast<int64_t>(batch.sequences.size()));
    trained_tokens.push_back(count);
    batch.row_offset.push_back(batch.row_offset.back() + count);
    batch.sequences.emplace_back(row->input_ids);
    batch.trained_positions.push_back(std::move(positions));
  }
  batch.old_values_R = column_of(rows, kValuesColumn, batch.num_rows(), dtype);
  batch.returns_R = column_of(rows, kReturnsColumn, batch.num_rows(), dtype);
  LossRows& fields = batch.fields;
  fields.sequences_R = at::tensor(row_sequences, at::kLong);
  fields.weights_R = expand_to_rows(
      sequence_weights(aggregation, trained_tokens, group_numbers(rows), row_shares(rows, trained_tokens)),
      fields.sequences_R, dtype);
  if (has_advantages) fields.advantages_R = at::tensor(advantages, at::kFloat).to(dtype);
  if (!versions.empty() && std::ssize(versions) == batch.num_rows())
    fields.versions_R = at::tensor(versions, at::kInt);
  if (has_behaviour) fields.behaviour_log_probs_R = at::tensor(behaviour, at::kFloat).to(dtype);
  return batch;
}

TrainBatch make_batch(const std::vector<Trajectory>& trajectories, const AggregationSettings& aggregation,
                      at::ScalarType dtype) {
  return make_batch(pointers(trajectories), aggregation, dtype);
}

namespace {

// The conversations that filters and estimators see ("entries"): those with a reward, and those whose reward
// failed. Lists are indexed by conversation.
struct Entries {
  std::vector<int64_t> entry_of;  // by row; -1: the row belongs to no entry
  std::vector<double> rewards;    // shaped
  std::vector<int64_t> groups, tokens;
  std::vector<std::vector<double>> parts;  // parts of the reward, by name
  std::vector<double> baselines;           // shaped; only if the estimator needs them
  FilterResult filtered;
};

// Sets the baseline of every entry: the shaped reward of its group's greedy response (Trajectory::baseline),
// which is not an entry itself. If the reward of the greedy response failed, the group's entries are marked
// as not valid.
void add_baselines(const std::vector<Trajectory>& batch, const ActorSettings& settings,
                   int64_t max_response_tokens, std::vector<uint8_t>& valid, Entries& out) {
  struct Baseline {
    double reward = 0;
    int64_t length = 0;
    bool valid = false;
  };
  std::map<std::string_view, Baseline> baselines;
  for (const Trajectory& row : batch) {
    if (!row.baseline) continue;
    Baseline& own = baselines[row.group];
    own.valid = row.valid && row.reward;
    if (own.valid) own.reward = *row.reward;
    own.length += row.num_generated();
  }
  std::vector<double> rewards;
  std::vector<int64_t> lengths;
  for (size_t s = 0; s < batch.size(); ++s) {
    if (out.entry_of[s] < 0) continue;
    const auto e = static_cast<size_t>(out.entry_of[s]);
    const auto found = baselines.find(batch[s].group);
    if (found == baselines.end())
      throw UserError(str("the group ", quoted(batch[s].group),
                          " has no greedy response (a row with `baseline: true`), which adv_estimator ",
                          settings.advantages.adv_estimator,
                          " needs; generate rollouts with this estimator, or choose another one"));
    rewards.resize(out.rewards.size());
    lengths.resize(out.rewards.size());
    rewards[e] = found->second.reward;
    lengths[e] = found->second.length;
    if (!found->second.valid) valid[e] = 0;
  }
  out.baselines = shape_rewards(settings.shaping, rewards, lengths, max_response_tokens);
}

// For each entry: the mean, over its trained tokens, of the trained policy's acceptance (acceptance.h).
std::vector<double> acceptance_of(const std::vector<Trajectory>& batch, const std::vector<int64_t>& entry_of,
                                  size_t num_entries) {
  std::vector<double> sums(num_entries, 0), counts(num_entries, 0);
  for (size_t s = 0; s < batch.size(); ++s) {
    if (entry_of[s] < 0 || !batch[s].in_loss() || !batch[s].trains_a_token()) continue;
    const std::vector<double> own = trained_column(batch[s], kAcceptanceColumn);
    if (own.empty())
      throw UserError(str(
          "keep_samples_by: acceptance needs the trained policy's values of every sample, but one of group ",
          quoted(batch[s].group),
          " has none (column `acceptance` of a rollout file, as `bough train` writes it); expected reward"));
    for (const double value : own) {
      sums[static_cast<size_t>(entry_of[s])] += value;
      ++counts[static_cast<size_t>(entry_of[s])];
    }
  }
  for (size_t e = 0; e < num_entries; ++e) sums[e] /= std::max(1.0, counts[e]);
  return sums;
}

Entries collect(const std::vector<Trajectory>& batch, const ActorSettings& settings,
                std::optional<int64_t> max_response_tokens, const std::set<std::string_view>& stale_groups) {
  if (settings.shaping.overlong_reward_penalty && !max_response_tokens)
    throw UserError("setting overlong_reward_penalty: a rollout file has no response limit; expected false");
  Entries out;
  Numbering<TrajectoryKey> entries;
  Numbering<std::string_view> group_of;
  std::vector<double> rewards;
  std::vector<int64_t> lengths;
  std::vector<uint8_t> truncated, valid, stale;
  out.entry_of.assign(batch.size(), -1);
  for (size_t s = 0; s < batch.size(); ++s) {
    const Trajectory& row = batch[s];
    const bool counts = row.valid && row.reward;
    if ((row.valid && !row.reward) || row.baseline) continue;
    const int64_t entry = out.entry_of[s] = entries[trajectory_key(row, s)];
    const auto e = static_cast<size_t>(entry);
    if (e == rewards.size()) {
      rewards.push_back(0);
      out.groups.push_back(group_of[row.group]);
      out.tokens.push_back(0);
      out.parts.emplace_back();
      lengths.push_back(0);
      truncated.push_back(0);
      valid.push_back(0);
      stale.push_back(stale_groups.contains(row.group));
    }
    if (!counts) continue;
    if (valid[e] && rewards[e] != *row.reward)
      throw UserError(str("rows of the trajectory ", quoted(row.trajectory), " have rewards ", rewards[e],
                          " and ", *row.reward, "; expected the same reward in each row"));
    rewards[e] = *row.reward;
    if (!valid[e])
      for (const auto& [name, part] : row.rewards) out.parts[e].push_back(part);
    valid[e] = 1;
    lengths[e] += row.num_generated();
    if (row.trained) out.tokens[e] += std::ssize(trained_positions(row));
    truncated[e] |= row.finish_reason == "length";
  }
  out.rewards = shape_rewards(settings.shaping, rewards, lengths, max_response_tokens.value_or(0));
  if (settings.advantages.needs_baselines())
    add_baselines(batch, settings, max_response_tokens.value_or(0), valid, out);
  std::vector<double> acceptance;
  if (settings.filters.needs_acceptance()) acceptance = acceptance_of(batch, out.entry_of, rewards.size());
  out.filtered =
      filter_sequences(settings.filters, {out.rewards, out.groups, truncated, valid, stale, acceptance});
  return out;
}

// The SequenceSteps of each entry, from its trained rows. Entries that are not trained have empty ones.
std::vector<SequenceSteps> collect_steps(const std::vector<Trajectory>& batch, const Entries& entries,
                                         const ActorSettings& settings) {
  std::vector<SequenceSteps> steps(entries.rewards.size());
  const bool needs_values = settings.advantages.needs_values();
  for (size_t s = 0; s < batch.size(); ++s)
    if (entries.entry_of[s] >= 0 && batch[s].in_loss() && batch[s].trains_a_token())
      append_row(steps[static_cast<size_t>(entries.entry_of[s])], batch[s], settings.shaping.reward_scaling,
                 needs_values);
  for (size_t e = 0; e < steps.size(); ++e) finish_steps(steps[e], entries.rewards[e]);
  return steps;
}

// The KL's rewards of each entry's trained tokens.
std::vector<std::vector<double>> collect_kl_rewards(const std::vector<Trajectory>& batch,
                                                    const Entries& entries) {
  std::vector<std::vector<double>> out(entries.rewards.size());
  for (size_t s = 0; s < batch.size(); ++s) {
    if (entries.entry_of[s] < 0 || !batch[s].in_loss() || !batch[s].trains_a_token()) continue;
    const std::vector<double> own = trained_column(batch[s], kKlRewardsColumn);
    BOUGH_CHECK(!own.empty(), "a sequence of group ", quoted(batch[s].group), " has no KL rewards");
    std::vector<double>& all = out[static_cast<size_t>(entries.entry_of[s])];
    all.insert(all.end(), own.begin(), own.end());
  }
  return out;
}

// For every entry: one number, or one per trained token; 0 for entries that filters dropped. `returns` is
// empty unless the estimator computes returns.
struct Estimates {
  std::vector<std::vector<double>> advantages, returns;
};
Estimates estimate(const std::vector<Trajectory>& batch, const Entries& entries,
                   const ActorSettings& settings) {
  std::vector<double> rewards;
  std::vector<int64_t> groups, tokens;
  AdvantageInput kept;
  std::vector<SequenceSteps> steps;
  if (settings.advantages.needs_steps()) steps = collect_steps(batch, entries, settings);
  std::vector<std::vector<double>> kl_rewards;
  if (settings.has_kl_rewards()) kl_rewards = collect_kl_rewards(batch, entries);
  for (size_t e = 0; e < entries.rewards.size(); ++e) {
    if (!entries.filtered.kept[e]) continue;
    rewards.push_back(entries.rewards[e]);
    groups.push_back(entries.groups[e]);
    tokens.push_back(entries.filtered.trained[e] ? entries.tokens[e] : 0);
    kept.parts.push_back(entries.parts[e]);
    if (!steps.empty()) kept.steps.push_back(std::move(steps[e]));
    if (!kl_rewards.empty()) kept.kl_rewards.push_back(std::move(kl_rewards[e]));
    if (!entries.baselines.empty()) kept.baselines.push_back(entries.baselines[e]);
  }
  kept.rewards = rewards;
  kept.groups = groups;
  kept.tokens = tokens;
  Estimates estimated, out;
  estimated.advantages = compute_advantages(settings.advantages, kept, &estimated.returns);
  out.advantages.assign(entries.rewards.size(), {0.0});
  if (!estimated.returns.empty()) out.returns.resize(entries.rewards.size());
  size_t next = 0;
  for (size_t e = 0; e < out.advantages.size(); ++e) {
    if (!entries.filtered.kept[e]) continue;
    out.advantages[e] = std::move(estimated.advantages[next]);
    if (!estimated.returns.empty()) out.returns[e] = std::move(estimated.returns[next]);
    ++next;
  }
  return out;
}

// The part of the conversation's advantages that belongs to `row`. `next_token` counts the conversation's
// trained tokens and is advanced by those of `row`.
std::vector<float> advantage_of_row(const Trajectory& row, const std::vector<double>& advantages,
                                    int64_t& next_token) {
  if (advantages.size() == 1 || !row.in_loss() || row.input_ids.empty())
    return {advantages.empty() ? 0.0f : static_cast<float>(advantages[0])};
  std::vector<float> by_token(row.input_ids.size(), 0.0f);
  for (size_t i = 0; i < by_token.size(); ++i)
    if (row.trains(i)) by_token[i] = static_cast<float>(advantages.at(static_cast<size_t>(next_token++)));
  return by_token;
}

}  // namespace

std::optional<std::string> why_dropped(const std::vector<Trajectory>& group, const ActorSettings& settings,
                                       std::optional<int64_t> max_response_tokens) {
  // The acceptance of the trained policy is not known yet. The filter by acceptance never drops a whole
  // group, so it is off here.
  ActorSettings before_training = settings;
  if (settings.filters.needs_acceptance()) before_training.filters.keep_samples = 0;
  const FilterResult filtered = collect(group, before_training, max_response_tokens, {}).filtered;
  if (std::find(filtered.trained.begin(), filtered.trained.end(), 1) != filtered.trained.end()) return {};
  return filtered.zero_std_groups > 0 && settings.filters.dynamic_sampling ? "equal rewards" : "nothing left";
}

FilterResult set_advantages(std::vector<Trajectory>& batch, const ActorSettings& settings,
                            std::optional<int64_t> max_response_tokens, const AgeLimit& age,
                            const SetValues& set_values) {
  // Groups are looked up by name, because a row with a given advantage and no reward has a group but no
  // entry.
  std::set<std::string_view> stale_groups;
  if (age.action == "drop_group")
    for (const Trajectory& row : batch)
      if (row.in_loss() && age.is_too_old(row)) stale_groups.insert(row.group);
  Entries entries = collect(batch, settings, max_response_tokens, stale_groups);
  for (size_t s = 0; s < batch.size(); ++s) {
    const int64_t entry = entries.entry_of[s];
    if (entry >= 0 ? !entries.filtered.trained[static_cast<size_t>(entry)]
                   : stale_groups.contains(batch[s].group))
      batch[s].trained = false;
  }
  if (set_values && (settings.advantages.needs_values() || settings.has_kl_rewards())) set_values(batch);
  const Estimates estimated = estimate(batch, entries, settings);
  std::vector<int64_t> next_token(estimated.advantages.size(), 0);
  for (size_t s = 0; s < batch.size(); ++s) {
    Trajectory& row = batch[s];
    if (entries.entry_of[s] >= 0) {
      const auto e = static_cast<size_t>(entries.entry_of[s]);
      const int64_t first_token = next_token[e];
      const std::vector<float> own = advantage_of_row(row, estimated.advantages[e], next_token[e]);
      if (row.advantage.empty()) row.advantage = own;
      if (!estimated.returns.empty() && row.in_loss() && row.trains_a_token())
        set_trained_column(row, kReturnsColumn, estimated.returns[e].data() + first_token);
    }
    BOUGH_CHECK(!row.in_loss() || !row.advantage.empty(), "sequence ", s,
                " has neither reward nor advantage");
  }
  if (age.action == "mask") entries.filtered.masked_tokens = mask_old_tokens(batch, age);
  return entries.filtered;
}

std::vector<int64_t> group_numbers(const std::vector<const Trajectory*>& trajectories) {
  Numbering<std::string_view> numbers;
  std::vector<int64_t> out;
  for (const Trajectory* trajectory : trajectories) out.push_back(numbers[trajectory->group]);
  return out;
}

std::vector<TokenSpan> token_spans(const std::vector<Trajectory>& trajectories) {
  std::vector<TokenSpan> spans;
  for (const Trajectory& trajectory : trajectories) spans.emplace_back(trajectory.input_ids);
  return spans;
}

std::vector<uint8_t> trained_flags(const std::vector<Trajectory>& trajectories) {
  std::vector<uint8_t> flags;
  for (const Trajectory& trajectory : trajectories)
    for (size_t i = 0; i < trajectory.input_ids.size(); ++i) flags.push_back(trajectory.trains(i));
  return flags;
}

PlanRequest plan_request(const TrainBatch& batch, int64_t max_tokens_per_pass) {
  PlanRequest request{
      .sequences = batch.sequences, .trained = {}, .max_tokens_per_pass = max_tokens_per_pass};
  for (size_t s = 0; s < batch.sequences.size(); ++s) {
    const size_t begin = request.trained.size();
    request.trained.resize(begin + batch.sequences[s].size(), 0);
    for (const int32_t position : batch.trained_positions[s]) request.trained[begin + position] = 1;
  }
  return request;
}

PlanRequest plan_request(const TrainBatch& batch, const MicroBatchSettings& settings,
                         const TreeTrainingSettings& tree, const PassCosts* costs) {
  PlanRequest request = plan_request(batch, settings.max_tokens_per_mb.value_or(kMaxTokensPerPass));
  request.packer = tree.packer;
  request.layers = tree.layers();
  request.offload = tree.offload();
  request.num_micro_batches = settings.n_mbs;
  request.fixed_micro_batches = settings.allocation == "fixed";
  request.costs = costs;
  if (costs && !settings.memory.is_auto()) request.memory_bytes = settings.memory.count;
  return request;
}

}  // namespace bough
