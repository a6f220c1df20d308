#include "train/parallel_groups.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string_view>

#include "base/error.h"
#include "data/rollout_file.h"
#include "models/tensor_parallel.h"
#include "tree/prefix_tree.h"

namespace bough {

namespace {

void sum_tensor(const at::Tensor& values, Communicator& ranks) {
  if (values.defined()) all_reduce_(values, ranks);
}

// Serializes the loss and the metrics. Metric names contain no zero byte.
std::string packed(double loss, const WeightedSums& metrics) {
  std::string text(reinterpret_cast<const char*>(&loss), sizeof loss);
  for (const auto& [name, metric] : metrics) {
    text += name;
    text += '\0';
    text.append(reinterpret_cast<const char*>(&metric), sizeof metric);
  }
  return text;
}

double unpack(const std::string& text, WeightedSums& metrics) {
  double loss = 0;
  std::memcpy(&loss, text.data(), sizeof loss);
  for (size_t at = sizeof loss; at < text.size(); at += sizeof(WeightedSum)) {
    const std::string name = text.data() + at;
    at += name.size() + 1;
    WeightedSum metric;
    std::memcpy(&metric, text.data() + at, sizeof metric);
    metrics[name] = metric;
  }
  return loss;
}

}  // namespace

std::optional<ParallelSizes> sizes_of_backend(const std::string& backend) {
  if (backend.empty()) return {};
  constexpr const char* kExpected = "expected fsdp:dNpMcKtL for N x M x K x L ranks";
  const auto refuse = [&](const std::string& what) -> void {
    throw UserError(str("actor.backend: got ", quoted(backend), what));
  };
  const size_t separator = backend.find_first_of(":.");
  const std::string name = separator == std::string::npos ? "" : backend.substr(0, separator);
  if (name != "" && name != "fsdp" && name != "megatron" && name != "archon")
    refuse(str(" with unknown trainer ", quoted(name), "; ", kExpected));
  ParallelSizes sizes;
  const char* at = backend.c_str() + (separator == std::string::npos ? 0 : separator + 1);
  if (*at == 0) refuse(str(" without a size; ", kExpected));
  while (*at != 0) {
    const char dimension = *at++;
    char* end = nullptr;
    const int64_t size = *at >= '1' && *at <= '9' ? std::strtoll(at, &end, 10) : 0;
    if (size == 0 || std::string_view("dtpce").find(dimension) == std::string_view::npos)
      refuse(str(", ", kExpected));
    if (dimension == 'd') sizes.data = size;
    else if (dimension == 'c') sizes.context = size;
    else if (dimension == 't') sizes.tensor = size;
    else if (dimension == 'p') sizes.pipeline = size;
    else if (size > 1)
      refuse(str(
          ", but ", dimension, size,
          " is not supported: ranks split the batch (d), the list of layers (p), the tokens of a pass (c) ",
          "and the heads and widths of each layer (t), docs/ranks.md; ", kExpected));
    at = end;
  }
  return sizes;
}

ParallelSizes ActorSettings::sizes_of(int64_t num_ranks) const {
  const ParallelSizes sizes = sizes_of_backend(backend).value_or(ParallelSizes{.data = num_ranks});
  if (sizes.all() != num_ranks)
    throw UserError(str("actor.backend: got ", backend, ", which needs ", sizes.all(), " ranks, but ",
                        num_ranks, num_ranks == 1 ? " trains" : " train", "; expected --ranks ",
                        sizes.all()));
  return sizes;
}

TrainingRanks::TrainingRanks(Communicator* all, const ParallelSizes& sizes)
    : all_(all && all->size() > 1 ? all : nullptr), sizes_(sizes) {
  BOUGH_CHECK(sizes.all() == (all_ ? all_->size() : 1), "got ", all_ ? all_->size() : 1, " ranks, expected ",
              sizes.all());
  if (!all_) return;
  rank_ = all_->rank();
  const int64_t of_replica = sizes.context * sizes.tensor, of_stage = sizes.data * of_replica;
  const int64_t t = rank_ % sizes.tensor;
  if (sizes.data * sizes.context > 1) data_parallel_group_ = all_->split(rank_ / of_stage * sizes.tensor + t);
  if (sizes.context > 1) context_ = all_->split(rank_ / of_replica * sizes.tensor + t);
  if (sizes.tensor > 1) tensor_ = all_->split(rank_ / sizes.tensor);
  if (sizes.pipeline == 1) return;
  loss_group_ = all_->split(t);
  stages_ = all_->split(rank_ % of_stage);
  stages_back_ = all_->split(rank_ % of_stage);
}

std::vector<Communicator*> TrainingRanks::groups() const {
  std::vector<Communicator*> groups;
  for (const auto& group :
       {&data_parallel_group_, &loss_group_, &context_, &tensor_, &stages_, &stages_back_})
    if (*group) groups.push_back(group->get());
  return groups;
}

void TrainingRanks::set_deadline(double seconds) {
  for (Communicator* group : groups()) group->set_deadline(seconds);
}

std::vector<int64_t> TrainingRanks::gather(int64_t own) const {
  std::vector<int64_t> numbers;
  for (const std::string& number : all_->all_gather(std::to_string(own)))
    numbers.push_back(std::stoll(number));
  return numbers;
}

double TrainingRanks::bytes_sent() const {
  double bytes = all_ ? all_->bytes_sent() : 0;
  for (const Communicator* group : groups()) bytes += group->bytes_sent();
  return bytes;
}

BalanceWeights balance_weights(const PassCosts* costs) {
  if (!costs) return {};
  constexpr int64_t kTokens = 1024;
  const PassShape pass{.tokens = kTokens, .pairs = kTokens * (kTokens + 1) / 2};
  const double attention = costs->attention_forward_seconds(pass) + costs->attention_backward_seconds(pass);
  const double all = costs->forward_seconds(pass) + costs->backward_seconds(pass);
  return {.per_token = (all - attention) / static_cast<double>(pass.tokens),
          .per_pair = attention / static_cast<double>(pass.pairs)};
}

Plan plan_shard(const std::string& strategy, const PlanRequest& whole, int64_t rank, int64_t num_ranks) {
  const PrefixTree tree = build_prefix_tree(whole.sequences);
  const std::vector<RankShare> shares = balance_load(tree, num_ranks, balance_weights(whole.costs));
  const std::vector<int64_t>& own = shares.at(static_cast<size_t>(rank)).sequences;
  Plan plan = make_plan(strategy, part_of(whole, own));
  for (PlannedTree& planned : plan.trees)
    for (int64_t& sequence : planned.sequences) sequence = own[static_cast<size_t>(sequence)];
  return plan;
}

void sum_values(RowValues& values, Communicator& ranks) {
  for (const at::Tensor* tensor : {&values.log_probs_R, &values.entropies_R, &values.top_k_log_probs_RK,
                                   &values.top_ids_RK, &values.top_log_probs_RK})
    sum_tensor(*tensor, ranks);
}

void sum_values(const at::Tensor& values_R, Communicator& ranks) {
  sum_tensor(values_R, ranks);
}

void gather_experts(std::vector<RoutedExperts>& by_sequence, Communicator& ranks) {
  Json own = Json::object();
  for (size_t s = 0; s < by_sequence.size(); ++s)
    if (!by_sequence[s].empty()) own[std::to_string(s)] = to_json(by_sequence[s]);
  for (const std::string& text : ranks.all_gather(own.dump())) {
    const Json of_rank = Json::parse(text);
    for (const auto& [s, routed] : of_rank.items())
      by_sequence.at(std::stoul(s)) = routed_experts_from_json(routed);
  }
}

void sum_losses(double& loss, WeightedSums& metrics, Communicator& ranks) {
  const std::vector<std::string> all = ranks.all_gather(packed(loss, metrics));
  loss = 0;
  metrics.clear();
  for (const std::string& text : all) {
    WeightedSums of_rank;
    loss += unpack(text, of_rank);
    merge(metrics, of_rank);
  }
}

void send_order(const RankOrder& order, Communicator& ranks) {
  std::set<std::string> columns;
  std::string rows;
  Json choices = Json::object();  // by row; rollout files do not store them
  for (size_t i = 0; i < order.batch.size(); ++i) {
    const Trajectory& row = order.batch[i];
    if (!row.page_choices.positions.empty()) choices[std::to_string(i)] = to_json(row.page_choices);
    for (const auto& [name, values] : row.columns) columns.insert(name);
    Trajectory sent = row;
    for (const TrajectoryText& text : kTrajectoryTexts) (sent.*text.member).reset();
    sent.fields = Json::object();
    append_rollout_line(rows, sent);
    rows += '\n';
  }
  const Json head = {{"kind", std::string(1, static_cast<char>(order.kind))},
                     {"version", order.version},
                     {"columns", columns},
                     {"choices", choices}};
  ranks.broadcast(head.dump() + "\n" + rows);
}

RankOrder receive_order(Communicator& ranks) {
  const std::string text = ranks.await_broadcast();
  size_t at = text.find('\n');
  const Json head = Json::parse(std::string_view(text).substr(0, at));
  RankOrder order{.kind = static_cast<RankOrder::Kind>(head.at("kind").get<std::string>().at(0)),
                  .version = head.at("version").get<int64_t>(),
                  .batch = {}};
  const RolloutReadOptions options{.require_reward_or_advantage = false,
                                   .columns = head.at("columns").get<std::vector<std::string>>()};
  for (++at; at < text.size();) {
    const size_t end = text.find('\n', at);
    order.batch.push_back(
        parse_rollout_line(std::string_view(text).substr(at, end - at), "rank 0's batch", options));
    at = end + 1;
  }
  for (const auto& [row, choices] : head.at("choices").items())
    order.batch.at(std::stoul(row)).page_choices = page_choices_from_json(choices);
  return order;
}

void sum_gradients(Model& model, Communicator* ranks) {
  if (model.tensor_ranks()) sum_copied_gradients(model.trained_parameters(), *model.tensor_ranks());
  if (ranks) {
    std::vector<at::Tensor> gradients;
    for (const Parameter* parameter : model.trained_parameters())
      if (parameter->main_grad.defined()) gradients.push_back(parameter->main_grad);
    sum_in_buckets_(gradients, *ranks);
  }
  if (const Parameter* const tied = model.trained_at_both_ends())
    sum_over_ends_(tied->main_grad, *model.ranks().stages);
}

ExecutionResult sum_shards(std::vector<ExecutionResult> own, Communicator* ranks) {
  ExecutionResult sum;
  sum.values = std::move(own.at(0).values);
  // Each loss row has an output in one share and 0 in all others, so the sum is exact.
  const auto add = [](at::Tensor& to, const at::Tensor& more) {
    if (to.defined()) to.add_(more);
  };
  for (size_t i = 1; i < own.size(); ++i) {
    add(sum.values.log_probs_R, own[i].values.log_probs_R);
    add(sum.values.entropies_R, own[i].values.entropies_R);
    add(sum.values.top_k_log_probs_RK, own[i].values.top_k_log_probs_RK);
  }
  if (ranks) sum_values(sum.values, *ranks);
  std::vector<std::vector<std::string>> all;  // [local share][rank]
  for (const ExecutionResult& result : own) {
    const std::string text = packed(result.loss, result.metrics);
    all.push_back(ranks ? ranks->all_gather(text) : std::vector<std::string>{text});
  }
  for (size_t rank = 0; rank < all[0].size(); ++rank)
    for (const std::vector<std::string>& share : all) {
      WeightedSums metrics;
      sum.loss += unpack(share[rank], metrics);
      merge(sum.metrics, metrics);
    }
  return sum;
}

}  // namespace bough
