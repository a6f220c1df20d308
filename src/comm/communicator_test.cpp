#include "comm/communicator.h"

#include <unistd.h>

#include <map>

#include "base/base_test_util.h"
#include "base/build_id.h"
#include "base/error.h"
#include "base/file.h"
#include "base/mutex.h"
#include "comm/communicator_test_cases.h"
#include "comm/store_communicator.h"

namespace bough {
namespace {

// An in-process store.
class MemoryStore final : public KeyValueStore {
 public:
  struct Shared {
    Mutex mutex;
    std::map<std::string, std::string> values GUARDED_BY(mutex);
  };
  explicit MemoryStore(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}

  void set(const std::string& key, const std::string& value) override {
    const MutexLock lock(shared_->mutex);
    shared_->values[key] = value;
  }
  bool has(const std::string& key) override {
    const MutexLock lock(shared_->mutex);
    return shared_->values.contains(key);
  }
  std::vector<std::string> get(const std::vector<std::string>& keys) override {
    const MutexLock lock(shared_->mutex);
    std::vector<std::string> values;
    for (const std::string& key : keys) values.push_back(shared_->values.at(key));
    return values;
  }
  int64_t add(const std::string& key, int64_t count) override {
    const MutexLock lock(shared_->mutex);
    std::string& value = shared_->values[key];
    value = std::to_string((value.empty() ? 0 : std::stoll(value)) + count);
    return std::stoll(value);
  }
  void erase(const std::string& key) override {
    const MutexLock lock(shared_->mutex);
    EXPECT_EQ(shared_->values.erase(key), 1u) << key;
  }

 private:
  const std::shared_ptr<Shared> shared_;
};

Groups ranks_of(const std::shared_ptr<MemoryStore::Shared>& shared, int64_t size,
                double silence_seconds = 8) {
  Groups ranks;
  for (int64_t rank = 0; rank < size; ++rank)
    ranks.push_back(store_communicator(
        std::make_unique<MemoryStore>(shared),
        {.rank = rank, .size = size, .holds_store = rank == 0, .silence_seconds = silence_seconds}));
  return ranks;
}

INSTANTIATE_TEST_SUITE_P(All, CommunicatorTest,
                         testing::Values(GroupKind{"threads", thread_communicators},
                                         GroupKind{"store",
                                                   [](int64_t size) {
                                                     return ranks_of(std::make_shared<MemoryStore::Shared>(),
                                                                     size);
                                                   }}),
                         [](const auto& kind) { return std::string(kind.param.name); });

class StoreCommunicatorTest : public CommunicatorTest {};

TEST_F(StoreCommunicatorTest, LeavesNothingInTheStore) {
  const auto shared = std::make_shared<MemoryStore::Shared>();
  on_ranks(ranks_of(shared, 3), [](Communicator& ranks) {
    const auto part = ranks.split(ranks.rank() / 2);
    for (int i = 0; i < 20; ++i) {
      std::vector<int64_t> send(6, ranks.rank()), receive(6);
      for (const auto kind : {Collective::Kind::kReduceScatter, Collective::Kind::kAllToAll,
                              Collective::Kind::kAllGather, Collective::Kind::kAllReduce})
        ranks.run({.kind = kind,
                   .send = send.data(),
                   .receive = receive.data(),
                   .count = 2,
                   .element = Element::kInt64});
      part->barrier();
      EXPECT_EQ(part->broadcast("x"), "x");
      EXPECT_EQ(ranks.broadcast("", 1), "");
    }
  });
  for (const auto& [key, value] : shared->values) {
    EXPECT_TRUE(key.starts_with("alive/")) << key;
    EXPECT_EQ(value, "gone") << key;
  }
  EXPECT_EQ(shared->values.size(), 3u);
}

std::string failure_of(Communicator& rank) {
  rank.set_deadline(9);
  try {
    rank.barrier();
  } catch (const IoError& error) {
    return error.what();
  }
  return "the barrier ended";
}

TEST_F(StoreCommunicatorTest, NoticesARankThatDiesOrFails) {
  const auto shared = std::make_shared<MemoryStore::Shared>();
  MemoryStore(shared).set("alive/1", "17");  // rank 1 says nothing after this
  Groups ranks = ranks_of(shared, 1);
  ranks[0] = store_communicator(std::make_unique<MemoryStore>(shared),
                                {.rank = 0, .size = 2, .silence_seconds = 1.5});
  EXPECT_NE(failure_of(*ranks[0]).find("rank 1 of 2 has said nothing"), std::string::npos);

  Groups others = ranks_of(std::make_shared<MemoryStore::Shared>(), 2);
  try {
    const std::unique_ptr<Communicator> failing = std::move(others[1]);
    throw IoError("what ends rank 1");
  } catch (const IoError&) {
  }
  EXPECT_EQ(failure_of(*others[0]), "rank 1 of 2 has failed");
}

TEST(NcclCommunicator, IsRefusedForSeveralRanksIfItsLibraryIsMissing) {
  EXPECT_EQ(nccl_communicator(single_communicator(), {})->size(), 1);
  auto ranks = thread_communicators(2);
  try {
    nccl_communicator(std::move(ranks[0]), {});
    FAIL() << "expected UserError";
  } catch (const UserError& error) {
    expect_names(error.what(), {"libbough_nccl.so", "got 2 ranks", "bough_cuda", "nvidia-nccl-cu13"});
  }
}

TEST(NcclCommunicator, IsRefusedIfItsLibraryIsOfAnotherBuild) {
  const std::filesystem::path path = std::filesystem::temp_directory_path() / str("nccl", ::getpid(), ".so");
  write_file_atomically(path, str("\x7f", "ELF bough build id \n bough build id 0123456789abcdef"));
  try {
    nccl_communicator(single_communicator(), path);
    ADD_FAILURE() << "expected UserError";
  } catch (const UserError& error) {
    expect_names(error.what(), {path.string(), "0123456789abcdef", build_id(), "bough_nccl"});
  }
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace bough
