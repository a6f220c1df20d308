// A file without a name, for data that does not fit into memory: its bytes go with the object or the process,
// also when the process is killed. Nothing is flushed to the disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>

#include "base/descriptor.h"

namespace bough {

class ScratchFile {
 public:
  // Creates the file in `folder`. Throws IoError if it cannot be created.
  explicit ScratchFile(const std::filesystem::path& folder);

  // Appends the bytes. Throws IoError if the disk is full.
  void write(const void* data, size_t num_bytes);
  // Reads bytes that were written, from `offset` on. Throws IoError.
  void read(void* data, size_t num_bytes, int64_t offset) const;

 private:
  [[noreturn]] void fail(const char* doing) const;

  std::filesystem::path folder_;  // for messages
  Descriptor descriptor_;
};

}  // namespace bough
