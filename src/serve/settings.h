// Settings of `bough serve`, given as key=value. `gconfig` holds the default sampling settings of requests,
// `rollout` the engine's settings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/settings.h"
#include "engine/settings.h"
#include "net/http_server.h"

namespace bough {

// A LoRA adapter that is served beside the model, in the format of vLLM's --lora-modules name=path.
struct LoraModule {
  std::string name, path;

  template <class V>
  void visit(V& v) {
    v("name", name, "what requests call it");
    v("path", path, "directory in PEFT's format");
  }
  static LoraModule from_text(const std::string& text) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0 || equals + 1 == text.size())
      throw UserError("got '" + text + "', expected NAME=DIRECTORY");
    return {text.substr(0, equals), text.substr(equals + 1)};
  }
  std::optional<std::string> to_text() const { return name + "=" + path; }
};

struct ServeSettings {
  std::string host = "127.0.0.1";
  int64_t port = 8000;
  std::string api_key_file;
  std::vector<std::string> served_model_name;
  std::vector<LoraModule> lora_modules;
  std::string tool_call_parser;
  std::string reasoning_parser;
  std::string logprobs_mode = "raw_logprobs";
  int64_t seed = 1;
  int64_t max_requests = 1024;
  int64_t max_samples_per_request = 128;
  double shutdown_seconds = 30;
  bool log_requests = true;
  HttpLimits http;
  // A request without a token limit gets max_new_tokens, or the rest of the context if that is shorter.
  SamplingParameters gconfig = [] {
    SamplingParameters parameters;
    parameters.max_new_tokens = 4096;
    return parameters;
  }();
  RolloutSettings rollout;

  template <class V>
  void visit(V& v) {
    v("host", host, "address to listen at; any but this machine's own (127.0.0.1, ::1) needs a token",
      not_empty());
    v("port", port, "0: a free one", range(0, 65535));
    v("api_key_file", api_key_file,
      "file whose first line is the bearer token that every request must have; the environment's "
      "BOUGH_API_KEY does the same");
    v("served_model_name", served_model_name,
      "names that requests may call the model, the first in answers; '*' among them: any name; none: the "
      "directory's");
    v("lora_modules", lora_modules,
      "low-rank adapters over the model, each asked by its own name: [NAME=DIRECTORY, ...]");
    v("tool_call_parser", tool_call_parser,
      "how the model writes tool calls (docs/chat.md); empty: no tools");
    v("reasoning_parser", reasoning_parser, "how the model writes reasoning (docs/chat.md); empty: as text");
    v("logprobs_mode", logprobs_mode,
      "log-probabilities in answers: of the model's logits, or of what was drawn from, after temperature, "
      "penalties, top_k, top_p and min_p",
      one_of({"raw_logprobs", "processed_logprobs"}));
    v("seed", seed, "draws of requests without a seed of their own are a function of it and their number",
      at_least(0));
    v("max_requests", max_requests, "requests in flight; more are answered 429", range(1, 1000000));
    v("max_samples_per_request", max_samples_per_request, "n times the number of prompts, at most",
      range(1, 100000));
    v("shutdown_seconds", shutdown_seconds,
      "after SIGTERM or Ctrl-C running requests have this long to finish", range(0.0, 86400.0));
    v("log_requests", log_requests, "a line of log for each request");
    v("http", http, "what one client may take");
    v("gconfig", gconfig, "what a request gets that does not say otherwise");
    v("rollout", rollout, "how the engine runs");
  }
};

}  // namespace bough
