#include "env/environment_process.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <set>
#include <utility>

#include "base/error.h"
#include "env/process_reward.h"
#include "env/python_worker_script.h"
#include "env/worker_process.h"
#include "env/worker_protocol.h"

namespace bough {

namespace {

using Clock = std::chrono::steady_clock;

// As of rewards (process_reward.cpp): a first process that is there after a moment can be run, and one that
// closed its end is given another moment to be gone.
constexpr std::chrono::milliseconds kSettling{200}, kExitGrace{200};

Clock::time_point in_seconds(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

std::string dump(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

// What is no reply of the protocol; what() says what came.
struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Of messages as texts and lists.
OrderedJson read_messages(const OrderedJson& value, size_t num_calls) {
  OrderedJson out = OrderedJson::array();
  if (value.is_null()) return out;
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    if (num_calls == 0) out.push_back(message_of("user", text));
    for (size_t i = 0; i < num_calls; ++i) out.push_back(message_of("tool", text));
    return out;
  }
  if (!value.is_array()) throw Malformed("messages: expected a list of messages, or a text");
  for (const OrderedJson& message : value) {
    if (message.is_string() && num_calls > 0) {  // answers of the calls, in order
      out.push_back(message_of("tool", message.get<std::string>()));
      continue;
    }
    if (!message.is_object() || !message.contains("role") || !message["role"].is_string() ||
        !message.contains("content"))
      throw Malformed(
          str("messages: got ", quoted(dump(message)), ", expected an object with role and content"));
    out.push_back(message);
  }
  return out;
}

double read_number(const OrderedJson& value, const char* key) {
  if (value.is_boolean()) return value.get<bool>() ? 1 : 0;
  if (!value.is_number() || !std::isfinite(value.get<double>()))
    throw Malformed(str(key, ": got ", quoted(dump(value)), ", expected a finite number"));
  return value.get<double>();
}

Observation read_observation(const OrderedJson& reply, size_t num_calls) {
  Observation out;
  const auto field = [&](const char* key) {
    const auto found = reply.find(key);
    return found == reply.end() ? OrderedJson() : *found;
  };
  out.messages = read_messages(field("messages"), num_calls);
  if (OrderedJson tools = field("tools"); !tools.is_null()) {
    if (!tools.is_array()) throw Malformed("tools: expected a list of schemas of functions");
    if (!tools.empty()) out.tools = std::move(tools);
  }
  if (const OrderedJson reward = field("reward"); !reward.is_null())
    out.reward = read_number(reward, "reward");
  if (const OrderedJson rewards = field("rewards"); !rewards.is_null()) {
    if (!rewards.is_object()) throw Malformed("rewards: expected an object of numbers");
    for (const auto& [name, value] : rewards.items()) out.rewards[name] = read_number(value, "rewards");
  }
  if (const OrderedJson count = field("invalid_calls"); !count.is_null())
    out.invalid_calls = static_cast<int64_t>(read_number(count, "invalid_calls"));
  if (const OrderedJson done = field("done"); !done.is_null()) {
    if (!done.is_boolean())
      throw Malformed(str("done: got ", quoted(dump(done)), ", expected true or false"));
    out.done = done.get<bool>();
  }
  return out;
}

struct PoolOptions {
  std::string name;  // begins messages
  std::vector<std::string> arguments;
  bool announces_ready = false;
};

class ProcessEnvironment final : public Environment {
 public:
  ProcessEnvironment(PoolOptions options, const EnvironmentSettings& settings)
      : options_(std::move(options)), settings_(settings), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (wake_ < 0) throw IoError(str("environment: eventfd: ", std::strerror(errno)));
    thread_ = std::thread([this] { run(); });
    std::unique_lock lock(mutex_);
    started_.wait(lock, [this] { return has_started_ || !start_error_.empty(); });
    if (start_error_.empty()) return;
    lock.unlock();
    stop();  // the destructor does not run for an object that was never complete
    throw UserError(str("environment ", options_.name, ": ", start_error_));
  }
  ~ProcessEnvironment() override { stop(); }

  uint64_t begin(const Problem& problem, uint64_t seed, std::shared_ptr<EpisodeInbox> inbox) override {
    const uint64_t episode = next_episode_++;
    OrderedJson request = {{"method", "reset"}, {"problem", problem_json(problem)}, {"seed", seed}};
    order({Order::kBegin, episode, std::move(request), 0, std::move(inbox)});
    return episode;
  }
  void step(uint64_t episode, const Action& action) override {
    OrderedJson calls = OrderedJson::array();
    for (const EnvironmentCall& call : action.calls)
      calls.push_back({{"id", call.id}, {"name", call.name}, {"arguments", call.arguments}});
    OrderedJson request = {{"method", "step"},
                           {"action",
                            {{"text", action.text},
                             {"content", action.content},
                             {"reasoning", action.reasoning},
                             {"calls", std::move(calls)}}}};
    order({Order::kStep, episode, std::move(request), action.calls.size(), nullptr});
  }
  int64_t max_open() const override { return settings_.workers; }
  void end(uint64_t episode) override { order({Order::kEnd, episode, {}, 0, nullptr}); }

 private:
  struct Order {
    enum Kind { kBegin, kStep, kEnd } kind;
    uint64_t episode;
    OrderedJson request;
    size_t num_calls;
    std::shared_ptr<EpisodeInbox> inbox;
  };
  struct Worker {
    enum class State { kStarting, kIdle, kHeld, kBusy } state = State::kStarting;
    std::unique_ptr<WorkerProcess> process;
    LineSplitter incoming;
    std::string outgoing;
    std::optional<uint64_t> episode;
    int64_t request = 0;
    Clock::time_point deadline;
  };
  struct Running {
    std::shared_ptr<EpisodeInbox> inbox;
    OrderedJson reset;         // until it has been answered
    int64_t num_attempts = 0;  // at reset
    size_t num_calls = 0;      // of the request that is being answered
    Worker* worker = nullptr;
    bool is_stepping = false;
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
      family_ = std::make_unique<WorkerFamily>();
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
    } catch (const IoError& error) {
      // No first process, or none of the system's resources any more.
      fail_start(error.what());
      for (auto& [id, running] : episodes_) post(id, running, EpisodeFailure::kStart, error.what());
    }
    workers_.clear();
    family_.reset();
  }

  void take(Order& order) {
    if (order.kind == Order::kBegin) {
      episodes_[order.episode] = {.inbox = std::move(order.inbox), .reset = std::move(order.request)};
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
    if (running.failure != EpisodeFailure::kNone || !running.worker) {
      post(order.episode, running,
           running.failure == EpisodeFailure::kNone ? EpisodeFailure::kError : running.failure,
           running.message);
      return;
    }
    running.is_stepping = true;
    running.num_calls = order.num_calls;
    send(*running.worker, order.request);
  }

  // The episode goes on without its process: one that answers is free for others, one that computes is not
  // waited for.
  void leave(Running& running) {
    Worker* const worker = running.worker;
    running.worker = nullptr;
    if (!worker) return;
    worker->episode.reset();
    if (worker->state == Worker::State::kHeld && std::ssize(workers_) <= settings_.workers) {
      worker->outgoing += "{\"method\": \"close\"}\n";
      worker->state = Worker::State::kIdle;
      advance(*worker);
    } else {
      remove(*worker);
    }
  }

  void start() {
    auto worker = std::make_unique<Worker>();
    worker->process = family_->start(options_.arguments);
    if (options_.announces_ready) worker->deadline = in_seconds(settings_.startup_timeout_seconds);
    else if (!has_started_) worker->deadline = Clock::now() + kSettling;
    else worker->state = Worker::State::kIdle;
    workers_.push_back(std::move(worker));
  }

  void remove(Worker& worker) {
    std::erase_if(workers_, [&](const std::unique_ptr<Worker>& other) { return other.get() == &worker; });
  }

  void send(Worker& worker, OrderedJson request) {
    request["id"] = worker.request = next_request_++;
    worker.outgoing += dump(request) + "\n";
    worker.state = Worker::State::kBusy;
    worker.deadline = in_seconds(settings_.timeout_seconds);
    advance(worker);
  }

  void give_work() {
    while (!waiting_.empty()) {
      const auto idle = std::find_if(workers_.begin(), workers_.end(), [](const auto& worker) {
        return worker->state == Worker::State::kIdle;
      });
      if (idle == workers_.end()) break;
      Running& running = episodes_.at(waiting_.front());
      Worker& worker = **idle;
      worker.episode = waiting_.front();
      waiting_.pop_front();
      running.worker = &worker;
      running.num_calls = 0;
      ++running.num_attempts;
      send(worker, running.reset);
    }
    const auto num_starting = std::count_if(workers_.begin(), workers_.end(), [](const auto& worker) {
      return worker->state == Worker::State::kStarting;
    });
    // A few at a time: processes that start compete for the cores with what computes.
    constexpr int64_t kStarting = 8;
    for (int64_t i = num_starting; i < std::min<int64_t>(kStarting, std::ssize(waiting_)); ++i) {
      try {
        start();
      } catch (const IoError& error) {  // no process to be had, for now
        return lost_at_start(error.what());
      }
    }
  }

  void poll_all() {
    std::vector<pollfd> watched = {{wake_, POLLIN, 0}};
    std::vector<Worker*> owners = {nullptr};
    auto nearest = Clock::time_point::max();
    for (const auto& worker : workers_) {
      const short events = worker->outgoing.empty() ? POLLIN : POLLIN | POLLOUT;
      watched.push_back({worker->process->descriptor(), events, 0});
      owners.push_back(worker.get());
      if (waits(*worker)) nearest = std::min(nearest, worker->deadline);
    }
    int timeout = -1;
    if (nearest != Clock::time_point::max()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(nearest - Clock::now()).count();
      timeout = static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
    }
    const bool has_idle = std::any_of(workers_.begin(), workers_.end(), [](const auto& worker) {
      return worker->state == Worker::State::kIdle;
    });
    if (!waiting_.empty() && has_idle) timeout = 0;
    poll(watched.data(), watched.size(), timeout);
    uint64_t count;
    while (read(wake_, &count, sizeof count) > 0) {
    }
    for (size_t i = 1; i < watched.size(); ++i) {
      if (watched[i].revents != 0 && is_there(owners[i])) advance(*owners[i]);
      if (is_there(owners[i])) check_deadline(*owners[i]);
    }
  }
  bool is_there(const Worker* worker) const {
    return std::any_of(workers_.begin(), workers_.end(),
                       [&](const auto& other) { return other.get() == worker; });
  }
  static bool waits(const Worker& worker) {
    return worker.state == Worker::State::kStarting || worker.state == Worker::State::kBusy;
  }

  // Sends and receives what can be at once; the worker may be gone afterwards.
  void advance(Worker& worker) {
    if (!worker.outgoing.empty()) {
      const auto sent = worker.process->send(worker.outgoing);
      if (sent) worker.outgoing.erase(0, *sent);
      else worker.outgoing.clear();  // the end of its stream, read below, says how it ended
    }
    std::string bytes;
    const bool is_open = worker.process->receive(bytes);
    worker.incoming.append(bytes);
    while (auto line = worker.incoming.next()) {
      if (!handle(worker, *line)) return;
    }
    if (worker.incoming.overflowed())
      return lose(worker, EpisodeFailure::kProtocol,
                  str("its answer has more than ", kMaxReplyBytes, " bytes without a line break"));
    if (is_open) return;
    const std::string how = worker.process->end(kExitGrace);
    lose(worker, EpisodeFailure::kCrash, "the worker " + how);
  }

  // False: the worker is gone.
  bool handle(Worker& worker, const std::string& line) {
    const OrderedJson reply = OrderedJson::parse(line, nullptr, /*allow_exceptions=*/false);
    const auto broken = [&](const std::string& why) {
      lose(worker, EpisodeFailure::kProtocol, why);
      return false;
    };
    if (!reply.is_object()) return broken(str("it answered ", quoted(line), ", which is no JSON object"));
    if (const auto ready = reply.find("ready"); ready != reply.end()) {
      if (worker.state != Worker::State::kStarting) return true;  // said unasked
      if (ready->is_boolean() && ready->get<bool>()) {
        become_ready(worker);
        return true;
      }
      const auto error = reply.find("error");
      return broken(error != reply.end() && error->is_string() ? shortened(error->get<std::string>())
                                                               : "it says that it is not ready");
    }
    const auto id = reply.find("id");
    const bool is_answer = worker.state == Worker::State::kBusy && id != reply.end() &&
                           id->is_number_integer() && id->get<int64_t>() == worker.request;
    if (!is_answer) return broken(str("it answered ", quoted(line), ", which nobody asked"));
    worker.state = Worker::State::kHeld;
    const uint64_t episode = *worker.episode;
    Running& running = episodes_.at(episode);
    if (const auto error = reply.find("error"); error != reply.end()) {
      const std::string text = error->is_string() ? error->get<std::string>() : dump(*error);
      running.failure = EpisodeFailure::kError;
      running.message = shortened(text);
      post(episode, running, running.failure, running.message);
      return true;
    }
    try {
      EpisodeReply out{.episode = episode, .observation = read_observation(reply, running.num_calls)};
      running.reset = {};
      running.is_stepping = false;
      running.inbox->post(std::move(out));
      return true;
    } catch (const Malformed& error) {
      return broken(shortened(error.what()));
    }
  }

  void become_ready(Worker& worker) {
    worker.state = Worker::State::kIdle;
    const std::lock_guard lock(mutex_);
    has_started_ = true;
    started_.notify_all();
  }

  void check_deadline(Worker& worker) {
    if (!waits(worker) || Clock::now() < worker.deadline) return;
    if (worker.state == Worker::State::kStarting && !options_.announces_ready) return become_ready(worker);
    if (worker.state == Worker::State::kStarting)
      return lose(worker, EpisodeFailure::kTimeout,
                  str("not loaded within ", settings_.startup_timeout_seconds,
                      " s (environment.startup_timeout_seconds)"));
    lose(worker, EpisodeFailure::kTimeout,
         str("no answer within ", settings_.timeout_seconds,
             " s (environment.timeout_seconds); raise it if tools may take longer"));
  }

  // The worker is of no more use. Its destructor kills what it is and has started.
  void lose(Worker& worker, EpisodeFailure failure, const std::string& why) {
    const bool was_starting = worker.state == Worker::State::kStarting;
    const std::optional<uint64_t> episode = worker.episode;
    if (episode) episodes_.at(*episode).worker = nullptr;
    remove(worker);
    if (was_starting) return lost_at_start(why);
    if (!episode) return;
    Running& running = episodes_.at(*episode);
    if (!running.reset.is_null()) {  // it was being opened
      if (failure == EpisodeFailure::kCrash && running.num_attempts <= settings_.retries) {
        waiting_.push_front(*episode);
        return;
      }
      return post(*episode, running, failure, why);
    }
    running.failure = failure;
    running.message = why;
    if (running.is_stepping) post(*episode, running, failure, why);
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
      post(episode, episodes_.at(episode), EpisodeFailure::kStart,
           "its process could not be started: " + why);
  }

  void fail_start(const std::string& why) {
    const std::lock_guard lock(mutex_);
    if (!has_started_ && start_error_.empty()) start_error_ = why;
    started_.notify_all();
  }

  void post(uint64_t episode, Running& running, EpisodeFailure failure, const std::string& why) {
    running.is_stepping = false;
    running.failure = failure;
    running.inbox->post({.episode = episode,
                         .observation = {},
                         .failure = failure,
                         .message = str("environment ", options_.name, ": ", why)});
  }

  const PoolOptions options_;
  const EnvironmentSettings settings_;
  const int wake_;
  std::atomic<uint64_t> next_episode_ = 0;

  // The thread alone touches these.
  std::unique_ptr<WorkerFamily> family_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::unordered_map<uint64_t, Running> episodes_;
  std::deque<uint64_t> waiting_;  // to be opened
  int64_t next_request_ = 0;

  std::mutex mutex_;  // of all below
  std::condition_variable started_;
  std::deque<Order> orders_;
  bool is_stopping_ = false, has_started_ = false;
  std::string start_error_;

  std::thread thread_;  // last: it uses all the others
};

}  // namespace

std::unique_ptr<Environment> make_process_environment(const EnvironmentSettings& settings) {
  PoolOptions options;
  if (settings.type == "python") {
    const PythonFunction found = parse_python_function(settings.path, "environment.path",
                                                       "FILE.py:CLASS such as my_env.py:MyEnvironment");
    options = {.name = settings.path,
               .arguments = {find_python(settings.python), "-u", "-c",
                             str(kPythonWorkerStart, kPythonEnvironmentWorker), found.file, found.name},
               .announces_ready = true};
  } else if (settings.type == "command") {
    options = {.name = settings.command, .arguments = {"/bin/sh", "-c", settings.command}};
  } else {
    throw UserError(str("environment.type: ", quoted(settings.type), " is not built yet"));
  }
  return std::make_unique<ProcessEnvironment>(std::move(options), settings);
}

}  // namespace bough
