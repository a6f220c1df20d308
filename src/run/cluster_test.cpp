#include "run/cluster.h"

#include <gtest/gtest.h>

namespace bough {
namespace {

SimulationOptions workload() {
  SimulationOptions options;
  options.controller.batch_groups = 64;
  options.controller.group_size = 8;
  options.controller.total_steps = 8;
  options.lengths = {.mean = 1000, .sigma = 0.8, .longest = 8192, .seen = {}};
  options.rates = {
      .pass_seconds = 0.01, .sample_seconds = 2e-5, .prefill_tokens_per_s = 1e5, .train_tokens_per_s = 2e4};
  return options;
}

ClusterRates rates_of(const char* model, ClusterSettings cluster = {}, const char* device = "h100") {
  return {cluster, built_in_profile(device, "bf16"), named_model_shape(model, "bf16"), workload()};
}

// Weights and fp32 gradients of Qwen3-8B take 49 GB on each device, AdamW's state and master weights 98 GB
// divided by the devices. On eight devices that is 61 GB each, in addition to a pass of 2,048 tokens and a
// path.
TEST(Cluster, MemoryDecidesHowManyDevicesHaveAReplica) {
  const ClusterRates rates = rates_of("qwen3-8b");
  const double pass = rates.training_bytes(1, {}) - 18 * 8.19e9;
  EXPECT_GT(pass, 1e9);
  EXPECT_NEAR(rates.training_bytes(8, {}) - pass, (6 + 12.0 / 8) * 8.19e9, 0.2e9);
  EXPECT_NEAR(rates.training_bytes(1, {.tensor = 8}), rates.training_bytes(1, {}) / 8, 1e9);
  // The first stage of a pipeline holds its part of the activations of as many passes as there are stages.
  // Weights and the path's keys and values are split among stages, activations are not.
  EXPECT_GT(rates.training_bytes(1, {.stages = 8}), rates.training_bytes(1, {.tensor = 8}) + 0.5 * pass);
  EXPECT_LT(rates.training_bytes(1, {.stages = 8}), 18 * 8.19e9 / 8 + pass);
  const auto eight = rates.layout(8, 8, false);
  ASSERT_TRUE(eight);
  EXPECT_EQ(eight->devices_per_engine, 1);
  EXPECT_EQ(eight->replica.devices(), rates.training_bytes(8, {}) <= rates.memory_bytes() ? 1 : 2);
  EXPECT_EQ(eight->text(), "d8+" + eight->backend().substr(5));
  EXPECT_EQ(rates.layout(7, 1, false), std::nullopt) << "147 GB on one device";
  EXPECT_EQ(rates.rates(7, 1, false), std::nullopt);
  EXPECT_EQ(rates_of("qwen3-0.6b").layout(7, 1, false)->text(), "d7+d1");
}

// 8.19e9 parameters with 4 bytes of gradient and 2 of weight. Seven eighths go over NVLink. Between four
// nodes three quarters of an eighth go over each device's own port.
TEST(Cluster, CollectivesTakeBytesOverBandwidth) {
  const ClusterRates rates = rates_of("qwen3-8b");
  const double bytes = 8.19e9 * 6;
  EXPECT_EQ(rates.step_collectives_seconds(1, 1), 0);
  EXPECT_NEAR(rates.step_collectives_seconds(8, 1), bytes * 7 / 8 / 450e9, 2e-3);
  EXPECT_NEAR(rates.step_collectives_seconds(32, 1), bytes * 7 / 8 / 450e9 + bytes / 8 * 3 / 4 / 50e9, 2e-3);
  // With tensor-parallel pairs each device has half of the bytes, and a node holds four replicas.
  EXPECT_NEAR(rates.step_collectives_seconds(4, 2), bytes / 2 * 3 / 4 / 450e9, 2e-3);
}

TEST(Cluster, RatesDependOnTheSplit) {
  const ClusterRates rates = rates_of("qwen3-1.7b");
  const SimulatedRates one = workload().rates;
  const auto within = rates.rates(4, 4, false), apart = rates.rates(8, 8, false);
  ASSERT_TRUE(within && apart);
  EXPECT_EQ(within->rollout_devices, 4);
  EXPECT_EQ(within->train_devices, 4);
  EXPECT_EQ(within->pass_seconds, one.pass_seconds);
  EXPECT_EQ(within->train_tokens_per_s, one.train_tokens_per_s);
  EXPECT_NEAR(apart->swap_seconds, 9 * within->swap_seconds, 1e-9) << "over the network, not NVLink";
  EXPECT_EQ(rates.rates(8, 8, true)->swap_seconds, 0) << "in turns the engine reads the trainer's weights";
  // A larger model needs several devices per replica. They are faster than one device, but less than
  // proportionally.
  const ClusterRates large = rates_of("qwen3-14b");
  const auto split = large.rates(8, 8, false);
  ASSERT_TRUE(split);
  const int64_t tensor = 8 / split->train_devices;
  ASSERT_GT(tensor, 1);
  EXPECT_GT(split->train_tokens_per_s, one.train_tokens_per_s);
  EXPECT_LT(split->train_tokens_per_s, one.train_tokens_per_s * static_cast<double>(tensor));
}

// If the devices of a node cannot divide layers, or have slow links, the devices become pipeline stages.
TEST(Cluster, PipelineTimesFollowTheSchedule) {
  const ClusterRates apart = rates_of("qwen3-14b", {.n_gpus_per_node = 1});
  const auto layout = apart.layout(8, 8, false);
  ASSERT_TRUE(layout);
  EXPECT_EQ(layout->replica.tensor, 1);
  ASSERT_GT(layout->replica.stages, 1);
  EXPECT_EQ(layout->backend(), str("fsdp:d", layout->replicas, "p", layout->replica.stages));
  const double one = workload().rates.train_tokens_per_s;
  for (const int64_t stages : {2, 4}) {
    const double rate = apart.replica_tokens_per_s(2, {.stages = stages});
    EXPECT_LT(rate, static_cast<double>(stages) * one);
    EXPECT_GT(rate, 0.7 * static_cast<double>(stages) * one);
    // With more replicas each has fewer passes to fill its stages. On a slow network messages take longer.
    EXPECT_LT(apart.replica_tokens_per_s(64, {.stages = stages}), rate);
    EXPECT_LT(rates_of("qwen3-14b", {.n_gpus_per_node = 1, .network_gb_per_s = 1})
                  .replica_tokens_per_s(2, {.stages = stages}),
              rate);
  }
  // Within a node the faster layout is chosen.
  const auto kind = [](double nvlink) {
    return rates_of("qwen3-14b", {.nvlink_gb_per_s = nvlink}).layout(8, 8, false)->replica;
  };
  EXPECT_GT(kind(5).stages, 1);
  EXPECT_GT(kind(1e5).tensor, 1);
}

}  // namespace
}  // namespace bough
