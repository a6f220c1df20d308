// The tokenizer and the chat template for tests written in Python: JSON lines in, one JSON line out for each.
//
//   {"op": "load", "name": N, "path": P}                     {"vocab_size": …}
//   {"op": "encode", "name": N, "text": T, "add_special_tokens": B}   {"ids": […]}
//   {"op": "decode", "name": N, "ids": […], "skip_special_tokens": B} {"text": …, "streamed": …}
//   {"op": "chat", "path": P, "messages": […], "tools": […], "documents": […], "variables": {…}, "now": seconds,
//    "add_generation_prompt": B}                             {"text": …}
//   {"op": "parse", "reasoning_parser": N, "tool_call_parser": N, "tools": […], "in_reasoning": B, "text": T}
//                                                            {"reasoning": …, "content": …, "calls": […]}
//   {"op": "byte_level", "path": P}   writes the files of `bough init` there   {}
//
// A UserError gives {"error": message}.
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "base/error.h"
#include "text/chat_template.h"
#include "text/output_parser.h"
#include "text/tokenizer.h"

namespace {

using bough::Tokenizer;
using nlohmann::json;

json chat(const bough::OrderedJson& request) {
  bough::Conversation conversation;
  conversation.messages = request.at("messages");
  conversation.tools = request.value("tools", bough::OrderedJson());
  conversation.documents = request.value("documents", bough::OrderedJson());
  conversation.variables = request.value("variables", bough::OrderedJson::object());
  conversation.add_generation_prompt = request.value("add_generation_prompt", false);
  if (request.contains("now")) conversation.now = request.at("now").get<std::time_t>();
  const auto chat_template = bough::ChatTemplate::from_directory(request.at("path").get<std::string>());
  return {{"text", chat_template.render(conversation)}};
}

json parse(const bough::OrderedJson& request) {
  const bough::OutputParser parser(
      request.value("reasoning_parser", ""), request.value("tool_call_parser", ""),
      request.value("tools", bough::OrderedJson()),
      {.in_reasoning = request.value("in_reasoning", false), .forced = request.value("forced", "")});
  const bough::OutputParts parts = bough::OutputParser::parse(parser, request.at("text").get<std::string>());
  json calls = json::array();
  for (const bough::ToolCall& call : parts.calls)
    calls.push_back(
        {{"name", call.name}, {"arguments", call.arguments}, {"id", call.id}, {"error", call.error}});
  return {{"reasoning", parts.reasoning}, {"content", parts.content}, {"calls", calls}};
}

json answer(const json& request, const std::string& line, std::map<std::string, Tokenizer>& tokenizers) {
  const std::string op = request.at("op");
  if (op == "load") {
    const auto [entry, fresh] = tokenizers.insert_or_assign(
        request.at("name"), Tokenizer::load(request.at("path").get<std::string>()));
    return {{"vocab_size", entry->second.vocab_size()}};
  }
  if (op == "encode")
    return {{"ids",
             tokenizers.at(request.at("name"))
                 .encode(request.at("text").get<std::string>(), request.value("add_special_tokens", false))}};
  if (op == "decode") {
    const Tokenizer& tokenizer = tokenizers.at(request.at("name"));
    const std::vector<int32_t> ids = request.at("ids");
    const bool skip = request.value("skip_special_tokens", true);
    bough::StreamDecoder stream(tokenizer, skip);
    std::string streamed;
    for (const int32_t id : ids) streamed += stream.push(id);
    return {{"text", tokenizer.decode(ids, skip)}, {"streamed", streamed + stream.finish()}};
  }
  if (op == "chat") {
    return chat(bough::parse_ordered_json(line, "the request"));
  }
  if (op == "parse") return parse(bough::parse_ordered_json(line, "the request"));
  if (op == "byte_level") {
    const std::string directory = request.at("path");
    std::ofstream(directory + "/tokenizer.json") << bough::byte_level_tokenizer_json();
    std::ofstream(directory + "/tokenizer_config.json") << bough::byte_level_tokenizer_config_json();
    return json::object();
  }
  return {{"error", "unknown op " + op}};
}

}  // namespace

int main() {
  std::map<std::string, Tokenizer> tokenizers;
  for (std::string line; std::getline(std::cin, line);) {
    json out;
    try {
      out = answer(json::parse(line), line, tokenizers);
    } catch (const bough::UserError& error) {
      out = {{"error", error.what()}};
    }
    std::cout << out.dump() << std::endl;
  }
}
