// What inference servers of others are asked and what they answer: vLLM (OpenAI's completions with token ids,
// and the routes of VLLM_SERVER_DEV_MODE) and SGLang (/generate and its routes for reinforcement learning).
// Texts only: who speaks them over HTTP, and when, is server_engine.h. An API is a class in the source file
// and a line of its table.
//
// Log-probabilities must be those of log softmax(logits / temperature): vLLM's --logprobs-mode
// processed_logprobs, SGLang's default. Both apply truncation or penalties to them where a request has any,
// so that requests here have none.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"

namespace bough {

// A call to make of a server, as one step of several.
struct ServerCall {
  std::string method = "POST", target;
  Json body;                 // null: none
  bool is_optional = false;  // 404 will do: an older server, which does without it
  bool is_repeated = false;  // "success": false means that it is asked again a little later
};

// A sample to go on with.
struct ServerRequest {
  std::string id;                  // no other request has it
  std::vector<int32_t> input_ids;  // the prompt and what has been drawn
  int64_t max_new_tokens = 0;
  double temperature = 1;  // 0: the most likely token
  int64_t top_logprobs = 0;
  std::vector<int32_t> stop_tokens;
  bool ignore_eos = false;
};

struct ServerToken {
  int32_t id = 0;
  double logprob = 0;
  std::vector<int32_t> top_ids;  // by falling probability
  std::vector<float> top_logprobs;
};

// What one event of a stream says.
struct ServerEvent {
  std::vector<ServerToken> tokens;  // new ones
  std::string finish_reason;        // empty: it goes on
};

struct ServerDescription {
  std::string model;       // what requests call it
  int64_t max_length = 0;  // tokens of prompt and response; 0: unknown
};

class ServerApi {
 public:
  virtual ~ServerApi() = default;

  virtual ServerCall describe() const = 0;
  virtual ServerDescription description(const Json& answer) const = 0;
  virtual ServerCall generate(const ServerRequest& request, const std::string& model) const = 0;
  // `seen`: tokens that earlier events of this stream had. Throws a UserError where it is none of the API's.
  virtual ServerEvent event(const Json& event, size_t seen, int64_t top_logprobs) const = 0;
  // In order; the first ones end what the server is generating, so that all tokens before are of the old
  // weights and all after of the new ones.
  virtual std::vector<ServerCall> update_weights(const std::filesystem::path& directory) const = 0;
  // How a server must be started, for messages.
  virtual std::string how_to_start() const = 0;
};

// Of vllm or sglang.
const ServerApi& server_api(const std::string& name);

}  // namespace bough
