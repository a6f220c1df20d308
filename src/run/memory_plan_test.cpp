#include "run/memory_plan.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/file.h"
#include "run/run_components.h"
#include "train/collective_buckets.h"

namespace bough {
namespace {

constexpr int64_t kGB = 1'000'000'000;

class MemoryPlanTest : public ::testing::Test {
 protected:
  // A directory with the config.json of a named shape, and settings of a run that trains it on a GPU.
  RunSettings settings(const std::string& shape, const std::vector<std::string>& more = {}) {
    ModelConfig config = named_model_shape(shape, "bf16");
    config.max_position_embeddings = 40960;
    config.qk_norm = true;
    make_directories(folder_ / shape);
    write_file_atomically(folder_ / shape / "config.json", dump_pretty(write_model_config(config)));
    std::vector<std::string> given = {"device=cuda", "model.path=" + (folder_ / shape).string(),
                                      "train_dataset.path=d", "fileroot=" + folder_.string()};
    given.insert(given.end(), more.begin(), more.end());
    return parse_settings<RunSettings>("", "run.yaml", given);
  }
  static MemoryPlan plan(const RunSettings& settings, int64_t device = 80 * kGB, int64_t ranks = 1,
                         int64_t host = 1000 * kGB) {
    DeviceProfile profile = built_in_profile("h100", settings.dtype);
    profile.memory_bytes = device;
    RunMemory memory = memory_of_profile(profile);
    memory.host_free = host;
    return plan_memory(settings, profile, memory, ranks);
  }
  static MemoryRow row(const MemoryPlan& plan, const std::string& what) {
    for (const MemoryRow& row : plan.rows)
      if (row.what == what) return row;
    return {};
  }

  void TearDown() override { std::filesystem::remove_all(folder_); }

 private:
  const std::filesystem::path folder_ =
      std::filesystem::path(::testing::TempDir()) / str("bough_memory_plan_", ::getpid());
};

TEST_F(MemoryPlanTest, EveryPartHasItsBytes) {
  const RunSettings own = settings("qwen3-0.6b");
  const MemoryPlan of_run = plan(own);
  const int64_t elements = load_model_config(own.model.path).num_parameters();
  EXPECT_EQ(row(of_run, "weights").device_bytes, 2 * elements);
  EXPECT_EQ(row(of_run, "gradients").device_bytes, 4 * elements);
  EXPECT_EQ(row(of_run, "optimizer").device_bytes, 12 * elements);
  EXPECT_EQ(row(of_run, "reference").device_bytes, 0);
  EXPECT_EQ(row(of_run, "weights of generation").device_bytes, 0);
  EXPECT_EQ(of_run.shortage, "");
  EXPECT_FALSE(of_run.offloads);
  EXPECT_LE(of_run.device_bytes(), 80 * kGB);
  EXPECT_EQ(of_run.host_bytes(), 0);

  const MemoryPlan of_more =
      plan(settings("qwen3-0.6b", {"actor.kl_ctl=0.1", "rollout.max_head_offpolicyness=1",
                                   "actor.adv_estimator=gae", "actor.teacher.path=" + own.model.path}));
  EXPECT_EQ(row(of_more, "reference").device_bytes, 2 * elements);
  EXPECT_EQ(row(of_more, "teacher").device_bytes, 2 * elements);
  EXPECT_EQ(row(of_more, "weights of generation").device_bytes, 2 * elements);
  EXPECT_EQ(row(of_more, "weights of generation").host_bytes, 2 * elements);
  EXPECT_EQ(row(of_more, "copies for checkpoints").host_bytes, 14 * elements);
  const MemoryPlan without =
      plan(settings("qwen3-0.6b", {"rollout.max_head_offpolicyness=1", "saver.freq_minutes=0"}));
  EXPECT_EQ(row(without, "copies for checkpoints").host_bytes, 0) << "none while training goes on";
  EXPECT_EQ(row(of_more, "critic: optimizer").device_bytes, 12 * elements);  // tied: no lm_head less
  EXPECT_EQ(of_more.critic_bytes, 18 * elements);

  const MemoryPlan of_fp32 = plan(settings("qwen3-0.6b", {"dtype=fp32"}));
  EXPECT_EQ(row(of_fp32, "optimizer").device_bytes, 8 * elements);  // a weight is its own master
  const MemoryPlan of_ranks = plan(own, 80 * kGB, 8);
  EXPECT_EQ(row(of_ranks, "optimizer").device_bytes, 12 * ((elements + 7) / 8));
  EXPECT_GT(row(of_ranks, "NCCL").device_bytes, 0);
  EXPECT_EQ(row(of_ranks, "buckets of gradients and weights").device_bytes, kCollectiveBufferBytes);
  EXPECT_EQ(row(of_run, "buckets of gradients and weights").device_bytes, 0);
}

TEST_F(MemoryPlanTest, AnAdapterIsAllThatIsTrained) {
  const RunSettings own =
      settings("qwen3-8b", {"lora.rank=16", "lora.targets=[q_proj,v_proj]", "actor.kl_ctl=0.1"});
  const ModelConfig config = load_model_config(own.model.path);
  const int64_t adapters =
      16 * config.num_layers * (2 * config.hidden_size + config.query_width() + config.key_width());
  const MemoryPlan of_run = plan(own);
  EXPECT_EQ(row(of_run, "optimizer").device_bytes, 12 * adapters);
  EXPECT_EQ(row(of_run, "reference").device_bytes, 0) << "the model without its adapter";
  EXPECT_EQ(of_run.shortage, "");
  EXPECT_FALSE(of_run.offloads);
  const int64_t of_head = 16 * (config.hidden_size + config.vocab_size);
  const RunSettings with_head =
      settings("qwen3-8b", {"lora.rank=16", "lora.targets=[q_proj,v_proj,lm_head]"});
  EXPECT_EQ(row(plan(with_head), "optimizer").device_bytes, 12 * (adapters + of_head));
}

// The plan decides what the settings leave open: the rest of the device is divided, offloading only if
// nothing else fits.
TEST_F(MemoryPlanTest, DecidesWhatIsLeftOpen) {
  const RunSettings small = settings("qwen3-0.6b"), large = settings("qwen3-8b");
  const RunSettings planned = with_memory_plan(small, plan(small));
  EXPECT_EQ(planned.rollout.kv_memory.count, plan(small).kv_bytes);
  EXPECT_EQ(planned.actor.mb_spec.memory.count, plan(small).pass_bytes);
  EXPECT_EQ(planned.actor.optimizer.offload, false);
  EXPECT_TRUE(small.rollout.kv_memory.is_auto());

  const MemoryPlan of_large = plan(large);
  EXPECT_TRUE(of_large.offloads);
  EXPECT_EQ(of_large.shortage, "");
  EXPECT_EQ(row(of_large, "optimizer").device_bytes, 0);
  EXPECT_NE(memory_table(of_large).find("offloaded to host memory"), std::string::npos);
  EXPECT_EQ(with_memory_plan(large, of_large).actor.optimizer.offload, true);

  // The given settings count, whatever the rest would be.
  const RunSettings given = settings("qwen3-0.6b", {"rollout.kv_memory=3GB", "actor.mb_spec.memory=20GB"});
  EXPECT_EQ(plan(given).kv_bytes, 3 * kGB);
  EXPECT_EQ(plan(given).pass_bytes, 20 * kGB);

  // A critic of its own where memory holds one.
  const RunSettings with_critic = settings("qwen3-1.7b", {"actor.adv_estimator=gae"});
  EXPECT_FALSE(plan(with_critic, 141 * kGB).shares_backbone);
  EXPECT_TRUE(plan(with_critic, 50 * kGB).shares_backbone);
  EXPECT_EQ(with_memory_plan(with_critic, plan(with_critic, 50 * kGB)).critic.share_backbone, true);
}

TEST_F(MemoryPlanTest, RefusesOnePercentUnderAndFitsOnePercentOver) {
  for (const auto& more :
       std::vector<std::vector<std::string>>{{},
                                             {"rollout.max_head_offpolicyness=2"},
                                             {"lora.rank=8"},
                                             {"actor.adv_estimator=gae", "critic.share_backbone=false"},
                                             {"actor.optimizer.offload=true"},
                                             {"actor.kl_ctl=0.1"}}) {
    std::vector<std::string> given = more;
    if (more.empty() || !more.back().starts_with("actor.optimizer")) {
      given.push_back("actor.optimizer.offload=false");
    }
    const RunSettings own = settings("qwen3-1.7b", given);
    // least_bytes depends on the device, whose reserve is a share of it.
    int64_t device = plan(own, 200 * kGB).least_bytes;
    for (int i = 0; i < 20; ++i) device = plan(own, device).least_bytes;
    const MemoryPlan under = plan(own, device * 99 / 100), over = plan(own, device * 101 / 100);
    EXPECT_NE(under.shortage, "");
    EXPECT_THROW(with_memory_plan(own, under), UserError);
    EXPECT_EQ(over.shortage, "");
    EXPECT_LE(over.device_bytes(), device * 101 / 100);
    EXPECT_GE(over.device_bytes(), over.least_bytes);
  }
}

TEST_F(MemoryPlanTest, NamesTheSmallestChangeThatFits) {
  const auto shortage = [&](const std::string& shape, const std::vector<std::string>& more,
                            int64_t host = 1000 * kGB) {
    return plan(settings(shape, more), 80 * kGB, 1, host).shortage;
  };
  EXPECT_NE(
      shortage("qwen3-8b", {"actor.optimizer.offload=false"}).find("fits with actor.optimizer.offload=null"),
      std::string::npos);
  EXPECT_NE(shortage("qwen3-0.6b", {"rollout.kv_memory=100GB"}).find("fits with rollout.kv_memory=auto"),
            std::string::npos);
  EXPECT_NE(
      shortage("qwen3-0.6b", {"actor.mb_spec.memory=100GB"}).find("fits with actor.mb_spec.memory=auto"),
      std::string::npos);
  EXPECT_NE(shortage("qwen3-14b", {}).find("fits with lora.rank=32"), std::string::npos)
      << shortage("qwen3-14b", {});
  EXPECT_NE(shortage("qwen3-8b", {}, 20 * kGB).find("host memory: the run takes"), std::string::npos);
  EXPECT_NE(shortage("qwen3-8b", {}, 20 * kGB).find("on as many GPUs"), std::string::npos)
      << shortage("qwen3-8b", {}, 20 * kGB);
  // The message of the run ends with the table.
  const RunSettings own = settings("qwen3-14b");
  try {
    with_memory_plan(own, plan(own));
    FAIL() << "no error";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("gradients"), std::string::npos) << error.what();
  }
}

// A run that was begun with one kind of critic goes on with it.
TEST_F(MemoryPlanTest, AResumedRunKeepsItsCritic) {
  const RunSettings own = settings("qwen3-0.6b", {"actor.adv_estimator=gae"});
  const DeviceProfile profile = built_in_profile("h100", "bf16");
  const RunMemory memory = memory_of_profile(profile);
  EXPECT_FALSE(plan_memory(own, profile, memory, 1).shares_backbone);
  EXPECT_TRUE(plan_memory(own, profile, memory, 1, true).shares_backbone);
}

}  // namespace
}  // namespace bough
