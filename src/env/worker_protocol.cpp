#include "env/worker_protocol.h"

#include <cmath>

#include "base/error.h"
#include "base/json.h"

namespace bough {

namespace {

constexpr size_t kMaxMessage = 1000;

WorkerReply malformed(std::string_view text) {
  WorkerReply reply;
  reply.message =
      str("it answered ", quoted(text), ", which is no reply; expected {\"id\": ..., \"reward\": ...}");
  return reply;
}

}  // namespace

std::string encode_request(int64_t id, const RewardRequest& request) {
  Json fields = request.problem->fields.is_object() ? request.problem->fields : Json::object();
  Json answer = request.problem->answer;
  if (const auto own = fields.find("answer"); own != fields.end()) answer = std::move(*own);
  for (const char* key : {"prompt", "completion", "answer"}) fields.erase(key);
  return dump_line({{"id", id},
                    {"prompt", request.prompt},
                    {"completion", request.completion},
                    {"answer", std::move(answer)},
                    {"fields", std::move(fields)}});
}

WorkerReply parse_reply(std::string_view text, bool needs_id) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return malformed(text);
  WorkerReply reply;
  const auto error = json.find("error");
  const bool has_error = error != json.end() && error->is_string();
  if (has_error) reply.message = shortened(error->get_ref<const std::string&>());
  if (const auto ready = json.find("ready"); ready != json.end()) {
    if (!ready->is_boolean() || (!ready->get<bool>() && !has_error)) return malformed(text);
    reply.kind = ready->get<bool>() ? WorkerReply::Kind::ready : WorkerReply::Kind::refused;
    return reply;
  }
  const auto id = json.find("id");
  if (id != json.end() && id->is_number_integer()) reply.id = id->get<int64_t>();
  else if (id != json.end() || needs_id) return malformed(text);
  if (has_error) {
    reply.kind = WorkerReply::Kind::failure;
    return reply;
  }
  const auto reward = json.find("reward");
  if (reward == json.end()) return malformed(text);
  if (!reward->is_number() || !std::isfinite(reward->get<double>())) {
    reply.kind = WorkerReply::Kind::failure;
    reply.message = str("it answered the reward ", quoted(dump_line(*reward)), ", expected a finite number");
    return reply;
  }
  reply.kind = WorkerReply::Kind::reward;
  reply.reward = reward->get<double>();
  return reply;
}

std::string shortened(std::string_view text) {
  if (text.size() <= kMaxMessage) return std::string(text);
  size_t end = kMaxMessage;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;  // inside a character
  return std::string(text.substr(0, end)) + "…";
}

void LineSplitter::append(std::string_view bytes) {
  if (!overflowed_) pending_ += bytes;
}

std::optional<std::string> LineSplitter::next() {
  const size_t end = pending_.find('\n', searched_);
  if (end == std::string::npos ? pending_.size() > kMaxReplyBytes : end > kMaxReplyBytes) overflowed_ = true;
  if (overflowed_) pending_ = {};
  if (overflowed_ || end == std::string::npos) {
    searched_ = pending_.size();
    return std::nullopt;
  }
  std::string line = pending_.substr(0, end);
  pending_.erase(0, end + 1);
  searched_ = 0;
  return line;
}

}  // namespace bough
