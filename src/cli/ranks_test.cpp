#include "cli/ranks.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "base/error.h"

namespace bough {
namespace {

// The GPU that a rank sees where CUDA_VISIBLE_DEVICES was `given`, or was not set.
std::string seen(const char* given, int64_t local_rank) {
  if (given) setenv("CUDA_VISIBLE_DEVICES", given, 1);
  else unsetenv("CUDA_VISIBLE_DEVICES");
  see_one_gpu(local_rank);
  return std::getenv("CUDA_VISIBLE_DEVICES");
}

TEST(SeeOneGpu, IsTheRanksOwnOfThoseThatAreListed) {
  EXPECT_EQ(seen(nullptr, 3), "3");
  EXPECT_EQ(seen("4,5,6,7", 2), "6");
  EXPECT_EQ(seen("GPU-a,GPU-b", 1), "GPU-b");
  EXPECT_EQ(seen("2", 5), "2");  // the starter gave each rank one
  EXPECT_THROW(seen("0,1", 2), UserError);
  unsetenv("CUDA_VISIBLE_DEVICES");
}

}  // namespace
}  // namespace bough
