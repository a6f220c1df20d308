// Every case is parsed whole, split in two at every byte, and byte by byte. The three results must be equal.
#include "text/output_parser.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "text/chat_template.h"

namespace bough {
namespace {

const char* const kTools =
    R"([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"},
                   "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}}}])";

struct Case {
  std::string reasoning_parser, tool_call_parser, text;
  std::string reasoning, content;
  std::vector<std::string>
      calls;  // "name arguments"; "#id " in front if the call has an id; "!" if malformed
};

OutputParser parser_of(const Case& c) {
  return OutputParser(c.reasoning_parser, c.tool_call_parser, parse_ordered_json(kTools, "tools"));
}

void check(const Case& c) {
  SCOPED_TRACE(c.tool_call_parser + " " + c.reasoning_parser + ": " + c.text);
  const OutputParts whole = OutputParser::parse(parser_of(c), c.text);
  EXPECT_EQ(whole.reasoning, c.reasoning);
  EXPECT_EQ(whole.content, c.content);
  std::vector<std::string> calls;
  for (const ToolCall& call : whole.calls)
    calls.push_back(call.valid()
                        ? str(call.id.empty() ? "" : "#" + call.id + " ", call.name, " ", call.arguments)
                        : "!" + call.text);
  EXPECT_EQ(calls, c.calls);
  for (size_t split = 0; split <= c.text.size(); ++split) {
    OutputParser parser = parser_of(c);
    OutputParts parts = parser.feed(std::string_view(c.text).substr(0, split));
    parts.append(parser.feed(std::string_view(c.text).substr(split)));
    parts.append(parser.finish());
    ASSERT_TRUE(parts == whole) << "split at " << split;
  }
  OutputParser parser = parser_of(c);
  OutputParts parts;
  for (const char byte : c.text) parts.append(parser.feed(std::string_view(&byte, 1)));
  parts.append(parser.finish());
  EXPECT_TRUE(parts == whole) << "byte by byte";
}

TEST(OutputParser, Reasoning) {
  check({"deepseek_r1", "", "why\n</think>\n\nso", "why\n", "\n\nso", {}});
  check({"deepseek_r1", "", "<think>\nwhy</think>so", "\nwhy", "so", {}});
  check({"deepseek_r1", "", "why </thin", "why </thin", "", {}});
  check({"qwen3", "", "\n<think>\nwhy\n</think>\n\nso</think>", "\nwhy\n", "\n\nso</think>", {}});
  check({"qwen3", "", "no <think>thought</think>", "", "no <think>thought</think>", {}});
  check({"qwen3", "", "<thin", "", "<thin", {}});
  check({"qwen3", "", "", "", "", {}});
  check({"mistral", "", "[THINK]a[/THINK]b", "a", "b", {}});
  check({"seed_oss", "", "<seed:think>a</seed:think>b", "a", "b", {}});
  check({"granite", "", "Here is my thought process: a Here is my response: b", " a ", " b", {}});
  check({"", "", "<think>a</think>", "", "<think>a</think>", {}});
}

TEST(OutputParser, ThePromptMayHaveBegunTheReasoning) {
  EXPECT_TRUE(opens_reasoning("qwen3", "<|im_start|>assistant\n<think>\n"));
  EXPECT_FALSE(opens_reasoning("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n"));
  EXPECT_FALSE(opens_reasoning("openai_gptoss", "<|start|>assistant"));
  const OutputParts parts =
      OutputParser::parse(OutputParser("qwen3", "", {}, {.in_reasoning = true}), "why</think>so");
  EXPECT_EQ(parts.reasoning, "why");
  EXPECT_EQ(parts.content, "so");
}

TEST(OutputParser, Hermes) {
  const std::string call =
      "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"b\": 1, \"a\": \"é\"}}\n</tool_call>";
  check({"", "hermes", "So.\n" + call, "", "So.\n", {"f {\"b\": 1, \"a\": \"é\"}"}});
  check({"qwen3",
         "hermes",
         "<think>x</think>\n\n" + call + "\n" + call + "\n",
         "x",
         "\n\n",
         {"f {\"b\": 1, \"a\": \"é\"}", "f {\"b\": 1, \"a\": \"é\"}"}});
  check({"", "hermes", call + "\nand more", "", "and more", {"f {\"b\": 1, \"a\": \"é\"}"}});
  // The end marker inside a string; no end marker, and arguments as a text; no arguments; no call.
  check({"",
         "hermes",
         R"(<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\""}}</tool_call>)",
         "",
         "",
         {R"(f {"a": "</tool_call>\""})"}});
  check({"", "hermes", R"(<tool_call>{"name": "f", "arguments": "{\"a\": 1}"})", "", "", {R"(f {"a": 1})"}});
  check({"", "hermes", R"(<tool_call>{"name": "f"}</tool_call>)", "", "", {"f {}"}});
  check({"", "hermes", "a < b <tool_cal", "", "a < b <tool_cal", {}});
  check({"", "qwen25", "no call", "", "no call", {}});
}

TEST(OutputParser, MalformedCallsAreReturnedAsInvalid) {
  for (const std::string body :
       {"{\"name\": \"f\", \"arguments\": {\"a\": }}", "f(1)", "{}", "", "{\"name\": 1}",
        "{\"name\": \"f\", \"arguments\": [1]}", "[]", "{\"name\": \"f\", \"name\": \"g\"}",
        "{\"name\": \"f\", \"arguments\": {\"a\": 123456789012345678901234}}"}) {
    const std::string text = "<tool_call>" + body + "</tool_call>";
    check({"", "hermes", text + "\nrest", "", "rest", {"!" + text}});
  }
  // A string that is not closed hides the end marker of its call, but not the next call.
  const std::string open = "<tool_call>{\"name\": \"f}</tool_call>";
  check({"", "hermes", open + "<tool_call>{\"name\": \"g\"}</tool_call>", "", "", {"!" + open, "g {}"}});
  check({"", "hermes", "<tool_call>{\"name\": \"f\", ", "", "", {"!<tool_call>{\"name\": \"f\", "}});
  for (const std::string& name : tool_call_parser_names()) {
    const ToolFormat* format = find_tool_format(name);
    if (format->begins.empty()) continue;
    const std::string text = std::string(format->begins[0]) + "(no call" + std::string(format->end);
    const OutputParts parts = OutputParser::parse(OutputParser("", name), text);
    ASSERT_EQ(parts.calls.size(), 1u) << name;
    EXPECT_FALSE(parts.calls[0].valid()) << name;
    EXPECT_EQ(parts.calls[0].text, text) << name;
  }
}

// Parsing the rest of an output after a forced beginning gives the same parts as parsing the whole output.
TEST(OutputParser, ACallMayBeForced) {
  const auto parse_forced = [](const std::string& reasoning, const std::string& name, bool in_reasoning,
                               const std::string& rest) {
    OutputBegin begin{in_reasoning, forced_call(reasoning, name, in_reasoning)};
    const OutputParts whole =
        OutputParser::parse(OutputParser(reasoning, name, {}, {in_reasoning, ""}), begin.forced + rest);
    const OutputParts forced = OutputParser::parse(OutputParser(reasoning, name, {}, begin), rest);
    EXPECT_TRUE(forced == whole) << name;
    return forced;
  };
  for (const std::string& name : tool_call_parser_names()) {
    const ToolFormat* format = find_tool_format(name);
    if (format->is_harmony) {
      EXPECT_THROW(forced_call("", name, false), UserError);
      continue;
    }
    const OutputParts parts = parse_forced("", name, false, "(no call" + std::string(format->end));
    // text that only resembles a call is content in these formats
    const bool is_plain = !format->bare.empty();
    EXPECT_EQ(parts.calls.size(), is_plain ? 0u : 1u) << name;
    EXPECT_EQ(parts.content.empty(), !is_plain) << name;
  }
  const std::string call = "\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
  for (const auto& [reasoning, in_reasoning] : {std::pair("", false), std::pair("qwen3", false),
                                                std::pair("qwen3", true), std::pair("deepseek_r1", false)}) {
    const OutputParts parts = parse_forced(reasoning, "hermes", in_reasoning, call);
    ASSERT_EQ(parts.calls.size(), 1u) << reasoning;
    EXPECT_EQ(parts.calls[0].name, "f");
    EXPECT_EQ(parts.reasoning, "");
  }
  EXPECT_EQ(forced_call("qwen3", "hermes", false), "<tool_call>");
  EXPECT_EQ(forced_call("qwen3", "hermes", true), "</think>\n\n<tool_call>");
  EXPECT_EQ(forced_call("", "deepseek_v3", false), "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>");
  EXPECT_EQ(forced_call("", "llama4_pythonic", false), "[");
  EXPECT_EQ(parse_forced("", "llama3_json", false, R"("name": "f", "parameters": {}})").calls.size(), 1u);
  EXPECT_EQ(parse_forced("", "pythonic", false, "f(a=1)]").calls.size(), 1u);
}

TEST(OutputParser, Tags) {
  check({"",
         "qwen3_coder",
         "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</"
         "parameter>\n"
         "<parameter=deep>\n{\"x\": [1, null]}\n</parameter>\n<parameter=other>\ntwo\nlines\n</parameter>\n"
         "</function>\n</tool_call>",
         "",
         "",
         {R"(weather {"city": "12", "days": 3, "deep": {"x": [1, null]}, "other": "two\nlines"})"}});
  check({"",
         "qwen3_coder",
         "<tool_call><function=weather><parameter=maybe>null</parameter><parameter=days>many"
         "</parameter></function></tool_call>",
         "",
         "",
         {R"(weather {"maybe": null, "days": "many"})"}});
  check({"", "qwen3_coder", "<tool_call><function=f></function></tool_call>", "", "", {"f {}"}});
  check({"",
         "qwen3_coder",
         "<tool_call><function=f><parameter=a>1</function></tool_call>",
         "",
         "",
         {"!<tool_call><function=f><parameter=a>1</function></tool_call>"}});
  check({"seed_oss",
         "seed_oss",
         "<seed:think>t</seed:think><seed:tool_call><function=f><parameter=a>1</parameter>"
         "</function></seed:tool_call>",
         "t",
         "",
         {R"(f {"a": "1"})"}});
  check({"",
         "minimax_m2",
         "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"days\">2</parameter>\n"
         "</invoke>\n<invoke name=\"g\"></invoke></minimax:tool_call>",
         "",
         "",
         {R"(weather {"days": 2})", "g {}"}});
  check({"glm45",
         "glm45",
         "<think>t</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n"
         "<arg_key>x</arg_key>\n<arg_value>[1, \"a\"]</arg_value>\n</tool_call>\n<tool_call>g</tool_call>",
         "t",
         "\n",
         {R"(weather {"city": "5", "x": [1, "a"]})", "g {}"}});
}

TEST(OutputParser, BareAndBracketed) {
  check({"",
         "llama3_json",
         R"({"name": "f", "parameters": {"a": "}"}}; {"name": "g", "parameters": {}})",
         "",
         "",
         {R"(f {"a": "}"})", "g {}"}});
  check({"",
         "llama3_json",
         R"(<|python_tag|>{"name": "f", "parameters": {"a": 1}})",
         "",
         "",
         {R"(f {"a": 1})"}});
  check({"", "llama3_json", R"({"answer": {"a": 1}} is it)", "", R"({"answer": {"a": 1}} is it)", {}});
  check({"", "llama3_json", "{not json", "", "{not json", {}});
  check({"",
         "llama3_json",
         R"(It is {"name": "f", "parameters": {}})",
         "",
         R"(It is {"name": "f", "parameters": {}})",
         {}});
  check(
      {"",
       "mistral",
       R"(Sure. [TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}, "id": "abc"}])",
       "",
       "Sure. ",
       {R"(f {"a": "]"})", "#abc g {}"}});
  check({"",
         "mistral",
         R"([TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]id9[ARGS]{})",
         "",
         "",
         {R"(f {"a": 1})", "#id9 g {}"}});
  check({"", "mistral", R"([TOOL_CALLS]f{"a": [1]})", "", "", {R"(f {"a": [1]})"}});
  check({"",
         "phi4_mini_json",
         R"(functools[{"name": "f", "arguments": {"a": 1}}])",
         "",
         "",
         {R"(f {"a": 1})"}});
  check({"", "phi4_mini_json", "functools.partial", "", "functools.partial", {}});
  check({"", "granite", R"(<|tool_call|>[{"name": "f", "arguments": {}}])", "", "", {"f {}"}});
  check(
      {"",
       "jamba",
       R"(x<tool_calls>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1.0}}]</tool_calls>)",
       "",
       "x",
       {"f {}", R"(g {"a": 1.0})"}});
  check({"",
         "internlm",
         "a<|action_start|><|plugin|>\n{\"name\": \"f\", \"parameters\": {\"a\": 1}}\n<|action_end|>",
         "",
         "a",
         {R"(f {"a": 1})"}});
}

TEST(OutputParser, Sections) {
  check({"deepseek_r1",
         "deepseek_v3",
         "t</think>a<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": "
         "1}\n```<｜tool▁call▁end｜>\n"
         "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><"
         "｜tool▁calls▁end｜>",
         "t",
         "a",
         {R"(f {"a": 1})", "g {}"}});
  check({"",
         "deepseek_v31",
         "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": "
         "\"```\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
         "",
         "",
         {R"(f {"a": "```"})"}});
  check({"",
         "kimi_k2",
         "a<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": 1}"
         "<|tool_call_end|><|tool_calls_section_end|>",
         "",
         "a",
         {R"(#functions.f:0 f {"a": 1})"}});
}

TEST(OutputParser, Python) {
  check({"",
         "pythonic",
         R"([f(a=1, b='x"]', c=[True, None, -2.5e3], d={"k": (1,)}), g.h()])",
         "",
         "",
         {R"(f {"a": 1, "b": "x\"]", "c": [true, null, -2500.0], "d": {"k": [1]}})", "g.h {}"}});
  check({"", "pythonic", "[1] is a list", "", "[1] is a list", {}});
  check({"", "pythonic", "[f(a=b)]", "", "[f(a=b)]", {}});
  check({"", "pythonic", "plain", "", "plain", {}});
  check({"",
         "llama4_pythonic",
         "<|python_start|>[f(a='it\\'s')]<|python_end|>",
         "",
         "",
         {R"(f {"a": "it's"})"}});
  check({"", "lfm2", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>done", "", "done", {R"(f {"a": 1})"}});
  check({"",
         "olmo3",
         "<function_calls>f(a=1)\ng(b=\"\\n\")</function_calls>",
         "",
         "",
         {R"(f {"a": 1})", R"(g {"b": "\n"})"}});
  check({"",
         "lfm2",
         "<|tool_call_start|>[f(1)]<|tool_call_end|>",
         "",
         "",
         {"!<|tool_call_start|>[f(1)]<|tool_call_end|>"}});
}

TEST(OutputParser, GptOss) {
  check({"openai_gptoss",
         "openai",
         "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary to=functions.f "
         "<|constrain|>json<|message|>{\"a\": 1}<|call|>",
         "why",
         "",
         {R"(f {"a": 1})"}});
  check(
      {"openai_gptoss",
       "",
       "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant<|channel|>final<|message|>so<|return|>",
       "a < b",
       "so",
       {}});
  check({"",
         "openai",
         "<|channel|>commentary to=functions.f<|message|>{oops<|call|>",
         "",
         "",
         {"!<|channel|>commentary to=functions.f<|message|>{oops"}});
  check(
      {"",
       "openai",
       "<|channel|>commentary<|message|>I call.<|end|><|start|>assistant to=functions.f<|channel|>commentary"
       "<|message|>{}",
       "",
       "I call.",
       {"f {}"}});
  check({"", "openai", "no message", "", "no message", {}});
}

// Types of arguments behind references and combinations, as Pydantic writes them.
TEST(OutputParser, TypesOfArguments) {
  const OrderedJson tools =
      parse_ordered_json(R"([{"type": "function", "function": {"name": "f", "parameters": {
    "$defs": {"Kind": {"enum": ["1", "2"]}, "Deep": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"},
              "More": {"properties": {"more": {"type": "integer"}}}},
    "properties": {"kind": {"$ref": "#/$defs/Kind"}, "deep": {"allOf": [{"$ref": "#/$defs/Deep"}]},
      "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "text": {"type": ["string", "null"]},
      "list": {"items": {"type": "integer"}}, "either": {"oneOf": [{"const": "7"}, {"type": "number"}]},
      "loop": {"$ref": "#/$defs/Loop"}, "lost": {"$ref": "#/$defs/None"}, "flag": {"type": "boolean"}},
    "allOf": [{"$ref": "#/$defs/More"}], "additionalProperties": {"type": "number"}}}}])",
                         "tools");
  const auto read = [&](const std::string& key, const std::string& value) {
    const std::string text =
        str("<tool_call><function=f><parameter=", key, ">", value, "</parameter></function></tool_call>");
    const OutputParts parts = OutputParser::parse(OutputParser("", "qwen3_coder", tools), text);
    return parts.calls.at(0).arguments;
  };
  EXPECT_EQ(read("kind", "1"), R"({"kind": "1"})");
  EXPECT_EQ(read("deep", R"({"a": 1})"), R"({"deep": {"a": 1}})");
  EXPECT_EQ(read("deep", "{'a': True, 'b': [None, 'it\\'s', (1, 2.5)], 'c': '\\xe9\\u20ac\\U0001f600'}"),
            R"({"deep": {"a": true, "b": [null, "it's", [1, 2.5]], "c": "é€😀"}})");
  EXPECT_EQ(read("deep", "{'a': '\\ud800'}"), R"({"deep": "{'a': '\\ud800'}"})");  // no character
  EXPECT_EQ(read("deep", "no object"), R"({"deep": "no object"})");
  EXPECT_EQ(read("maybe", "5"), R"({"maybe": 5})");
  EXPECT_EQ(read("maybe", "None"), R"({"maybe": null})");
  EXPECT_EQ(read("text", "5"), R"({"text": "5"})");
  EXPECT_EQ(read("text", "None"), R"({"text": null})");
  EXPECT_EQ(read("text", "'None'"), R"({"text": "'None'"})");
  EXPECT_EQ(read("list", "['a', 1]"), R"({"list": ["a", 1]})");
  EXPECT_EQ(read("either", "7"), R"({"either": "7"})");
  EXPECT_EQ(read("loop", "7"), R"({"loop": "7"})");
  EXPECT_EQ(read("lost", "7"), R"({"lost": "7"})");
  EXPECT_EQ(read("flag", "True"), R"({"flag": true})");
  EXPECT_EQ(read("more", "7"), R"({"more": 7})");
  EXPECT_EQ(read("other", "7"), R"({"other": 7})");
}

TEST(OutputParser, CallsWrittenAsPythonDicts) {
  check({"",
         "hermes",
         "<tool_call>{'name': 'f', 'arguments': {'is': True, 'not': None}}</tool_call>",
         "",
         "",
         {R"(f {"is": true, "not": null})"}});
  check({"", "llama3_json", "{'name': 'f', 'parameters': {'a': 'b'}}", "", "", {R"(f {"a": "b"})"}});
}

TEST(OutputParser, AnOutputMayEndAfterItsFirstCall) {
  const std::vector<std::pair<std::string, std::string>> outputs = {
      {"hermes",
       R"(a<tool_call>{"name": </tool_call>b<tool_call>{"name": "f"}</tool_call>c<tool_call>{"name": "g"})"},
      {"hermes", R"(a<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>c)"},
      {"mistral", R"(ab[TOOL_CALLS][{"name": "f"}, {"name": "g"}] c)"},
      {"openai",
       "<|channel|>commentary<|message|>ab<|end|><|start|>assistant to=functions.f<|message|>{}<|call|>"
       "<|start|>assistant to=functions.g<|message|>{}<|call|>"}};
  for (const auto& [name, text] : outputs)
    for (size_t split = 0; split <= text.size(); ++split) {
      OutputParser parser("", name);
      parser.end_after_call();
      OutputParts parts = parser.feed(std::string_view(text).substr(0, split));
      parts.append(parser.feed(std::string_view(text).substr(split)));
      EXPECT_TRUE(parser.is_over()) << text;
      parts.append(parser.finish());
      std::string names;
      for (const ToolCall& call : parts.calls) names += call.valid() ? call.name : "!";
      EXPECT_TRUE(names == "f" || names == "!f") << names << " " << text;
      EXPECT_TRUE(parts.content.ends_with(name == "hermes" && names == "f" ? "a" : "b")) << parts.content;
    }
}

TEST(OutputParser, WrittenCallsAreReadAgain) {
  const OrderedJson calls = parse_ordered_json(R"([
    {"id": "1", "type": "function",
     "function": {"name": "f", "arguments": {"a": "it's \"é\"", "b": [1, null]}}},
    {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}}])",
                                               "calls");
  int64_t num_written = 0;
  for (const std::string& name : tool_call_parser_names()) {
    const auto written = written_calls(name, calls);
    if (!written) continue;
    ++num_written;
    const OutputParts parts = OutputParser::parse(OutputParser("", name), *written);
    ASSERT_EQ(parts.calls.size(), 2) << name << " " << *written;
    EXPECT_EQ(parts.calls[0].name + parts.calls[0].arguments, R"(f{"a": "it's \"é\"", "b": [1, null]})")
        << name;
    EXPECT_EQ(parts.calls[1].name + parts.calls[1].arguments, "g{}") << name;
    EXPECT_EQ(parts.content, "") << name;
  }
  EXPECT_GT(num_written, 12);
  EXPECT_FALSE(written_calls("qwen3_coder", calls));
}

TEST(OutputParser, NamesAreKnownOrListed) {
  for (const std::string& name : tool_call_parser_names()) EXPECT_NO_THROW(OutputParser("", name)) << name;
  for (const std::string& name : reasoning_parser_names()) EXPECT_NO_THROW(OutputParser(name, "")) << name;
  try {
    OutputParser("", "hermez");
    FAIL();
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("hermes"), std::string::npos);
  }
}

// Pieces of every format are mixed at random. Nothing crashes, no text is lost, and every split gives the
// same result.
TEST(OutputParser, RandomOutputs) {
  uint64_t state = 7;
  const auto draw = [&](size_t n) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<size_t>(state >> 33) % n;
  };
  const std::vector<std::string> pieces = {"{",
                                           "}",
                                           "[",
                                           "]",
                                           "\"",
                                           "'",
                                           "\\",
                                           "(",
                                           ")",
                                           "=",
                                           ",",
                                           ":",
                                           "\n",
                                           " ",
                                           "a",
                                           "1",
                                           "\"name\": \"f\"",
                                           "\"arguments\": {}",
                                           "<function=f>",
                                           "</function>",
                                           "<",
                                           "f(a=1)",
                                           "<|message|>",
                                           "<|channel|>",
                                           "to=f",
                                           "```",
                                           "<arg_key>",
                                           "</arg_key>",
                                           "é",
                                           "\xff"};
  for (const std::string& name : tool_call_parser_names()) {
    const ToolFormat* format = find_tool_format(name);
    std::vector<std::string> all = pieces;
    for (int i = 0; i < 4; ++i) {
      for (const auto marker : format->begins) all.emplace_back(marker);
      for (const auto marker : format->dropped) all.emplace_back(marker);
      if (!format->end.empty()) all.emplace_back(format->end);
    }
    for (int round = 0; round < 150; ++round) {
      std::string text;
      for (size_t i = draw(14) + 1; i > 0; --i) text += all[draw(all.size())];
      const OutputParser fresh(round % 3 ? "" : "qwen3", name);
      const OutputParts whole = OutputParser::parse(fresh, text);
      for (size_t split = 0; split <= text.size(); ++split) {
        OutputParser parser = fresh;
        OutputParts parts = parser.feed(std::string_view(text).substr(0, split));
        parts.append(parser.feed(std::string_view(text).substr(split)));
        parts.append(parser.finish());
        ASSERT_TRUE(parts == whole) << name << " split at " << split << " of " << text;
      }
    }
  }
}

}  // namespace
}  // namespace bough
