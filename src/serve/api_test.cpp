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

// Null fields, empty lists and missing fields of an answer mean the same, in all APIs.
TEST(ApiTest, EveryFormOfAnAnswerIsReadAlike) {
  const ServedModel served = model();
  const auto prompt = [&](Read read, const std::string& body) {
    return prompt_of(read(parse_ordered_json(body, "body"), served, nullptr));
  };
  const auto chat = [&](const std::string& fields) {
    return prompt(read_chat_completion,
                  str(R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", )", fields,
                      R"(}, {"role": "user", "content": "r"}]})"));
  };
  const std::string plain = R"([{"role": "user", "content": "q"}][{"role": "assistant", "content": "a"}])"
                            R"([{"role": "user", "content": "r"}])";
  for (
      const char* fields :
      {R"("content": "a")", R"("content": "a", "tool_calls": null)", R"("content": "a", "tool_calls": [])",
       R"("content": [{"type": "text", "text": "a"}], "refusal": null, "audio": null, "function_call": null)",
       R"("content": "a", "annotations": null, "name": null, "reasoning_content": null, "reasoning": null)",
       R"("content": null, "refusal": "a")", R"("content": [{"type": "refusal", "refusal": "a"}])"})
    EXPECT_EQ(chat(fields), plain) << fields;
  EXPECT_EQ(prompt(read_response,
                   R"({"input": [{"role": "user", "content": "q"}, {"type": "message", "role": "assistant",
    "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": null}]},
    {"role": "user", "content": "r"}]})"),
            plain);
  EXPECT_EQ(prompt(read_message,
                   R"({"model": "bytes", "max_tokens": 5, "messages": [{"role": "user", "content": "q"},
    {"role": "assistant", "content": [{"type": "text", "text": "a", "citations": null}]},
    {"role": "user", "content": "r"}]})"),
            plain);
  const std::string empty = R"([{"role": "user", "content": "q"}][{"role": "assistant", "content": ""}])"
                            R"([{"role": "user", "content": "r"}])";
  for (const char* fields : {R"("content": "")", R"("content": null)", R"("tool_calls": [])"})
    EXPECT_EQ(chat(fields), empty) << fields;
  EXPECT_EQ(prompt(read_message,
                   R"({"model": "bytes", "max_tokens": 5, "messages": [{"role": "user", "content": "q"},
    {"role": "assistant", "content": []}, {"role": "user", "content": "r"}]})"),
            empty);
  EXPECT_NE(prompt(read_response, R"({"input": [{"role": "user", "content": "q"}, {"type": "reasoning",
    "summary": [{"type": "summary_text", "text": "why"}]}, {"role": "user", "content": "r"}]})")
                .find(R"("reasoning_content": "why")"),
            std::string::npos);
  const auto reasoned = [&](const std::string& fields) {
    return prompt(read_response, R"({"input": [{"role": "user", "content": "q"}, {"type": "reasoning", )" +
                                     fields + R"(}, {"role": "user", "content": "r"}]})");
  };
  const std::string content = R"("content": [{"type": "reasoning_text", "text": "why"}])";
  for (const char* fields :
       {R"("content": [], "summary": [], "encrypted_content": "reasoning: why")",
        R"("content": [{"type": "reasoning_text", "text": "why"}], "encrypted_content": "reasoning: why")"})
    EXPECT_EQ(reasoned(fields), reasoned(content)) << fields;
  EXPECT_EQ(reasoned(R"("encrypted_content": "another server's")"), reasoned(R"("content": [])"));
  for (const char* fields : {R"("content": "a", "function_call": {"name": "f"})", R"("audio": {"id": "x"})"})
    EXPECT_THROW(chat(fields), ApiError) << fields;
}

TEST(ApiTest, SamplingFieldsReachTheEngine) {
  const ServedModel served = model();
  const std::string fields =
      R"("temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "presence_penalty": 1.5,
         "frequency_penalty": -1.5, "repetition_penalty": 1.25, "min_tokens": 2,
         "stop_token_ids": [9], "seed": 5)";
  const std::pair<Read, std::string> bodies[] = {
      {read_chat_completion, R"({"messages": [{"role": "user", "content": "q"}], "stop": "x",
         "logprobs": true, "top_logprobs": 3, "stream_options": {"include_usage": true}, )"},
      {read_completion, R"({"prompt": "q", "stop": ["x"], "logprobs": 3, "stream_options": {}, )"},
      {read_response, R"({"input": "q", "top_logprobs": 3, )"},
      {read_message, R"({"model": "bytes", "max_tokens": 5, "messages": [{"role": "user", "content": "q"}],
         "stop_sequences": ["x"], )"}};
  for (const auto& [read, body] : bodies) {
    SCOPED_TRACE(body);
    const ServedRequest request =
        read(parse_ordered_json(body + fields + "}", "body"), served, nullptr).request;
    const SamplingParameters& sampling = request.sampling;
    EXPECT_EQ(sampling.temperature, 0.5);
    EXPECT_EQ(sampling.top_p, 0.25);
    EXPECT_EQ(sampling.top_k, 7);
    EXPECT_EQ(sampling.min_p, 0.125);
    EXPECT_EQ(sampling.presence_penalty, 1.5);
    EXPECT_EQ(sampling.frequency_penalty, -1.5);
    EXPECT_EQ(sampling.repetition_penalty, 1.25);
    EXPECT_EQ(sampling.min_new_tokens, 2);
    EXPECT_EQ(sampling.stop_token_ids, std::vector<int64_t>{9});
    EXPECT_EQ(request.seed, 5);
    EXPECT_EQ(sampling.stop,
              read == read_response ? std::vector<std::string>{} : std::vector<std::string>{"x"});
    EXPECT_EQ(sampling.top_logprobs, read == read_message ? 0 : 3);
  }
}

TEST(ApiTest, VariablesReachTheTemplate) {
  ServedModel served = model();
  served.chat_template =
      ChatTemplate::from_text("{{ reasoning_effort }} {{ enable_thinking }} {{ mine }}", "test");
  const auto prompt = [&](Read read, const std::string& body) {
    return prompt_of(read(parse_ordered_json(body, "body"), served, nullptr));
  };
  EXPECT_EQ(prompt(read_chat_completion, R"({"messages": [{"role": "user", "content": "q"}],
    "reasoning_effort": "low", "chat_template_kwargs": {"mine": 1}})"),
            "low  1");
  EXPECT_EQ(prompt(read_response, R"({"input": "q", "reasoning": {"effort": "high", "summary": "auto"}})"),
            "high  ");
  for (const auto& [type, value] : {std::pair("enabled", "True"), std::pair("disabled", "False")})
    EXPECT_EQ(prompt(read_message, str(R"({"model": "bytes", "max_tokens": 5, "thinking": {"type": ")", type,
                                       R"("}, "messages": [{"role": "user", "content": "q"}]})")),
              str(" ", value, " "));
}

TEST(ApiTest, ToolsReachTheTemplate) {
  const ServedModel served = model();
  const std::string shown = R"([{"type": "function", "function": {"name": "f", "description": "d", )"
                            R"("parameters": {"z": 1, "a": 2}}}])";
  const auto tools_of = [&](Read read, const std::string& body) {
    const std::string prompt = prompt_of(read(parse_ordered_json(body, "body"), served, nullptr));
    return prompt.substr(prompt.find("}]") + 2);
  };
  EXPECT_EQ(tools_of(read_response,
                     R"({"input": "q", "tools": [{"type": "function", "name": "f", "description": "d",
    "strict": true, "parameters": {"z": 1, "a": 2}}]})"),
            shown);
  EXPECT_EQ(tools_of(read_message,
                     R"({"model": "bytes", "max_tokens": 5, "messages": [{"role": "user", "content": "q"}],
    "tools": [{"type": "custom", "name": "f", "description": "d", "input_schema": {"z": 1, "a": 2}}]})"),
            shown);
}

TEST(ApiTest, OneCallAtATime) {
  const ServedModel served = model();
  const auto ends = [&](Read read, const std::string& body) {
    return read(parse_ordered_json(body, "body"), served, nullptr).request.ends_after_call;
  };
  const std::string chat = R"({"messages": [{"role": "user", "content": "q"}], "tools": [{"type": "function",
    "function": {"name": "f", "parameters": {}}}], "parallel_tool_calls": )";
  EXPECT_TRUE(ends(read_chat_completion, chat + "false}"));
  EXPECT_FALSE(ends(read_chat_completion, chat + "true}"));
  EXPECT_TRUE(ends(read_chat_completion, chat + R"(false, "tool_choice": "required"})"));
  const std::string message =
      R"({"model": "bytes", "max_tokens": 5, "messages": [{"role": "user", "content": "q"}],
    "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": )";
  EXPECT_TRUE(ends(read_message, message + R"("auto", "disable_parallel_tool_use": true}})"));
  EXPECT_TRUE(ends(read_message, message + R"("tool", "name": "f", "disable_parallel_tool_use": true}})"));
  EXPECT_FALSE(ends(read_message, message + R"("any"}})"));
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
