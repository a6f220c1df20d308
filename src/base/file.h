// Files that survive a full disk and a killed process.
//
// Errors: UserError if the path itself is wrong (missing, a directory, empty where content is needed, no
// permission). IoError if the same call may succeed later (disk full, quota, read error). Both name the path.
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

// Replaces `path` by `contents`. Writes a temporary file in the same folder, flushes it to the disk and
// renames it. If the function throws, `path` is unchanged and no temporary file is left. A symbolic link is
// followed. An existing file keeps its permissions. A device (/dev/null) is written in place.
void write_file_atomically(const std::filesystem::path& path, std::string_view contents);

// Like write_file_atomically, for content that is written in pieces. commit() makes the file appear at
// `path`. If commit() was not called, the destructor removes the temporary file.
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

  std::filesystem::path path_;       // as given, for messages
  std::filesystem::path target_;     // after symbolic links
  std::filesystem::path temporary_;  // empty if a device is written in place
  int descriptor_ = -1;
};

// A file that only grows. Each append() is one write, so lines of two processes do not interleave.
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

  // Appends all or nothing: after a failed write, the file is truncated to its former length.
  void append(std::string_view text);
  void sync();

 private:
  std::filesystem::path path_;
  Durability durability_;
  int descriptor_ = -1;
};

// A file mapped read-only for the lifetime of the object. Throws UserError if it is missing, empty or a
// directory.
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

// Like mkdir -p. Throws UserError if a part of the path is a file or is not writable.
void make_directories(const std::filesystem::path& path);

// Returns the first of $BOUGH_CACHE, $XDG_CACHE_HOME/bough and $HOME/.cache/bough whose variable is set.
// Empty if none of the variables is set.
std::filesystem::path cache_folder();

// Removes a file, or a folder with its content. Does nothing if `path` does not exist. (Not named remove_all:
// calls would be ambiguous with std::filesystem::remove_all.)
void remove_tree(const std::filesystem::path& path);

// Renames the prepared folder `temporary` to `final_path`. At any time, `final_path` is complete or absent.
// Flushes all files of the folder to the disk before, and the parent folder after. A folder that exists at
// `final_path` is replaced.
void publish_directory(const std::filesystem::path& temporary, const std::filesystem::path& final_path);

std::string host_name();  // of this machine; empty if the system does not say it

// Ensures that only one process works in a run's folder: an advisory lock (flock) on <folder>/.lock. The lock
// ends when the process that holds it ends, even by a kill. If the lock is held, the constructor throws
// UserError with the process id and host of the holder, and the name of the setting of the folder.
class FolderLock {
 public:
  explicit FolderLock(const std::filesystem::path& folder, const std::string& setting = "trial_name");
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int descriptor_ = -1;
};

}  // namespace bough
