#include "base/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/descriptor.h"
#include "base/error.h"

namespace bough {
namespace fs = std::filesystem;
namespace {

// Throws for errno `code`: UserError if the user can fix the cause, IoError if the failure may be temporary.
[[noreturn]] void fail(const char* doing, const fs::path& path, int code) {
  const std::string message =
      str("cannot ", doing, " ", quoted(path.string(), 300), ": ", std::strerror(code));
  switch (code) {
    case ENOSPC:
    case EDQUOT:
      throw IoError(message + "; free some space (or raise the quota) and start the same command again");
    case EFBIG: throw IoError(message + "; the file size limit of this process (ulimit -f) is too low");
    case ENOENT: throw UserError(message + "; check the path");
    case EACCES:
    case EPERM:
    case EROFS: throw UserError(message + "; choose a path that this user may use");
    case EISDIR:
    case ENOTDIR:
    case ELOOP:
    case ENAMETOOLONG: throw UserError(message);
    default: throw IoError(message);
  }
}

int open_retrying(const fs::path& path, int flags, mode_t mode = 0666) {
  int descriptor;
  do descriptor = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  while (descriptor < 0 && errno == EINTR);
  return descriptor;
}

// Opens a file for reading and refuses folders, which open() accepts.
int open_to_read(const fs::path& path, struct stat& status) {
  const int descriptor = open_retrying(path, O_RDONLY);
  if (descriptor < 0) fail("read", path, errno);
  if (::fstat(descriptor, &status) != 0 || S_ISDIR(status.st_mode)) {
    const int code = S_ISDIR(status.st_mode) ? EISDIR : errno;
    ::close(descriptor);
    if (code == EISDIR)
      throw UserError(str("cannot read ", quoted(path.string(), 300), ": expected a file, got a folder"));
    fail("read", path, code);
  }
  return descriptor;
}

// Writes everything or throws; `path` is for the message.
void write_all(int descriptor, const void* data, size_t num_bytes, const fs::path& path) {
  const char* next = static_cast<const char*>(data);
  while (num_bytes > 0) {
    const ssize_t written = ::write(descriptor, next, num_bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail("write", path, written < 0 ? errno : EIO);
    next += written;
    num_bytes -= static_cast<size_t>(written);
  }
}

// Some file systems and devices have nothing to flush and return an error. This error is ignored.
void sync_descriptor(int descriptor, const fs::path& path) {
  if (::fsync(descriptor) != 0 && errno != EINVAL && errno != EROFS && errno != ENOTSUP)
    fail("flush", path, errno);
}

void sync_path(const fs::path& path, int flags) {
  const Descriptor descriptor(open_retrying(path, O_RDONLY | flags));
  if (descriptor.value < 0) fail("flush", path, errno);
  sync_descriptor(descriptor.value, path);
}

// The folder that holds `path`'s entry.
fs::path parent_of(const fs::path& path) {
  const fs::path parent = path.parent_path();
  return parent.empty() ? fs::path(".") : parent;
}

std::string unique_suffix() {
  static std::atomic<uint64_t> counter{0};
  return str(".", ::getpid(), ".", counter++, ".tmp");
}
}  // namespace

std::string read_file(const fs::path& path) {
  struct stat status;
  const Descriptor descriptor(open_to_read(path, status));
  std::string content;
  // st_size is a hint only: pipes and /proc say 0, and the file may grow while it is read.
  content.resize(static_cast<size_t>(status.st_size) + 1);
  size_t size = 0;
  while (true) {
    const ssize_t got = ::read(descriptor.value, content.data() + size, content.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", path, errno);
    if (got == 0) break;
    size += static_cast<size_t>(got);
    if (size == content.size()) content.resize(size * 2);
  }
  content.resize(size);
  return content;
}

void write_file_atomically(const fs::path& path, std::string_view contents) {
  AtomicFile file(path);
  file.write(contents);
  file.commit();
}

AtomicFile::AtomicFile(const fs::path& path) : path_(path), target_(path) {
  std::error_code ignored;
  if (fs::is_symlink(path, ignored)) target_ = fs::weakly_canonical(path, ignored);
  struct stat status;
  const bool exists = ::stat(target_.c_str(), &status) == 0;
  if (path.empty() || !path.has_filename() || (exists && S_ISDIR(status.st_mode)))
    throw UserError(str("cannot write ", quoted(path.string(), 300), ": expected a file, got a folder"));
  if (exists && !S_ISREG(status.st_mode)) {
    descriptor_ = open_retrying(target_, O_WRONLY);
  } else {
    temporary_ = parent_of(target_) / ("." + target_.filename().string() + unique_suffix());
    descriptor_ = open_retrying(temporary_, O_WRONLY | O_CREAT | O_EXCL);
  }
  if (descriptor_ < 0) {
    temporary_.clear();
    fail("write", path, errno);
  }
  if (exists && !temporary_.empty()) ::fchmod(descriptor_, status.st_mode & 07777);
}

AtomicFile::~AtomicFile() {
  discard();
}

void AtomicFile::discard() noexcept {
  if (descriptor_ < 0) return;
  ::close(std::exchange(descriptor_, -1));
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, size_t num_bytes) {
  BOUGH_CHECK(descriptor_ >= 0, "file already committed: ", path_.string());
  write_all(descriptor_, data, num_bytes, path_);
}

void AtomicFile::commit() {
  BOUGH_CHECK(descriptor_ >= 0, "file already committed: ", path_.string());
  sync_descriptor(descriptor_, path_);
  if (!temporary_.empty()) {
    if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("write", path_, errno);
    temporary_.clear();  // the file now has its final name: discard() must not remove it
    sync_path(parent_of(target_), O_DIRECTORY);
  }
  ::close(std::exchange(descriptor_, -1));
}

AppendFile::AppendFile(const fs::path& path, Durability durability) : path_(path), durability_(durability) {
  descriptor_ = open_retrying(path, O_WRONLY | O_CREAT | O_APPEND);
  if (descriptor_ < 0) fail("write", path, errno);
}

AppendFile::~AppendFile() {
  ::close(descriptor_);
}

void AppendFile::append(std::string_view text) {
  struct stat before;
  const bool can_cut = ::fstat(descriptor_, &before) == 0 && S_ISREG(before.st_mode);
  try {
    write_all(descriptor_, text.data(), text.size(), path_);
    if (durability_ == Durability::kSynced) sync_descriptor(descriptor_, path_);
  } catch (...) {
    // Half a line would make the file unreadable for readers of lines. The error of the write is thrown even
    // if the truncation fails.
    if (can_cut && ::ftruncate(descriptor_, before.st_size) != 0) errno = 0;
    throw;
  }
}

void AppendFile::sync() {
  sync_descriptor(descriptor_, path_);
}

MappedFile::MappedFile(const fs::path& path) {
  struct stat status;
  const Descriptor descriptor(open_to_read(path, status));
  if (status.st_size == 0)
    throw UserError(str("cannot use ", quoted(path.string(), 300), ": the file is empty"));
  void* address =
      ::mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, descriptor.value, 0);
  if (address == MAP_FAILED) fail("map", path, errno);
  data_ = static_cast<const std::byte*>(address);
  size_ = static_cast<size_t>(status.st_size);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void make_directories(const fs::path& path) {
  std::error_code code;
  fs::create_directories(path, code);
  if (!code && !fs::is_directory(path)) code = std::make_error_code(std::errc::not_a_directory);
  if (code) fail("make the folder", path, code.value());
}

std::filesystem::path cache_folder() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::filesystem::path(value ? value : "");
  };
  if (const auto own = variable("BOUGH_CACHE"); !own.empty()) return own;
  if (const auto xdg = variable("XDG_CACHE_HOME"); !xdg.empty()) return xdg / "bough";
  if (const auto home = variable("HOME"); !home.empty()) return home / ".cache" / "bough";
  return {};
}

void remove_tree(const fs::path& path) {
  std::error_code code;
  fs::remove_all(path, code);
  if (code) fail("remove", path, code.value());
}

void publish_directory(const fs::path& temporary, const fs::path& final_path) {
  if (!fs::is_directory(temporary)) fail("publish", temporary, ENOENT);
  for (const auto& entry : fs::recursive_directory_iterator(temporary))
    if (entry.is_regular_file() || entry.is_directory()) sync_path(entry.path(), 0);
  sync_path(temporary, O_DIRECTORY);
  // rename() replaces only an empty folder. So an existing folder is renamed first, and removed afterwards.
  fs::path old;
  if (fs::exists(final_path)) {
    old = final_path.string() + unique_suffix();
    if (::rename(final_path.c_str(), old.c_str()) != 0) fail("replace", final_path, errno);
  }
  if (::rename(temporary.c_str(), final_path.c_str()) != 0) {
    const int code = errno;
    if (!old.empty() && ::rename(old.c_str(), final_path.c_str()) != 0)
      throw IoError(str("cannot write ", quoted(final_path.string(), 300), ": ", std::strerror(code),
                        "; the previous content is now at ", quoted(old.string(), 300)));
    fail("write", final_path, code);
  }
  sync_path(parent_of(final_path), O_DIRECTORY);
  if (!old.empty()) remove_tree(old);
}

FolderLock::FolderLock(const fs::path& folder, const std::string& setting) {
  const fs::path path = folder / ".lock";
  descriptor_ = open_retrying(path, O_RDWR | O_CREAT);
  if (descriptor_ < 0) fail("lock", path, errno);
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    const int code = errno;
    std::string holder(256, '\0');
    const ssize_t length = ::pread(descriptor_, holder.data(), holder.size(), 0);
    holder.resize(length > 0 ? static_cast<size_t>(length) : 0);
    ::close(descriptor_);
    if (code != EWOULDBLOCK) fail("lock", path, code);
    throw UserError(str("the folder ", quoted(folder.string(), 300), " is in use by ",
                        holder.empty() ? "another process" : holder,
                        "; wait for it, stop it, or choose another folder (", setting, ")"));
  }
  const std::string holder = str("process ", ::getpid(), " on ", host_name());
  // The text in the lock file is only for the message above. So a full disk must not stop the run here.
  if (::ftruncate(descriptor_, 0) != 0 || ::pwrite(descriptor_, holder.data(), holder.size(), 0) < 0)
    errno = 0;
}

std::string host_name() {
  char name[HOST_NAME_MAX + 1] = {};
  return ::gethostname(name, HOST_NAME_MAX) == 0 ? name : "";
}

FolderLock::~FolderLock() {
  // The lock file is not removed: otherwise two processes could lock two different files of that name.
  if (::ftruncate(descriptor_, 0) != 0) errno = 0;
  ::close(descriptor_);
}

}  // namespace bough
