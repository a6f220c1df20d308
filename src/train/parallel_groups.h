// Data parallelism on trees. Each rank computes a shard of the batch: an interval of the tree's leaves, in
// depth-first order (plan/load_balance.h). Data-parallel ranks differ in passes and memory, so they exchange
// nothing during plan execution. Results are summed afterwards. Every rank gets the whole batch as input,
// because the loss weights divide by counts of the whole batch. After the sums every rank has the outputs of
// all loss rows and the loss, metrics and gradient of the whole batch.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "data/trajectory.h"
#include "models/model.h"
#include "plan/load_balance.h"
#include "plan/pipeline_schedule.h"
#include "plan/plan.h"
#include "train/collective_buckets.h"
#include "train/executor.h"
#include "train/settings.h"

namespace bough {

// The process groups that this rank belongs to. A process group of one rank is nullptr. Neighboring ranks
// split a layer (tensor), ranks further apart the tokens of a pass (context), then the batch (data), then the
// list of layers (pipeline): rank = ((stage · data + replica) · context + c) · tensor + t.
class TrainingRanks {
 public:
  // Collective call of all sizes.all() ranks. `all`: nullptr if this process trains alone. Not owned.
  TrainingRanks(Communicator* all, const ParallelSizes& sizes);

  Communicator* all() const { return all_; }
  // The ranks with the same shard of the model; they sum gradients and shard the optimizer's state.
  Communicator* data_parallel_group() const { return data_parallel_group_.get(); }
  // The ranks that sum outputs, loss and metrics of a batch: all stages, replicas and context ranks with this
  // rank's index in its tensor-parallel group, because ranks of that group compute equal outputs. Without
  // pipeline stages it is data_parallel_group(). nullptr if there is only one such rank.
  Communicator* loss_group() const { return loss_group_ ? loss_group_.get() : data_parallel_group_.get(); }
  Communicator* context() const { return context_.get(); }
  Communicator* tensor() const { return tensor_.get(); }
  // The process groups that hold the other shards of this rank's model replica.
  ModelRanks model() const { return {tensor_.get(), stages_.get(), stages_back_.get()}; }
  bool has_unsharded_model() const { return !tensor_ && !stages_; }
  // Whether this rank and rank 0 hold shards of one copy of the model: equal replica and context index.
  bool shares_with_leader() const { return replica() == 0 && rank_ / sizes_.tensor % sizes_.context == 0; }
  // Index of this rank's replica of the model. The replica computes the batch shard of the same index.
  int64_t replica() const { return rank_ / (sizes_.context * sizes_.tensor) % sizes_.data; }
  int64_t num_replicas() const { return sizes_.data; }
  const ParallelSizes& sizes() const { return sizes_; }
  // The pipeline schedule of a plan execution with gradients.
  Pipeline pipeline() const { return {.num_stages = sizes_.pipeline, .leaves_on_stack = sizes_.context > 1}; }
  bool is_rank_zero() const { return rank_ == 0; }
  void set_deadline(double seconds);
  std::vector<int64_t> gather(int64_t own) const;  // every rank's number, in rank order; collective call
  double bytes_sent() const;                       // by this rank, in all groups

 private:
  Communicator* all_;
  ParallelSizes sizes_;
  int64_t rank_ = 0;
  std::vector<Communicator*> groups() const;

  std::unique_ptr<Communicator> data_parallel_group_, loss_group_, context_, tensor_, stages_, stages_back_;
};

// Seconds per token and per (query, key) pair, for load balancing. Without costs every token weighs 1.
BalanceWeights balance_weights(const PassCosts* costs);

// Plans shard `rank` of the batch of `whole`. PlannedTree::sequences are indices into the whole batch. All
// ranks must use the same costs, because each rank computes the cut of the batch itself.
Plan plan_shard(const std::string& strategy, const PlanRequest& whole, int64_t rank, int64_t num_ranks);

// Each rank has outputs for the loss rows of its shard and zeros elsewhere. All ranks get the sum.
void sum_values(RowValues& values, Communicator& ranks);
// Merges the results of all shares (kFixedShares), in the order of the shares, into the result of all loss
// rows. `own`: this rank's results, one per share. `ranks`: nullptr if there is one rank.
ExecutionResult sum_shards(std::vector<ExecutionResult> own, Communicator* ranks);
void sum_values(const at::Tensor& values_R, Communicator& ranks);
// `by_sequence`: each rank has the experts of its shard's sequences, and nothing of other sequences. All
// ranks get all.
void gather_experts(std::vector<RoutedExperts>& by_sequence, Communicator& ranks);
// Replaces each rank's loss and metrics by those of all loss rows, merged in rank order.
void sum_losses(double& loss, WeightedSums& metrics, Communicator& ranks);
// A command from rank 0, which all ranks execute together. Ranks other than 0 have no batches of their own
// and wait for commands without a deadline.
struct RankOrder {
  enum class Kind : char {
    kTrain = 't',      // train on `batch` as version `version`
    kValues = 'v',     // compute the critic's values of `batch`
    kLogProbs = 'l',   // compute the policy's log-probabilities of `batch`
    kKlRewards = 'r',  // compute the KL's rewards of `batch`
    kWeights = 'w',    // gather the weights of sharded layers on rank 0
    kPublish = 'p',    // publish the weights as `version` to the rank's local engine
    kSnapshot = 's',   // gather the training state on rank 0 (Trainer::snapshot)
    kEnd = 'e',
  };
  Kind kind = Kind::kEnd;
  int64_t version = 0;
  std::vector<Trajectory> batch;  // sent without the texts (kTrajectoryTexts) and `fields`
};
void send_order(const RankOrder& order, Communicator& ranks);  // called by rank 0
RankOrder receive_order(Communicator& ranks);                  // called by all other ranks

// Sums main_grad of the trained parameters over all ranks that hold them. main_grad must contain only the
// gradient of the current plan execution. `ranks`: the ranks with the same shard of the model, or nullptr if
// no other rank has it.
void sum_gradients(Model& model, Communicator* ranks);

}  // namespace bough
