#include "engine/server_steps.h"

#include <poll.h>

#include "base/error.h"

namespace bough {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kRepeatPause{50};

Json parsed(const std::string& text) {
  try {
    return parse_json(text, "the server's answer");
  } catch (const UserError&) {
    return nullptr;  // for example SGLang's "Cache flushed."
  }
}

}  // namespace

void ServerSteps::advance() {
  if (is_done()) return;
  const auto now = std::chrono::steady_clock::now();
  const std::string& target = calls_[next_].target;
  if (now > deadline_) {
    call_->hang_up();
    error_ = str(target, ": no answer in time");
    return;
  }
  if (waits_until_) {
    if (now < *waits_until_) return;
    waits_until_.reset();
    return begin();
  }
  const auto answer = call_->advance();
  if (!answer) return;
  if (answer->kind == HttpAnswer::kAnswered && answer->status == 404 && calls_[next_].is_optional)
    return go_on();
  if (!answer->is_success()) {
    error_ = str(target, ": ", answer->message);
    is_refused_ = answer->kind == HttpAnswer::kAnswered && !answer->is_transient();
    if (answer->status == 401)
      error_ += "; set the key: BOUGH_ROLLOUT_API_KEY or rollout.servers.api_key_file";
    return;
  }
  answer_ = parsed(answer->body);
  const bool has_failed = answer_.is_object() && answer_.value("success", Json(true)) == Json(false);
  if (has_failed && calls_[next_].is_repeated) {
    waits_until_ = now + kRepeatPause;
    return;
  }
  if (has_failed) {
    error_ = str(target, ": ", quoted(answer->body, 200));
    return;
  }
  go_on();
}

void ServerSteps::begin() {
  const ServerCall& call = calls_[next_];
  call_->begin(call.method, call.target, call.body.is_null() ? "" : dump_line(call.body));
}

void ServerSteps::go_on() {
  if (++next_ < calls_.size()) begin();
}

void finish_all(const std::vector<ServerSteps*>& all) {
  for (;;) {
    std::vector<pollfd> watched;
    bool is_done = true;
    for (ServerSteps* steps : all) {
      steps->advance();
      if (steps->is_done()) continue;
      is_done = false;
      const int events = POLLIN | (steps->wants_to_send() ? POLLOUT : 0);
      watched.push_back({steps->descriptor(), static_cast<short>(events), 0});
    }
    if (is_done) return;
    poll(watched.data(), watched.size(), static_cast<int>(kRepeatPause.count()));
  }
}

}  // namespace bough
