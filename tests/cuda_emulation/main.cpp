// The main function of the test programs on the emulated device (docs/cuda_emulation.md). A test that skips
// itself fails, unless the table below names it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

namespace {

struct Excluded {
  std::string_view program, test;
  std::string_view reason;
};
constexpr Excluded kExcluded[] = {
    {"kernels_test", "CudaTreeAttention.BySegmentsHasASimilarError", "libtorch's FlashAttention has no stand-in"},
    {"kernels_test", "CudaLibrary.HasMatrixProduct", "cuBLAS has no stand-in"},
    {"kernels_test", "CudaMatrixProduct.EqualsTheProductInFp64", "cuBLAS has no stand-in"},
    {"kernels_test", "CudaPriorityStream.DoesNotWaitForAnotherThreadsWork", "work of all streams runs at once"},
    {"kernels_test", "Cuda/CudaSelfTest.EqualsItsReference/flash_segments",
     "libtorch's FlashAttention has no stand-in"},
};

std::string name_of(const testing::TestInfo& test) {
  return std::string(test.test_suite_name()) + "." + test.name();
}

// Fails tests that skip themselves.
class NoSkips : public testing::EmptyTestEventListener {
  // Not in OnTestPartResult(), where a further result would wait for googletest's own mutex.
  void OnTestEnd(const testing::TestInfo& test) override {
    if (test.result()->Skipped())
      ADD_FAILURE() << "skipped on the emulated device; tests/cuda_emulation/main.cpp names such tests";
  }
};

// Returns whether each excluded test of the program exists.
bool check_excluded(std::string_view program) {
  std::vector<std::string> names;
  const auto& all = *testing::UnitTest::GetInstance();
  for (int s = 0; s < all.total_test_suite_count(); ++s)
    for (int t = 0; t < all.GetTestSuite(s)->total_test_count(); ++t)
      names.push_back(name_of(*all.GetTestSuite(s)->GetTestInfo(t)));
  for (const auto& excluded : kExcluded)
    if (excluded.program == program &&
        std::find(names.begin(), names.end(), excluded.test) == names.end()) {
      std::cerr << "tests/cuda_emulation/main.cpp excludes " << excluded.test << ", which does not exist\n";
      return false;
    }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  setenv("BOUGH_EMULATED_CUDA", "1", /*overwrite=*/1);
  testing::InitGoogleTest(&argc, argv);
  const std::string_view path = argv[0];
  const std::string_view program = path.substr(path.rfind('/') + 1);
  if (!check_excluded(program)) return 1;
  std::string& filter = testing::GTEST_FLAG(filter);
  filter += filter.find('-') == std::string::npos ? "-" : ":";
  for (const auto& excluded : kExcluded) {
    if (excluded.program != program) continue;
    std::cout << "excluded: " << excluded.test << ": " << excluded.reason << "\n";
    filter += std::string(excluded.test) + ":";
  }
  testing::UnitTest::GetInstance()->listeners().Append(new NoSkips);
  return RUN_ALL_TESTS();
}
