// The server's APIs without a server, for tests written in Python: JSON lines in, one JSON line out for each.
//
//   {"path": "/v1/messages", "body": {…}, "template": T, "tool_call_parser": N, "reasoning_parser": N, "output": O}
//       {"status": 200, "prompt": P, "body": B}
//
// O is the model's output, P the prompt as text, B the answer's body: JSON, or the events of a stream. Tokens are
// bytes. {"template": T, "parser_of": true} gives {"tool_call_parser": N}.
#include <iostream>
#include <map>
#include <optional>
#include <string>

#include "base/error.h"
#include "serve/api.h"
#include "serve/sample_text.h"

namespace {

using bough::Json;
using bough::OrderedJson;

struct Path {
  bough::ReadRequest (*read)(const OrderedJson&, const bough::ServedModel&, const bough::SessionPointer&);
  Json (*error)(const bough::ApiError&);
};
const std::map<std::string, Path> kPaths = {
    {"/v1/chat/completions", {bough::read_chat_completion, bough::openai_error}},
    {"/v1/completions", {bough::read_completion, bough::openai_error}},
    {"/v1/responses", {bough::read_response, bough::openai_error}},
    {"/v1/messages", {bough::read_message, bough::anthropic_error}},
    {"/v1/messages/count_tokens", {bough::read_token_count, bough::anthropic_error}}};

bough::ServedModel model_of(const OrderedJson& request) {
  bough::ServeSettings settings;
  const auto chat_template = bough::ChatTemplate::from_text(request.at("template").get<std::string>(), "test",
                                                            {{"bos_token", "<s>"}, {"eos_token", "</s>"}});
  settings.tool_call_parser = request.value("tool_call_parser", "auto");
  if (settings.tool_call_parser == bough::kAutoParser)
    settings.tool_call_parser = chat_template.tool_call_parser();
  settings.reasoning_parser = request.value("reasoning_parser", "");
  return {.names = {"bytes"},
          .tokenizer = bough::Tokenizer::from_json(bough::byte_level_tokenizer_json(), "tokenizer.json"),
          .chat_template = chat_template,
          .max_length = 1 << 20,
          .vocab_size = 259,
          .settings = settings};
}

Json answer(const OrderedJson& asked) {
  static std::map<std::string, bough::ServedModel> models;
  const std::string key = asked.at("template").get<std::string>() + asked.value("tool_call_parser", "auto") +
                          "\n" + asked.value("reasoning_parser", "");
  if (!models.contains(key)) models.emplace(key, model_of(asked));
  const bough::ServedModel& model = models.at(key);
  if (asked.contains("parser_of")) return {{"tool_call_parser", model.settings.tool_call_parser}};
  const Path& path = kPaths.at(asked.at("path").get<std::string>());
  try {
    bough::ReadRequest read = path.read(asked.at("body"), model, nullptr);
    const bough::ServedRequest& request = read.request;
    const std::string prompt = model.tokenizer.decode(request.prompts.at(0), false);
    if (read.ready) return {{"status", 200}, {"prompt", prompt}, {"body", bough::dump_line(*read.ready)}};
    bough::OutputParser parser(request.reasoning_parser, request.tool_call_parser, request.tools,
                               request.begun);
    if (request.ends_after_call) parser.end_after_call();
    bough::SampleText text(model.tokenizer, parser, &request.sampling, false);
    std::vector<bough::ChoiceDelta> choices(1);
    std::string stream = read.answer->begin();
    const auto add = [&](bough::ChoiceDelta delta) {
      stream += read.answer->add(0, delta);
      choices[0].parts.append(delta.parts);
      choices[0].tokens.insert(choices[0].tokens.end(), delta.tokens.begin(), delta.tokens.end());
      choices[0].end = delta.end;
    };
    for (const char byte : asked.value("output", "")) {
      const int32_t token = static_cast<unsigned char>(byte);
      add({.parts = text.push(token), .tokens = {{token, -1.0, {}}}, .end = {}});
    }
    constexpr int32_t kStop = 258;
    bough::ChoiceDelta last{.parts = text.finish(kStop, bough::FinishReason::kStop),
                            .tokens = {{kStop, -1.0, {}}},
                            .end = text.end()};
    add(std::move(last));
    const std::string body =
        request.stream ? stream + read.answer->end(choices) : bough::dump_line(read.answer->whole(choices));
    return {{"status", 200}, {"prompt", prompt}, {"body", body}};
  } catch (const bough::ApiError& error) {
    return {{"status", error.status}, {"body", bough::dump_line(path.error(error))}};
  }
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    Json out;
    try {
      out = answer(bough::parse_ordered_json(line, "the request"));
    } catch (const bough::UserError& error) {
      out = {{"error", error.what()}};
    }
    std::cout << bough::dump_line(out) << std::endl;
  }
}
