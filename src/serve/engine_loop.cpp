#include "serve/engine_loop.h"

#include <chrono>
#include <utility>

#include "base/error.h"

namespace bough {

EngineLoop::EngineLoop(Engine& engine, Deliver deliver) : engine_(engine), deliver_(std::move(deliver)) {}

void EngineLoop::on_commands(std::function<void()> wake) {
  const MutexLock lock(mutex_);
  wake_ = std::move(wake);
}

void EngineLoop::submit(std::vector<GenerationRequest> requests) {
  std::function<void()> wake;
  {
    const MutexLock lock(mutex_);
    for (GenerationRequest& request : requests) commands_.emplace_back(std::move(request));
    wake = wake_;
  }
  has_commands_.notify_one();
  if (wake) wake();
}

void EngineLoop::cancel(uint64_t id) {
  std::function<void()> wake;
  {
    const MutexLock lock(mutex_);
    commands_.emplace_back(id);
    wake = wake_;
  }
  has_commands_.notify_one();
  if (wake) wake();
}

EngineStatistics EngineLoop::statistics() const {
  const MutexLock lock(mutex_);
  return statistics_;
}

int32_t EngineLoop::version() const {
  const MutexLock lock(mutex_);
  return version_;
}

void EngineLoop::run(const std::function<bool()>& stop) {
  while (!stop()) {
    if (pass()) continue;
    MutexLock lock(mutex_);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
    while (commands_.empty() && has_commands_.wait_until(mutex_, deadline)) {
    }
  }
}

bool EngineLoop::pass() {
  const bool was_asked = take_commands();
  if (!was_asked && engine_.idle()) return false;
  deliver_events();  // clients learn what was accepted or refused before the pass begins
  for (GenerationResult& result : engine_.step()) {
    if (running_.erase(result.id) == 0) continue;
    EngineEvent& event = events_.emplace_back();
    event.id = result.id;
    event.kind = EngineEvent::Kind::kFinished;
    event.result = std::move(result);
  }
  deliver_events();
  const MutexLock lock(mutex_);
  statistics_ = engine_.statistics();
  version_ = engine_.version();
  return true;
}

bool EngineLoop::take_commands() {
  std::vector<Command> commands;
  {
    const MutexLock lock(mutex_);
    commands.swap(commands_);
  }
  for (Command& command : commands) {
    if (const auto* cancelled = std::get_if<uint64_t>(&command)) {
      if (running_.erase(*cancelled) > 0) engine_.cancel(*cancelled);
      continue;
    }
    GenerationRequest& request = std::get<GenerationRequest>(command);
    const uint64_t id = request.id;
    request.on_token = [this](const StreamedToken& token) {
      if (!running_.contains(token.id)) return;
      EngineEvent& event = events_.emplace_back();
      event.id = token.id;
      event.token = token;
    };
    EngineEvent event;
    event.id = id;
    try {
      engine_.submit(std::move(request));
      running_.insert(id);
      event.kind = EngineEvent::Kind::kAccepted;
    } catch (const UserError& error) {
      event.kind = EngineEvent::Kind::kRefused;
      event.message = error.what();
    }
    events_.push_back(std::move(event));
  }
  return !commands.empty();
}

void EngineLoop::deliver_events() {
  if (!events_.empty()) deliver_(std::exchange(events_, {}));
}

}  // namespace bough
