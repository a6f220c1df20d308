#include "serve/api.h"

#include <gtest/gtest.h>

#include "base/random.h"
#include "serve/serve_test_util.h"

namespace bough {
namespace {

using Read = ReadRequest (*)(const OrderedJson&, const ServedModel&, const SessionPointer&);

// Shows what the template gets.
constexpr const char* kTemplate =
    "{% for message in messages %}[{{ message | tojson }}]{% endfor %}{{ tools | tojson if tools }}";

ServedModel model() {
  ServeSettings settings;
  settings.tool_call_parser = "hermes";
  settings.reasoning_parser = "qwen3";
  ServedModel made = testing::byte_model(settings);
  made.chat_template = ChatTemplate::from_text(kTemplate, "test");
  return made;
}

std::string prompt_of(const ReadRequest& read) {
  return {read.request.prompts[0].begin(), read.request.prompts[0].end()};
}

constexpr const char* kChatBody = R"({"model": "bytes", "messages": [
  {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
  {"role": "user", "content": "c", "name": "n"},
  {"role": "assistant", "content": null, "reasoning": "r", "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"z\": 1, \"a\": [2]}"}}]},
  {"role": "tool", "tool_call_id": "1", "content": "d"}],
  "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
  "tool_choice": "auto", "stream": true, "stream_options": {"include_usage": true}, "n": 2, "seed": 3,
  "stop": ["x"], "temperature": 0.5, "top_p": 0.5, "max_tokens": 9, "logprobs": true, "top_logprobs": 0,
  "return_token_ids": true, "chat_template_kwargs": {"k": 1}, "response_format": {"type": "text"}})";
constexpr const char* kCompletionBody = R"({"prompt": ["a", [5, 6]], "echo": true, "n": 2, "stop": "x",
  "stream_options": {}, "max_tokens": 3, "best_of": 2, "logit_bias": {}})";
constexpr const char* kResponseBody = R"({"instructions": "i", "input": [{"role": "user", "content": "a"},
  {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
  {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
  {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
  {"type": "function_call_output", "call_id": "1", "output": "c"}], "reasoning": {"effort": "low"},
  "tools": [{"type": "function", "name": "f", "parameters": {}}], "include": ["message.output_text.logprobs"],
  "text": {"format": {"type": "text"}}, "max_output_tokens": 5, "metadata": {"k": "v"}, "stream": true})";
constexpr const char* kMessageBody =
    R"({"model": "bytes", "max_tokens": 5, "system": [{"type": "text", "text": "s"}],
  "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [
    {"type": "thinking", "thinking": "r", "signature": ""}, {"type": "text", "text": "b"},
    {"type": "tool_use", "id": "1", "name": "f", "input": {"z": 1}}]},
  {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1",
    "content": [{"type": "text", "text": "c"}], "is_error": true}, {"type": "text", "text": "d"}]}],
  "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "auto"},
  "thinking": {"type": "disabled"}, "stop_sequences": ["x"], "stream": true})";

TEST(ApiTest, ConversationsReachTheTemplateAsItWantsThem) {
  const ServedModel served = model();
  const ReadRequest chat = read_chat_completion(parse_ordered_json(kChatBody, "body"), served, nullptr);
  const std::string call =
      R"("tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": )";
  EXPECT_EQ(prompt_of(chat),
            R"([{"role": "system", "content": "a\nb"}][{"role": "user", "content": "c", "name": "n"}])"
            R"([{"role": "assistant", "content": null, "reasoning": "r", )" +
                call +
                R"({"z": 1, "a": [2]}}}], "reasoning_content": "r"}])"
                R"([{"role": "tool", "tool_call_id": "1", "content": "d"}])"
                R"([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])");
  EXPECT_EQ(chat.request.sampling.n_samples, 2);
  EXPECT_EQ(chat.request.seed, 3);
  EXPECT_EQ(chat.request.tool_call_parser, "hermes");

  const ReadRequest response = read_response(parse_ordered_json(kResponseBody, "body"), served, nullptr);
  EXPECT_EQ(prompt_of(response),
            R"([{"role": "system", "content": "i"}][{"role": "user", "content": "a"}])"
            R"([{"role": "assistant", "content": "b", "reasoning_content": "r", )" +
                call +
                R"({}}}]}][{"role": "tool", "tool_call_id": "1", "content": "c"}])"
                R"([{"type": "function", "function": {"name": "f", "parameters": {}}}])");

  const ReadRequest message = read_message(parse_ordered_json(kMessageBody, "body"), served, nullptr);
  EXPECT_EQ(prompt_of(message),
            R"([{"role": "system", "content": "s"}][{"role": "user", "content": "a"}])"
            R"([{"role": "assistant", "content": "b", "reasoning_content": "r", )" +
                call +
                R"({"z": 1}}}]}][{"role": "tool", "tool_call_id": "1", "content": "Error: c"}])"
                R"([{"role": "user", "content": "d"}])"
                R"([{"type": "function", "function": {"name": "f", "parameters": {}}}])");
}

TEST(ApiTest, LimitsOfTokensAndSamples) {
  ServedModel served = model();
  served.max_length = 100;
  const auto read = [&](const std::string& fields) {
    return read_completion(parse_ordered_json(R"({"prompt": "0123456789", )" + fields + "}", "body"), served,
                           nullptr)
        .request;
  };
  EXPECT_EQ(read(R"("n": 1)").sampling.max_new_tokens, 16);
  EXPECT_EQ(read(R"("max_tokens": 50)").sampling.max_new_tokens, 50);
  EXPECT_EQ(read(R"("max_tokens": 500)").sampling.max_new_tokens, 90);
  EXPECT_THROW(read(R"("min_tokens": 20)"), ApiError);
  EXPECT_THROW(read(R"("n": 129)"), ApiError);
  served.max_length = 10;
  EXPECT_THROW(read(R"("n": 1)"), ApiError);
}

// Makes a random value, or a copy of the body with a random value somewhere in it.
class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed, Purpose::test) {}
  OrderedJson mutated(const OrderedJson& json) {
    if (json.is_structured() && !json.empty() && draw(4) > 0) {
      OrderedJson copy = json;
      auto it = copy.begin();
      std::advance(it, static_cast<int64_t>(draw(copy.size())));
      if (draw(12) == 0) copy.erase(it);
      else *it = mutated(*it);
      return copy;
    }
    return value();
  }
  uint64_t draw(uint64_t bound) { return random_.below(bound, 0, next_++); }

 private:
  OrderedJson value() {
    static const char* const kValues[] = {"null",
                                          "true",
                                          "false",
                                          "0",
                                          "-1",
                                          "1",
                                          "3",
                                          "1e300",
                                          "18446744073709551615",
                                          "-9223372036854775808",
                                          "0.5",
                                          "\"\"",
                                          "\"text\"",
                                          "\"function\"",
                                          "\"{}\"",
                                          "\"\\u0000\"",
                                          "[]",
                                          "[[]]",
                                          "[1]",
                                          "[null]",
                                          "[\"a\"]",
                                          "{}",
                                          "{\"type\": \"text\"}",
                                          "{\"type\": 1}",
                                          "{\"role\": \"user\"}",
                                          "[{}]",
                                          "{\"text\": 5, \"type\": \"text\"}"};
    return OrderedJson::parse(kValues[draw(std::size(kValues))]);
  }
  const CounterRandom random_;
  uint64_t next_ = 0;
};

// A client's request is either refused by an ApiError or can be answered. No other exception is thrown.
TEST(ApiTest, AdversarialBodiesAreRefusedOrAnswered) {
  const ServedModel served = model();
  const std::pair<Read, const char*> bodies[] = {{read_chat_completion, kChatBody},
                                                 {read_completion, kCompletionBody},
                                                 {read_response, kResponseBody},
                                                 {read_message, kMessageBody},
                                                 {read_token_count, kMessageBody}};
  int64_t num_answered = 0, num_refused = 0;
  for (const auto& [read, text] : bodies) {
    const OrderedJson body = parse_ordered_json(text, "body");
    for (uint64_t i = 0; i < 3000; ++i) {
      Mutator mutator(i);
      OrderedJson mutated = mutator.mutated(body);
      if (mutator.draw(2) == 0) mutated = mutator.mutated(mutated);
      try {
        const ReadRequest made = read(mutated, served, nullptr);
        if (!made.answer) continue;
        std::vector<ChoiceDelta> choices(static_cast<size_t>(made.request.num_choices()));
        std::string stream = made.answer->begin();
        for (size_t k = 0; k < choices.size(); ++k) {
          choices[k].parts = {"r", "c", {ToolCall{"f", "{}", "", "", ""}}};
          choices[k].tokens = {{200, -1.0}};
          choices[k].end = SampleEnd{};
          stream += made.answer->add(k, choices[k]);
        }
        stream += made.answer->end(choices);
        EXPECT_TRUE(stream.ends_with("\n\n"));
        EXPECT_TRUE(made.answer->whole(choices).is_object());
        ++num_answered;
      } catch (const ApiError& error) {
        EXPECT_TRUE(error.status == 400 || error.status == 404) << error.what();
        ++num_refused;
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what() << "\n" << dump_line(Json(mutated));
      }
    }
  }
  EXPECT_GT(num_answered, 1000);
  EXPECT_GT(num_refused, 1000);
}

}  // namespace
}  // namespace bough
