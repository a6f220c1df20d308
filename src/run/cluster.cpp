#include "run/cluster.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "base/error.h"
#include "plan/pipeline_schedule.h"

namespace bough {

namespace {
// Bytes per parameter: AdamW's two moments and the fp32 master weight.
constexpr double kStateBytes = 12;
constexpr double kUsableMemory = 0.9;  // the rest is for the driver, the libraries and fragmentation
// A pass with fewer tokens does not fill a GPU. A replica must have memory for a pass of this many tokens.
constexpr int64_t kLeastPass = 2048;
constexpr double kCollectiveLatency = 2e-5;  // seconds
// An engine must be able to run this many samples at once.
constexpr double kLeastSamples = 8;

// Prompts per step for which a pipeline's schedule is simulated. With more prompts the pipeline is full.
constexpr int64_t kMostPrompts = 16;
constexpr int64_t kMostStages = 16;

std::string side(int64_t count, int64_t tensor, int64_t stages = 1) {
  const auto part = [](char letter, int64_t size) { return size > 1 ? str(letter, size) : ""; };
  return str("d", count, part('p', stages), part('t', tensor));
}

// Seconds of a ring all-reduce of `bytes` bytes among `count` devices.
double all_reduce_seconds(double bytes, int64_t count, double link) {
  return count <= 1 ? 0
                    : 2 * bytes * static_cast<double>(count - 1) / static_cast<double>(count) / link +
                          kCollectiveLatency;
}
}  // namespace

std::string ClusterLayout::text() const {
  return side(engines, devices_per_engine) + "+" + side(replicas, replica.tensor, replica.stages);
}

std::string ClusterLayout::backend() const {
  return "fsdp:" + side(replicas, replica.tensor, replica.stages);
}

ClusterRates::ClusterRates(ClusterSettings cluster, DeviceProfile device, ModelShape shape,
                           SimulationOptions one)
    : cluster_(cluster),
      device_(std::move(device)),
      shape_(std::move(shape)),
      one_(std::move(one)),
      parameters_(static_cast<double>(shape_.num_parameters())) {}

double ClusterRates::memory_bytes() const {
  return kUsableMemory *
         (cluster_.memory_gib > 0 ? cluster_.memory_gib * 0x1p30 : static_cast<double>(device_.memory_bytes));
}

double ClusterRates::kv_bytes_per_sample() const {
  const double row = 2.0 * static_cast<double>(shape_.num_layers * shape_.num_kv_heads * shape_.head_dim *
                                               shape_.element_bytes);
  return row * (static_cast<double>(one_.prompt_tokens) / static_cast<double>(one_.controller.group_size) +
                one_.lengths.mean);
}

double ClusterRates::longest_path() const {
  return static_cast<double>(one_.prompt_tokens) +
         std::min(static_cast<double>(one_.lengths.longest), 8 * one_.lengths.mean);
}

// The first stage of a pipeline holds its part of the activations of as many passes as there are stages.
// Together these parts are the activations of one whole pass.
double ClusterRates::training_bytes(int64_t replicas, const ClusterLayout::Replica& replica) const {
  const DecoderBytes bytes(shape_, device_.kernels);
  const auto devices = static_cast<double>(replica.devices());
  const double pass = static_cast<double>(bytes.of_kept(RecomputePolicy::kActivations) * kLeastPass);
  const double stack = static_cast<double>(bytes.of_stack_row()) * longest_path();
  return (static_cast<double>(shape_.parameter_bytes()) + stack) / devices +
         pass / static_cast<double>(replica.tensor) +
         kStateBytes * parameters_ / (devices * static_cast<double>(replicas));
}

double ClusterRates::pipeline_efficiency(int64_t replicas, int64_t stages) const {
  if (stages == 1) return 1;
  const ControllerOptions& controller = one_.controller;
  const int64_t prompts = std::clamp<int64_t>(controller.batch_groups / replicas, 1, kMostPrompts);
  const double tokens = static_cast<double>(controller.group_size) * one_.lengths.mean;
  const int64_t leaves = std::max<int64_t>(1, std::llround(tokens / kLeastPass));
  // Times in units of a forward pass of kLeastPass tokens. A prompt is computed once, and again before its
  // backward.
  const double prompt = static_cast<double>(one_.prompt_tokens) / kLeastPass;
  std::vector<ExecutionStep> steps;
  std::vector<double> forward, backward;
  const auto add = [&](Step::Kind kind, int64_t prompt_of, int64_t block, double there, double back) {
    steps.push_back({kind, static_cast<int32_t>(prompt_of), static_cast<int32_t>(block), prompt_of});
    forward.push_back(there);
    backward.push_back(back);
  };
  for (int64_t p = 0; p < prompts; ++p) {
    add(Step::Kind::kForward, p, 0, prompt, 0);
    for (int64_t leaf = 1; leaf <= leaves; ++leaf) add(Step::Kind::kForwardBackward, p, leaf, 1, 2);
    add(Step::Kind::kBackward, p, 0, 0, 3 * prompt);
  }
  double work = 0;
  for (size_t i = 0; i < steps.size(); ++i) work += forward[i] + backward[i];
  return work / pipeline_seconds(steps, forward, backward, {.num_stages = stages});
}

double ClusterRates::replica_tokens_per_s(int64_t replicas, const ClusterLayout::Replica& replica) const {
  const double layers = static_cast<double>(shape_.num_layers) / static_cast<double>(replica.stages);
  const double hidden = static_cast<double>(shape_.hidden_size * shape_.element_bytes);
  const double computed = one_.rates.train_tokens_per_s * static_cast<double>(replica.devices());
  // Seconds per token. Forward and backward each sum hidden states over the tensor-parallel ranks twice per
  // layer. The sums of a recomputed forward are not counted.
  const double sums =
      4 * layers *
      (all_reduce_seconds(hidden, replica.tensor, within()) - (replica.tensor > 1 ? kCollectiveLatency : 0));
  // The tensor-parallel ranks of a stage each send their part of the hidden states over their own link.
  const bool in_node = replica.devices() <= cluster_.n_gpus_per_node;
  const double messages =
      replica.stages > 1 ? 2 * hidden / static_cast<double>(replica.tensor) / (in_node ? within() : between())
                         : 0;
  return pipeline_efficiency(replicas, replica.stages) / (1 / computed + sums + messages);
}

std::optional<ClusterLayout> ClusterRates::layout(int64_t rollout_devices, int64_t train_devices,
                                                  bool in_turns) const {
  const double memory = memory_bytes();
  const double weights = parameters_ * static_cast<double>(shape_.element_bytes);
  const double samples = kLeastSamples * kv_bytes_per_sample();
  // Tensor-parallel ranks are in one node, and their number divides the number of heads. Neither they nor
  // pipeline stages share a mixture of experts.
  const auto may_share_layers = [&](int64_t t) {
    if (shape_.is_mixture() && t > 1) return false;
    return t <= cluster_.n_gpus_per_node && shape_.num_heads % t == 0;
  };
  // If generation and training take turns, the engine uses the trainer's weights and devices, with the same
  // tensor parallelism.
  const auto replica_of = [&](int64_t devices) -> std::optional<ClusterLayout::Replica> {
    const int64_t replicas = train_devices / devices;
    std::optional<ClusterLayout::Replica> best;
    for (int64_t t = devices; t >= 1; t /= 2) {
      const ClusterLayout::Replica replica{t, devices / t};
      if (!may_share_layers(t) || replica.stages > std::min(kMostStages, shape_.num_layers)) continue;
      if ((in_turns || shape_.is_mixture()) && replica.stages > 1) continue;
      const double kv = in_turns ? samples / static_cast<double>(t) : 0;
      if (training_bytes(replicas, replica) + kv > memory) continue;
      if (!best || replica_tokens_per_s(replicas, replica) > replica_tokens_per_s(replicas, *best))
        best = replica;
    }
    return best;
  };
  std::optional<ClusterLayout::Replica> replica;
  for (int64_t devices = 1; !replica && devices <= train_devices; devices *= 2)
    if (train_devices % devices == 0) replica = replica_of(devices);
  if (!replica) return {};
  const int64_t replicas = train_devices / replica->devices();
  if (in_turns) return ClusterLayout{replicas, replica->tensor, replicas, *replica};
  for (int64_t t = 1; t <= rollout_devices; t *= 2)
    if (rollout_devices % t == 0 && may_share_layers(t) &&
        (weights + samples) / static_cast<double>(t) <= memory)
      return ClusterLayout{rollout_devices / t, t, replicas, *replica};
  return {};
}

double ClusterRates::step_collectives_seconds(int64_t replicas, int64_t devices_per_replica) const {
  if (replicas <= 1) return 0;
  const double bytes = parameters_ * static_cast<double>(shape_.accumulator_bytes + shape_.element_bytes) /
                       static_cast<double>(devices_per_replica);
  const int64_t per_node = std::max<int64_t>(1, cluster_.n_gpus_per_node / devices_per_replica);
  const int64_t local = std::min(replicas, per_node), nodes = ceil_div(replicas, local);
  const auto part = [](int64_t count) { return static_cast<double>(count - 1) / static_cast<double>(count); };
  return bytes * part(local) / within() + bytes / static_cast<double>(local) * part(nodes) / between() +
         2 * kCollectiveLatency;
}

std::optional<SimulatedRates> ClusterRates::rates(int64_t rollout_devices, int64_t train_devices,
                                                  bool in_turns) const {
  const std::optional<ClusterLayout> found = layout(rollout_devices, train_devices, in_turns);
  if (!found) return {};
  SimulatedRates rates = one_.rates;
  const auto engine = static_cast<double>(found->devices_per_engine);
  const double layers = static_cast<double>(shape_.num_layers);
  const double hidden = static_cast<double>(shape_.hidden_size * shape_.element_bytes);
  const double weights = parameters_ * static_cast<double>(shape_.element_bytes);

  rates.rollout_devices = found->engines;
  const double sums = 2 * layers;  // per decoding pass
  rates.pass_seconds =
      rates.pass_seconds / engine + (found->devices_per_engine > 1 ? sums * kCollectiveLatency : 0);
  rates.sample_seconds = rates.sample_seconds / engine +
                         sums * (all_reduce_seconds(hidden, found->devices_per_engine, within()) -
                                 (found->devices_per_engine > 1 ? kCollectiveLatency : 0));
  rates.prefill_tokens_per_s *= engine;
  const double held = in_turns ? training_bytes(found->replicas, found->replica) : weights / engine;
  const double num_samples = (memory_bytes() - held) * engine / kv_bytes_per_sample();
  rates.max_running = std::clamp<int64_t>(static_cast<int64_t>(num_samples), 1,
                                          rates.max_running * found->devices_per_engine);

  rates.train_devices = found->replicas;
  rates.train_tokens_per_s = replica_tokens_per_s(found->replicas, found->replica);
  const double state = 2 * kStateBytes * parameters_ / static_cast<double>(train_devices);
  const double bandwidth = device_.memory_bytes_per_s > 0 ? device_.memory_bytes_per_s : 3e12;
  rates.step_seconds = cluster_.step_seconds + state / bandwidth +
                       step_collectives_seconds(found->replicas, found->replica.devices());
  // If generation and training take turns, the engines read the trainer's weights in place.
  const bool one_node = in_turns || rollout_devices + train_devices <= cluster_.n_gpus_per_node;
  const double moved = in_turns ? 0 : weights / engine / (one_node ? within() : between());
  rates.publish_seconds = rates.swap_seconds = moved;
  return rates;
}

}  // namespace bough
