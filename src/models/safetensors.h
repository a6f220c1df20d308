// The safetensors format: 8 bytes little-endian header length, a JSON header, the tensors' bytes.
//
//   {"__metadata__": {"format": "pt"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
//
// Offsets count from the end of the header; tensors fill the rest of the file without holes or overlap, as
// the format's own reader demands. Files are untrusted: every number is checked before it is used.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/json.h"

namespace bough {

struct SafetensorsEntry {
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  size_t begin;  // bytes [begin, end) after the header
  size_t end;
};

class SafetensorsFile {
 public:
  // Maps the file and checks the whole header. UserError names file, tensor, got, expected, remedy.
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const std::map<std::string, SafetensorsEntry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // The tensor where it is mapped, of the file's dtype: contiguous, on the CPU, never to be written to. It
  // keeps the mapping alive. UserError if the file has no tensor of this name.
  at::Tensor tensor(const std::string& name) const;

 private:
  void read_header();
  SafetensorsEntry parse_entry(const std::string& name, const Json& value) const;
  void check_layout() const;
  [[noreturn]] void fail(const std::string& what) const;

  std::filesystem::path path_;
  std::shared_ptr<const MappedFile> file_;
  size_t data_begin_ = 0;  // where the header ends
  std::map<std::string, SafetensorsEntry> entries_;
  std::map<std::string, std::string> metadata_;
};

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
using SafetensorsMetadata = std::map<std::string, std::string>;

// Writes the tensors one after the other, each converted to `dtype` where one is given (a copy of one tensor
// at a time). Tensors of any device and strides. Wide elements come first: all are aligned to their size.
// IoError on a full disk leaves what was there.
void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       std::optional<at::ScalarType> dtype = {},
                       const SafetensorsMetadata& metadata = {{"format", "pt"}});

// Writes the tensors into a file that the caller commits: shards appear together or not at all.
void write_safetensors(AtomicFile& file, const NamedTensors& tensors,
                       std::optional<at::ScalarType> dtype = {},
                       const SafetensorsMetadata& metadata = {{"format", "pt"}});

// A tensor that is made when its turn to be written comes, and stored in `dtype`: only one is in memory.
struct SafetensorsSource {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  std::function<at::Tensor()> make;
};
void write_safetensors(AtomicFile& file, const std::vector<SafetensorsSource>& sources,
                       const SafetensorsMetadata& metadata = {{"format", "pt"}});

// The bytes that a tensor takes in the file.
int64_t stored_bytes(const at::Tensor& tensor, std::optional<at::ScalarType> dtype);

}  // namespace bough
