#include "cost/cost_model.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "kernels/log_prob/log_prob_cost.h"

namespace bough {
namespace {

// Each kind of cost is a different power of ten, so each part of a sum can be read off its digits.
DeviceProfile simple_profile() {
  const auto per_token = [](double seconds) { return CostCurve{{1, 1000}, {seconds, 1000 * seconds}}; };
  DeviceProfile profile;
  profile.name = profile.source = "test";
  profile.dtype = "fp32";
  profile.kernels.attention = DeviceKernels::Attention::kReference;
  profile.linear_forward = per_token(1e-9);
  profile.linear_backward = per_token(2e-9);
  profile.elementwise_forward = profile.elementwise_backward = per_token(0);
  profile.attention_forward = per_token(1e-6);
  profile.attention_backward = per_token(3e-6);
  profile.head_forward = per_token(1e-3);
  profile.head_backward = per_token(2e-3);
  return profile;
}

ModelShape tiny_shape() {
  ModelShape shape;
  shape.name = "tiny";
  shape.num_layers = 2;
  shape.hidden_size = 8;
  shape.intermediate_size = 16;
  shape.num_heads = 4;
  shape.num_kv_heads = 2;
  shape.head_dim = 4;
  shape.vocab_size = 1 << 16;
  return shape;
}

TEST(CostModel, AProfileOfAnotherElementSizeIsRefused) {
  EXPECT_THROW(CostModel(simple_profile(), named_model_shape("small", "bf16")), InternalError);
}

TEST(CostModel, SecondsAreTheSumOfTheirParts) {
  const CostModel costs(simple_profile(), tiny_shape());
  const PassShape pass{.tokens = 10, .stack_rows = 5, .pairs = 105, .head_rows = 3};
  const double linear = tiny_shape().linear_flops_per_token() * 10;
  // The reference attention computes every query with every key.
  const double attention = 2 * 4 * 16 * 10.0 * (5 + 10);
  EXPECT_NEAR(costs.forward_seconds(pass), 1e-9 * linear + 1e-6 * attention, 1e-12);
  EXPECT_NEAR(costs.backward_seconds(pass), 2e-9 * linear + 3e-6 * attention, 1e-12);
  EXPECT_NEAR(costs.attention_forward_seconds(pass), 1e-6 * attention, 1e-12);
  EXPECT_NEAR(costs.attention_backward_seconds(pass), 3e-6 * attention, 1e-12);
  EXPECT_NEAR(costs.head_backward_seconds(pass), 2e-3 * 3 * 2 * 8 * (1 << 16), 1e-6);
  EXPECT_EQ(costs.forward_seconds({}), 0);
  EXPECT_EQ(costs.backward_seconds({}), 0);
  EXPECT_EQ(costs.head_forward_seconds({.tokens = 10}), 0);
}

TEST(CostModel, ConstantsAddUpOnACpuAndHideBehindTheWorkOnAGpu) {
  auto profile = simple_profile();
  const PassShape pass{.tokens = 10, .pairs = 55};
  const double work = CostModel(profile, tiny_shape()).forward_seconds(pass);
  profile.seconds_per_layer_forward = 1;
  profile.seconds_per_pass_forward = 0.5;
  EXPECT_NEAR(CostModel(profile, tiny_shape()).forward_seconds(pass), work + 2.5, 1e-9);
  profile.launches_overlap = true;
  EXPECT_NEAR(CostModel(profile, tiny_shape()).forward_seconds(pass), std::max(work, 2.5), 1e-9);
}

TEST(CostModel, APassReadsTheWeightsOfEveryExpertThatItUses) {
  auto profile = simple_profile();
  profile.attention_forward = CostCurve{{1, 1000}, {0, 0}};
  ModelShape shape = tiny_shape();
  shape.num_experts = 4;
  shape.experts_per_token = 2;
  shape.expert_intermediate_size = 6;
  const double all = shape.linear_flops_per_token(), experts = shape.expert_flops_per_token();
  EXPECT_EQ(experts, 2.0 * 2 * 2 * 3 * 8 * 6);  // FLOPs, layers, experts, matrices
  const auto seconds = [&](int64_t tokens) {
    return CostModel(profile, shape).forward_seconds({.tokens = tokens, .pairs = tokens});
  };
  // With seconds proportional to rows, only FLOPs count. 100 tokens have 50 pairs for each of 4 experts.
  EXPECT_NEAR(seconds(100), 1e-9 * 100 * all, 1e-12);
  // With the same seconds for any number of rows, the products of an expert take as long as its weights are
  // large. One token uses two experts, many tokens all four.
  profile.linear_forward = CostCurve{{1, 1000}, {1e-9, 1e-9}};
  EXPECT_NEAR(seconds(1), 1e-9 * all, 1e-13);
  EXPECT_NEAR(seconds(100), 1e-9 * (all + experts), 1e-13);
}

TEST(CostModel, TheHeadIsPaidChunkByChunk) {
  auto profile = simple_profile();
  profile.head_forward = {{64, 128}, {1.0, 1.0}};  // a chunk costs the same for any number of rows
  const CostModel costs(profile, tiny_shape());
  ASSERT_EQ(head_chunk_rows(tiny_shape().vocab_size), 64);
  const double chunk = tiny_shape().flops_per_head_row();
  const auto seconds = [&](int64_t rows) {
    return costs.head_forward_seconds({.tokens = 200, .head_rows = rows});
  };
  EXPECT_DOUBLE_EQ(seconds(1), chunk);
  EXPECT_DOUBLE_EQ(seconds(64), chunk);
  EXPECT_DOUBLE_EQ(seconds(65), 2 * chunk);
  EXPECT_DOUBLE_EQ(seconds(200), 4 * chunk);
}

TEST(CostModel, AGpusChunksAreLargeEnoughToHideTheHeadsWeight) {
  EXPECT_EQ(head_chunk_rows(151936, /*on_gpu=*/true), 4096);
  EXPECT_EQ(head_chunk_rows(1 << 20, /*on_gpu=*/true), 600);
  DeviceProfile profile = simple_profile();
  profile.kernels.attention = DeviceKernels::Attention::kFused;
  profile.head_forward = {{64, 128}, {1.0, 1.0}};
  ModelShape shape = tiny_shape();
  const double chunk = CostModel(profile, shape).head_forward_seconds({.tokens = 4096, .head_rows = 4096});
  EXPECT_DOUBLE_EQ(CostModel(profile, shape).head_forward_seconds({.tokens = 4097, .head_rows = 4097}),
                   chunk + CostModel(profile, shape).head_forward_seconds({.tokens = 1, .head_rows = 1}));
}

TEST(CostModel, PiecesAndPartlySeenStacksChangeAttentionOnly) {
  auto profile = simple_profile();
  profile.kernels.attention = DeviceKernels::Attention::kFused;
  const CostModel costs(profile, tiny_shape());
  PassShape pass{.tokens = 256, .stack_rows = 100, .pairs = 256 * 100 + 256 * 257 / 2};
  const double whole = costs.attention_forward_seconds(pass);
  PassShape pieces = pass;
  pieces.pieces = 8;
  EXPECT_GT(costs.attention_forward_seconds(pieces), whole);
  EXPECT_DOUBLE_EQ(costs.forward_seconds(pieces) - costs.attention_forward_seconds(pieces),
                   costs.forward_seconds(pass) - whole);
  PassShape partly = pass;
  partly.stack_pairs = 256 * 50;
  partly.pairs -= 256 * 50;
  EXPECT_LT(costs.attention_forward_seconds(partly), whole);
}

TEST(CostModel, BytesOfTheSmallShapeByHand) {
  auto profile = simple_profile();
  const CostModel costs(profile, named_model_shape("small", "fp32"));
  EXPECT_EQ(costs.stack_row_bytes(), 8 * 2 * 256 * (4 + 4));
  EXPECT_EQ(costs.kept_bytes(RecomputePolicy::kAttention), 8 * (512 * 4 + 8 * 4));
  EXPECT_EQ(costs.boundary_bytes(), 512 * (4 + 4));
  // Per layer: x twice, q k v twice, gate and up, two scales, attention. Then the last norm, angles and ids.
  EXPECT_EQ(
      costs.kept_bytes(RecomputePolicy::kActivations),
      8 * ((2 * 512 + 2 * 1024 + 2 * 1536) * 4 + 2 * 4) + 8 * (512 + 8) * 4 + 2 * 512 * 4 + 65 * 4 + 20);
  EXPECT_EQ(costs.kept_bytes(RecomputePolicy::kKeysValues), 0);
  EXPECT_EQ(costs.kept_bytes(RecomputePolicy::kLayerInputs), 8 * 512 * 4 + 2 * 512 * 4 + 65 * 4 + 20);
  EXPECT_EQ(costs.kept_bytes(RecomputePolicy::kLayerInputsAndAttention) -
                costs.kept_bytes(RecomputePolicy::kLayerInputs),
            costs.kept_bytes(RecomputePolicy::kAttention));
  // On a CPU, kLayerInputsOnHost saves nothing: device memory is host memory. On a GPU, two of the 8 layer
  // inputs stay on the device.
  EXPECT_EQ(costs.kept_bytes(RecomputePolicy::kLayerInputsOnHost),
            costs.kept_bytes(RecomputePolicy::kLayerInputs));
  profile.kernels.attention = DeviceKernels::Attention::kFused;
  const CostModel gpu(profile, named_model_shape("small", "fp32"));
  EXPECT_EQ(
      gpu.kept_bytes(RecomputePolicy::kLayerInputs) - gpu.kept_bytes(RecomputePolicy::kLayerInputsOnHost),
      6 * 512 * 4);
  profile.dtype = "bf16";
  const CostModel half(profile, named_model_shape("small", "bf16"));
  EXPECT_EQ(half.stack_row_bytes(), 8 * 2 * 256 * (2 + 4));
  EXPECT_EQ(half.boundary_bytes(), 512 * (2 + 4));
}

// Seconds of recomputation: the forward pass without its last products, and without attention if its outputs
// are kept.
TEST(CostModel, SecondsOfComputingAgain) {
  const CostModel costs(simple_profile(), named_model_shape("small", "fp32"));
  const PassShape pass{.tokens = 256, .pairs = 256 * 257 / 2};
  const double forward = costs.forward_seconds(pass), attention = costs.attention_forward_seconds(pass);
  EXPECT_EQ(costs.recompute_seconds(pass, RecomputePolicy::kActivations), 0);
  EXPECT_DOUBLE_EQ(costs.recompute_seconds(pass, RecomputePolicy::kKeysValues), forward);
  EXPECT_DOUBLE_EQ(costs.recompute_seconds(pass, RecomputePolicy::kAttention), forward - attention);
  const double layers = costs.recompute_seconds(pass, RecomputePolicy::kLayerInputs);
  EXPECT_LT(layers, forward);
  EXPECT_GT(layers, 0.7 * forward);
  EXPECT_NEAR(costs.recompute_seconds(pass, RecomputePolicy::kLayerInputsAndAttention), layers - attention,
              1e-12 * forward);
}

// Only the copy time that computation does not hide counts: the copy to the host minus the forward pass, and
// the copy back minus recomputation and backward.
TEST(CostModel, SecondsOfCopiesToTheHost) {
  auto profile = simple_profile();
  const PassShape pass{.tokens = 256, .pairs = 256 * 257 / 2};
  const auto seconds = [&](double rate) {
    profile.host_bytes_per_s = rate;
    return CostModel(profile, named_model_shape("small", "fp32"))
        .recompute_seconds(pass, RecomputePolicy::kLayerInputsOnHost);
  };
  const CostModel costs(profile, named_model_shape("small", "fp32"));
  const double again = costs.recompute_seconds(pass, RecomputePolicy::kLayerInputs),
               forward = costs.forward_seconds(pass), backward = costs.backward_seconds(pass);
  const double copied = 256 * 7 * 512 * 4;
  EXPECT_EQ(seconds(copied / (0.9 * forward)), again);
  const double longer = 1.5 * forward;  // longer than the forward pass alone
  ASSERT_LT(longer, again + backward);
  EXPECT_DOUBLE_EQ(seconds(copied / longer), again + longer - forward);
  const double longest = 2 * (again + backward);
  EXPECT_DOUBLE_EQ(seconds(copied / longest), again + (longest - forward) + (longest - again - backward));
  EXPECT_EQ(seconds(0), seconds(kAssumedHostBytesPerS));
}

TEST(CostModel, TemporariesGrowWithThePassAndItsHead) {
  auto profile = simple_profile();
  profile.kernels.attention = DeviceKernels::Attention::kTiles;
  const CostModel costs(profile, named_model_shape("qwen3-0.6b", "fp32"));
  int64_t before = 0;
  for (int64_t tokens = 32; tokens <= 4096; tokens *= 2) {
    const PassShape pass{.tokens = tokens, .pairs = tokens * tokens / 2, .head_rows = tokens};
    const int64_t bytes = costs.temporary_bytes(pass, RecomputePolicy::kActivations);
    EXPECT_GT(bytes, before);
    before = bytes;
  }
  // The lm_head holds at least one chunk of logits.
  EXPECT_GT(costs.temporary_bytes({.tokens = 1, .pairs = 1, .head_rows = 1}, RecomputePolicy::kActivations),
            151936 * 4);
  // The reference attention holds dense score matrices.
  profile.kernels.attention = DeviceKernels::Attention::kReference;
  const CostModel dense(profile, named_model_shape("qwen3-0.6b", "fp32"));
  EXPECT_GT(
      dense.temporary_bytes({.tokens = 1024, .stack_rows = 1024, .pairs = 1}, RecomputePolicy::kActivations),
      int64_t{16} * 1024 * 2048 * 4);
}

}  // namespace
}  // namespace bough
