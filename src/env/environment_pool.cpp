#include "env/environment_pool.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/mutex.h"

namespace bough {

namespace {

using State = Worker::State;

constexpr int64_t kMostStarting = 8;  // starting processes compete for the cores with generation and training
// When the pool is destroyed, it takes at most this time to tell endpoints that their conversations are over.
constexpr double kClosingSeconds = 1;

EpisodeChannel& episode_channel(Worker& worker) {
  return static_cast<EpisodeChannel&>(*worker.channel);  // made by Open
}

class EnvironmentPool final : public Environment, private WorkerScheduler {
 public:
  using Open = std::function<std::unique_ptr<EpisodeChannel>()>;

  EnvironmentPool(WorkerPoolOptions options, const EnvironmentSettings& settings, Open open)
      : settings_(settings),
        name_(options.name),
        pool_(std::move(options),
              {.what = "environment",
               .timeout_seconds = settings.startup_timeout_seconds,
               .timeout_setting = "environment.startup_timeout_seconds"},
              std::move(open), *this) {}

  uint64_t begin(const Problem& problem, uint64_t seed, std::shared_ptr<ReplyQueue> reply_queue) override {
    const uint64_t episode = next_episode_++;
    order({Order::kBegin, episode, {problem, seed, {}}, std::move(reply_queue)});
    return episode;
  }
  void step(uint64_t episode, const Action& action) override {
    order({Order::kStep, episode, {{}, 0, action}, nullptr});
  }
  int64_t max_open() const override { return settings_.workers; }
  void end(uint64_t episode) override { order({Order::kEnd, episode, {}, nullptr}); }
  void check(const Dataset& dataset) const override {
    if (settings_.type != "mcp") return;
    for (const Problem& problem : dataset.problems())
      if (!problem.tools.is_null())
        throw UserError(
            str(problem.where, problem.where.empty() ? "" : ": ",
                "tools: the model is shown the tools of the MCP server (", name_,
                "), not these; leave them out, or set the data set's tools_key to another field"));
  }

 private:
  struct Order {
    enum Kind { kBegin, kStep, kEnd } kind;
    uint64_t episode;
    EpisodeCall call;
    std::shared_ptr<ReplyQueue> reply_queue;
  };
  struct Running {
    std::shared_ptr<ReplyQueue> reply_queue;
    EpisodeCall call;
    bool is_open = false;                            // reset was answered
    bool is_waiting = true;                          // the caller waits for an answer
    int64_t num_attempts = 0;                        // of the current call
    Worker* worker = nullptr;                        // the worker whose job is this episode
    EpisodeFailure failure = EpisodeFailure::kNone;  // found between calls: the next step returns it
    std::string message;
  };

  void order(Order order) {
    {
      const MutexLock lock(mutex_);
      orders_.push_back(std::move(order));
    }
    pool_.wake();
  }

  // ---- The pool's thread.

  void give_work() override {
    std::deque<Order> orders;
    {
      const MutexLock lock(mutex_);
      orders.swap(orders_);
    }
    for (Order& order : orders) take(order);
    while (Worker* const idle = waiting_.empty() ? nullptr : pool_.find_idle()) {
      idle->job = waiting_.front();
      waiting_.pop_front();
      Running& running = episodes_.at(*idle->job);
      running.worker = idle;
      make_call(*idle, running);
    }
    const int64_t num_starting = pool_.count(State::kStarting) + pool_.count(State::kClosing);
    for (int64_t i = num_starting; i < std::min<int64_t>(kMostStarting, std::ssize(waiting_)); ++i)
      if (!pool_.start()) return;
  }
  bool has_waiting() const override { return !waiting_.empty(); }

  void take(Order& order) {
    if (order.kind == Order::kBegin) {
      episodes_[order.episode] = {.reply_queue = std::move(order.reply_queue), .call = std::move(order.call)};
      waiting_.push_back(order.episode);
      return;
    }
    const auto found = episodes_.find(order.episode);
    if (found == episodes_.end()) return;
    Running& running = found->second;
    if (order.kind == Order::kEnd) {
      leave(running);
      std::erase(waiting_, order.episode);
      episodes_.erase(found);
      return;
    }
    running.is_waiting = true;
    if (running.failure != EpisodeFailure::kNone || !running.worker)
      return post(order.episode, running,
                  running.failure == EpisodeFailure::kNone ? EpisodeFailure::kError : running.failure,
                  running.message);
    running.call = std::move(order.call);
    running.num_attempts = 0;
    make_call(*running.worker, running);
  }

  // Takes the episode's worker away. The worker is removed if its channel is still computing and cannot
  // abandon the call, or cannot take another conversation. Otherwise other episodes can use it.
  void leave(Running& running) {
    Worker* const worker = std::exchange(running.worker, nullptr);
    if (!worker) return;
    worker->job.reset();
    if (worker->state == State::kBusy && !episode_channel(*worker).give_up()) return pool_.remove(*worker);
    switch (episode_channel(*worker).close()) {
      case EpisodeChannel::AfterClose::kFree:
        if (is_surplus()) return pool_.remove(*worker);
        worker->state = State::kIdle;
        break;
      case EpisodeChannel::AfterClose::kClosing: worker->state = State::kClosing; break;
      case EpisodeChannel::AfterClose::kGone: return pool_.remove(*worker);
    }
    worker->deadline = pool_.after(settings_.timeout_seconds);
    pool_.advance(*worker);
  }

  // Tells endpoints that their conversations are over.
  void handle_end() override {
    waiting_.clear();
    for (auto& [id, running] : episodes_) leave(running);
    const Clock::Time deadline = pool_.after(kClosingSeconds);
    while (pool_.now() < deadline && pool_.count(State::kClosing) > 0) pool_.poll_all(deadline);
  }

  // Whether there are more workers than the setting says. They were started because an evaluation had
  // conversations open in addition to the run's.
  bool is_surplus() const { return pool_.num_workers() > settings_.workers; }

  void make_call(Worker& worker, Running& running) {
    ++running.num_attempts;
    episode_channel(worker).begin(running.call);
    worker.state = State::kBusy;
    worker.deadline = pool_.after(settings_.timeout_seconds);
    pool_.advance(worker);
  }

  bool handle_reply(Worker& worker) override {
    const std::optional<ChannelReply> reply = episode_channel(worker).advance();
    if (reply) handle(worker, *reply);
    return reply.has_value();
  }

  void handle(Worker& worker, const ChannelReply& reply) {
    if (reply.kind == ChannelReply::kReady) {
      if (worker.state == State::kStarting) pool_.become_ready(worker);
      if (worker.state == State::kClosing && is_surplus()) return pool_.remove(worker);
      if (worker.state == State::kClosing) worker.state = State::kIdle;
      return;
    }
    if (reply.kind == ChannelReply::kBroken) return lose(worker, reply.failure, reply.message);
    if (worker.state != State::kBusy) return;
    Running& running = episodes_.at(*worker.job);
    if (reply.kind == ChannelReply::kNotDone && running.num_attempts <= settings_.retries) {
      worker.state = State::kPausing;
      worker.deadline = pool_.now() + pool_.retry_pause(running.num_attempts, /*max_doublings=*/10);
      return;
    }
    worker.state = State::kHeld;
    if (reply.kind != ChannelReply::kAnswer) return post(*worker.job, running, reply.failure, reply.message);
    running.is_open = true;
    running.is_waiting = false;
    running.reply_queue->post({.episode = *worker.job, .observation = reply.observation});
  }

  void handle_deadline(Worker& worker) override {
    if (worker.state == State::kPausing) return make_call(worker, episodes_.at(*worker.job));
    const std::string why = str("no answer within ", settings_.timeout_seconds,
                                " s (environment.timeout_seconds); raise it if tools may take longer");
    if (worker.state == State::kClosing || !episode_channel(worker).give_up())
      return lose(worker, EpisodeFailure::kTimeout, why);
    worker.state = State::kHeld;
    post(*worker.job, episodes_.at(*worker.job), EpisodeFailure::kTimeout, why);
  }

  // Removes a worker that cannot be used any more. Its destructor ends its processes.
  void lose(Worker& worker, EpisodeFailure failure, const std::string& why) {
    if (worker.state == State::kStarting) return pool_.fail_start(worker, why);
    const std::optional<uint64_t> episode = worker.job;
    if (episode) episodes_.at(*episode).worker = nullptr;
    pool_.remove(worker);
    if (!episode) return;
    Running& running = episodes_.at(*episode);
    if (!running.is_open && failure == EpisodeFailure::kCrash && running.num_attempts <= settings_.retries)
      return waiting_.push_front(*episode);
    running.failure = failure;
    running.message = why;
    if (running.is_waiting) post(*episode, running, failure, why);
  }

  // A start may fail because, for example, the file was changed during the run. Episodes that wait for a
  // worker then fail, unless another worker exists that they can use later.
  void handle_failed_start(const std::string& why) override {
    if (pool_.num_workers() > 0) return;
    for (const uint64_t episode : std::exchange(waiting_, {}))
      post(episode, episodes_.at(episode), EpisodeFailure::kStart, "it could not be started: " + why);
  }

  void post(uint64_t episode, Running& running, EpisodeFailure failure, const std::string& why) {
    running.is_waiting = false;
    running.failure = failure;
    running.message = why;
    running.reply_queue->post({.episode = episode,
                               .observation = {},
                               .failure = failure,
                               .message = str("environment ", name_, ": ", why)});
  }

  const EnvironmentSettings settings_;
  const std::string name_;
  std::atomic<uint64_t> next_episode_ = 0;

  // Used by the pool's thread only.
  std::unordered_map<uint64_t, Running> episodes_;
  std::deque<uint64_t> waiting_;  // episodes to be opened

  Mutex mutex_;
  std::deque<Order> orders_ GUARDED_BY(mutex_);

  WorkerPool pool_;  // last, because its thread uses all other members
};

}  // namespace

std::unique_ptr<Environment> make_environment_pool(const WorkerPoolOptions& options,
                                                   const EnvironmentSettings& settings,
                                                   std::function<std::unique_ptr<EpisodeChannel>()> open) {
  return std::make_unique<EnvironmentPool>(options, settings, std::move(open));
}

}  // namespace bough
