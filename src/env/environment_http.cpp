#include "env/environment_http.h"

#include <cstdio>
#include <random>
#include <utility>

#include "base/error.h"
#include "env/environment_pool.h"
#include "net/http_client.h"
#include "net/worker_protocol.h"

namespace bough {

namespace {

constexpr std::chrono::milliseconds kEnvironmentRetryPause{
    500};  // a server that restarts is away for a moment

class HttpEpisodes final : public EpisodeChannel {
 public:
  HttpEpisodes(HttpUrl url, const HttpAddress& address, std::string name)
      : call_(std::move(url), address), name_(std::move(name)) {}

  void begin(const EpisodeCall& call) override {
    if (call.is_reset() && !is_open_) ++num_episodes_;
    is_open_ = true;
    is_reset_ = call.is_reset();
    num_calls_ = call.num_calls();
    ask(request_of(call));
  }
  AfterClose close() override {
    is_open_ = false;
    ask({{"method", "close"}});
    return AfterClose::kClosing;
  }
  bool give_up() override {
    call_.hang_up();
    return true;
  }
  int descriptor() const override { return call_.descriptor(); }
  bool wants_to_send() const override { return call_.wants_to_send(); }
  bool has_come() const override { return call_.has_failed(); }

  std::optional<ChannelReply> advance() override {
    const std::optional<HttpAnswer> answer = call_.advance();
    if (!answer) return std::nullopt;
    if (!is_open_) return ChannelReply{.kind = ChannelReply::kReady};  // the reply to close
    return reply_of(*answer);
  }

 private:
  void ask(OrderedJson request) {
    request["id"] = 0;  // keeps the key's place in the order of keys
    request["episode"] = str(name_, "-", num_episodes_);
    call_.post(write_request(++request_, std::move(request)));
  }

  ChannelReply reply_of(const HttpAnswer& answer) const {
    const auto failed = [](EpisodeFailure failure, const std::string& why) {
      return ChannelReply{.kind = ChannelReply::kFailed, .failure = failure, .message = shortened(why)};
    };
    if (answer.kind == HttpAnswer::kMalformed) return failed(EpisodeFailure::kProtocol, answer.message);
    if (!answer.is_success()) {
      const bool is_broken = answer.kind != HttpAnswer::kAnswered;
      ChannelReply reply =
          failed(is_broken || answer.is_transient() ? EpisodeFailure::kCrash : EpisodeFailure::kError,
                 answer.message);
      const bool came_to_nothing =
          answer.kind == HttpAnswer::kNotConnected || answer.status == 429 || answer.status == 503;
      if (came_to_nothing || (is_reset_ && (is_broken || answer.is_transient())))
        reply.kind = ChannelReply::kNotDone;
      return reply;
    }
    const auto reply = read_message<OrderedJson>(answer.body);
    if (!reply)
      return failed(EpisodeFailure::kProtocol,
                    str("it answered ", quoted(answer.body), ", which is not a JSON object"));
    if (reply->has_id && reply->id != request_)
      return failed(EpisodeFailure::kProtocol,
                    str("it answered ", quoted(answer.body), ", expected id ", request_));
    if (reply->error) return failed(EpisodeFailure::kError, *reply->error);
    try {
      return {.kind = ChannelReply::kAnswer, .observation = read_observation(reply->object, num_calls_)};
    } catch (const Malformed& malformed) {
      return failed(EpisodeFailure::kProtocol, malformed.what());
    }
  }

  HttpCall call_;
  const std::string name_;  // the channel's unique name
  int64_t request_ = 0, num_episodes_ = 0;
  size_t num_calls_ = 0;  // calls in the current request
  bool is_open_ = false, is_reset_ = false;
};

// Draws the prefix of the names of this run's conversations. The names then differ from those of other runs
// at the same endpoint.
std::string draw_name() {
  std::random_device random;
  char text[17];
  std::snprintf(text, sizeof text, "%08x%08x", random(), random());
  return text;
}

}  // namespace

std::unique_ptr<Environment> make_http_environment(const EnvironmentSettings& settings) {
  const HttpUrl url = parse_http_url(settings.url, "environment.url");
  const HttpAddress address =
      wait_for_endpoint("environment " + settings.url, url, settings.startup_timeout_seconds,
                        "environment.startup_timeout_seconds");
  const auto open = [url, address, name = draw_name(), number = int64_t{0}]() mutable {
    return std::make_unique<HttpEpisodes>(url, address, str(name, "-", number++));
  };
  return make_environment_pool({.name = settings.url, .retry_pause = kEnvironmentRetryPause}, settings, open);
}

}  // namespace bough
