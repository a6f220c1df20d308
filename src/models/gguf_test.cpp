#include "models/gguf.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <random>

#include "base/error.h"
#include "models/gguf_import.h"
#include "models/model.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

// A GGUF file in the making.
struct Writer {
  template <class T>
  Writer& number(T value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Writer& text(const std::string& value) {
    number<uint64_t>(value.size());
    bytes += value;
    return *this;
  }
  Writer& header(uint64_t tensors, uint64_t entries, uint32_t version = 3) {
    bytes += "GGUF";
    return number(version).number(tensors).number(entries);
  }
  Writer& key(const std::string& name, uint32_t type) { return text(name).number(type); }
  Writer& integer(const std::string& name, uint32_t value) { return key(name, 4).number(value); }
  Writer& word(const std::string& name, const std::string& value) { return key(name, 8).text(value); }
  Writer& words(const std::string& name, const std::vector<std::string>& values) {
    key(name, 9).number<uint32_t>(8).number<uint64_t>(values.size());
    for (const std::string& value : values) text(value);
    return *this;
  }
  Writer& tensor(const std::string& name, const std::vector<uint64_t>& inner_first, uint32_t type,
                 uint64_t offset) {
    text(name).number(static_cast<uint32_t>(inner_first.size()));
    for (const uint64_t size : inner_first) number(size);
    return number(type).number(offset);
  }
  Writer& align() {
    bytes.append((32 - bytes.size() % 32) % 32, '\0');
    return *this;
  }
  std::string bytes;
};

// A llama of one layer, width 32, 2 heads, feed-forward 32, whose matrices are Q8_0 but for one in F32.
std::string tiny_llama() {
  const std::vector<std::string> tokens = {"<s>", "a", "b", "ab", "<e>"};
  struct Matrix {
    const char* name;
    std::vector<uint64_t> shape;
    uint32_t type;
  };
  const std::vector<Matrix> matrices = {
      {"token_embd.weight", {32, 5}, 8},         {"output_norm.weight", {32}, 0},
      {"blk.0.attn_norm.weight", {32}, 0},       {"blk.0.attn_q.weight", {32, 32}, 8},
      {"blk.0.attn_k.weight", {32, 32}, 8},      {"blk.0.attn_v.weight", {32, 32}, 8},
      {"blk.0.attn_output.weight", {32, 32}, 0}, {"blk.0.ffn_norm.weight", {32}, 0},
      {"blk.0.ffn_gate.weight", {32, 32}, 8},    {"blk.0.ffn_up.weight", {32, 32}, 8},
      {"blk.0.ffn_down.weight", {32, 32}, 8}};
  Writer file;
  file.header(matrices.size(), 14)
      .word("general.architecture", "llama")
      .integer("llama.block_count", 1)
      .integer("llama.context_length", 64)
      .integer("llama.embedding_length", 32)
      .integer("llama.feed_forward_length", 32)
      .integer("llama.attention.head_count", 2)
      .key("llama.attention.layer_norm_rms_epsilon", 6)
      .number(1e-5f)
      .word("tokenizer.ggml.model", "gpt2")
      .word("tokenizer.ggml.pre", "gpt-2")
      .words("tokenizer.ggml.tokens", tokens)
      .words("tokenizer.ggml.merges", {"a b"})
      .integer("tokenizer.ggml.bos_token_id", 0)
      .integer("tokenizer.ggml.eos_token_id", 4)
      .key("tokenizer.ggml.token_type", 9)
      .number<uint32_t>(5)
      .number<uint64_t>(tokens.size());
  for (const int32_t type : {3, 1, 1, 1, 3}) file.number(type);
  uint64_t offset = 0;
  std::string data;
  std::mt19937 draw(1);
  for (const Matrix& matrix : matrices) {
    uint64_t elements = 1;
    for (const uint64_t size : matrix.shape) elements *= size;
    file.tensor(matrix.name, matrix.shape, matrix.type, offset);
    std::string bytes;
    for (uint64_t i = 0; i < elements; ++i) {
      if (matrix.type == 8 && i % 32 == 0) bytes += std::string("\x00\x2c", 2);  // 1/16 in fp16
      if (matrix.type == 8) bytes += static_cast<char>(draw());
      else bytes += Writer().number(static_cast<float>(draw() % 16) / 16.0f).bytes;
    }
    bytes.append((32 - bytes.size() % 32) % 32, '\0');
    data += bytes;
    offset = data.size();
  }
  return file.align().bytes + data;
}

class Gguf : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) /
              str("gguf_", ::getpid(), "_", ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  fs::path write(const std::string& bytes) const {
    const fs::path path = folder_ / "model.gguf";
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  // The message of the UserError that a file of these bytes causes.
  std::string refusal(const std::string& bytes) const {
    try {
      GgufFile file(write(bytes));
    } catch (const UserError& error) {
      return error.what();
    }
    return "(accepted)";
  }
  std::string import_refusal(const std::string& bytes, const ImportOptions& options = {}) const {
    try {
      import_gguf(write(bytes), folder_ / "out", options);
    } catch (const UserError& error) {
      return error.what();
    }
    return "(accepted)";
  }
  fs::path folder_;
};

void expect_names(const std::string& message, std::initializer_list<std::string> words) {
  for (const std::string& word : words)
    EXPECT_NE(message.find(word), std::string::npos) << "no <" << word << "> in: " << message;
}

std::string replaced(std::string bytes, const std::string& from, const std::string& to) {
  const size_t at = bytes.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return bytes.replace(at, from.size(), to);
}

TEST_F(Gguf, ReadsMetadataAndTensors) {
  const GgufFile file(write(tiny_llama()));
  EXPECT_EQ(file.text("general.architecture"), "llama");
  EXPECT_EQ(file.integer("llama.context_length"), 64);
  EXPECT_EQ(file.list("tokenizer.ggml.tokens").size(), 5u);
  EXPECT_EQ(file.tensors().at("token_embd.weight").shape, (std::vector<int64_t>{5, 32}));
  EXPECT_EQ(file.dequantized("blk.0.ffn_up.weight").sizes(), (at::IntArrayRef{32, 32}));
}

TEST_F(Gguf, RefusesWhatIsNoGgufFile) {
  expect_names(refusal("PK\x03\x04 and more bytes"), {"model.gguf", "PK", "expected a GGUF file"});
  expect_names(refusal("GG"), {"GG", "expected a GGUF file"});
  expect_names(refusal(Writer().header(0, 0, 1).bytes), {"version 1", "expected 2 or 3", "convert"});
  expect_names(refusal(Writer().header(0, 0, 0x03000000).bytes), {"big-endian", "little-endian"});
}

TEST_F(Gguf, CountsAreCheckedAgainstTheFileBeforeMemoryIsTaken) {
  const uint64_t huge = std::numeric_limits<uint64_t>::max();
  expect_names(refusal(Writer().header(huge, 0).bytes),
               {"the number of tensors", "got 18446744073709551615"});
  expect_names(refusal(Writer().header(0, huge).bytes), {"the number of metadata entries", "damaged"});
  expect_names(refusal(Writer().header(0, 1).number(huge).number(huge).bytes), {"key of metadata entry 0"});
  Writer array;
  array.header(0, 1).key("list", 9).number<uint32_t>(0).number(huge);
  expect_names(refusal(array.bytes), {"'list'", "got 18446744073709551615"});
  Writer nested;
  nested.header(0, 1).key("list", 9);
  for (int i = 0; i < 9; ++i) nested.number<uint32_t>(9).number<uint64_t>(1);
  expect_names(refusal(nested.bytes), {"'list'", "nested"});
  Writer wide;
  wide.header(1, 0).tensor("w", {huge, 2}, 0, 0).align();
  expect_names(refusal(wide.bytes), {"'w'", "dimension 0", "damaged"});
  Writer twice;
  twice.header(0, 2).integer("a", 1).integer("a", 2).align();
  expect_names(refusal(twice.bytes), {"'a'", "twice"});
}

TEST_F(Gguf, TensorsLieWithinTheFileWithoutOverlap) {
  const auto two = [](uint64_t first, uint64_t second, size_t bytes) {
    Writer file;
    file.header(2, 0).tensor("x", {8}, 0, first).tensor("y", {8}, 0, second).align();
    return file.bytes + std::string(bytes, '\0');
  };
  EXPECT_EQ(refusal(two(0, 32, 64)), "(accepted)");
  expect_names(refusal(two(0, 32, 63)), {"'y'", "63 bytes of data", "cut off"});
  expect_names(refusal(two(0, 0, 64)), {"begin at", "ends"});
  expect_names(refusal(two(0, 33, 128)), {"'y'", "offset 33", "multiple of 32"});
  expect_names(refusal(two(0, uint64_t{1} << 63, 64)), {"'y'", "offset 9223372036854775808"});
}

TEST_F(Gguf, OtherTypesAreRefusedByName) {
  Writer q5;
  q5.header(1, 0).tensor("blk.0.ffn_up.weight", {256}, 13, 0).align();
  expect_names(refusal(q5.bytes), {"'blk.0.ffn_up.weight'", "type Q5_K", "Q4_K or Q6_K", "use a file"});
  Writer unknown;
  unknown.header(1, 0).tensor("w", {256}, 99, 0).align();
  expect_names(refusal(unknown.bytes), {"type 99"});
  Writer odd;
  odd.header(1, 0).tensor("w", {33}, 8, 0).align();
  expect_names(refusal(odd.bytes), {"rows of 33", "multiple of 32", "Q8_0"});
}

TEST_F(Gguf, BlocksAreDequantised) {
  // The Q4_0 block has scale 2, quanta 0 (element 0) and 15 (element 16).
  std::string block = std::string("\x00\x40", 2) + "\xF0" + std::string(15, '\x88');
  float out[32];
  dequantize(GgmlType::kQ4_0, reinterpret_cast<const std::byte*>(block.data()), 32, out);
  EXPECT_EQ(out[0], -16);
  EXPECT_EQ(out[16], 14);
  EXPECT_EQ(out[1], 0);
  // The Q4_1 block has scale 2, minimum -1, quanta 0 (element 0) and 15 (element 16).
  block = std::string("\x00\x40\x00\xBC", 4) + "\xF0" + std::string(15, '\0');
  dequantize(GgmlType::kQ4_1, reinterpret_cast<const std::byte*>(block.data()), 32, out);
  EXPECT_EQ(out[0], -1);
  EXPECT_EQ(out[16], 29);
}

TEST_F(Gguf, ImportedDirectoryIsAModel) {
  const ImportReport report = import_gguf(write(tiny_llama()), folder_ / "out", {});
  EXPECT_EQ(report.architecture, "LlamaForCausalLM");
  EXPECT_EQ(report.dtype, at::kFloat);  // one matrix is F32
  const auto model = load_model(folder_ / "out", at::kFloat);
  EXPECT_EQ(model->config().num_layers, 1);
  EXPECT_TRUE(model->config().tie_word_embeddings);
  // Nothing is left beside the model's directory.
  size_t files = 0;
  for (const auto& entry : fs::directory_iterator(folder_)) files += entry.path().filename() != "model.gguf";
  EXPECT_EQ(files, 1u);
}

TEST_F(Gguf, AFolderIsReplacedOnlyWhenAskedAndAModel) {
  const std::string bytes = tiny_llama();
  fs::create_directories(folder_ / "out");
  std::ofstream(folder_ / "out" / "thesis.txt") << "years of work";
  expect_names(import_refusal(bytes), {"not empty", "--force"});
  ImportOptions force;
  force.force = true;
  expect_names(import_refusal(bytes, force), {"no config.json"});
  EXPECT_TRUE(fs::exists(folder_ / "out" / "thesis.txt"));
  std::ofstream(folder_ / "out" / "config.json") << "{}";
  EXPECT_EQ(import_refusal(bytes, force), "(accepted)");
  EXPECT_FALSE(fs::exists(folder_ / "out" / "thesis.txt"));
}

TEST_F(Gguf, WhatIsNotKnownIsRefusedByName) {
  const std::string bytes = tiny_llama();
  const std::string architecture = replaced(bytes, std::string("\x08\0\0\0\x05\0\0\0\0\0\0\0llama", 17),
                                            std::string("\x08\0\0\0\x05\0\0\0\0\0\0\0falco", 17));
  expect_names(import_refusal(architecture), {"general.architecture", "'falco'", "llama, qwen2, qwen3"});
  expect_names(import_refusal(replaced(bytes, "gpt-2", "gpt-9")), {"tokenizer.ggml.pre", "'gpt-9'", "--pre"});
  expect_names(import_refusal(replaced(bytes, "gpt2", "bert")), {"tokenizer.ggml.model", "'bert'"});
  expect_names(import_refusal(replaced(bytes, "context_length", "logit_scale_xx")),
               {"'llama.logit_scale_xx'", "not supported"});
  expect_names(import_refusal(replaced(bytes, "ffn_up", "ffn_xx")), {"no tensor 'blk.0.ffn_up.weight'"});
  expect_names(import_refusal(replaced(bytes, "a b", "b b")), {"merge 0", "'\"b b\"'"});
  EXPECT_FALSE(fs::exists(folder_ / "out"));
}

TEST_F(Gguf, DamagedFilesNeverCrash) {
  const std::string whole = tiny_llama();
  // Flips of bits in weights are just other weights: these are the 11,200 bytes at the end.
  const size_t header = whole.size() - 11'200;
  std::mt19937 draw(7);
  int refused = 0, accepted = 0;
  ImportOptions force;
  force.force = true;
  for (int round = 0; round < 600; ++round) {
    std::string bytes = whole;
    if (round % 4 == 0) bytes.resize(draw() % bytes.size());
    else
      for (uint32_t flips = 1 + draw() % 3; flips > 0; --flips)
        bytes[draw() % header] ^= static_cast<char>(1u << draw() % 8);
    if (bytes.empty()) continue;
    try {
      import_gguf(write(bytes), folder_ / "out", force);
      ++accepted;
    } catch (const UserError& error) {
      ++refused;
      EXPECT_LT(std::strlen(error.what()), 2000u);
    }
  }
  EXPECT_GT(refused, 300);
  EXPECT_GT(accepted, 5);
}

}  // namespace
}  // namespace bough
