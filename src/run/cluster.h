// Estimates the rates of a cluster for the simulator (run_simulator.h), for every split into devices that
// generate and devices that train. Inputs are the rates of one device, the links between devices, and what
// fits into memory.
//
// An engine has as many devices (tensor parallel) as the model and the keys and values of some samples need.
// A trainer replica has as many as weights, gradients and passes need. The devices of a replica divide each
// layer within a node (tensor parallel), are stages of a pipeline, or both: the fastest choice is taken. The
// optimizer state is sharded over all trainer devices (ZeRO stage 1), and the batch is divided over the
// replicas. Link traffic that is counted:
//   a training step   gradients summed (reduce-scatter, accumulator type) and weights gathered (all-gather)
//                     over the replicas: within nodes first, then between nodes, each device on its own link
//   tensor parallel   two sums of the hidden states per layer, in forward and in backward; ring all-reduce
//   a pipeline        hidden states to the next stage and gradients back, not overlapped; and the time that
//                     stages wait in the schedule of the step's passes (plan/pipeline_schedule.h)
//   new weights       to every engine, over links between nodes if there are several nodes
// Not counted: contention, stragglers, and everything that a run does besides generation and training.
#pragma once

#include <optional>
#include <string>

#include "control/run_simulator.h"
#include "cost/device_profile.h"
#include "models/decoder_cost.h"

namespace bough {

// A cluster's description, as YAML. Link rates are for one device and one direction.
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

// The parallel layout of a split.
struct ClusterLayout {
  struct Replica {
    int64_t tensor = 1, stages = 1;
    int64_t devices() const { return tensor * stages; }
  };
  int64_t engines = 0, devices_per_engine = 0;  // that generate
  int64_t replicas = 0;                         // that train
  Replica replica;
  std::string text() const;     // in AReaL's form: "d4t2+d8p2"
  std::string backend() const;  // of the trainers, for actor.backend: "fsdp:d8p2"
};

class ClusterRates {
 public:
  // `one`: the workload, and the rates of one device that works alone.
  ClusterRates(ClusterSettings cluster, DeviceProfile device, ModelShape shape, SimulationOptions one);

  // nullopt if the model does not fit, or if devices would be left over. in_turns: the same devices generate
  // and train, so both counts may be all devices of the cluster.
  std::optional<ClusterLayout> layout(int64_t rollout_devices, int64_t train_devices, bool in_turns) const;
  std::optional<SimulatedRates> rates(int64_t rollout_devices, int64_t train_devices, bool in_turns) const;

  // Seconds per training step that `replicas` replicas need to sum their gradients and gather their weights.
  double step_collectives_seconds(int64_t replicas, int64_t devices_per_replica) const;
  // Bytes that training needs on one device, without keys and values of rollouts.
  double training_bytes(int64_t replicas, const ClusterLayout::Replica& replica) const;
  double memory_bytes() const;
  // Tokens per second that one replica trains if the batch is divided over `replicas`.
  double replica_tokens_per_s(int64_t replicas, const ClusterLayout::Replica& replica) const;

 private:
  double within() const { return cluster_.nvlink_gb_per_s * 1e9; }
  double between() const { return cluster_.network_gb_per_s * 1e9; }
  double kv_bytes_per_sample() const;
  double longest_path() const;
  // Fraction of a pipeline's time in which its stages compute.
  double pipeline_efficiency(int64_t replicas, int64_t stages) const;

  const ClusterSettings cluster_;
  const DeviceProfile device_;
  const ModelShape shape_;
  const SimulationOptions one_;
  const double parameters_;
};

}  // namespace bough
