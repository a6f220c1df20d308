#include "cli/launch_ranks.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "base/error.h"
#include "cli/tcp_store.h"
#include "comm/communicator_test_cases.h"

namespace bough {
namespace {

// The GPU that a rank sees if CUDA_VISIBLE_DEVICES was `given`. nullptr: the variable was not set.
std::string seen(const char* given, int64_t local_rank) {
  if (given) setenv("CUDA_VISIBLE_DEVICES", given, 1);
  else unsetenv("CUDA_VISIBLE_DEVICES");
  see_one_gpu(local_rank);
  return std::getenv("CUDA_VISIBLE_DEVICES");
}

TEST(SeeOneGpu, EachRankSeesItsEntryOfTheList) {
  EXPECT_EQ(seen(nullptr, 3), "3");
  EXPECT_EQ(seen("4,5,6,7", 2), "6");
  EXPECT_EQ(seen("GPU-a,GPU-b", 1), "GPU-b");
  EXPECT_EQ(seen("2", 5), "2");  // the launcher gave each rank one GPU
  EXPECT_THROW(seen("0,1", 2), UserError);
  unsetenv("CUDA_VISIBLE_DEVICES");
}

// Sets the environment variables that torchrun sets for rank `rank` of `size`.
void set_environment(int64_t rank, int64_t size, uint16_t port) {
  const auto set = [](const char* name, const std::string& value) { setenv(name, value.c_str(), 1); };
  set("RANK", std::to_string(rank));
  set("WORLD_SIZE", std::to_string(size));
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", std::to_string(port));
}

struct Environment : testing::Test {
  void TearDown() override {
    for (const char* name :
         {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"})
      unsetenv(name);
  }
};

TEST_F(Environment, GivesTheRankAndTheStoresAddress) {
  EXPECT_FALSE(store_environment());
  set_environment(0, 4, 1234);
  EXPECT_TRUE(store_environment()->rank.holds_store);
  EXPECT_EQ(rank_prefix(), "rank 0: ");
  setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  EXPECT_FALSE(store_environment()->rank.holds_store);
  set_environment(3, 4, 1234);
  EXPECT_EQ(store_environment()->rank.rank, 3);
  EXPECT_EQ(store_environment()->rank.size, 4);
  EXPECT_EQ(store_environment()->port, 1234);
  set_environment(0, 1, 1234);
  EXPECT_FALSE(store_environment()) << "one rank is no group";
  EXPECT_EQ(rank_prefix(), "");
  set_environment(4, 4, 1234);
  EXPECT_THROW(store_environment(), UserError);
  set_environment(3, 4, 1234);
  unsetenv("MASTER_ADDR");
  EXPECT_THROW(store_environment(), UserError);
}

// Ranks connected by torch's store, each by its own connection.
Groups tcp_ranks(int64_t size) {
  static std::vector<std::unique_ptr<HeldStore>> stores;  // live until all tests are over
  stores.push_back(hold_store());
  Groups ranks;
  for (int64_t rank = 0; rank < size; ++rank) {
    const StoreEnvironment environment{.rank = {.rank = rank, .size = size},
                                       .host = "127.0.0.1",
                                       .port = stores.back()->port(),
                                       .attempt = "0"};
    ranks.push_back(store_communicator(environment));
  }
  return ranks;
}

INSTANTIATE_TEST_SUITE_P(All, CommunicatorTest, testing::Values(GroupKind{"tcp_store", tcp_ranks}),
                         [](const auto& kind) { return std::string(kind.param.name); });

}  // namespace
}  // namespace bough
