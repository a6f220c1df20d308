// Data parallelism on trees: each rank walks an interval of the batch's leaves in depth-first order (plan/
// load_balance.h), and what the ranks found is summed after the walk. Ranks differ in passes and memory, so
// that nothing is exchanged inside a walk. Every rank has the whole batch, whose denominators are in its
// weights, and afterwards all rows' values, the loss, the metrics and the gradient of the whole batch.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "data/trajectory.h"
#include "models/model.h"
#include "plan/load_balance.h"
#include "plan/pipeline.h"
#include "plan/plan.h"
#include "train/executor.h"
#include "train/settings.h"

namespace bough {

// Where results must not depend on the number of ranks (actor.deterministic), the batch and each parameter's
// elements are cut into so many shares, whatever that number, which must divide it. Each rank has the same
// number of consecutive shares, and sums are taken as a tree, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
inline constexpr int64_t kFixedShares = 8;

// This rank's groups, of all ranks that train; of one rank: null. Adjacent ranks share a layer (tensor), then
// the tokens of a pass (context), then the batch (data); stages of a pipeline are furthest apart: rank =
// ((stage · data + replica) · context + c) · tensor + t.
class TrainingRanks {
 public:
  // A call of all, of whom there are sizes.all(); null: this process alone. Not owned.
  TrainingRanks(Communicator* all, const ParallelSizes& sizes);

  Communicator* all() const { return all_; }
  // Those that have the same pieces of the model: they sum gradients and share the optimizer's state.
  Communicator* sharing() const { return sharing_.get(); }
  // Those that walk the batch together, of all stages: what one of them found of a row, all get.
  Communicator* walking() const { return walking_ ? walking_.get() : sharing_.get(); }
  Communicator* context() const { return context_.get(); }
  Communicator* tensor() const { return tensor_.get(); }
  // Those that have the other pieces of this rank's model.
  ModelRanks model() const { return {tensor_.get(), stages_.get(), stages_back_.get()}; }
  bool has_whole_model() const { return !tensor_ && !stages_; }
  // Whether this rank's pieces are some of those that make the leader's model whole.
  bool shares_with_leader() const { return replica() == 0 && rank_ / sizes_.tensor % sizes_.context == 0; }
  // Which share of the batch this rank's replica plans, and of how many.
  int64_t replica() const { return rank_ / (sizes_.context * sizes_.tensor) % sizes_.data; }
  int64_t num_replicas() const { return sizes_.data; }
  const ParallelSizes& sizes() const { return sizes_; }
  // How stages go through a walk with gradients.
  Pipeline pipeline() const { return {.num_stages = sizes_.pipeline, .leaves_on_stack = sizes_.context > 1}; }
  bool leads() const { return rank_ == 0; }
  void set_deadline(double seconds);
  std::vector<int64_t> gather(int64_t own) const;  // each rank's number; all of them call it
  double bytes_sent() const;                       // by this rank, in all groups

 private:
  Communicator* all_;
  ParallelSizes sizes_;
  int64_t rank_ = 0;
  std::vector<Communicator*> groups() const;

  std::unique_ptr<Communicator> sharing_, walking_, context_, tensor_, stages_, stages_back_;
};

// What tokens and pairs cost on a device, for the cut; one a token without costs.
BalanceWeights balance_weights(const PassCosts* costs);

// Rank `rank`'s part of the batch that the request is of, planned for itself. Its trees name sequences by
// their index in the whole batch. All ranks must plan by the same costs.
Plan plan_share(const std::string& strategy, const PlanRequest& whole, int64_t rank, int64_t num_ranks);

// Of rows that one rank has computed each, the others' are 0: every rank gets all.
void sum_values(RowValues& values, Communicator& ranks);
// Of `own`, results of consecutive shares of the rows that each rank has: those of all rows, merged in the
// order of shares. Null: of one rank.
WalkResult sum_shares(std::vector<WalkResult> own, Communicator* ranks);
void sum_values(const at::Tensor& values_R, Communicator& ranks);
// Loss and metrics of the ranks' rows become those of all rows, merged in rank order.
void sum_losses(double& loss, WeightedSums& metrics, Communicator& ranks);
// What rank 0 of a run has the others do with it. They have no batches of their own: they wait for orders, as
// long as it takes.
struct RankOrder {
  enum class Kind : char {
    kTrain = 't',     // on `batch`, as batch number `version`
    kValues = 'v',    // the critic's, of `batch`
    kLogProbs = 'l',  // the policy's, of `batch`
    kWeights = 'w',   // of the shared layers, to rank 0
    kPublish = 'p',   // the weights, as `version`, to the rank's own engine
    kSnapshot = 's',  // of all that is trained (Trainer::snapshot), to rank 0
    kEnd = 'e',
  };
  Kind kind = Kind::kEnd;
  int64_t version = 0;
  std::vector<Trajectory> batch;  // what people read of it is not sent
};
void send_order(const RankOrder& order, Communicator& ranks);  // by rank 0
RankOrder receive_order(Communicator& ranks);                  // by all others

// main_grad of the trained parameters, which held nothing else than this walk's gradient. `ranks`, of those
// that have the same pieces of the model, may be null.
void sum_gradients(Model& model, Communicator* ranks);

// A tensor's elements in memory order, as the ranks share them: each has so many, the last ones fewer or
// none.
struct ElementShare {
  int64_t most = 0;  // of a rank
  int64_t begin = 0, count = 0;
};
// `fixed`: as kFixedShares cut them.
ElementShare share_of(int64_t num_elements, const Communicator* ranks, bool fixed = false);
// Own share, one dimension, of the sum over ranks; `fixed`: which is taken as a tree. Contiguous.
at::Tensor reduce_scatter(const at::Tensor& values, Communicator& ranks, bool fixed = false);
// The whole of `num_elements`, one dimension, of every rank's own share.
at::Tensor all_gather(const at::Tensor& own, int64_t num_elements, Communicator& ranks, bool fixed = false);

}  // namespace bough
