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

// A LoRA adapter that is served under its own model name, in the format of vLLM's --lora-modules name=path.
struct LoraModule {
  std::string name, path;

  template <class V>
  void visit(V& v) {
    v("name", name, "model name in requests");
    v("path", path, "directory of the adapter, in PEFT's format");
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
  std::string tool_call_parser = "auto";
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
    v("host", host, "address to listen at; an address other than 127.0.0.1 or ::1 needs an API key",
      not_empty());
    v("port", port, "port to listen at; 0: a free port", range(0, 65535));
    v("api_key_file", api_key_file,
      "file whose first line is the API key that every request must send as bearer token; alternative: "
      "environment variable BOUGH_API_KEY");
    v("served_model_name", served_model_name,
      "model names that requests may use; answers have the first; '*' in the list: any name; empty: the "
      "directory's name");
    v("lora_modules", lora_modules,
      "low-rank adapters of the model, each requested by its own name: [NAME=DIRECTORY, ...]");
    v("tool_call_parser", tool_call_parser,
      "format of the model's tool calls (docs/chat.md); auto: the one whose markers the chat template has; "
      "empty: no tools");
    v("reasoning_parser", reasoning_parser,
      "format of the model's reasoning (docs/chat.md); empty: reasoning is part of the text");
    v("logprobs_mode", logprobs_mode,
      "log-probabilities in answers: raw_logprobs (of the model's logits) or processed_logprobs (of the "
      "sampling distribution, after temperature, penalties, top_k, top_p and min_p)",
      one_of({"raw_logprobs", "processed_logprobs"}));
    v("seed", seed, "seeds, together with the request's number, the samples of requests without a seed",
      at_least(0));
    v("max_requests", max_requests, "maximum number of requests in flight; more are answered 429",
      range(1, 1000000));
    v("max_samples_per_request", max_samples_per_request, "maximum of n times the number of prompts",
      range(1, 100000));
    v("shutdown_seconds", shutdown_seconds,
      "seconds that running requests have to finish after SIGTERM or Ctrl-C", range(0.0, 86400.0));
    v("log_requests", log_requests, "write a log line for each request");
    v("http", http, "limits of connections and requests");
    v("gconfig", gconfig, "default sampling settings of requests");
    v("rollout", rollout, "settings of the engine");
  }
};

}  // namespace bough
