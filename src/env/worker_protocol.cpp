#include "env/worker_protocol.h"

#include <cmath>

#include "base/error.h"
#include "base/json.h"

namespace bough {

namespace {

WorkerReply malformed(std::string_view line) {
  WorkerReply reply;
  reply.message = str("the worker answered ", quoted(line), ", which is not a reply");
  return reply;
}

}  // namespace

std::string encode_request(int64_t id, const RewardRequest& request) {
  Json fields = request.problem->fields.is_object() ? request.problem->fields : Json::object();
  fields.erase("prompt");
  fields.erase("completion");
  if (!fields.contains("answer")) fields["answer"] = request.problem->answer;
  const Json line = {{"id", id},
                     {"prompt", request.prompt},
                     {"completion", request.completion},
                     {"fields", std::move(fields)}};
  return dump_line(line) + "\n";
}

WorkerReply parse_reply(std::string_view line) {
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return malformed(line);
  WorkerReply reply;
  const auto error = json.find("error");
  const bool has_error = error != json.end() && error->is_string();
  if (has_error) reply.message = error->get<std::string>();
  if (const auto ready = json.find("ready"); ready != json.end()) {
    if (!ready->is_boolean() || (!ready->get<bool>() && !has_error)) return malformed(line);
    reply.kind = ready->get<bool>() ? WorkerReply::Kind::ready : WorkerReply::Kind::refused;
    return reply;
  }
  const auto id = json.find("id");
  if (id == json.end() || !id->is_number_integer()) return malformed(line);
  reply.id = id->get<int64_t>();
  if (has_error) {
    reply.kind = WorkerReply::Kind::failure;
    return reply;
  }
  const auto reward = json.find("reward");
  if (reward == json.end() || !reward->is_number() || !std::isfinite(reward->get<double>()))
    return malformed(line);
  reply.kind = WorkerReply::Kind::reward;
  reply.reward = reward->get<double>();
  return reply;
}

void LineSplitter::append(std::string_view bytes) {
  if (!overflowed_) pending_ += bytes;
}

std::optional<std::string> LineSplitter::next() {
  const size_t end = pending_.find('\n', searched_);
  if (end == std::string::npos) {
    searched_ = pending_.size();
    overflowed_ = overflowed_ || pending_.size() > kMaxReplyBytes;
    return std::nullopt;
  }
  std::string line = pending_.substr(0, end);
  pending_.erase(0, end + 1);
  searched_ = 0;
  return line;
}

}  // namespace bough
