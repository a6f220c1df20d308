#include "env/environment_pool.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>

#include "base/error.h"

namespace bough {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMostStarting = 8;  // processes that start compete for the cores with what computes
constexpr std::chrono::seconds kClosingTime{1};  // for endpoints to be told of the end

Clock::time_point in_seconds(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

class EnvironmentPool final : public Environment {
 public:
  using Open = std::function<std::unique_ptr<EpisodeChannel>()>;

  EnvironmentPool(EnvironmentPoolOptions options, const EnvironmentSettings& settings, Open open)
      : options_(std::move(options)),
        settings_(settings),
        open_(std::move(open)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (wake_ < 0) throw IoError(str("environment: eventfd: ", std::strerror(errno)));
    thread_ = std::thread([this] { run(); });
    std::unique_lock lock(mutex_);
    started_.wait(lock, [this] { return has_started_ || !start_error_.empty(); });
    if (start_error_.empty()) return;
    lock.unlock();
    stop();  // the destructor does not run for an object that was never complete
    throw UserError(str("environment ", options_.name, ": ", start_error_));
  }
  ~EnvironmentPool() override { stop(); }

  uint64_t begin(const Problem& problem, uint64_t seed, std::shared_ptr<EpisodeInbox> inbox) override {
    const uint64_t episode = next_episode_++;
    order({Order::kBegin, episode, {problem, seed, {}}, std::move(inbox)});
    return episode;
  }
  void step(uint64_t episode, const Action& action) override {
    order({Order::kStep, episode, {{}, 0, action}, nullptr});
  }
  int64_t max_open() const override { return settings_.workers; }
  void end(uint64_t episode) override { order({Order::kEnd, episode, {}, nullptr}); }

 private:
  struct Order {
    enum Kind { kBegin, kStep, kEnd } kind;
    uint64_t episode;
    EpisodeCall call;
    std::shared_ptr<EpisodeInbox> inbox;
  };
  struct Worker {
    enum class State { kStarting, kIdle, kHeld, kBusy, kPausing, kClosing } state = State::kStarting;
    int64_t number = 0;
    std::unique_ptr<EpisodeChannel> channel;
    std::optional<uint64_t> episode;
    Clock::time_point deadline;  // of all states but kIdle and kHeld
  };
  struct Running {
    std::shared_ptr<EpisodeInbox> inbox;
    EpisodeCall call;
    bool is_open = false;      // reset has been answered
    bool is_waiting = true;    // somebody waits for an answer
    int64_t num_attempts = 0;  // at the call
    Worker* worker = nullptr;
    EpisodeFailure failure = EpisodeFailure::kNone;  // found while nobody asked: of the next step
    std::string message;
  };

  void order(Order order) {
    {
      const std::lock_guard lock(mutex_);
      orders_.push_back(std::move(order));
    }
    wake();
  }
  void wake() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_, &one, sizeof one);  // full means awake already
  }
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      is_stopping_ = true;
    }
    wake();
    if (thread_.joinable()) thread_.join();
    close(wake_);
  }

  // ---- The thread.

  void run() {
    try {
      start();
      while (true) {
        std::deque<Order> orders;
        {
          const std::lock_guard lock(mutex_);
          if (is_stopping_) break;
          orders.swap(orders_);
        }
        for (Order& order : orders) take(order);
        give_work();
        poll_all();
      }
      say_goodbye();
    } catch (const IoError& error) {
      // No first channel, or none of the system's resources any more.
      fail_start(error.what());
      for (auto& [id, running] : episodes_)
        if (running.is_waiting) post(id, running, EpisodeFailure::kStart, error.what());
    }
    workers_.clear();
  }

  void take(Order& order) {
    if (order.kind == Order::kBegin) {
      episodes_[order.episode] = {.inbox = std::move(order.inbox), .call = std::move(order.call)};
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

  // The episode goes on without its channel: one that answered is free for others, one that computes is not
  // waited for.
  void leave(Running& running) {
    Worker* const worker = std::exchange(running.worker, nullptr);
    if (!worker) return;
    worker->episode.reset();
    using State = Worker::State;
    if (worker->state == State::kBusy && !worker->channel->give_up()) return remove(*worker);
    switch (worker->channel->close()) {
      case EpisodeChannel::AfterClose::kFree:
        if (is_surplus()) return remove(*worker);
        worker->state = State::kIdle;
        break;
      case EpisodeChannel::AfterClose::kClosing: worker->state = State::kClosing; break;
      case EpisodeChannel::AfterClose::kGone: return remove(*worker);
    }
    worker->deadline = in_seconds(settings_.timeout_seconds);
    advance(*worker);
  }

  // Who holds conversations elsewhere is told that they are over.
  void say_goodbye() {
    waiting_.clear();
    for (auto& [id, running] : episodes_) leave(running);
    const auto deadline = Clock::now() + kClosingTime;
    const auto closes = [](const auto& entry) { return entry.second->state == Worker::State::kClosing; };
    while (Clock::now() < deadline && std::any_of(workers_.begin(), workers_.end(), closes))
      poll_all(deadline);
  }

  void start() {
    auto worker = std::make_unique<Worker>();
    worker->number = next_worker_++;
    worker->channel = open_();
    if (options_.announces_ready) worker->deadline = in_seconds(settings_.startup_timeout_seconds);
    else if (!has_started_) worker->deadline = Clock::now() + options_.settling;
    else worker->state = Worker::State::kIdle;
    const int64_t number = worker->number;
    workers_[number] = std::move(worker);
  }

  // An evaluation held conversations beside the run's.
  bool is_surplus() const { return std::ssize(workers_) > settings_.workers; }
  void remove(const Worker& worker) { workers_.erase(worker.number); }

  void make_call(Worker& worker, Running& running) {
    ++running.num_attempts;
    worker.channel->begin(running.call);
    worker.state = Worker::State::kBusy;
    worker.deadline = in_seconds(settings_.timeout_seconds);
    advance(worker);
  }

  void give_work() {
    while (!waiting_.empty()) {
      const auto idle = std::find_if(workers_.begin(), workers_.end(), [](const auto& entry) {
        return entry.second->state == Worker::State::kIdle;
      });
      if (idle == workers_.end()) break;
      Worker& worker = *idle->second;
      worker.episode = waiting_.front();
      waiting_.pop_front();
      Running& running = episodes_.at(*worker.episode);
      running.worker = &worker;
      make_call(worker, running);
    }
    const auto num_starting = std::count_if(workers_.begin(), workers_.end(), [](const auto& entry) {
      return entry.second->state == Worker::State::kStarting ||
             entry.second->state == Worker::State::kClosing;
    });
    for (int64_t i = num_starting; i < std::min<int64_t>(kMostStarting, std::ssize(waiting_)); ++i) {
      try {
        start();
      } catch (const IoError& error) {  // the system gives no process at this moment
        return lost_at_start(error.what());
      }
    }
  }

  void poll_all(Clock::time_point nearest = Clock::time_point::max()) {
    std::vector<pollfd> watched = {{wake_, POLLIN, 0}};
    std::vector<int64_t> numbers = {-1};
    bool is_urgent = false;
    for (const auto& [number, worker] : workers_) {
      const short events = worker->channel->wants_to_send() ? POLLIN | POLLOUT : POLLIN;
      watched.push_back({worker->channel->descriptor(), events, 0});
      numbers.push_back(number);
      is_urgent |=
          worker->channel->has_come() || (worker->state == Worker::State::kIdle && !waiting_.empty());
      if (has_deadline(*worker)) nearest = std::min(nearest, worker->deadline);
    }
    int timeout = -1;
    if (nearest != Clock::time_point::max()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(nearest - Clock::now()).count();
      timeout = static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
    }
    poll(watched.data(), watched.size(), is_urgent ? 0 : timeout);
    uint64_t count;
    while (read(wake_, &count, sizeof count) > 0) {
    }
    for (size_t i = 1; i < watched.size(); ++i) {
      Worker* worker = find(numbers[i]);
      if (worker && (watched[i].revents != 0 || worker->channel->has_come())) advance(*worker);
      worker = find(numbers[i]);
      if (worker) check_deadline(*worker);
    }
  }
  Worker* find(int64_t number) const {
    const auto found = workers_.find(number);
    return found == workers_.end() ? nullptr : found->second.get();
  }
  static bool has_deadline(const Worker& worker) {
    return worker.state != Worker::State::kIdle && worker.state != Worker::State::kHeld;
  }

  // The worker may be gone afterwards.
  void advance(Worker& worker) {
    const int64_t number = worker.number;
    while (find(number) == &worker) {
      const std::optional<ChannelReply> reply = worker.channel->advance();
      if (!reply) return;
      handle(worker, *reply);
    }
  }

  void handle(Worker& worker, const ChannelReply& reply) {
    using State = Worker::State;
    if (reply.kind == ChannelReply::kReady) {
      if (worker.state == State::kStarting) become_ready(worker);
      if (worker.state == State::kClosing && is_surplus()) return remove(worker);
      if (worker.state == State::kClosing) worker.state = State::kIdle;
      return;
    }
    if (reply.kind == ChannelReply::kBroken) return lose(worker, reply.failure, reply.message);
    if (worker.state != State::kBusy) return;
    Running& running = episodes_.at(*worker.episode);
    if (reply.kind == ChannelReply::kNotDone && running.num_attempts <= settings_.retries) {
      worker.state = State::kPausing;
      worker.deadline = Clock::now() + options_.retry_pause *
                                           (int64_t{1} << std::min<int64_t>(running.num_attempts - 1, 10));
      return;
    }
    worker.state = State::kHeld;
    if (reply.kind != ChannelReply::kAnswer)
      return post(*worker.episode, running, reply.failure, reply.message);
    running.is_open = true;
    running.is_waiting = false;
    running.inbox->post({.episode = *worker.episode, .observation = reply.observation});
  }

  void become_ready(Worker& worker) {
    worker.state = Worker::State::kIdle;
    const std::lock_guard lock(mutex_);
    has_started_ = true;
    started_.notify_all();
  }

  void check_deadline(Worker& worker) {
    if (!has_deadline(worker) || Clock::now() < worker.deadline) return;
    using State = Worker::State;
    if (worker.state == State::kPausing) return make_call(worker, episodes_.at(*worker.episode));
    if (worker.state == State::kStarting && !options_.announces_ready) return become_ready(worker);
    if (worker.state == State::kStarting)
      return lose(worker, EpisodeFailure::kTimeout,
                  str("not loaded within ", settings_.startup_timeout_seconds,
                      " s (environment.startup_timeout_seconds)"));
    const std::string why = str("no answer within ", settings_.timeout_seconds,
                                " s (environment.timeout_seconds); raise it if tools may take longer");
    if (worker.state == State::kClosing || !worker.channel->give_up())
      return lose(worker, EpisodeFailure::kTimeout, why);
    worker.state = State::kHeld;
    post(*worker.episode, episodes_.at(*worker.episode), EpisodeFailure::kTimeout, why);
  }

  // The worker is of no more use. Its destructor ends what runs behind it.
  void lose(Worker& worker, EpisodeFailure failure, const std::string& why) {
    const bool was_starting = worker.state == Worker::State::kStarting;
    const std::optional<uint64_t> episode = worker.episode;
    if (episode) episodes_.at(*episode).worker = nullptr;
    remove(worker);
    if (was_starting) return lost_at_start(why);
    if (!episode) return;
    Running& running = episodes_.at(*episode);
    if (!running.is_open && failure == EpisodeFailure::kCrash && running.num_attempts <= settings_.retries)
      return waiting_.push_front(*episode);
    running.failure = failure;
    running.message = why;
    if (running.is_waiting) post(*episode, running, failure, why);
  }

  void lost_at_start(const std::string& why) {
    bool was_first = false;
    {
      const std::lock_guard lock(mutex_);
      was_first = !has_started_;
    }
    if (was_first) return fail_start(why);
    // The file was changed under the run, say: who waits fails, unless others will be free.
    if (!workers_.empty()) return;
    for (const uint64_t episode : std::exchange(waiting_, {}))
      post(episode, episodes_.at(episode), EpisodeFailure::kStart, "it could not be started: " + why);
  }

  void fail_start(const std::string& why) {
    const std::lock_guard lock(mutex_);
    if (!has_started_ && start_error_.empty()) start_error_ = why;
    started_.notify_all();
  }

  void post(uint64_t episode, Running& running, EpisodeFailure failure, const std::string& why) {
    running.is_waiting = false;
    running.failure = failure;
    running.message = why;
    running.inbox->post({.episode = episode,
                         .observation = {},
                         .failure = failure,
                         .message = str("environment ", options_.name, ": ", why)});
  }

  const EnvironmentPoolOptions options_;
  const EnvironmentSettings settings_;
  const Open open_;
  const int wake_;
  std::atomic<uint64_t> next_episode_ = 0;

  // The thread alone touches these.
  std::map<int64_t, std::unique_ptr<Worker>> workers_;  // by number: the oldest that is free is used first
  std::unordered_map<uint64_t, Running> episodes_;
  std::deque<uint64_t> waiting_;  // to be opened
  int64_t next_worker_ = 0;

  std::mutex mutex_;  // of all below
  std::condition_variable started_;
  std::deque<Order> orders_;
  bool is_stopping_ = false, has_started_ = false;
  std::string start_error_;

  std::thread thread_;  // last: it uses all the others
};

}  // namespace

std::unique_ptr<Environment> make_environment_pool(const EnvironmentPoolOptions& options,
                                                   const EnvironmentSettings& settings,
                                                   std::function<std::unique_ptr<EpisodeChannel>()> open) {
  return std::make_unique<EnvironmentPool>(options, settings, std::move(open));
}

}  // namespace bough
