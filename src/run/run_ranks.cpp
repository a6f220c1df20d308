#include "run/run_ranks.h"

#include <ATen/Parallel.h>

#include <exception>
#include <filesystem>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/mutex.h"
#include "run/engine_process.h"

namespace bough {

void check_ranks(const RunSettings& settings, int64_t num_ranks) {
  const int64_t engines = settings.rollout.ranks;
  if (engines > 0 && engines >= num_ranks)
    throw UserError(str("rollout.ranks: got ", engines, " of ", num_ranks,
                        num_ranks == 1 ? " process" : " processes",
                        ", which leaves none to train; expected fewer than --ranks, or 0"));
  const ParallelSizes sizes = settings.actor.sizes_of(num_ranks - engines);
  const bool shares_model = sizes.tensor * sizes.pipeline > 1;
  if (shares_model && !settings.rollout.generates_elsewhere())
    throw UserError(
        str("actor.backend: got ", settings.actor.backend,
            ", whose ranks share the model's layers, so none has the unsharded model for generation; "
            "expected rollout.ranks above 0, or servers (rollout.backend)"));
  if (sizes.all() > sizes.data && settings.rollout.batch_invariant.value_or(false))
    throw UserError(str("rollout.batch_invariant: got true, but the ranks of actor.backend ",
                        settings.actor.backend,
                        " share passes and sum in another order than the engine; expected false, or data "
                        "parallelism only"));
}

RankGroups::RankGroups(Communicator* all_ranks, const RunSettings& settings)
    : all(all_ranks), trainers(all_ranks) {
  const RolloutSettings& rollout = settings.rollout;
  if (!all || all->size() == 1) {
    trainers = nullptr;
    return;
  }
  const bool on_gpus = settings.device == "cuda";
  if (rollout.ranks == 0) {
    if (!rollout.has_servers()) engines = all->split(0);
    if (!on_gpus) return;
    of_side_ = nccl_communicator(all->split(0));
    trainers = of_side_.get();
    return;
  }
  is_engine = only_generates(settings, *all);
  of_side_ = all->split(is_engine ? 1 : 0);
  if (on_gpus && !is_engine && of_side_->size() > 1) of_side_ = nccl_communicator(std::move(of_side_));
  trainers = is_engine || of_side_->size() == 1 ? nullptr : of_side_.get();
  const bool is_served = is_engine || all->rank() == 0;
  engines = all->split(is_served ? 0 : 1);
  publication = std::make_unique<PublicationRanks>(all->split(is_served ? 0 : 1));
}

void send_checkpoint(const std::optional<RunCheckpoint>& checkpoint, Communicator& ranks) {
  ranks.broadcast(checkpoint
                      ? str(checkpoint->step, " ", std::filesystem::absolute(checkpoint->directory).string())
                      : "");
}

std::optional<RunCheckpoint> receive_checkpoint(Communicator& ranks) {
  const std::string text = ranks.broadcast("");
  if (text.empty()) return {};
  const size_t space = text.find(' ');
  return RunCheckpoint{std::stoll(text.substr(0, space)), text.substr(space + 1)};
}

void run_both(const std::function<void()>& beside, const std::vector<Communicator*>& of_beside,
              const std::function<void()>& here, const std::vector<Communicator*>& of_here) {
  Mutex mutex;
  std::exception_ptr failure;
  const auto abort_check = [&] {
    const MutexLock lock(mutex);
    if (failure) std::rethrow_exception(failure);
  };
  const auto guarded = [&](const std::function<void()>& work) {
    try {
      work();
    } catch (...) {
      const MutexLock lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  const auto set_abort_checks = [&](const std::function<void()>& to) {
    for (const auto& groups : {of_beside, of_here})
      for (Communicator* group : groups) group->set_abort_check(to);
  };
  set_abort_checks(abort_check);
  std::thread thread([&] { guarded(beside); });
  guarded(here);
  thread.join();
  set_abort_checks({});
  abort_check();
}

// ---- Rank 0.

namespace {

// If every rank has an engine: rank 0 publishes a version, and each engine takes weights from its own
// trainer.
class RanksWeights final : public WeightChannel {
 public:
  RanksWeights(WeightChannel& own, Trainer& trainer) : own_(own), trainer_(trainer) {}
  void publish(int32_t version) override {
    trainer_.publish_ranks(version);
    own_.publish(version);
  }
  std::optional<WeightUpdate> take() override { return own_.take(); }
  bool has_new() const override { return own_.has_new(); }

 private:
  WeightChannel& own_;
  Trainer& trainer_;
};

// If layers are sharded over ranks: before each publication they are gathered in rank 0's unsharded model.
class UnshardedWeights final : public WeightChannel {
 public:
  UnshardedWeights(WeightChannel& published, Trainer& trainer) : published_(published), trainer_(trainer) {}
  void publish(int32_t version) override {
    trainer_.unsharded_model();
    published_.publish(version);
  }
  std::optional<WeightUpdate> take() override { return published_.take(); }
  bool has_new() const override { return published_.has_new(); }

 private:
  WeightChannel& published_;
  Trainer& trainer_;
};

}  // namespace

RankZero::RankZero(RankGroups& groups, RunComponents& parts) : groups_(groups), parts_(parts) {
  if (groups.engines)
    ranks_engine_ =
        std::make_unique<RanksEngine>(parts.engine.get(), parts.published().config(), *groups.engines);
  if (groups.engines && !groups.publication)
    ranks_weights_ = std::make_unique<RanksWeights>(*parts.weights, parts.trainer);
  if (groups.publication) {
    published_weights_ = std::make_unique<PublishedWeights>(
        parts.published(), *groups.publication,
        /*waits=*/!parts.settings.rollout.is_asynchronous(), what_changes(parts.settings));
  }
  if (parts.unsharded) {
    WeightChannel& published = published_weights_ ? *published_weights_ : *parts.weights;
    unsharded_weights_ = std::make_unique<UnshardedWeights>(published, parts.trainer);
  }
}

Engine& RankZero::engine() {
  if (ranks_engine_) return *ranks_engine_;
  return *parts_.engine;
}

WeightChannel& RankZero::weights() {
  if (unsharded_weights_) return *unsharded_weights_;
  if (published_weights_) return *published_weights_;
  if (ranks_weights_) return *ranks_weights_;
  return *parts_.weights;
}

void RankZero::add_metrics(MetricValues& metrics) {
  if (!published_weights_) return;
  const PublishedWeights::Report report = published_weights_->take_report();
  if (report.publications > 0) {
    metrics["publication/bytes"] = report.bytes;
    metrics["publication/seconds"] = report.seconds;
    metrics["publication/stall_seconds"] = ranks_engine_->take_longest_exchange();
  }
  metrics["rollout/engine_restarts"] = static_cast<double>(ranks_engine_->num_restarts());
}

void RankZero::end() {
  if (num_ranks() == 1) return;
  if (ranks_engine_) ranks_engine_->end();
  if (published_weights_) published_weights_->end();
  parts_.trainer.end_ranks();
}

void RankZero::give_up() {
  if (published_weights_) published_weights_->give_up();
}

// ---- The other ranks.

namespace {

// A rank that only generates: its engine executes rank 0's commands while weights arrive.
void follow_generation(const RunSettings& settings, const std::vector<std::string>& command,
                       RankGroups& groups) {
  EngineProcess engine(command, engine_job(settings), *groups.engines, *groups.publication);
  run_both([&] { engine.receive_weights(); },
           {groups.publication->all.get(), groups.publication->leaders.get()},
           [&] { serve_engine(engine, *groups.engines); }, {groups.engines.get()});
}

// A rank other than 0 that trains: it trains when rank 0 does. In a thread of its own it also generates for
// rank 0's engine, unless servers or ranks that only generate do.
void follow_training(const RunSettings& settings, RankGroups& groups) {
  Communicator& ranks = *groups.trainers;
  RunComponents parts(
      settings, [] { return false; }, &ranks);
  if (const auto checkpoint = receive_checkpoint(ranks)) parts.trainer.load(*checkpoint);
  if (!parts.engine) return parts.trainer.follow();
  run_both(
      [&] {
        at::set_num_threads(parts.threads.generating);
        serve_engine(*parts.engine, *parts.weights, *groups.engines);
      },
      {groups.engines.get()},
      [&] { parts.trainer.follow([&](int32_t version) { parts.weights->publish(version); }); }, {&ranks});
}

}  // namespace

void follow_rank_zero(const RunSettings& settings, const std::vector<std::string>& command,
                      RankGroups& groups) {
  if (groups.is_engine) follow_generation(settings, command, groups);
  else follow_training(settings, groups);
}

}  // namespace bough
