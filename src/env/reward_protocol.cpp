#include "env/reward_protocol.h"

#include <cmath>

#include "base/error.h"
#include "base/json.h"
#include "net/worker_protocol.h"

namespace bough {

namespace {

WorkerReply malformed(std::string_view text) {
  WorkerReply reply;
  reply.message = str("it answered ", quoted(text),
                      ", which is not a valid reply; expected {\"id\": ..., \"reward\": ...}");
  return reply;
}

}  // namespace

std::string encode_request(int64_t id, const RewardRequest& request) {
  Json fields = request.problem->fields.is_object() ? request.problem->fields : Json::object();
  Json answer = request.problem->answer;
  if (const auto own = fields.find("answer"); own != fields.end()) answer = std::move(*own);
  for (const char* key : {"prompt", "completion", "answer"}) fields.erase(key);
  return write_request(id, Json{{"prompt", request.prompt},
                                {"completion", request.completion},
                                {"answer", std::move(answer)},
                                {"fields", std::move(fields)}});
}

WorkerReply parse_reply(std::string_view text, bool needs_id) {
  const auto message = read_message<Json>(text);
  if (!message) return malformed(text);
  WorkerReply reply;
  const bool has_error = message->error && message->error_is_text;
  if (has_error) reply.message = shortened(*message->error);
  if (message->has_ready) {
    if (!message->ready || (!*message->ready && !has_error)) return malformed(text);
    reply.kind = *message->ready ? WorkerReply::Kind::ready : WorkerReply::Kind::refused;
    return reply;
  }
  reply.id = message->id;
  if (!reply.id && (message->has_id || needs_id)) return malformed(text);
  if (has_error) {
    reply.kind = WorkerReply::Kind::failure;
    return reply;
  }
  const auto reward = message->object.find("reward");
  if (reward == message->object.end()) return malformed(text);
  if (!reward->is_number() || !std::isfinite(reward->get<double>())) {
    reply.kind = WorkerReply::Kind::failure;
    reply.message = str("it answered the reward ", quoted(dump_line(*reward)), ", expected a finite number");
    return reply;
  }
  reply.kind = WorkerReply::Kind::reward;
  reply.reward = reward->get<double>();
  return reply;
}

}  // namespace bough
