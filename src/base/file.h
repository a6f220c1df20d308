// Files that survive a full disk and a killed process.
//
// Errors: UserError where the path itself is wrong (missing, a directory, empty where content is needed, no
// permission); IoError where the same call may succeed later (disk full, quota, read error). Both name the
// path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace bough {

// The whole content; an empty file gives "".
std::string read_file(const std::filesystem::path& path);

// Replaces `path` by `contents`: written aside in the same folder, flushed to the disk, renamed. When it
// throws, what was at `path` is untouched and nothing is left beside it. A symbolic link is followed, the
// permissions of an existing file are kept; a device (/dev/null) is written in place.
void write_file_atomically(const std::filesystem::path& path, std::string_view contents);

// Writes aside and renames content that is produced in pieces. Without commit() the destructor discards what
// was written.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t num_bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  void commit();

 private:
  void discard() noexcept;

  std::filesystem::path path_;       // what was asked for, in messages
  std::filesystem::path target_;     // after symbolic links
  std::filesystem::path temporary_;  // empty when a device is written in place
  int descriptor_ = -1;
};

// A file that only grows; one append() is one write, so that lines of two processes do not interleave.
class AppendFile {
 public:
  enum class Durability {
    kFlushed,  // in the kernel after append(): survives a killed process
    kSynced,   // on the disk after append(): survives a power cut
  };
  explicit AppendFile(const std::filesystem::path& path, Durability durability = Durability::kFlushed);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  // Appends all or nothing: after a failed write the file is cut back to its former length.
  void append(std::string_view text);
  void sync();

 private:
  std::filesystem::path path_;
  Durability durability_;
  int descriptor_ = -1;
};

// A file mapped read-only for the lifetime of the object. UserError: missing, empty, a directory.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Like mkdir -p. UserError when something on the way is a file or may not be written.
void make_directories(const std::filesystem::path& path);

// Removes a file or a folder with all in it; nothing happens if it is not there. (Not named as the standard
// one: a call with a path would be ambiguous.)
void remove_tree(const std::filesystem::path& path);

// Makes a folder that was prepared as `temporary` appear as `final_path`, complete or not at all: flushes
// every file in it to the disk, renames it, flushes the parent. A folder already at `final_path` is replaced.
void publish_directory(const std::filesystem::path& temporary, const std::filesystem::path& final_path);

// Only one process works in a run's folder: an advisory lock (flock) on <folder>/.lock, gone with its process
// whatever way that dies. UserError says who holds it (process id and host).
class FolderLock {
 public:
  explicit FolderLock(const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int descriptor_ = -1;
};

}  // namespace bough
