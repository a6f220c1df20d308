// The GGUF container, versions 2 and 3, little-endian:
//
//   "GGUF"  version u32  number of tensors u64  number of metadata entries u64
//   metadata: key (u64 length, bytes)  type u32  value
//   tensors:  name  number of dimensions u32  dimensions u64, the innermost first  type u32  offset u64
//   padding to general.alignment (32); offsets count from there
//
// Files are untrusted: every count, length and offset is checked against the file's size before it is used,
// so that whatever memory a file asks for is bounded by its own length.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/json.h"

namespace bough {

// Types of tensors that can be read, numbered as in the file.
enum class GgmlType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ6_K = 14,
  kBF16 = 30,
};

// Returns "Q4_K", for example; "type 99" for a number that ggml does not have.
std::string ggml_type_name(uint32_t type);

// A block of a type: so many elements share so many bytes; rows are whole blocks.
struct GgmlBlock {
  int64_t elements;
  int64_t bytes;
};
GgmlBlock ggml_block(GgmlType type);

// Writes num_elements floats, a multiple of the block's elements, from the blocks at `blocks` (of any
// alignment). Equal to the `gguf` package bit for bit: scales are fp16 and quanta have at most 8 bits, so all
// products are exact in fp32 and only one addition rounds, whatever the order or contraction.
void dequantize(GgmlType type, const std::byte* blocks, int64_t num_elements, float* out);

struct GgufTensor {
  GgmlType type;
  std::vector<int64_t> shape;  // the outermost first, as torch has it
  size_t begin;                // bytes [begin, end) of the file
  size_t end;
};

class GgufFile {
 public:
  // Maps the file and checks the whole header. UserError names file, what, got, expected, remedy; tensors of
  // a type that cannot be read are refused by name.
  explicit GgufFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const std::map<std::string, GgufTensor>& tensors() const { return tensors_; }

  // Metadata are an object: numbers, booleans, strings (valid UTF-8) and arrays of these under their keys.
  const Json& metadata() const { return metadata_; }

  // The value of a key, or of one that must be there. UserError if it is of another kind.
  bool has(const std::string& key) const { return metadata_.contains(key); }
  std::string text(const std::string& key) const;
  std::string text_or(const std::string& key, const std::string& fallback) const;
  int64_t integer(const std::string& key) const;  // 0 to 2^63 - 1
  int64_t integer_or(const std::string& key, int64_t fallback) const;
  double number_or(const std::string& key, double fallback) const;
  bool flag_or(const std::string& key, bool fallback) const;
  const Json& list(const std::string& key) const;

  // The tensor's values in fp32.
  at::Tensor dequantized(const std::string& name) const;

  [[noreturn]] void fail(const std::string& what) const;     // path: what
  [[noreturn]] void damaged(const std::string& what) const;  // path: what; copy or download it again

 private:
  class Cursor;
  void read_header();
  Json read_value(Cursor& cursor, uint32_t type, const std::string& key, int depth) const;
  void read_tensors(Cursor& cursor, uint64_t count);
  void check_layout() const;
  const Json& value(const std::string& key) const;

  std::filesystem::path path_;
  std::shared_ptr<const MappedFile> file_;
  Json metadata_ = Json::object();
  std::map<std::string, GgufTensor> tensors_;
};

}  // namespace bough
