#include "report/chat_relay.h"

#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "report/run_control.h"

namespace bough {

namespace fs = std::filesystem;

ChatRelay::ChatRelay(const fs::path& run, const std::string& body, std::shared_ptr<HttpExchange> exchange,
                     HttpHeaders headers)
    : exchange_(std::move(exchange)), headers_(std::move(headers)) {
  Json request = Json::parse(body, nullptr, /*allow_exceptions=*/false);
  if (!request.is_object() || request.size() != 1 || !request.contains("messages"))
    throw UserError("the body of a chat: expected {\"messages\": [...]}");
  if (!is_run_alive(run)) throw UserError("the run is not alive");
  if (!fs::exists(model_server_file(run)))
    throw UserError("the run does not serve its model: start it with serve.port");
  const Json server = Json::parse(read_file(model_server_file(run)));
  const HttpUrl url = parse_http_url(server.at("url").get<std::string>() + "/v1/chat/completions", "serve");
  constexpr double kConnectSeconds = 0.2;  // on this machine
  const HttpAddress address = wait_for_endpoint("the run's server", url, kConnectSeconds, "serve.port");
  constexpr uint64_t kMostAnswerBytes = uint64_t{64} << 20;
  call_.emplace(url, address, server.at("api_key").get<std::string>(), kMostAnswerBytes);
  request["model"] = "policy";
  request["stream"] = true;
  call_->post(dump_line(request));
}

void ChatRelay::end(const std::string& message) {
  if (streams_) {
    exchange_->write("data: " + dump_line({{"error", {{"message", message}}}}) + "\n\n");
    exchange_->finish();
  } else {
    exchange_->respond({.status = 409, .body = dump_line({{"error", message}}), .headers = headers_});
  }
}

bool ChatRelay::advance() {
  if (!exchange_->is_open()) return false;
  const std::optional<HttpAnswer> answer = call_->advance();
  std::string part = call_->take_body();
  if (answer && answer->is_success()) part += answer->body;
  if (!part.empty() && !std::exchange(streams_, true)) exchange_->begin_stream(headers_);
  if (!part.empty()) exchange_->write(part);
  if (!answer) return true;
  if (answer->is_success() && streams_) {
    exchange_->finish();
    return false;
  }
  // The server's own words, if it has any.
  const Json error = Json::parse(answer->body, nullptr, /*allow_exceptions=*/false);
  const Json::json_pointer place("/error/message");
  const bool has_words = error.contains(place) && error[place].is_string();
  end(has_words ? error[place].get<std::string>() : "the run's server: " + answer->message);
  return false;
}

}  // namespace bough
