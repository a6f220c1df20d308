// The safetensors format: 8 bytes of little-endian header length, a JSON header, the tensors' bytes.
//
//   {"__metadata__": {"format": "pt"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
//
// Offsets count from the end of the header. Tensors fill the rest of the file without holes or overlap; the
// format's own reader requires this. Files are untrusted: every number is checked before it is used.
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
  // Maps the file and checks the whole header. Throws UserError if the file is missing or invalid. The
  // message names the file, the tensor, the value, what was expected and a remedy.
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const std::map<std::string, SafetensorsEntry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // Returns a view of the mapped bytes: the file's dtype, contiguous, on the CPU. Do not write to the view.
  // The view keeps the mapping alive. Throws UserError if the file has no tensor of this name.
  at::Tensor tensor(const std::string& name) const;

 private:
  void read_header();
  SafetensorsEntry parse_entry(const std::string& name, const Json& value) const;
  void check_layout() const;
  [[noreturn]] void fail(const std::string& what) const;

  std::filesystem::path path_;
  std::shared_ptr<const MappedFile> file_;
  size_t data_begin_ = 0;  // end of the header, in bytes
  std::map<std::string, SafetensorsEntry> entries_;
  std::map<std::string, std::string> metadata_;
};

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
using SafetensorsMetadata = std::map<std::string, std::string>;

// Writes tensors of any device and strides, each converted to `dtype` if given. Holds a copy of one tensor at
// a time. Tensors with wide elements come first, so all tensors are aligned to their element size. Throws
// IoError on a full disk; an existing file then stays unchanged.
void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       std::optional<at::ScalarType> dtype = {},
                       const SafetensorsMetadata& metadata = {{"format", "pt"}});

// Writes into a file that the caller commits, so that several files of one checkpoint can appear together.
void write_safetensors(AtomicFile& file, const NamedTensors& tensors,
                       std::optional<at::ScalarType> dtype = {},
                       const SafetensorsMetadata& metadata = {{"format", "pt"}});

// A tensor that is made only when it is written, and stored in `dtype`. Only one is in memory at a time.
struct SafetensorsSource {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  std::function<at::Tensor()> make;
};
void write_safetensors(AtomicFile& file, const std::vector<SafetensorsSource>& sources,
                       const SafetensorsMetadata& metadata = {{"format", "pt"}});

// The bytes of a tensor in the file.
int64_t stored_bytes(const at::Tensor& tensor, std::optional<at::ScalarType> dtype);

}  // namespace bough
