#include "base/run_time_library.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/base_test_util.h"
#include "base/error.h"
#include "base/file.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

class RunTimeLibraries : public ::testing::Test {
 protected:
  ~RunTimeLibraries() override { fs::remove(path_); }

  RunTimeLibrary library(const std::string& bytes) const {
    write_file_atomically(path_, bytes);
    return {.path = path_,
            .build_id = "0123456789abcdef",
            .purpose = "device cuda",
            .remedy = "install it",
            .rebuild = "bough and bough_cuda"};
  }
  static std::string refusal(const RunTimeLibrary& library) {
    try {
      open_run_time_library(library);
      return "opened";
    } catch (const UserError& error) {
      return error.what();
    }
  }

  const fs::path path_ = fs::temp_directory_path() / str("library", ::getpid(), ".so");
};

TEST_F(RunTimeLibraries, OfAnotherBuildAreRefusedBeforeTheirCodeRuns) {
  const std::string message = refusal(library("...bough build id fedcba9876543210..."));
  expect_names(message, {"device cuda", path_.string(), "another build", "got build id fedcba9876543210",
                         "expected 0123456789abcdef", "build bough and bough_cuda"});
}

TEST_F(RunTimeLibraries, WithoutABuildIdAreRefused) {
  expect_names(refusal(library("bough build id ? and bough build id 0123")), {"got no build id"});
  expect_names(refusal(library("")), {"got no build id"});
}

TEST_F(RunTimeLibraries, ThatTheSystemCannotOpenAreRefusedWithItsReason) {
  expect_names(refusal(library("bough build id ? bough build id 0123456789abcdef")),
               {"device cuda: cannot open", path_.string(), "install it"});
}

TEST_F(RunTimeLibraries, AreFoundBesideTheProgram) {
  EXPECT_TRUE(find_run_time_library("no such library").empty());
  EXPECT_EQ(find_run_time_library("base_test").filename(), "base_test");
}

}  // namespace
}  // namespace bough
