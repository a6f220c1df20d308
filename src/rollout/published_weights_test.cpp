// Publication of weights to other ranks (threads here): what arrives, its cost, and its timing.
#include "rollout/published_weights.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <thread>

#include "models/lora.h"
#include "rollout/copied_weights.h"
#include "rollout/rollout_test_util.h"

namespace bough {
namespace {

// Several buckets. The last one is not full.
ModelConfig wide_config() {
  ModelConfig config = small_config(80'000);
  config.hidden_size = 128;
  return config;
}

void add_to_all(Model& model, double value) {
  const at::NoGradGuard no_grad;
  for (Parameter* parameter : model.trained_parameters()) parameter->value.add_(value);
}

bool equal(Model& a, Model& b) {
  const auto left = a.trained_parameters(), right = b.trained_parameters();
  for (size_t i = 0; i < left.size(); ++i)
    if (!left[i]->value.equal(right[i]->value)) return false;
  return true;
}

// Size of the trained parameters. Each tensor is padded to whole cache lines of 64 bytes.
int64_t bytes_of(Model& model) {
  int64_t bytes = 0;
  for (const Parameter* parameter : model.trained_parameters())
    bytes += (static_cast<int64_t>(parameter->value.nbytes()) + 63) / 64 * 64;
  return bytes;
}

// Rank 0 publishes from `trained`. Rank 1 receives, on another host or on the same host.
struct Pair {
  explicit Pair(const std::function<std::unique_ptr<Model>()>& make, bool waits, bool apart = true,
                bool in_place = false)
      : trained(make()), generating(make()), mapped(*generating, in_place) {
    auto groups = thread_communicators(2);
    std::thread other([&] {
      of_engine = std::make_unique<PublicationRanks>(std::move(groups[1]), apart ? "there" : "here");
    });
    of_trainer = std::make_unique<PublicationRanks>(std::move(groups[0]), "here");
    other.join();
    received = std::make_unique<ReceivedWeights>(*of_engine, mapped.num_bytes());
    published = std::make_unique<PublishedWeights>(*trained, *of_trainer, waits);
    receiving = std::thread([this] { received->receive(); });
  }
  ~Pair() {
    published->end();
    receiving.join();
  }
  // Takes in the engines' order: rank 0 first.
  int32_t take() {
    std::optional<WeightUpdate> update;
    while (!(update = published->take())) std::this_thread::yield();
    const BufferedVersion arrived = received->arrived();
    EXPECT_EQ(arrived.version, update->version) << "rank 0 has taken what the engine has not got";
    mapped.take(arrived.version, received->path(arrived));
    received->hold(arrived);
    return update->version;
  }

  std::unique_ptr<Model> trained, generating;
  MappedWeights mapped;
  std::unique_ptr<PublicationRanks> of_trainer, of_engine;
  std::unique_ptr<ReceivedWeights> received;
  std::unique_ptr<PublishedWeights> published;
  std::thread receiving;
};

TEST(PublishedWeights, EqualTheTrainersBitForBitInSeveralBuckets) {
  for (const auto& [apart, in_place] :
       {std::pair(true, false), {true, true}, {false, false}, {false, true}}) {
    Pair pair([] { return small_rollout_model(at::kFloat, 5, wide_config()); }, /*waits=*/true, apart,
              in_place);
    ASSERT_GT(bytes_of(*pair.trained), kBucketBytes);
    const void* const address = pair.generating->embedding().value.const_data_ptr();
    for (int32_t version = 1; version <= 4; ++version) {
      add_to_all(*pair.trained, version);
      pair.published->publish(version);
      EXPECT_TRUE(pair.published->has_new());
      EXPECT_FALSE(equal(*pair.trained, *pair.generating)) << "before anybody has taken it";
      EXPECT_EQ(pair.take(), version);
      EXPECT_TRUE(equal(*pair.trained, *pair.generating));
      EXPECT_FALSE(pair.published->has_new());
      EXPECT_EQ(pair.received->arrived().version, -1);
      EXPECT_EQ(pair.received->held().version, version);
      EXPECT_EQ(pair.generating->embedding().value.const_data_ptr() == address, in_place);
    }
    const PublishedWeights::Report report = pair.published->take_report();
    EXPECT_EQ(report.publications, 4);
    EXPECT_EQ(report.bytes, 4.0 * static_cast<double>(bytes_of(*pair.trained)));
    EXPECT_GT(report.seconds, 0);
    // The communicator adds half of a broadcast's bytes to bytes_sent() of each of its two ranks. The
    // checksums add little.
    EXPECT_NEAR(pair.of_trainer->leaders->bytes_sent() / (report.bytes / 2), apart ? 1 : 0, 1e-3);
    EXPECT_LT(pair.of_trainer->all->bytes_sent(), 10'000);
    EXPECT_EQ(pair.published->take_report().publications, 0);
  }
}

TEST(PublishedWeights, OnlyTrainedAdaptersAreSent) {
  Pair pair(
      [] {
        auto model = small_rollout_model(at::kFloat, 5);
        add_adapter(*model, {.rank = 4}, /*seed=*/1);
        return model;
      },
      /*waits=*/true);
  add_to_all(*pair.trained, 1.5);
  pair.published->publish(1);
  pair.take();
  EXPECT_TRUE(equal(*pair.trained, *pair.generating));
  int64_t all = 0;
  for (const Parameter* parameter : pair.trained->parameters())
    all += static_cast<int64_t>(parameter->value.nbytes());
  EXPECT_LT(pair.published->take_report().bytes, 0.5 * static_cast<double>(all));
}

// The trainer changes its weights right after publish(), and publishes faster than versions are taken.
TEST(PublishedWeights, KeepTheirVersionWhileTheTrainerContinues) {
  for (const bool apart : {true, false}) {
    Pair pair([] { return small_rollout_model(at::kFloat, 5, wide_config()); }, /*waits=*/false, apart);
    std::map<int32_t, uint64_t> sums;
    const auto sum = [](const Model& model) { return checksum_of(model.embedding().value); };
    int32_t version = 0, taken = -1;
    for (int round = 0; round < 20; ++round) {
      for (int i = 0; i < 1 + round % 3; ++i) {
        add_to_all(*pair.trained, 1);
        sums[++version] = sum(*pair.trained);
        pair.published->publish(version);
        add_to_all(*pair.trained, 1);  // while the publication is in transfer
      }
      const int32_t got = pair.take();
      EXPECT_GT(got, taken);
      taken = got;
      EXPECT_EQ(sum(*pair.generating), sums.at(got)) << "version " << got;
      // Versions published from now on go into the spare buffer until one is taken.
      pair.published->publish(++version);
      sums[version] = sum(*pair.trained);
      EXPECT_EQ(sum(*pair.generating), sums.at(got));
    }
  }
}

TEST(PublishedWeights, APublicationThatNobodyTakesEndsWithTheRun) {
  auto groups = thread_communicators(2);
  std::unique_ptr<PublicationRanks> nobody, ranks;
  std::thread other([&] { nobody = std::make_unique<PublicationRanks>(std::move(groups[1])); });
  ranks = std::make_unique<PublicationRanks>(std::move(groups[0]));
  other.join();
  const auto model = small_rollout_model(at::kFloat, 5);
  const auto begin = std::chrono::steady_clock::now();
  std::exception_ptr error;
  std::thread trainer;
  {
    PublishedWeights published(*model, *ranks, /*waits=*/false);
    trainer = std::thread([&] {
      try {
        published.publish(1);
      } catch (...) {
        error = std::current_exception();
      }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_FALSE(published.take());
    published.give_up();
    trainer.join();
  }
  EXPECT_TRUE(error) << "the trainer waits for ever";
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
}

}  // namespace
}  // namespace bough
