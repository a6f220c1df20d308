// What a cluster's devices would do of a run's work: rates for the simulator (run_simulator.h) of every
// split into devices that generate and devices that train, from the rates of one device, of the links
// between them, and from what fits into memory.
//
// An engine has as many devices as the model and a sample's keys and values need (tensor parallel), the
// trainer replicas of as many as weights, gradients and passes need: of that many those that share each layer
// within a node (tensor parallel) and those that are stages of a pipeline as trains fastest. Its optimizer's
// state is shared over all of them (ZeRO stage 1), and its replicas share the batch. Of links it counts
//   a training step   gradients summed (reduce-scatter, accumulator type) and weights gathered (all-gather)
//                     over the replicas: within nodes first, then between them, a part on each device's link
//   tensor parallel   two sums of the hidden states a layer, forward and backward each; ring all-reduce
//   a pipeline        hidden states to the next stage and gradients back, not overlapped; and of the schedule
//                     of the step's passes (plan/pipeline.h) what stages wait
//   new weights       to every engine, over links between nodes where there are several
// Not counted: contention, stragglers, and everything that a run does beside generation and training.
#pragma once

#include <optional>
#include <string>

#include "control/run_simulator.h"
#include "cost/device_profile.h"
#include "models/decoder_cost.h"

namespace bough {

// A cluster's description, as YAML. Links: what a device sends at once, one way.
struct ClusterSettings {
  int64_t n_gpus_per_node = 8;
  double nvlink_gb_per_s = 450, network_gb_per_s = 50, memory_gib = 0, step_seconds = 0;

  template <class V>
  void visit(V& v) {
    v("n_gpus_per_node", n_gpus_per_node, "devices of a node", range(1, 1024));
    v("nvlink_gb_per_s", nvlink_gb_per_s, "GB/s that a device sends to others of its node", at_least(1e-3));
    v("network_gb_per_s", network_gb_per_s, "GB/s that a device sends to other nodes", at_least(1e-3));
    v("memory_gib", memory_gib, "GiB of a device; 0: as the data sheet has it", at_least(0.0));
    v("step_seconds", step_seconds, "of each training step, beside what is counted", at_least(0.0));
  }
};

// How a split is laid out.
struct ClusterLayout {
  struct Replica {
    int64_t tensor = 1, stages = 1;
    int64_t devices() const { return tensor * stages; }
  };
  int64_t engines = 0, devices_per_engine = 0;  // generate
  int64_t replicas = 0;                         // train
  Replica replica;
  std::string text() const;     // AReaL's: "d4t2+d8p2"
  std::string backend() const;  // of those that train, for actor.backend: "fsdp:d8p2"
};

class ClusterRates {
 public:
  // `one`: the workload, and the rates of one device that does not share its work.
  ClusterRates(ClusterSettings cluster, DeviceProfile device, ModelShape shape, SimulationOptions one);

  // None where the model does not fit, or where devices would be left over. rollout_devices + train_devices
  // may be those of the cluster twice: in turns.
  std::optional<ClusterLayout> layout(int64_t rollout_devices, int64_t train_devices, bool in_turns) const;
  std::optional<SimulatedRates> rates(int64_t rollout_devices, int64_t train_devices, bool in_turns) const;

  // Seconds in which each of `replicas` sums its gradients with the others' and gathers their weights.
  double step_collectives_seconds(int64_t replicas, int64_t devices_per_replica) const;
  // Bytes of a device that trains, but for keys and values of rollouts.
  double training_bytes(int64_t replicas, const ClusterLayout::Replica& replica) const;
  double memory_bytes() const;
  // Tokens a second of a replica, of `replicas` that share the batch.
  double replica_tokens_per_s(int64_t replicas, const ClusterLayout::Replica& replica) const;

 private:
  double within() const { return cluster_.nvlink_gb_per_s * 1e9; }
  double between() const { return cluster_.network_gb_per_s * 1e9; }
  double kv_bytes_per_sample() const;
  double longest_path() const;
  // What a pipeline's stages compute of the time that they have.
  double pipeline_efficiency(int64_t replicas, int64_t stages) const;

  const ClusterSettings cluster_;
  const DeviceProfile device_;
  const ModelShape shape_;
  const SimulationOptions one_;
  const double parameters_;
};

}  // namespace bough
