#include "control/conversation.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/random.h"
#include "control/fakes.h"

namespace bough {
namespace {

// Special tokens have ids from 300. "ab" is one token, 256. Every other byte is its own token.
class TestCodec final : public testing::TemplateChat {
 public:
  explicit TestCodec(const std::string& jinja) : TemplateChat(ChatTemplate::from_text(jinja, "test")) {}
  std::vector<int32_t> encode_chat(std::string_view text, bool) const override {
    std::vector<int32_t> ids;
    while (!text.empty()) {
      size_t length = 1;
      int32_t id = static_cast<unsigned char>(text[0]);
      if (text.starts_with("ab")) id = 256, length = 2;
      for (size_t i = 0; i < kSpecial.size(); ++i)
        if (text.starts_with(kSpecial[i])) id = 300 + static_cast<int32_t>(i), length = kSpecial[i].size();
      ids.push_back(id);
      text.remove_prefix(length);
    }
    return ids;
  }
  std::string text_of(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      if (id >= 300) text += kSpecial[static_cast<size_t>(id - 300)];
      else if (id == 256) text += "ab";
      else text += static_cast<char>(id);
    }
    return text;
  }
  int32_t special(std::string_view token) const {
    return 300 + static_cast<int32_t>(std::find(kSpecial.begin(), kSpecial.end(), token) - kSpecial.begin());
  }

  static constexpr std::array<std::string_view, 5> kSpecial = {"<|end|>", "<|user|>", "<|assistant|>",
                                                               "<|tool|>", "<|eot|>"};

 private:
  ChatTemplate template_;
};

// When the template stops showing a turn's reasoning: never, after any later message, or after a later user
// message.
enum class Drops { kNever, kAtOnce, kAtUser };

struct Case {
  const char* name;
  const char* jinja;
  const char* stop;  // the token that ends a turn before a tool's answer
  Drops drops;
  bool shows_calls;
  const char* parser = "hermes";
  const char* reasoning = "qwen3";
  bool opens_thinking = false;  // true if the prompt opens the reasoning, so that every turn has one
};

constexpr const char* kPlain =
    "{%- for m in messages -%}<|{{ m.role if m.role != 'system' else 'user' }}|>{{ m.content }}<|end|>\n"
    "{% endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}";
// Calls and reasoning are shown, also the reasoning of earlier turns.
constexpr const char* kKeeps =
    "{%- for m in messages -%}<|{{ m.role }}|>"
    "{%- if m.reasoning_content is defined -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}"
    "{{ m.content }}{%- if m.tool_calls -%}{%- for c in m.tool_calls -%}"
    "<tool_call>{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson "
    "}}}</tool_call>"
    "{%- endfor -%}{%- endif -%}<|eot|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}";
// The reasoning of all messages but the last is dropped.
constexpr const char* kDrops =
    "{%- for m in messages -%}<|{{ m.role }}|>"
    "{%- if m.reasoning_content is defined and loop.last -%}<think>{{ m.reasoning_content }}</think>{%- "
    "endif -%}"
    "{{ m.content }}{%- if m.tool_calls -%}{%- for c in m.tool_calls -%}"
    "<tool_call>{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson "
    "}}}</tool_call>"
    "{%- endfor -%}{%- endif -%}<|end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}";
// As in GLM's template: a turn ends when the next one begins.
constexpr const char* kOpen =
    "{%- for m in messages -%}<|{{ m.role }}|>\n"
    "{%- if m.reasoning_content is defined -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}"
    "{{ m.content }}{%- if m.tool_calls -%}{%- for c in m.tool_calls -%}"
    "<tool_call>{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson "
    "}}}</tool_call>"
    "{%- endfor -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>\n{%- endif -%}";

// As in Qwen3's template: reasoning is shown after the last user message. Tool answers have the user role.
constexpr const char* kLikeQwen3 =
    "{%- set ns = namespace(last=0) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}<|assistant|>"
    "{%- if m.reasoning_content is defined and loop.index0 > ns.last -%}"
    "<think>{{ m.reasoning_content }}</think>{%- endif -%}{{ m.content }}"
    "{%- if m.tool_calls -%}{%- for c in m.tool_calls -%}"
    "<tool_call>{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson "
    "}}}</tool_call>{%- endfor -%}{%- endif -%}<|end|>{{ '\\n' }}"
    "{%- elif m.role == 'tool' -%}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' -%}<|user|>{%- endif -%}"
    "<tool_response>{{ m.content }}</tool_response>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}<|end|>{{ '\\n' }}{%- endif -%}"
    "{%- else -%}<|user|>{{ m.content }}<|end|>{{ '\\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}";
// As in Llama 3's template: a call is the whole message, and there is no reasoning.
constexpr const char* kLikeLlama3 =
    "{%- for m in messages -%}<|{{ m.role }}|>{{ '\\n\\n' }}"
    "{%- if m.tool_calls -%}{%- for c in m.tool_calls -%}"
    "{\"name\": \"{{ c.function.name }}\", \"parameters\": {{ c.function.arguments | tojson }}}"
    "{%- endfor -%}{%- else -%}{{ m.content | trim }}{%- endif -%}<|eot|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{{ '\\n\\n' }}{%- endif -%}";
// As in Mistral's template: calls are a list with the calls' names.
constexpr const char* kLikeMistral =
    "{%- for m in messages -%}<|{{ m.role }}|>"
    "{{ m.content }}{%- if m.tool_calls -%}[TOOL_CALLS][{%- for c in m.tool_calls -%}"
    "{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}, "
    "\"id\": \"{{ c.id }}\"}{%- if not loop.last -%}, {% endif -%}{%- endfor -%}]{%- endif -%}<|eot|>"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}";
// As in the template of DeepSeek's R1: the prompt opens the reasoning, which is never shown again.
constexpr const char* kLikeR1 =
    "{%- for m in messages -%}<|{{ m.role }}|>"
    "{{ m.content }}{%- if m.tool_calls -%}{%- for c in m.tool_calls -%}"
    "<tool_call>{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson "
    "}}}</tool_call>{%- endfor -%}{%- endif -%}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|><think>{{ '\\n' }}{%- endif -%}";
// As in Qwen3-Coder's template: calls stand between tags, with arguments as plain text.
constexpr const char* kLikeCoder =
    "{%- for m in messages -%}<|{{ m.role }}|>"
    "{%- if m.reasoning_content is defined -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}"
    "{{ m.content }}{%- if m.tool_calls -%}{%- for c in m.tool_calls -%}"
    "<tool_call>{{ '\\n' }}<function={{ c.function.name }}>{{ '\\n' }}"
    "{%- for key, value in c.function.arguments.items() -%}"
    "<parameter={{ key }}>{{ '\\n' }}{{ value }}{{ '\\n' }}</parameter>{{ '\\n' }}{%- endfor -%}"
    "</function>{{ '\\n' }}</tool_call>{%- endfor -%}{%- endif -%}<|end|>{{ '\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}";
// As in Phi 4 mini's template.
constexpr const char* kLikePhi =
    "{%- for m in messages -%}<|{{ m.role }}|>"
    "{{ m.content }}{%- if m.tool_calls -%}functools[{%- for c in m.tool_calls -%}"
    "{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}"
    "{%- if not loop.last -%}, {% endif -%}{%- endfor -%}]{%- endif -%}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}";

constexpr Case kCases[] = {
    {"plain", kPlain, "<|end|>", Drops::kNever, false},
    {"keeps", kKeeps, "<|eot|>", Drops::kNever, true},
    {"drops", kDrops, "<|end|>", Drops::kAtOnce, true},
    {"open", kOpen, "<|tool|>", Drops::kNever, true},
    {"like Qwen3", kLikeQwen3, "<|end|>", Drops::kAtUser, true},
    {"like Llama 3", kLikeLlama3, "<|eot|>", Drops::kNever, true, "llama3_json", ""},
    {"like Mistral", kLikeMistral, "<|eot|>", Drops::kNever, true, "mistral", ""},
    {"like R1", kLikeR1, "<|end|>", Drops::kAtOnce, true, "hermes", "deepseek_r1", true},
    {"like Coder", kLikeCoder, "<|end|>", Drops::kNever, true, "qwen3_coder"},
    {"like Phi", kLikePhi, "<|end|>", Drops::kNever, true, "phi4_mini_json", ""}};

// A turn's calls as a model writes them in this format. Kinds: as the template shows them; with other white
// space; of an unknown tool; unreadable. Unreadable calls are only for formats that mark both ends of a call.
enum class Kind { kShown, kSpaced, kUnknown, kBroken };
std::string calls_text(const Case& it, const std::vector<Kind>& kinds) {
  const std::string parser = it.parser;
  std::string out;
  for (size_t i = 0; i < kinds.size(); ++i) {
    const std::string name = kinds[i] == Kind::kUnknown ? "nope" : "calc";
    const char* const space = kinds[i] == Kind::kSpaced ? "" : " ";
    const std::string arguments = str("{\"a\":", space, "1}");
    const char* const key = parser == "llama3_json" ? "parameters" : "arguments";
    const std::string object =
        str("{\"name\":", space, "\"", name, "\",", space, "\"", key, "\":", space, arguments);
    if (parser == "hermes")
      out += kinds[i] == Kind::kBroken ? "<tool_call>{\"name\": </tool_call>"
                                       : str("<tool_call>", object, "}</tool_call>");
    else if (parser == "qwen3_coder")
      out += str("<tool_call>\n<function=", name, ">\n<parameter=a>\n1\n</parameter>\n",
                 kinds[i] == Kind::kSpaced ? "\n" : "", "</function>\n</tool_call>");
    else if (parser == "mistral") out += str(i > 0 ? ", " : "", object, ", \"id\": \"abcdefgh", i, "\"}");
    else out += str(i > 0 ? ", " : "", object, "}");
  }
  if (kinds.empty()) return "";
  if (parser == "mistral") return "[TOOL_CALLS][" + out + "]";
  if (parser == "phi4_mini_json") return "functools[" + out + "]";
  return out;
}

EnvironmentSettings thinking() {
  return {
      .max_turns = 50, .max_invalid_calls = 1000, .tool_call_parser = "hermes", .reasoning_parser = "qwen3"};
}

SamplingParameters sampling(int64_t max_new_tokens = 1000) {
  return {.n_samples = 1, .max_new_tokens = max_new_tokens};
}

const Problem kProblem{"p", "the prompt", {}, "42", {}};

Observation opening(bool tools = true) {
  Observation out;
  out.messages = {message_of("user", "do it ab")};
  if (tools) out.tools = {function_tool("calc", "", {{"a", {{"type", "number"}}}})};
  return out;
}

GeneratedSample sample_of(const TestCodec& codec, const std::string& text, const std::string& stop,
                          bool split = false) {
  GeneratedSample sample;
  for (const int32_t id : codec.encode_chat(text, true)) {
    if (id == 256 && split) {
      sample.token_ids.push_back('a');
      sample.token_ids.push_back('b');
    } else {
      sample.token_ids.push_back(id);
    }
  }
  if (!stop.empty()) sample.token_ids.push_back(codec.special(stop));
  sample.finish_reason = stop.empty() ? FinishReason::kLength : FinishReason::kStop;
  for (size_t i = 0; i < sample.token_ids.size(); ++i) {
    sample.logprobs.push_back(-static_cast<double>(i) - 1);
    sample.versions.push_back(3);
  }
  return sample;
}

constexpr const char* kThinksAndCalls =
    "<think>xyz</think>well<tool_call>{\"name\": \"calc\", \"arguments\": {\"a\": 1}}</tool_call>";

// The test's own record of a conversation: the tokens of each row, and which of them were sampled in that row
// (mask 1).
struct Ledger {
  std::vector<std::vector<int32_t>> rows;
  std::vector<std::vector<uint8_t>> masks;
};

// A thousand conversations, a hundred with each of ten templates. A ledger beside each records what the
// engine and the environment added.
TEST(Conversation, EveryRowIsWhatEngineAndEnvironmentPutThere) {
  const CounterRandom random(7, Purpose::test);
  int64_t num_rows = 0, num_retokenized = 0, num_otherwise = 0;
  for (const Case& it : kCases) {
    const TestCodec codec(it.jinja);
    EnvironmentSettings settings = thinking();
    settings.tool_call_parser = it.parser;
    settings.reasoning_parser = it.reasoning;
    const ConversationFormat format(codec, settings, 100000);
    EXPECT_EQ(format.shows_calls(), it.shows_calls) << it.name;
    for (uint64_t c = 0; c < 100; ++c) {
      uint64_t draw = 0;
      const auto below = [&](uint64_t n) { return random.below(n, c, draw++); };
      const auto words = [&](uint64_t most) {
        std::string text;
        for (uint64_t n = 1 + below(most); n > 0; --n)
          text += (text.empty() ? "" : " ") + std::string(below(2) ? "ab" : "xyz");
        return text;
      };
      ConversationRun run(format, kProblem, sampling());
      Ledger ledger;
      run.observe({.observation = opening()});
      const uint64_t turns = 1 + below(6);
      bool has_thought = false, thoughts_since_user = false, hides_thoughts = false;
      int64_t expected_rows = 1;
      for (uint64_t turn = 0; turn < turns; ++turn) {
        ASSERT_EQ(run.waits_for(), ConversationRun::Waits::kEngine);
        const std::vector<int32_t> prompt = run.prompt();
        // The prompt begins with the exact tokens of the last row, or starts a new row if reasoning was
        // dropped.
        const bool extends = !ledger.rows.empty() && prompt.size() > ledger.rows.back().size() &&
                             std::equal(ledger.rows.back().begin(), ledger.rows.back().end(), prompt.begin());
        const bool is_new = turn == 0 || (it.drops == Drops::kAtOnce && has_thought) || hides_thoughts;
        ASSERT_EQ(extends, !is_new) << it.name << " turn " << turn << ": " << codec.text_of(prompt)
                                    << "\nafter "
                                    << codec.text_of(ledger.rows.empty() ? prompt : ledger.rows.back());
        if (is_new) {
          ledger.rows.emplace_back();
          ledger.masks.emplace_back();
          if (turn > 0) ++expected_rows;
        }
        ledger.rows.back() = prompt;
        ledger.masks.back().resize(prompt.size(), 0);
        has_thought = *it.reasoning != 0 && (it.opens_thinking || below(2) == 0);
        thoughts_since_user |= has_thought;
        std::string text = it.opens_thinking ? words(3) + "</think>"
                           : has_thought     ? "<think>" + words(3) + "</think>"
                                             : "";
        const bool is_last = turn + 1 == turns;
        const bool is_call_alone = it.parser == std::string("llama3_json");
        if (is_last || !is_call_alone) text += words(4);
        std::vector<Kind> kinds;
        bool any_valid = false;
        if (!is_last)
          for (uint64_t n = is_call_alone ? 1 : 1 + below(2); n > 0; --n) {
            const uint64_t draw = below(5);
            kinds.push_back(draw == 0                                         ? Kind::kSpaced
                            : draw == 3                                       ? Kind::kUnknown
                            : draw == 4 && it.parser == std::string("hermes") ? Kind::kBroken
                                                                              : Kind::kShown);
            any_valid |= kinds.back() == Kind::kShown || kinds.back() == Kind::kSpaced;
          }
        text += calls_text(it, kinds);
        const GeneratedSample sample = sample_of(codec, text, it.stop, below(3) == 0);
        run.sampled(sample, 1.0);
        ledger.rows.back().insert(ledger.rows.back().end(), sample.token_ids.begin(), sample.token_ids.end());
        ledger.masks.back().resize(ledger.rows.back().size(), 1);
        run.check_integrity();
        hides_thoughts = false;
        if (!kinds.empty() && !any_valid) continue;  // the model was answered without the environment
        ASSERT_EQ(run.waits_for(), ConversationRun::Waits::kEnvironment) << text;
        Observation observation;
        for (size_t i = 0; i < run.action().calls.size(); ++i)
          observation.messages.push_back(message_of("tool", words(5)));
        if (it.drops == Drops::kAtUser && below(3) == 0) {
          observation.messages.push_back(message_of("user", words(3)));
          hides_thoughts = std::exchange(thoughts_since_user, false);
        }
        observation.reward = 0.5;
        observation.done = is_last;
        run.observe({.observation = observation});
      }
      ASSERT_EQ(run.reason(), "done");
      const std::vector<Trajectory> rows = run.trajectory("g", "4", false);
      ASSERT_EQ(rows.size(), ledger.rows.size()) << it.name;
      EXPECT_EQ(std::ssize(rows), expected_rows);
      double sum = 0;
      for (const double reward : rows[0].turn_rewards) sum += reward;
      for (size_t r = 0; r < rows.size(); ++r) {
        EXPECT_EQ(rows[r].input_ids, ledger.rows[r]);
        EXPECT_EQ(rows[r].loss_mask, ledger.masks[r]);
        EXPECT_EQ(rows[r].trajectory, "4");
        EXPECT_EQ(rows[r].reward, sum);
        for (size_t i = 0; i < rows[r].input_ids.size(); ++i) {
          EXPECT_EQ(rows[r].versions[i], ledger.masks[r][i] ? 3 : -1);
          EXPECT_EQ(rows[r].turns[i] >= 0, ledger.masks[r][i] == 1);
          EXPECT_EQ(rows[r].logprobs[i] < 0, ledger.masks[r][i] == 1);
        }
      }
      num_rows += std::ssize(rows);
      const Json& about = rows.back().fields.at("conversation");
      num_retokenized += std::ssize(about.at("retokenized"));
      num_otherwise += about.at("shown_otherwise").get<int64_t>();
      EXPECT_EQ(about.at("turns"), turns);
    }
  }
  EXPECT_GT(num_rows, 1200) << "some must have been rewritten";
  EXPECT_GT(num_retokenized, 100);
  EXPECT_GT(num_otherwise, 50);
}

TEST(Conversation, APromptIsTheTemplatesText) {
  for (const Case& it : std::span(kCases).first(4)) {
    const TestCodec codec(it.jinja);
    const ConversationFormat format(codec, thinking(), 100000);
    ConversationRun run(format, kProblem, sampling());
    run.observe({.observation = opening()});
    run.sampled(sample_of(codec, kThinksAndCalls, it.stop), 1.0);
    ASSERT_EQ(run.action().calls.size(), 1u) << it.name;
    EXPECT_EQ(run.action().reasoning, "xyz");
    EXPECT_EQ(run.action().content, "well");
    EXPECT_EQ(run.action().calls[0].arguments.dump(), R"({"a":1})");
    Observation observation;
    observation.messages = {message_of("tool", "2")};
    run.observe({.observation = observation});
    Conversation whole{.add_generation_prompt = true};
    OrderedJson assistant = message_of("assistant", "well");
    if (it.shows_calls) {
      assistant["reasoning_content"] = "xyz";
      assistant["tool_calls"] =
          OrderedJson::parse(R"([{"function": {"name": "calc", "arguments": {"a": 1}}}])");
    } else {
      assistant["content"] =
          "<think>xyz</think>well<tool_call>{\"name\": \"calc\", \"arguments\": {\"a\": 1}}</tool_call>";
    }
    whole.messages = {opening().messages[0], assistant, message_of("tool", "2")};
    EXPECT_EQ(codec.text_of(run.prompt()), codec.render(whole)) << it.name;
  }
}

TEST(Conversation, TheFormatOfCallsIsFoundInTheTemplate) {
  for (const Case& it : kCases) {
    const TestCodec codec(it.jinja);
    const ConversationFormat format(codec, EnvironmentSettings{}, 1000);
    // The template "like Llama 3" ends turns otherwise than Llama's.
    const bool is_known = it.shows_calls && it.parser != std::string("llama3_json");
    EXPECT_EQ(format.settings().tool_call_parser, is_known ? it.parser : "") << it.name;
    EXPECT_EQ(format.knows_no_calls(), !is_known) << it.name;
  }
  const TestCodec codec(kPlain);
  const ConversationFormat unknown(codec, EnvironmentSettings{}, 1000);
  ConversationRun run(unknown, kProblem, sampling());
  EXPECT_THROW(run.observe({.observation = opening()}), UserError);
  ConversationRun without(unknown, kProblem, sampling());
  without.observe({.observation = opening(/*tools=*/false)});
  EXPECT_EQ(without.waits_for(), ConversationRun::Waits::kEngine);
}

TEST(Conversation, TextThatIsTokenizedDifferentlyIsLocated) {
  const TestCodec codec(kPlain);
  const ConversationFormat format(codec, {.tool_call_parser = ""}, 100000);
  ConversationRun run(format, kProblem, sampling());
  run.observe({.observation = opening(false)});
  const size_t begin = run.prompt().size();
  run.sampled(sample_of(codec, "xab", "<|end|>", /*split=*/true), 1.0);
  Observation observation;
  observation.messages = {message_of("user", "more")};
  run.observe({.observation = observation});
  run.sampled(sample_of(codec, "xab", "<|end|>"), 1.0);
  observation.done = true;
  run.observe({.observation = observation});
  const Trajectory row = run.trajectory("g", "0", false).at(0);
  const Json& places = row.fields["conversation"]["retokenized"];
  ASSERT_EQ(places.size(), 1u);
  EXPECT_EQ(places[0].dump(), str(R"({"position":)", begin + 1, R"(,"row":0,"turn":0})"));
}

// How a conversation of calls ends, and how many turns it has.
std::pair<std::string, int64_t> end_of(EnvironmentSettings settings, const SamplingParameters& sampling,
                                       const std::string& text, bool cut = false,
                                       int64_t max_length = 100000) {
  static const TestCodec codec(kKeeps);
  settings.tool_call_parser = "hermes";
  const ConversationFormat format(codec, settings, max_length);
  ConversationRun run(format, kProblem, sampling);
  run.observe({.observation = opening()});
  while (run.waits_for() != ConversationRun::Waits::kNothing) {
    if (run.waits_for() == ConversationRun::Waits::kEngine) {
      GeneratedSample sample = sample_of(codec, text, cut ? "" : "<|eot|>");
      const auto most = static_cast<size_t>(run.max_new_tokens());
      if (sample.token_ids.size() > most) {
        sample.token_ids.resize(most);
        sample.logprobs.resize(most);
        sample.versions.resize(most);
        sample.finish_reason = FinishReason::kLength;
      }
      run.sampled(sample, 1.0);
    } else {
      Observation observation;
      observation.messages = {message_of("tool", std::string(100, 'x'))};
      run.observe({.observation = observation});
    }
    run.check_integrity();
  }
  const Trajectory row = run.trajectory("g", "0", false).back();
  EXPECT_TRUE(row.valid);
  EXPECT_EQ(row.reward, 0);
  const bool is_cut = run.reason().starts_with("max_") && run.reason() != "max_invalid_calls";
  EXPECT_EQ(row.finish_reason, is_cut ? "length" : "stop");
  EXPECT_EQ(row.loss_mask.back(), 1) << "nothing stands behind the last turn";
  return {run.reason(), run.turn()};
}

// A reward of 0 would say something about the model.
TEST(Conversation, AFirstPromptThatLeavesNoRoomForATurnIsAFailure) {
  const TestCodec codec(kKeeps);
  const ConversationFormat format(codec, {.tool_call_parser = "hermes"}, 5);
  const Problem problem{.id = "p", .prompt = "do it", .where = "d.jsonl:7"};
  ConversationRun run(format, problem, sampling());
  run.observe({.observation = opening()});
  ASSERT_EQ(run.waits_for(), ConversationRun::Waits::kNothing);
  EXPECT_EQ(run.reason(), "max_context");
  const Trajectory row = run.trajectory("g", "0", false).back();
  EXPECT_FALSE(row.valid);
  EXPECT_NE(row.reward_failure.value_or("").find("d.jsonl:7: the conversation begins with"),
            std::string::npos);
}

// If the environment gives no messages and tools, the conversation begins with those of the problem.
TEST(Conversation, BeginsWithAllFieldsOfTheProblem) {
  const TestCodec codec(
      "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.name or '' }}"
      "{% endfor %}");
  const ConversationFormat format(codec, {.tool_call_parser = "hermes"}, 1000);
  Problem problem;
  problem.messages = {message_of("user", "a"), message_of("tool", "b")};
  problem.messages[1]["name"] = "f";
  problem.tools = OrderedJson::array({{{"name", "f"}}});
  ConversationRun run(format, problem, sampling());
  run.observe({});
  EXPECT_EQ(codec.text_of(run.prompt()), R"([{"name": "f"}][user]a[tool]bf)");
}

TEST(Conversation, EveryLimitHasItsReason) {
  const std::string good = "<tool_call>{\"name\": \"calc\", \"arguments\": {\"a\": 1}}</tool_call>";
  const auto turn = static_cast<int64_t>(good.size()) + 1;
  using End = std::pair<std::string, int64_t>;
  EXPECT_EQ(end_of({.max_turns = 5}, sampling(), good), (End{"max_turns", 5}));
  EXPECT_EQ(end_of({}, sampling(20), good), (End{"max_new_tokens", 1}));
  EXPECT_EQ(end_of({.max_tokens = 2 * turn + 5}, sampling(), good), (End{"max_tokens", 3}));
  EXPECT_EQ(end_of({.max_tokens = 2 * turn}, sampling(), good), (End{"max_tokens", 2}));
  EXPECT_EQ(end_of({.max_context = 400}, sampling(), good).first, "max_context");
  EXPECT_EQ(end_of({.max_turns = 100}, sampling(), good, false, 400).first, "max_context");
  EXPECT_EQ(end_of({.max_invalid_calls = 3}, sampling(), "<tool_call>{</tool_call>"),
            (End{"max_invalid_calls", 4}));
  EXPECT_EQ(end_of({.max_invalid_calls = 0}, sampling(),
                   "<tool_call>{\"name\": \"calc\", \"arguments\": {}}</tool_call>"),
            (End{"max_invalid_calls", 1}))
      << "an argument is missing";
}

TEST(Conversation, AFailureLeavesNoReward) {
  const TestCodec codec(kPlain);
  const ConversationFormat format(codec, {.tool_call_parser = "hermes"}, 1000);
  for (const bool at_once : {true, false}) {
    ConversationRun run(format, kProblem, sampling());
    if (!at_once) {
      run.observe({.observation = opening()});
      run.sampled(sample_of(codec, "x", "<|end|>"), 1.0);
    }
    run.observe({.failure = EpisodeFailure::kCrash, .message = "it died"});
    const std::vector<Trajectory> rows = run.trajectory("g", "0", false);
    ASSERT_EQ(rows.size(), 1u);
    EXPECT_FALSE(rows[0].valid || rows[0].reward);
    EXPECT_EQ(rows[0].reward_failure, "it died");
    EXPECT_EQ(rows[0].fields["conversation"]["reason"], "environment_crash");
    EXPECT_EQ(rows[0].input_ids.empty(), at_once);
  }
}

TEST(Conversation, LongAnswersAreCutBetweenCharacters) {
  const TestCodec codec(kPlain);
  for (const auto& [side, expected] : {std::pair{"left", "...(9 bytes cut)...é"},
                                       {"right", "aé...(7 bytes cut)..."},
                                       {"middle", "a...(7 bytes cut)...ef"}}) {
    const std::string answer = side == std::string("middle") ? "aéébéef"
                               : side == std::string("left") ? "aébécéé"
                                                             : "aéébécf";
    EnvironmentSettings settings{
        .max_tool_response_length = 3, .tool_response_truncate_side = side, .tool_call_parser = "hermes"};
    const ConversationFormat format(codec, settings, 1000);
    ConversationRun run(format, kProblem, sampling());
    run.observe({.observation = opening()});
    run.sampled(sample_of(codec, "x", "<|end|>"), 1.0);
    Observation observation;
    observation.messages = {message_of("user", answer)};
    run.observe({.observation = observation});
    const std::string text = codec.text_of(run.prompt());
    EXPECT_NE(text.find(str("<|user|>", expected, "<|end|>")), std::string::npos) << side << ": " << text;
  }
}

TEST(Conversation, IsDescribedForPeople) {
  const TestCodec codec(kKeeps);
  const ConversationFormat format(codec, thinking(), 1000);
  ConversationRun run(format, kProblem, sampling());
  run.observe({.observation = opening()});
  run.sampled(sample_of(codec, kThinksAndCalls, "<|eot|>"), 1.0);
  Observation observation;
  observation.messages = {message_of("tool", "2\n3")};
  observation.reward = 0.5;
  observation.done = true;
  run.observe({.observation = observation});
  EXPECT_EQ(describe_conversation(run.trajectory("g", "0", false)[0]),
            "== g #0: done, reward 0.5, 1 turns, 85 tokens\n"
            "[user] do it ab\n"
            "[assistant (turn 0) thinks] xyz\n"
            "[assistant (turn 0)] well\n"
            "[assistant (turn 0) calls] calc{\"a\":1}\n"
            "    reward of the turn: 0.5\n"
            "[tool calc] 2\n    3\n");
}

// Three conversations of a group. The second forks from the first in the answer to its first turn. The third
// forks from the second in its second turn.
TEST(Conversation, GroupsSayWhereTheirConversationsForked) {
  const TestCodec codec(kKeeps);
  const ConversationFormat format(codec, thinking(), 1000);
  std::vector<Trajectory> rows;
  const auto hold = [&](const char* answer, const char* last) {
    ConversationRun run(format, kProblem, sampling());
    run.observe({.observation = opening()});
    run.sampled(sample_of(codec, kThinksAndCalls, "<|eot|>"), 1.0);
    Observation observation;
    observation.messages = {message_of("tool", answer)};
    run.observe({.observation = observation});
    run.sampled(sample_of(codec, last, "<|eot|>"), 1.0);
    observation.messages.clear();
    observation.reward = 1;
    observation.done = true;
    run.observe({.observation = observation});
    rows.push_back(run.trajectory("g", std::to_string(rows.size()), false).at(0));
  };
  hold("12", "it is x");
  hold("13", "it is x");
  hold("13", "it is y");
  rows.push_back(rows[0]);
  rows.back().group = "h";
  const std::vector<ConversationGroup> groups = conversation_groups(rows, 7, 1);
  ASSERT_EQ(groups.size(), 1u);
  ASSERT_EQ(groups[0].views.size(), 3u);
  EXPECT_EQ(groups[0].step, 7);
  const std::vector<ConversationView>& views = groups[0].views;
  EXPECT_EQ(views[0].forks_from, "");
  EXPECT_EQ(views[1].forks_from, "#0");
  EXPECT_EQ(views[1].fork_turn, 0);
  EXPECT_EQ(views[2].forks_from, "#1");
  EXPECT_EQ(views[2].fork_turn, 1);
  EXPECT_EQ(rows[2].input_ids[static_cast<size_t>(views[2].common_tokens)], 'y');
  int64_t tokens = 0;
  for (const ConversationView::Run& run : views[0].runs) tokens += run.tokens;
  EXPECT_EQ(tokens, std::ssize(rows[0].input_ids));
  EXPECT_TRUE(views[0].runs.back().is_model);
  EXPECT_EQ(views[0].messages[1].tokens, std::string_view(kThinksAndCalls).size() + 1);
  EXPECT_EQ(views[0].messages[1].reasoning, "xyz");
  EXPECT_EQ(views[0].messages[3].reward, 1);
}

// A file that was written by another program or damaged: none of its fields are trusted.
TEST(Conversation, DamagedConversationsAreDescribedWithoutAnError) {
  Trajectory row;
  row.group = "g";
  row.input_ids = {1, 2};
  row.loss_mask = {0, 1};
  row.fields = {{"conversation",
                 {{"reason", 3},
                  {"turns", "x"},
                  {"messages",
                   {7,
                    {{"role", 1}},
                    {{"role", "assistant"}, {"content", nullptr}, {"tool_calls", {5, {{"function", "f"}}}}}}},
                  {"retokenized", {1}},
                  {"turn_tokens", "x"}}}};
  std::vector<Trajectory> rows = {row, row};             // without `turns`
  rows.push_back({.group = "g", .fields = row.fields});  // failed before its first token
  rows.push_back(rows.back());
  const std::vector<ConversationGroup> groups = conversation_groups(rows, 1, 3);
  ASSERT_EQ(groups.size(), 1u);
  ASSERT_EQ(groups[0].views.size(), 4u);
  EXPECT_EQ(groups[0].views[0].messages.size(), 3u);
  EXPECT_EQ(groups[0].views[1].common_tokens, 2);
  EXPECT_EQ(groups[0].views[3].fork_turn, -1);
  EXPECT_FALSE(describe_conversation(row).empty());
}

TEST(ConversationFormat, WrongSettingsAreNamed) {
  const TestCodec codec(kPlain);
  EXPECT_THROW(ConversationFormat(codec, {.tool_call_parser = "hermos"}, 100), UserError);
  EXPECT_THROW(ConversationFormat(codec, {.chat_template_kwargs = "[1]"}, 100), UserError);
  EXPECT_THROW(ConversationFormat(codec, {.chat_template_kwargs = "{"}, 100), UserError);
}

}  // namespace
}  // namespace bough
