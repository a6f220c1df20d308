#include "base/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "base/base_test_util.h"
#include "base/error.h"

namespace bough {
namespace fs = std::filesystem;
namespace {

class File : public ::testing::Test {
 protected:
  int num_entries() const {
    return static_cast<int>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

  const TemporaryFolder temporary_;
  const fs::path folder_ = temporary_.path();
};

TEST_F(File, WritesAndReadsBack) {
  const std::string content("a\0b\n\xff", 5);
  write_file_atomically(folder_ / "x", content);
  EXPECT_EQ(read_file(folder_ / "x"), content);
  write_file_atomically(folder_ / "x", "");
  EXPECT_EQ(read_file(folder_ / "x"), "");
  EXPECT_EQ(num_entries(), 1);
}

TEST_F(File, AFailedWriteLeavesTheOldFileAndNothingElse) {
  write_file_atomically(folder_ / "x", "old");
  {
    const FileSizeLimit limit(1000);
    EXPECT_THROW(write_file_atomically(folder_ / "x", std::string(5000, 'n')), IoError);
  }
  {
    AtomicFile file(folder_ / "x");
    file.write("not committed");
  }
  EXPECT_EQ(read_file(folder_ / "x"), "old");
  EXPECT_EQ(num_entries(), 1);
}

TEST_F(File, AFullDiskSaysWhatToDo) {
  for (const bool append : {false, true}) {
    try {
      if (append) AppendFile("/dev/full").append("x");
      else write_file_atomically("/dev/full", "x");
      FAIL() << "a full device took a byte";
    } catch (const IoError& error) {
      EXPECT_NE(std::string(error.what()).find("free some space"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("/dev/full"), std::string::npos) << error.what();
    }
  }
}

TEST_F(File, KeepsPermissionsAndFollowsLinks) {
  write_file_atomically(folder_ / "real", "1");
  fs::permissions(folder_ / "real", fs::perms::owner_all);
  fs::create_symlink("real", folder_ / "link");
  write_file_atomically(folder_ / "link", "2");
  EXPECT_TRUE(fs::is_symlink(folder_ / "link"));
  EXPECT_EQ(read_file(folder_ / "real"), "2");
  EXPECT_EQ(fs::status(folder_ / "real").permissions(), fs::perms::owner_all);
}

TEST_F(File, WrongPathsAreUserErrors) {
  EXPECT_THROW(read_file(folder_ / "missing"), UserError);
  EXPECT_THROW(read_file(folder_), UserError);
  EXPECT_THROW(write_file_atomically(folder_, "x"), UserError);
  EXPECT_THROW(write_file_atomically(folder_ / "no" / "x", "x"), UserError);
  EXPECT_THROW(write_file_atomically("", "x"), UserError);
  EXPECT_THROW(AppendFile(folder_ / "no" / "x"), UserError);
  EXPECT_THROW(MappedFile(folder_ / "missing"), UserError);
  EXPECT_THROW(MappedFile{folder_}, UserError);
  write_file_atomically(folder_ / "empty", "");
  EXPECT_THROW(MappedFile(folder_ / "empty"), UserError);
  EXPECT_THROW(make_directories(folder_ / "empty" / "x"), UserError);
  EXPECT_THROW(make_directories(folder_ / "empty"), UserError);
}

TEST_F(File, AppendsWholeLinesOnly) {
  AppendFile file(folder_ / "x", AppendFile::Durability::kSynced);
  file.append("one\n");
  AppendFile(folder_ / "x").append("two\n");
  {
    const FileSizeLimit limit(12);
    EXPECT_THROW(file.append("a line too long\n"), IoError);
  }
  file.append("three\n");
  EXPECT_EQ(read_file(folder_ / "x"), "one\ntwo\nthree\n");
}

TEST_F(File, MapsAndMoves) {
  write_file_atomically(folder_ / "x", "mapped");
  MappedFile first(folder_ / "x");
  MappedFile second(std::move(first));
  EXPECT_EQ(second.text(), "mapped");
  EXPECT_EQ(first.size(), 0u);
  first = std::move(second);
  EXPECT_EQ(first.text(), "mapped");
}

TEST_F(File, PublishesADirectoryOverAnOldOne) {
  for (const char* content : {"1", "2"}) {
    make_directories(folder_ / "new" / "sub");
    write_file_atomically(folder_ / "new" / "sub" / "x", content);
    publish_directory(folder_ / "new", folder_ / "final");
    EXPECT_EQ(read_file(folder_ / "final" / "sub" / "x"), content);
    EXPECT_EQ(num_entries(), 1);
  }
  EXPECT_THROW(publish_directory(folder_ / "missing", folder_ / "final"), UserError);
  remove_tree(folder_ / "final");
  remove_tree(folder_ / "final");
  EXPECT_EQ(num_entries(), 0);
}

TEST_F(File, OneProcessHoldsAFolder) {
  {
    const FolderLock lock(folder_);
    try {
      const FolderLock second(folder_);
      FAIL() << "locked twice";
    } catch (const UserError& error) {
      EXPECT_NE(std::string(error.what()).find(str("process ", ::getpid())), std::string::npos)
          << error.what();
    }
  }
  const FolderLock again(folder_);
  EXPECT_THROW(FolderLock(folder_ / "missing"), UserError);
}

TEST_F(File, AKilledHolderLetsGo) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const FolderLock lock(folder_);
    if (::write(ready[1], "x", 1) != 1) ::_exit(1);
    ::pause();
    ::_exit(0);
  }
  char byte;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_THROW(FolderLock{folder_}, UserError);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  const FolderLock lock(folder_);
  ::close(ready[0]);
  ::close(ready[1]);
}

}  // namespace
}  // namespace bough
