#include "env/http_reward.h"

#include <utility>

#include "base/error.h"
#include "net/http_client.h"

namespace bough {

namespace {

constexpr std::chrono::milliseconds kRewardRetryPause{500};  // a server that restarts is away for a moment

class HttpChannel : public RewardChannel {
 public:
  HttpChannel(HttpUrl url, const HttpAddress& address) : call_(std::move(url), address) {}

  void begin(int64_t id, const RewardRequest& request) override { call_.post(encode_request(id, request)); }
  int descriptor() const override { return call_.descriptor(); }
  bool wants_to_send() const override { return call_.wants_to_send(); }

  std::optional<WorkerReply> advance() override {
    const std::optional<HttpAnswer> answer = call_.advance();
    if (!answer) return std::nullopt;
    switch (answer->kind) {
      case HttpAnswer::kMalformed: return WorkerReply{.message = answer->message};
      case HttpAnswer::kNotConnected:
      case HttpAnswer::kLost: return WorkerReply{.kind = WorkerReply::Kind::lost, .message = answer->message};
      case HttpAnswer::kAnswered: break;
    }
    if (!answer->is_success())
      return WorkerReply{.kind = WorkerReply::Kind::failure,
                         .message = answer->message,
                         .transient = answer->is_transient()};
    WorkerReply reply = parse_reply(answer->body, /*needs_id=*/false);
    if (reply.kind != WorkerReply::Kind::ready && reply.kind != WorkerReply::Kind::refused) return reply;
    return WorkerReply{.message = str("it answered ", quoted(answer->body), ", which is not a valid reply")};
  }

 private:
  HttpCall call_;
};

}  // namespace

std::unique_ptr<RewardPool> make_http_reward(const std::string& url, const RewardSettings& settings) {
  const HttpUrl parsed = parse_http_url(url);
  const HttpAddress address = wait_for_endpoint("reward " + url, parsed, settings.startup_timeout_seconds,
                                                "reward_service.startup_timeout_seconds");
  return std::make_unique<RewardPool>(
      WorkerPoolOptions{.name = url, .retry_pause = kRewardRetryPause}, settings,
      [parsed, address] { return std::make_unique<HttpChannel>(parsed, address); });
}

}  // namespace bough
