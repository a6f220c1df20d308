#include "env/environment.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "env/calculator.h"
#include "env/environment_http.h"
#include "env/environment_mcp.h"
#include "env/environment_process.h"
#include "env/guess.h"

namespace bough {

void EnvironmentSettings::check() const {
  const auto needs = [&](const std::string& value, const char* key, const char* what) {
    if (value.empty()) throw UserError(str("environment.", key, " is missing: type ", type, " needs ", what));
  };
  const auto only_for = [&](const std::string& value, const char* key, const char* types) {
    if (!value.empty())
      throw UserError(str("environment.", key, ": got ", quoted(value), " with type ", quoted(type),
                          "; only ", types, " it"));
  };
  if (type == "python") needs(path, "path", "FILE.py:CLASS");
  else only_for(path, "path", "type python uses");
  if (type == "command" || type == "mcp") needs(command, "command", "a shell command");
  else only_for(command, "command", "the types command and mcp use");
  if (type == "http") needs(url, "url", "http://HOST:PORT/PATH");
  else only_for(url, "url", "type http uses");
  if (type != "mcp" && server != EnvironmentSettings{}.server) only_for(server, "server", "type mcp uses");
}

const char* failure_name(EpisodeFailure failure) {
  switch (failure) {
    case EpisodeFailure::kNone: return "";
    case EpisodeFailure::kError: return "environment_error";
    case EpisodeFailure::kTimeout: return "environment_timeout";
    case EpisodeFailure::kCrash: return "environment_crash";
    case EpisodeFailure::kProtocol: return "environment_protocol";
    case EpisodeFailure::kStart: return "environment_start";
  }
  return "unknown";
}

void ReplyQueue::post(EpisodeReply reply) {
  {
    const MutexLock lock(mutex_);
    replies_.push_back(std::move(reply));
  }
  posted_.notify_one();
}

std::vector<EpisodeReply> ReplyQueue::take(std::chrono::microseconds at_most) {
  MutexLock lock(mutex_);
  if (replies_.empty() && at_most.count() > 0) {
    const auto deadline = std::chrono::steady_clock::now() + at_most;
    while (replies_.empty() && posted_.wait_until(mutex_, deadline)) {
    }
  }
  return std::exchange(replies_, {});
}

// ---- Episodes in C++ ----

ThreadedEnvironment::ThreadedEnvironment(Make make, int64_t threads) : make_(std::move(make)) {
  for (int64_t i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
}

ThreadedEnvironment::~ThreadedEnvironment() {
  {
    const MutexLock lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

uint64_t ThreadedEnvironment::begin(const Problem& problem, uint64_t seed,
                                    std::shared_ptr<ReplyQueue> reply_queue) {
  uint64_t episode = 0;
  {
    const MutexLock lock(mutex_);
    episode = next_++;
    episodes_[episode] = {make_(), std::move(reply_queue)};
  }
  post(episode, [problem, seed](Episode& world) { return world.reset(problem, seed); });
  return episode;
}

void ThreadedEnvironment::step(uint64_t episode, const Action& action) {
  post(episode, [action](Episode& world) { return world.step(action); });
}

void ThreadedEnvironment::end(uint64_t episode) {
  const MutexLock lock(mutex_);
  episodes_.erase(episode);
}

void ThreadedEnvironment::post(uint64_t episode, std::function<Observation(Episode&)> work) {
  {
    const MutexLock lock(mutex_);
    const auto found = episodes_.find(episode);
    BOUGH_CHECK(found != episodes_.end(), "there is no episode ", episode);
    queue_.push_back([episode, running = found->second, work = std::move(work)] {
      EpisodeReply reply{.episode = episode};
      try {
        reply.observation = work(*running.world);
      } catch (const std::exception& error) {
        reply.failure = EpisodeFailure::kError;
        reply.message = error.what();
      }
      running.reply_queue->post(std::move(reply));
    });
  }
  changed_.notify_one();
}

void ThreadedEnvironment::run() {
  MutexLock lock(mutex_);
  while (true) {
    while (!is_ending_ && queue_.empty()) changed_.wait(mutex_);
    if (is_ending_) return;
    const std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    work();
    lock.lock();
  }
}

// ---- Making the environment of a setting ----

std::unique_ptr<Environment> make_environment(const EnvironmentSettings& settings) {
  settings.check();
  const auto threaded = [](ThreadedEnvironment::Make make) {
    // One thread is enough: a turn takes microseconds.
    return std::make_unique<ThreadedEnvironment>(std::move(make), 1);
  };
  if (settings.type == "calculator") return threaded(make_calculator);
  if (settings.type == "guess") return threaded(make_guess);
  if (settings.type == "http") return make_http_environment(settings);
  if (settings.type == "mcp") return make_mcp_environment(settings);
  return make_process_environment(settings);
}

OrderedJson function_tool(const std::string& name, const std::string& description, OrderedJson parameters) {
  OrderedJson required = OrderedJson::array();
  for (const auto& [key, schema] : parameters.items()) required.push_back(key);
  return {{"type", "function"},
          {"function",
           {{"name", name},
            {"description", description},
            {"parameters",
             {{"type", "object"}, {"properties", std::move(parameters)}, {"required", required}}}}}};
}

OrderedJson problem_json(const Problem& problem) {
  OrderedJson out =
      OrderedJson::parse(dump_line(problem.fields.is_object() ? problem.fields : Json::object()));
  out["id"] = problem.id;
  if (!problem.prompt.empty()) out["prompt"] = problem.prompt;
  if (!problem.messages.empty()) out["messages"] = problem.messages;
  if (!problem.tools.is_null()) out["tools"] = problem.tools;
  if (!out.contains("answer")) out["answer"] = problem.answer;
  return out;
}

}  // namespace bough
