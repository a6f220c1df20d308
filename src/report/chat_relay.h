// The page's box to talk to a run that serves its model (serve.port): passes the conversation on to the run's
// server. It is a request without a session (docs/serve.md), so nobody trains on it.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "net/http_client.h"
#include "net/http_server.h"

namespace bough {

// One request, {"messages": [...]} as in OpenAI's chat completions. The answer is streamed as the run's
// server streams it. Without one it is {"error"}, status 409.
class ChatRelay {
 public:
  // Throws UserError if the body is malformed, or the run is not alive, serves no model or does not answer.
  ChatRelay(const std::filesystem::path& run, const std::string& body, std::shared_ptr<HttpExchange> exchange,
            HttpHeaders headers);

  // Sends and receives without blocking. Returns false when the answer is complete, or the reader has gone.
  bool advance();
  void end(const std::string& message);  // the answer ends here

 private:
  const std::shared_ptr<HttpExchange> exchange_;
  const HttpHeaders headers_;
  std::optional<HttpCall> call_;
  bool streams_ = false;
};

}  // namespace bough
