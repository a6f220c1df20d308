#include "text/tokenizer.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <random>
#include <thread>

#include "base/error.h"
#include "base/json.h"

namespace bough {
namespace {

// The byte-level tokenizer of `bough init` with more tokens, merges and added tokens. `tokenizers` gives the
// same ids.
Json description(const std::vector<std::pair<std::string, std::string>>& merges, const Json& added = {}) {
  Json file = Json::parse(byte_level_tokenizer_json());
  file["added_tokens"] = Json::array();
  int id = 256;
  for (const auto& [left, right] : merges) {
    file["model"]["vocab"][left + right] = id++;
    file["model"]["merges"].push_back({left, right});
  }
  for (Json token : added) {
    token["id"] = id++;
    file["added_tokens"].push_back(token);
  }
  return file;
}

Tokenizer tokenizer_of(const Json& file) {
  return Tokenizer::from_json(file.dump(), "test.json");
}

std::vector<int32_t> bytes_of(std::string_view text) {
  std::vector<int32_t> ids;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

std::string message_of(const Json& file) {
  try {
    tokenizer_of(file);
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Tokenizer, ByteLevelIdsAreTheBytes) {
  const Tokenizer tokenizer = Tokenizer::from_json(byte_level_tokenizer_json(), "init");
  EXPECT_EQ(tokenizer.vocab_size(), 259);
  const std::string text("\0\n Grüße 👍", 15);
  EXPECT_EQ(tokenizer.encode(text), bytes_of(text));
  EXPECT_EQ(tokenizer.encode("a<|im_end|>"), (std::vector<int32_t>{'a', 258}));
  EXPECT_EQ(tokenizer.token_to_id("<|im_start|>"), 257);
  EXPECT_EQ(tokenizer.token_to_id("Ġ"), ' ');
  EXPECT_EQ(tokenizer.token_to_id("no such"), std::nullopt);
  EXPECT_EQ(tokenizer.id_to_bytes(' '), " ");
  EXPECT_TRUE(tokenizer.is_special(256));
  EXPECT_FALSE(tokenizer.is_special('a'));
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{'a', 258, 'b'}), "ab");
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{'a', 258, 'b'}, false), "a<|im_end|>b");
}

TEST(Tokenizer, UnknownIdsDecodeToNothing) {
  const Tokenizer tokenizer = Tokenizer::from_json(byte_level_tokenizer_json(), "init");
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{-1, 'a', 259, INT32_MAX}, false), "a");
}

TEST(Tokenizer, MergesByRankThenFromTheLeft) {
  // Ranks of the merges: bc 0, ab 1, aa 2, abc (ab + c) 3.
  const Tokenizer tokenizer = tokenizer_of(description({{"b", "c"}, {"a", "b"}, {"a", "a"}, {"ab", "c"}}));
  EXPECT_EQ(tokenizer.encode("abc"), (std::vector<int32_t>{'a', 256}));
  EXPECT_EQ(tokenizer.encode("ab"), (std::vector<int32_t>{257}));
  EXPECT_EQ(tokenizer.encode("aaa"), (std::vector<int32_t>{258, 'a'}));
  EXPECT_EQ(tokenizer.encode("aaab"), (std::vector<int32_t>{258, 257}));
}

// The merge of "ab" is queued first. When it is popped, it is outdated, because "b" has become part of "bc".
TEST(Tokenizer, OutdatedMergesAreNotApplied) {
  const Tokenizer tokenizer = tokenizer_of(description({{"b", "c"}, {"a", "b"}, {"a", "bc"}}));
  EXPECT_EQ(tokenizer.encode("abc"), (std::vector<int32_t>{258}));
}

TEST(Tokenizer, IgnoreMergesTakesWholeWords) {
  Json file = description({{"b", "c"}, {"a", "b"}, {"ab", "c"}});
  EXPECT_EQ(tokenizer_of(file).encode("abc"), (std::vector<int32_t>{'a', 256}));
  file["model"]["ignore_merges"] = true;
  EXPECT_EQ(tokenizer_of(file).encode("abc"), (std::vector<int32_t>{258}));
}

TEST(Tokenizer, AddedTokenFlags) {
  const Tokenizer tokenizer = tokenizer_of(description({}, {{{"content", "word"}, {"single_word", true}},
                                                            {{"content", "<l>"}, {"lstrip", true}},
                                                            {{"content", "<r>"}, {"rstrip", true}},
                                                            {{"content", "<r>x"}}}));
  EXPECT_EQ(tokenizer.encode("word"), (std::vector<int32_t>{256}));
  EXPECT_EQ(tokenizer.encode("a word."), (std::vector<int32_t>{'a', ' ', 256, '.'}));
  EXPECT_EQ(tokenizer.encode("sword"), bytes_of("sword"));
  EXPECT_EQ(tokenizer.encode("words"), bytes_of("words"));
  EXPECT_EQ(tokenizer.encode("wordé"), bytes_of("wordé"));
  EXPECT_EQ(tokenizer.encode("a\u3000 <l> b"), (std::vector<int32_t>{'a', 257, ' ', 'b'}));
  EXPECT_EQ(tokenizer.encode("a <r> \nb"), (std::vector<int32_t>{'a', ' ', 258, 'b'}));
  EXPECT_EQ(tokenizer.encode("<r>x"), (std::vector<int32_t>{259})) << "the longest wins";
}

TEST(Tokenizer, NormalizedTokensAreFoundAfterNormalization) {
  Json file = description({}, {{{"content", "e\u0301"}, {"normalized", true}}, {{"content", "o\u0301"}}});
  file["normalizer"] = {{"type", "NFC"}};
  const Tokenizer tokenizer = tokenizer_of(file);
  EXPECT_EQ(tokenizer.encode("é"), (std::vector<int32_t>{256}));
  EXPECT_EQ(tokenizer.encode("e\u0301"), (std::vector<int32_t>{256}));
  EXPECT_EQ(tokenizer.encode("ó"), bytes_of("ó"));
  EXPECT_EQ(tokenizer.encode("o\u0301"), (std::vector<int32_t>{257}));
  EXPECT_EQ(tokenizer.encode("u\u0301"), bytes_of("ú"));
}

TEST(Tokenizer, TemplateIsAppliedOnRequest) {
  Json file =
      description({}, {{{"content", "<s>"}, {"special", true}}, {{"content", "</s>"}, {"special", true}}});
  file["post_processor"] = {
      {"type", "TemplateProcessing"},
      {"single",
       {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}},
        {{"Sequence", {{"id", "A"}, {"type_id", 0}}}},
        {{"SpecialToken", {{"id", "</s>"}, {"type_id", 0}}}}}},
      {"special_tokens",
       {{"<s>", {{"id", "<s>"}, {"ids", {256}}}}, {"</s>", {{"id", "</s>"}, {"ids", {257}}}}}}};
  EXPECT_EQ(tokenizer_of(file).encode("a"), (std::vector<int32_t>{'a'}));
  EXPECT_EQ(tokenizer_of(file).encode("a", true), (std::vector<int32_t>{256, 'a', 257}));
  file["post_processor"]["special_tokens"]["<s>"]["ids"] = {9999};
  EXPECT_NE(message_of(file).find("9999"), std::string::npos);
}

TEST(Tokenizer, TextMustBeUtf8) {
  const Tokenizer tokenizer = Tokenizer::from_json(byte_level_tokenizer_json(), "init");
  EXPECT_THROW(tokenizer.encode("ab\xFF"), UserError);
  EXPECT_THROW(tokenizer.encode("\xED\xA0\x80"), UserError) << "a surrogate";
}

TEST(Tokenizer, WrongFilesAreNamed) {
  const auto expect = [](const Json& file, const char* named) {
    const std::string message = message_of(file);
    EXPECT_NE(message.find(named), std::string::npos) << message;
    EXPECT_NE(message.find("test.json"), std::string::npos) << message;
  };
  const Json good = description({{"a", "b"}}, {{{"content", "<x>"}}});
  EXPECT_EQ(message_of(good), "no error");
  const auto with = [&](const char* pointer, const Json& value) {
    Json file = good;
    file[Json::json_pointer(pointer)] = value;
    return file;
  };
  expect(with("/model/dropout", 0.1), "dropout");
  expect(with("/model/byte_fallback", "yes"), "byte_fallback");
  expect(with("/model/type", "WordPiece"), "WordPiece");
  expect(with("/model/type", "Unigram"), "Unigram");
  expect(with("/model/type", "WordLevel"), "WordLevel");
  expect(with("/model/end_of_word_suffix", "</w>"), "end_of_word_suffix");
  expect(with("/model/vocab/a", -1), "'a'");
  expect(with("/model/vocab/a", 98), "98");
  expect(with("/model/vocab/zz", 2'000'000'000), "too large for this vocabulary");
  expect(with("/model/merges/0", "a b c"), "merge 0");
  expect(with("/model/merges/0", {"a", "c"}), "'ac'");
  expect(with("/model/merges/0", {"q", "unknown"}), "'unknown'");
  expect(with("/added_tokens/0/id", 300), "300");
  expect(with("/added_tokens/0/lstrip", 1), "lstrip");
  expect(with("/added_tokens/1", good["added_tokens"][0]), "twice");
  expect(with("/decoder", nullptr), "decoder");
  expect(with("/normalizer", {{"type", "Lowercase"}}), "Lowercase");
  expect(with("/normalizer", {{"type", "NFKC"}}), "NFKC");
  expect(with("/normalizer", {{"type", "Prepend"}, {"prepend", ""}}), "Prepend");
  const Json nothing = {{"type", "Replace"}, {"pattern", {{"Regex", "x*"}}}, {"content", "y"}};
  expect(with("/normalizer", nothing), "may match the empty string");
  expect(with("/decoder", nothing), "may match the empty string");
  expect(with("/decoder", {{"type", "CTC"}}), "CTC");
  expect(with("/decoder", {{"type", "Strip"}, {"content", " "}, {"start", 0}, {"stop", 1}}), "stop = 1");
  expect(with("/decoder", {{"type", "Sequence"}, {"decoders", Json::array()}}), "without a decoder");
  expect(with("/pre_tokenizer", {{"type", "Punctuation"}}), "Punctuation");
  Json vanishing = with("/added_tokens/0/content", " ");
  vanishing["added_tokens"][0]["normalized"] = true;
  vanishing["normalizer"] = {{"type", "Strip"}, {"strip_left", true}, {"strip_right", true}};
  expect(vanishing, "after normalization");
  EXPECT_THROW(Tokenizer::from_json("{\"model\":", "test.json"), UserError);
  EXPECT_THROW(Tokenizer::from_json("[]", "test.json"), UserError);
  EXPECT_THROW(Tokenizer::load("/no/such/tokenizer.json"), UserError);
}

// The expected ids are those of `tokenizers` 0.23.
TEST(Tokenizer, BytesWithoutATokenAreDroppedOrUnknown) {
  Json file = description({});
  file["model"]["vocab"].erase("z");
  file["model"]["vocab"].erase("y");
  EXPECT_EQ(tokenizer_of(file).encode("azyb"), bytes_of("ab"));
  file["model"]["unk_token"] = "b";
  EXPECT_EQ(tokenizer_of(file).encode("azyc"), bytes_of("abbc"));
  file["model"]["fuse_unk"] = true;
  EXPECT_EQ(tokenizer_of(file).encode("azycz"), bytes_of("abcb"));
  file["model"]["unk_token"] = "<u>";  // not in the vocabulary
  const Tokenizer unfit = tokenizer_of(file);
  EXPECT_EQ(unfit.encode("ab"), bytes_of("ab"));
  EXPECT_THROW(unfit.encode("z"), UserError);
}

// Byte tokens are placed before an unk_token that is held back to be fused, as in `tokenizers`.
TEST(Tokenizer, ByteFallback) {
  Json file = description({});
  for (const char* gone : {"x", "y", "z"}) file["model"]["vocab"].erase(gone);
  file["model"]["byte_fallback"] = true;
  file["model"]["vocab"]["<0x7A>"] = 'z';
  EXPECT_EQ(tokenizer_of(file).encode("azxb"), bytes_of("azb"));
  file["model"]["unk_token"] = "q";
  EXPECT_EQ(tokenizer_of(file).encode("axzb"), bytes_of("azqb"));
}

// A tokenizer over characters: ▁ for spaces, byte tokens, the given merges, ids from 300 on.
Json sentencepiece(const std::vector<std::pair<std::string, std::string>>& merges) {
  Json file = Json::parse(byte_level_tokenizer_json());
  file["added_tokens"] = Json::array();
  file["pre_tokenizer"] = nullptr;
  const Json mark = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "▁"}};
  const Json space = {{"type", "Replace"}, {"pattern", {{"String", "▁"}}}, {"content", " "}};
  const Json prepend = {{"type", "Prepend"}, {"prepend", "▁"}};
  file["normalizer"] = {{"type", "Sequence"}, {"normalizers", {prepend, mark}}};
  file["post_processor"] = nullptr;
  const Json strip = {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}};
  file["decoder"] = {{"type", "Sequence"},
                     {"decoders", {space, {{"type", "ByteFallback"}}, {{"type", "Fuse"}}, strip}}};
  Json vocabulary = Json::object();
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", byte);
    vocabulary[name] = byte;
  }
  int id = 300;
  for (const char* character : {"▁", "a", "b", "c"}) vocabulary[character] = id++;
  for (const auto& [left, right] : merges) {
    vocabulary[left + right] = id++;
    file["model"]["merges"].push_back({left, right});
  }
  file["model"]["vocab"] = vocabulary;
  file["model"]["byte_fallback"] = true;
  return file;
}

TEST(Tokenizer, CharactersAndBytes) {
  const Tokenizer tokenizer = tokenizer_of(sentencepiece({{"▁", "a"}, {"b", "c"}}));
  const std::vector<int32_t> ids = {304, 300, 305, 0xC3, 0xA9};  // ▁a ▁ bc é
  EXPECT_EQ(tokenizer.encode("a bcé"), ids);
  EXPECT_EQ(tokenizer.decode(ids), "a bcé");
  EXPECT_EQ(tokenizer.id_to_bytes(304), " a") << "inside a text the space is there";
  EXPECT_EQ(tokenizer.id_to_bytes(0xC3), "\xC3");
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{301, 0xC3, 0x41, 302}), "a\uFFFD\uFFFDb")
      << "a run of bytes is good as a whole or not at all";
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{0xC3, 256, 0xA9}), "é") << "no token has the id 256";
}

TEST(Tokenizer, AContinuationHasNoSpaceInFront) {
  const Tokenizer tokenizer = tokenizer_of(sentencepiece({{"▁", "a"}}));
  EXPECT_EQ(tokenizer.encode("ab a"), (std::vector<int32_t>{304, 302, 304}));
  EXPECT_EQ(tokenizer.encode_continuation("ab a"), (std::vector<int32_t>{301, 302, 304}));
}

// The text is cut before a ▁ only if no merge joins the texts before and after the cut. Here a merge does,
// after "b".
TEST(Tokenizer, MergesAcrossSpaces) {
  const Tokenizer tokenizer = tokenizer_of(sentencepiece({{"b", "▁"}, {"▁", "c"}}));
  EXPECT_EQ(tokenizer.encode_continuation("b c"), (std::vector<int32_t>{304, 303}));
  EXPECT_EQ(tokenizer.encode_continuation("a c"), (std::vector<int32_t>{301, 305}));
}

// After each merge, the neighbours of the merged token get new candidates. Quadratic time would take minutes.
TEST(Tokenizer, LongWordsTakeLinearTime) {
  const Tokenizer tokenizer = tokenizer_of(description({{"a", "a"}, {"aa", "aa"}, {"aaaa", "aaaa"}}));
  EXPECT_EQ(tokenizer.encode(std::string(1 << 20, 'a')), std::vector<int32_t>((1 << 20) / 8, 258));
  const Tokenizer characters = tokenizer_of(sentencepiece({{"a", "a"}, {"aa", "aa"}}));
  EXPECT_EQ(characters.encode_continuation(std::string(1 << 20, 'a')),
            std::vector<int32_t>((1 << 20) / 4, 305));
}

TEST(Tokenizer, ThreadsShareIt) {
  const Tokenizer tokenizer = tokenizer_of(description({{"a", "b"}, {"ab", "c"}, {"b", "c"}}));
  Json whole = description({{"a", "b"}, {"ab", "c"}, {"b", "c"}});
  whole["pre_tokenizer"]["use_regex"] = true;
  const Tokenizer cutting = tokenizer_of(whole);
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < 2000; ++i) {
      std::string text;
      for (int j = 0; j < 8; ++j) text += "abc d"[random() % 5];
      const std::vector<int32_t> ids = cutting.encode(text);
      ASSERT_EQ(cutting.decode(ids), text);
      ASSERT_EQ(ids, cutting.encode(text));
    }
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) threads.emplace_back(work, seed % 2);
  for (std::thread& thread : threads) thread.join();
}

TEST(StreamDecoder, HoldsBackIncompleteCharacters) {
  StreamDecoder stream(Tokenizer::from_json(byte_level_tokenizer_json(), "init"));
  EXPECT_EQ(stream.push('a'), "a");
  EXPECT_EQ(stream.push(0xF0), "");
  EXPECT_EQ(stream.push(0x9F), "");
  EXPECT_EQ(stream.push(258), "") << "special tokens are left out";
  EXPECT_EQ(stream.push(0x91), "");
  EXPECT_EQ(stream.push(0x8D), "👍");
  EXPECT_EQ(stream.push(0xC3), "");
  EXPECT_EQ(stream.push('b'), "\uFFFDb");
  EXPECT_EQ(stream.push(0xFF), "\uFFFD");
  EXPECT_EQ(stream.push(0xE2), "");
  EXPECT_EQ(stream.finish(), "\uFFFD");
  EXPECT_EQ(stream.finish(), "");
}

TEST(StreamDecoder, TakesOffTheFirstSpaceAndHoldsByteRuns) {
  StreamDecoder stream(tokenizer_of(sentencepiece({{"▁", "a"}})));
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(stream.push(304), "a");
    EXPECT_EQ(stream.push(304), " a");
    EXPECT_EQ(stream.push(0xC3), "");
    EXPECT_EQ(stream.push(0xA9), "") << "a wrong byte may follow";
    EXPECT_EQ(stream.push(302), "éb");
    EXPECT_EQ(stream.push(0xC3), "");
    EXPECT_EQ(stream.finish(), "\uFFFD");
  }
}

TEST(StreamDecoder, PiecesConcatenateToTheWhole) {
  const Tokenizer tokenizer = Tokenizer::from_json(byte_level_tokenizer_json(), "init");
  std::mt19937 random(1);
  const std::vector<int32_t> likely = {0xF0, 0x9F, 0x91, 0x8D, 0xE2, 0x82, 0xAC,
                                       0xC3, 0xA9, 0xED, 0xA0, 'a',  258};
  for (int round = 0; round < 2000; ++round) {
    std::vector<int32_t> ids(random() % 12);
    for (int32_t& id : ids)
      id = random() % 4 ? likely[random() % likely.size()] : static_cast<int32_t>(random() % 259);
    for (const bool skip : {false, true}) {
      StreamDecoder stream(tokenizer, skip);
      std::string text;
      for (const int32_t id : ids) text += stream.push(id);
      ASSERT_EQ(text + stream.finish(), tokenizer.decode(ids, skip));
    }
  }
}

}  // namespace
}  // namespace bough
