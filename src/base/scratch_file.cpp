#include "base/scratch_file.h"

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"

namespace bough {

ScratchFile::ScratchFile(const std::filesystem::path& folder) : folder_(folder) {
  std::string path = (folder / ".scratch-XXXXXX").string();
  descriptor_ = Descriptor(::mkostemp(path.data(), O_CLOEXEC));
  if (descriptor_.value < 0) fail("create");
  ::unlink(path.c_str());
}

void ScratchFile::write(const void* data, size_t num_bytes) {
  const auto* next = static_cast<const char*>(data);
  while (num_bytes > 0) {
    const ssize_t written = ::write(descriptor_.value, next, num_bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write");
    next += written;
    num_bytes -= static_cast<size_t>(written);
  }
}

void ScratchFile::read(void* data, size_t num_bytes, int64_t offset) const {
  auto* next = static_cast<char*>(data);
  while (num_bytes > 0) {
    const ssize_t count = ::pread(descriptor_.value, next, num_bytes, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count == 0) errno = EIO;  // the end of the file
    if (count <= 0) fail("read");
    next += count;
    offset += count;
    num_bytes -= static_cast<size_t>(count);
  }
}

void ScratchFile::fail(const char* doing) const {
  throw IoError(str("cannot ", doing, " a temporary file in ", quoted(folder_.string(), 300), ": ",
                    std::strerror(errno)));
}

}  // namespace bough
