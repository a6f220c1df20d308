// A test double for this module: an engine that answers with a given text, one byte a token.
#pragma once

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "control/fakes.h"
#include "engine/engine.h"
#include "net/net_test_util.h"
#include "serve/api.h"

namespace bough::testing {

// Each sample is `text`, then the byte-level tokenizer's stop token. An engine step samples one token of each
// sample. While is_open is false, engine steps do nothing. Members that other threads read are atomic.
class ScriptedEngine final : public BareEngine {
 public:
  static constexpr int32_t kStop = 258;

  explicit ScriptedEngine(std::string said) : text(std::move(said)) {}

  void submit(GenerationRequest request) override {
    if (request.prompt_ids.front() == 'X') throw UserError(str("request ", request.id, ": no X"));
    GenerationResult result{request.id, request.prompt_ids, 1.0, {}, {}};
    result.samples.resize(static_cast<size_t>(request.sampling.n_samples));
    sampled = request.sampled;
    running_.push_back({std::move(request), std::move(result)});
    ++in_flight;
    ++submitted;
  }
  std::vector<GenerationResult> step() override {
    std::vector<GenerationResult> finished;
    if (fails) throw IoError("the engine broke");
    if (!is_open) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return finished;
    }
    for (auto it = running_.begin(); it != running_.end();) {
      if (!draw(*it)) {
        ++it;
        continue;
      }
      finished.push_back(std::move(it->result));
      it = running_.erase(it);
      --in_flight;
    }
    return finished;
  }
  bool idle() const override { return running_.empty(); }
  bool cancel(uint64_t id) override {
    const auto count = std::erase_if(running_, [&](const Running& each) { return each.request.id == id; });
    in_flight -= static_cast<int64_t>(count);
    cancelled += static_cast<int64_t>(count);
    return count > 0;
  }
  int32_t version() const override { return 3; }

  const std::string text;
  std::atomic<bool> is_open = true, fails = false;
  std::atomic<int64_t> in_flight = 0, submitted = 0, cancelled = 0;
  std::vector<uint8_t>
      sampled;  // GenerationRequest::sampled of the last request; read it when no thread runs

 private:
  struct Running {
    GenerationRequest request;
    GenerationResult result;
  };
  // Returns whether this was the last token.
  bool draw(Running& running) const {
    const size_t n = running.result.samples.front().token_ids.size();
    const bool stops = n == text.size();
    const bool is_last = stops || n + 1 == static_cast<size_t>(running.request.sampling.max_new_tokens);
    for (size_t i = 0; i < running.result.samples.size(); ++i) {
      GeneratedSample& sample = running.result.samples[i];
      const int32_t token = stops ? kStop : static_cast<unsigned char>(text[n]);
      sample.token_ids.push_back(token);
      for (auto* values : {&sample.logprobs, &sample.raw_logprobs, &sample.sampling_logprobs})
        values->push_back(-0.5);
      sample.versions.push_back(3);
      sample.finish_reason = stops ? FinishReason::kStop : FinishReason::kLength;
      running.request.on_token({running.request.id, static_cast<int64_t>(i), static_cast<int64_t>(n), token,
                                -0.5, -0.5, -0.5, 3, is_last});
    }
    return is_last;
  }
  std::vector<Running> running_;
};

inline ServedModel byte_model(ServeSettings settings = {}) {
  settings.port = 0;
  settings.log_requests = false;
  if (settings.tool_call_parser == "auto") settings.tool_call_parser = "";  // as for the template ChatML
  return {.names = {"bytes"},
          .tokenizer = Tokenizer::from_json(byte_level_tokenizer_json(), "tokenizer.json"),
          .chat_template = ChatTemplate(),
          .max_length = 1 << 20,
          .vocab_size = 259,
          .settings = std::move(settings)};
}

}  // namespace bough::testing
