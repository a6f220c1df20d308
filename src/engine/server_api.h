// Requests to inference servers and their answers: vLLM (OpenAI's completions with token ids, and the routes
// of VLLM_SERVER_DEV_MODE) and SGLang (/generate and its routes for RL). This file has only the contents of
// messages. server_engine.h sends them over HTTP. A new API needs a class in server_api.cpp and a line in
// that file's table of APIs.
//
// Servers must return log softmax(logits / temperature): vLLM's --logprobs-mode processed_logprobs, SGLang's
// default. Truncation and penalties would change what they return, so requests here have neither.
//
// vLLM streams the experts of a mixture only from /inference/v1/generate, not from /v1/completions. Requests
// for experts go there.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "engine/engine.h"
#include "engine/server_experts.h"

namespace bough {

// One HTTP call to a server.
struct ServerCall {
  std::string method = "POST", target;
  Json body;                 // null: no body
  bool is_optional = false;  // 404 is accepted: an older server has no such route
  bool is_repeated = false;  // repeated after a pause if the answer has "success": false
};

// A sample to start or to continue.
struct ServerRequest {
  std::string id;                  // unique
  std::vector<int32_t> input_ids;  // the prompt and the tokens sampled so far
  int64_t max_new_tokens = 0;
  double temperature = 1;  // 0: the most likely token
  int64_t top_logprobs = 0;
  std::vector<int32_t> stop_tokens;
  bool ignore_eos = false;
  bool returns_experts = false;
  std::vector<std::string> stop;  // the server ends the request with the token that completes one of them
};

struct ServerToken {
  int32_t id = 0;
  double logprob = 0;
  std::vector<int32_t> top_ids;  // most likely first
  std::vector<float> top_logprobs;
};

// The content of one event of a stream.
struct ServerEvent {
  std::vector<ServerToken> tokens;  // that no earlier event had
  std::string finish_reason;        // empty: the stream continues
  Json experts;                     // for ServerApi::experts(); null: none
  // Whether the request ended as it should, by a stop token, a stop string or its length.
  bool is_complete() const { return finish_reason == "stop" || finish_reason == "length"; }
};

struct ServerDescription {
  std::string model;       // its name in requests
  int64_t max_length = 0;  // tokens of prompt and response; 0: unknown
};

class ServerApi {
 public:
  virtual ~ServerApi() = default;

  virtual ServerCall describe() const = 0;
  virtual ServerDescription description(const Json& answer) const = 0;
  virtual ServerCall generate(const ServerRequest& request, const std::string& model) const = 0;
  // `seen`: number of tokens in earlier events of this stream. Throws UserError or Json::exception if the
  // event is not of this API.
  virtual ServerEvent event(const Json& event, size_t seen, int64_t top_logprobs) const = 0;
  // The experts of all tokens of a request but the last: num_rows rows. `event`: the last one of its stream.
  // Throws UserError if the event has none, or others than `layout` allows.
  RoutedExperts experts(const ServerEvent& event, const ExpertLayout& layout, int64_t num_rows) const;
  // Returns the calls by which a server loads the weights in `directory`, in order. The first calls interrupt
  // generation, so that all tokens before are of the old weights and all tokens after of the new weights.
  virtual std::vector<ServerCall> update_weights(const std::filesystem::path& directory) const = 0;
  // The command that starts a suitable server, for error messages.
  virtual std::string how_to_start(bool returns_experts) const = 0;

 protected:
  virtual RoutedExperts decode_experts(const Json& text, const ExpertLayout& layout,
                                       int64_t num_rows) const = 0;
};

// Throws UserError if the request's sampling would change the log-probabilities that servers return.
void check_server_sampling(const GenerationRequest& request, const std::string& backend);

// name: vllm or sglang. Throws InternalError for another name.
const ServerApi& server_api(const std::string& name);

}  // namespace bough
