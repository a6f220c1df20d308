#include "base/scratch_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "base/error.h"

namespace bough {
namespace {

TEST(ScratchFile, GivesBackWhatWasWrittenAndHasNoName) {
  const auto folder = std::filesystem::temp_directory_path() / str("bough_scratch_", ::getpid());
  std::filesystem::create_directories(folder);
  ScratchFile file(folder);
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  file.write("abc", 3);
  file.write("defg", 4);
  std::string text(4, ' ');
  file.read(text.data(), 4, 2);
  EXPECT_EQ(text, "cdef");
  EXPECT_THROW(file.read(text.data(), 4, 4), IoError) << "beyond the end";
  std::filesystem::remove_all(folder);
  EXPECT_THROW(ScratchFile{folder}, IoError);
}

}  // namespace
}  // namespace bough
