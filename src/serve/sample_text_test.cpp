#include "serve/sample_text.h"

#include <gtest/gtest.h>

#include "base/random.h"

namespace bough {
namespace {

class SampleTextTest : public ::testing::Test {
 protected:
  // Each byte of the text is a token. finish() gets the last one. Returns the pieces as they were streamed.
  std::vector<std::string> pieces_of(const std::string& text, FinishReason reason) {
    SampleText sample(tokenizer_, OutputParser("", ""), &sampling_, true);
    std::vector<std::string> pieces;
    for (size_t i = 0; i + 1 < text.size(); ++i)
      pieces.push_back(sample.push(static_cast<unsigned char>(text[i])).content);
    pieces.push_back(sample.finish(static_cast<unsigned char>(text.back()), reason).content);
    end_ = sample.end();
    return pieces;
  }
  static std::string joined(const std::vector<std::string>& pieces) {
    std::string all;
    for (const std::string& piece : pieces) all += piece;
    return all;
  }

  const Tokenizer tokenizer_ = Tokenizer::from_json(byte_level_tokenizer_json(), "tokenizer.json");
  SamplingParameters sampling_;
  SampleEnd end_;
};

TEST_F(SampleTextTest, GivesWholeCharactersOnly) {
  EXPECT_EQ(pieces_of("aé😀", FinishReason::kLength),
            (std::vector<std::string>{"a", "", "é", "", "", "", "😀"}));
  EXPECT_EQ(joined(pieces_of("a\xF0\x9F", FinishReason::kLength)), "a\uFFFD");
}

TEST_F(SampleTextTest, AStopTokenIsNoText) {
  EXPECT_EQ(joined(pieces_of("ab", FinishReason::kStop)), "a");
  EXPECT_EQ(end_.stop_token, 'b');
  EXPECT_EQ(joined(pieces_of("ab", FinishReason::kLength)), "ab");
}

TEST_F(SampleTextTest, HoldsBackWhatMayBeAStopString) {
  sampling_.stop = {"STOP", "OPEN"};
  EXPECT_EQ(pieces_of("aST xSTO", FinishReason::kLength),
            (std::vector<std::string>{"a", "", "", "ST ", "x", "", "", "STO"}));
  EXPECT_EQ(joined(pieces_of("aSTOPEN", FinishReason::kStopString)), "a");
  EXPECT_EQ(end_.stop, "STOP");
  EXPECT_EQ(end_.reason, FinishReason::kStopString);
  EXPECT_EQ(joined(pieces_of("STaOPEN", FinishReason::kStopString)), "STa");
  EXPECT_EQ(end_.stop, "OPEN");
}

TEST_F(SampleTextTest, LooksForStopStringsFromMinNewTokensOn) {
  sampling_.stop = {"ab"};
  sampling_.min_new_tokens = 4;
  EXPECT_EQ(joined(pieces_of("abcab", FinishReason::kStopString)), "abc");
  EXPECT_EQ(joined(pieces_of("abcd", FinishReason::kLength)), "abcd");
}

// Markers count, and so does a stop token inside the reasoning. Tokens that may begin it count if they do.
TEST_F(SampleTextTest, CountsTheTokensOfTheReasoning) {
  const auto reasoning_tokens = [&](const std::string& text, const char* parser, bool in_reasoning = false) {
    SampleText sample(tokenizer_, OutputParser(parser, "", {}, {.in_reasoning = in_reasoning}), &sampling_,
                      /*skip_special_tokens=*/false);
    for (size_t i = 0; i + 1 < text.size(); ++i) sample.push(static_cast<unsigned char>(text[i]));
    sample.finish(static_cast<unsigned char>(text.back()), FinishReason::kLength);
    return sample.end().reasoning_tokens;
  };
  const auto size = [](std::string_view text) { return std::ssize(text); };
  EXPECT_EQ(reasoning_tokens("<think>why</think>so", "qwen3"), size("<think>why</think>"));
  EXPECT_EQ(reasoning_tokens(" <think>why", "qwen3"), size(" <think>why"));
  EXPECT_EQ(reasoning_tokens("why</think>so", "qwen3", true), size("why</think>"));
  EXPECT_EQ(reasoning_tokens("why</think>so", "deepseek_r1"), size("why</think>"));
  EXPECT_EQ(reasoning_tokens("<thin air", "qwen3"), 0);
  EXPECT_EQ(reasoning_tokens("<think>why</think>so", ""), 0);
  const std::string analysis = "<|channel|>analysis<|message|>why<|end|>";
  EXPECT_EQ(reasoning_tokens(analysis + "<|start|>assistant<|channel|>final<|message|>so", "openai_gptoss"),
            size(analysis));
}

// A streamed piece is never taken back. All pieces together are the text up to the first stop string.
TEST_F(SampleTextTest, StreamsOfRandomTextsAreTheirCutTexts) {
  const CounterRandom random(1, Purpose::test);
  for (uint64_t i = 0; i < 2000; ++i) {
    std::string text;
    for (uint64_t k = 0; k < 12; ++k) text += "ab"[random.below(2, i, k)];
    sampling_.stop = {"aab", "baba"};
    size_t end = text.size();  // the engine stops where a stop string is complete
    for (const std::string& stop : sampling_.stop)
      if (const size_t found = text.find(stop); found != std::string::npos)
        end = std::min(end, found + stop.size());
    const bool stops = text.substr(0, end).ends_with("aab") || text.substr(0, end).ends_with("baba");
    text.resize(end);
    std::string expected = text;
    for (const std::string& stop : sampling_.stop)
      expected.resize(std::min(expected.size(), expected.find(stop)));
    EXPECT_EQ(joined(pieces_of(text, stops ? FinishReason::kStopString : FinishReason::kLength)), expected)
        << text;
  }
}

TEST_F(SampleTextTest, MalformedCallsAreContent) {
  SampleText sample(tokenizer_, OutputParser("", "hermes"), &sampling_, true);
  OutputParts all;
  const std::string text =
      R"(a<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{</tool_call>)";
  for (const char c : text) all.append(sample.push(static_cast<unsigned char>(c)));
  all.append(sample.finish({}, FinishReason::kLength));
  EXPECT_EQ(all.content, "a<tool_call>{</tool_call>");
  ASSERT_EQ(all.calls.size(), 1);
  EXPECT_EQ(all.calls[0].name, "f");
  EXPECT_EQ(sample.malformed_calls(), 1);
}

TEST_F(SampleTextTest, KnowsWhichMarkersAreSpecialTokens) {
  EXPECT_FALSE(has_special_markers(tokenizer_, "qwen3", "hermes"));
  EXPECT_FALSE(has_special_markers(tokenizer_, "", ""));
  EXPECT_TRUE(has_special_markers(tokenizer_, "gpt-oss", ""));
  Json file = parse_json(byte_level_tokenizer_json(), "tokenizer.json");
  Json added = file["added_tokens"][0];
  added["id"] = 259;
  added["content"] = "[TOOL_CALLS]";
  file["added_tokens"].push_back(added);
  const Tokenizer mistral = Tokenizer::from_json(file.dump(), "tokenizer.json");
  EXPECT_TRUE(has_special_markers(mistral, "", "mistral"));
  EXPECT_FALSE(has_special_markers(mistral, "mistral", "hermes"));
}

}  // namespace
}  // namespace bough
