#include "control/cluster.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"

namespace bough {

namespace {
// AdamW's two moments and the fp32 master of a parameter.
constexpr double kStateBytes = 12;
constexpr double kUsableMemory = 0.9;  // the rest is the driver's, the libraries' and fragmentation's
// Tokens of a pass below which a GPU is not full: what a replica must have room for.
constexpr int64_t kLeastPass = 2048;
constexpr double kCollectiveLatency = 2e-5;  // seconds
// Samples that an engine must be able to run at once.
constexpr double kLeastSamples = 8;

std::string side(int64_t count, int64_t tensor) {
  return str("d", count, tensor > 1 ? str("t", tensor) : "");
}

// Seconds of a ring all-reduce of so many bytes among `count` devices.
double all_reduce_seconds(double bytes, int64_t count, double link) {
  return count <= 1 ? 0
                    : 2 * bytes * static_cast<double>(count - 1) / static_cast<double>(count) / link +
                          kCollectiveLatency;
}
}  // namespace

std::string ClusterLayout::text() const {
  return side(engines, devices_per_engine) + "+" + side(replicas, devices_per_replica);
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

double ClusterRates::training_bytes(int64_t replicas, int64_t devices_per_replica) const {
  const DecoderBytes bytes(shape_, device_.kernels);
  const auto tensor = static_cast<double>(devices_per_replica);
  const double longest = static_cast<double>(one_.prompt_tokens) +
                         std::min(static_cast<double>(one_.lengths.longest), 8 * one_.lengths.mean);
  const double work = static_cast<double>(bytes.of_kept(Keep::kActivations) * kLeastPass) +
                      static_cast<double>(bytes.of_stack_row()) * longest;
  return (static_cast<double>(shape_.parameter_bytes()) + work) / tensor +
         kStateBytes * parameters_ / (tensor * static_cast<double>(replicas));
}

std::optional<ClusterLayout> ClusterRates::layout(int64_t rollout_devices, int64_t train_devices,
                                                  bool in_turns) const {
  const double memory = memory_bytes();
  const double weights = parameters_ * static_cast<double>(shape_.element_bytes);
  const double samples = kLeastSamples * kv_bytes_per_sample();
  // Tensor parallel stays within a node, as many devices as divide it and the key heads.
  const auto smallest = [&](int64_t devices, auto&& fits) -> int64_t {
    for (int64_t t = 1; t <= std::min(devices, cluster_.n_gpus_per_node); t *= 2)
      if (devices % t == 0 && shape_.num_heads % t == 0 && fits(t)) return t;
    return 0;
  };
  const int64_t tensor = smallest(train_devices, [&](int64_t t) {
    return training_bytes(train_devices / t, t) + (in_turns ? samples / static_cast<double>(t) : 0) <= memory;
  });
  if (tensor == 0) return {};
  // In turns the engine has the trainer's weights and devices.
  if (in_turns) return ClusterLayout{train_devices / tensor, tensor, train_devices / tensor, tensor};
  const int64_t engine = smallest(
      rollout_devices, [&](int64_t t) { return (weights + samples) / static_cast<double>(t) <= memory; });
  if (engine == 0) return {};
  return ClusterLayout{rollout_devices / engine, engine, train_devices / tensor, tensor};
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
  const auto tensor = static_cast<double>(found->devices_per_replica);
  const double layers = static_cast<double>(shape_.num_layers);
  const double hidden = static_cast<double>(shape_.hidden_size * shape_.element_bytes);
  const double weights = parameters_ * static_cast<double>(shape_.element_bytes);

  rates.rollout_devices = found->engines;
  const double sums = 2 * layers;  // of a decoding pass
  rates.pass_seconds =
      rates.pass_seconds / engine + (found->devices_per_engine > 1 ? sums * kCollectiveLatency : 0);
  rates.sample_seconds = rates.sample_seconds / engine +
                         sums * (all_reduce_seconds(hidden, found->devices_per_engine, within()) -
                                 (found->devices_per_engine > 1 ? kCollectiveLatency : 0));
  rates.prefill_tokens_per_s *= engine;
  const double held =
      in_turns ? training_bytes(found->replicas, found->devices_per_replica) : weights / engine;
  const double room = (memory_bytes() - held) * engine / kv_bytes_per_sample();
  rates.max_running =
      std::clamp<int64_t>(static_cast<int64_t>(room), 1, rates.max_running * found->devices_per_engine);

  rates.train_devices = found->replicas;
  // Forward and backward sum hidden states twice a layer each; a pass recomputed, forward's once more.
  const double token_sums = 4 * layers *
                            (all_reduce_seconds(hidden, found->devices_per_replica, within()) -
                             (found->devices_per_replica > 1 ? kCollectiveLatency : 0));
  rates.train_tokens_per_s = 1 / (1 / (rates.train_tokens_per_s * tensor) + token_sums);
  const double state = 2 * kStateBytes * parameters_ / (tensor * static_cast<double>(found->replicas));
  const double bandwidth = device_.memory_bytes_per_s > 0 ? device_.memory_bytes_per_s : 3e12;
  rates.step_seconds = cluster_.step_seconds + state / bandwidth +
                       step_collectives_seconds(found->replicas, found->devices_per_replica);
  // In turns the engines read the trainer's weights.
  const bool one_node = in_turns || rollout_devices + train_devices <= cluster_.n_gpus_per_node;
  const double moved = in_turns ? 0 : weights / engine / (one_node ? within() : between());
  rates.publish_seconds = rates.swap_seconds = moved;
  return rates;
}

}  // namespace bough
