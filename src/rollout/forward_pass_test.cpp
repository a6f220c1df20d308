#include "rollout/forward_pass.h"

#include "kernels/common/device.h"
#include "kernels/paged_attention/group_tables.h"
#include "rollout/rollout_test_util.h"

namespace bough {
namespace {

TEST(PagedWork, UsualPassesFitTheirGraphs) {
  for (const int own : {1, 4, 64, 500})
    for (const int shared : {0, 2, 64, 700})
      for (const auto& [groups, samples] :
           std::vector<std::pair<int, int>>{{1, 1}, {1, 64}, {16, 8}, {64, 1}, {13, 19}}) {
        const auto tables = group_tables(groups, samples, shared, own);
        for (const int64_t kv_heads : {2, 8}) {
          const PagedWork work = plan_paged_work(last_tokens(tables), 16, kv_heads);
          const int64_t size = rounded_decode_size(groups * samples);
          EXPECT_GE(size, groups * samples);
          EXPECT_TRUE(work.fits(decode_capacities(size, kv_heads, !work.large.empty(), !work.merges.empty())))
              << groups << " x " << samples << ", " << shared << " + " << own
              << " pages: " << work.large.size() << " large, " << work.small.size() << " small items, "
              << work.rows.size() << " rows";
        }
      }
  EXPECT_EQ(rounded_decode_size(1), 1);
  EXPECT_EQ(rounded_decode_size(3), 4);
  EXPECT_EQ(rounded_decode_size(16), 16);
  EXPECT_EQ(rounded_decode_size(17), 32);
  EXPECT_EQ(rounded_decode_size(100), 112);
}

class ForwardPassOn : public OnDevice {};
BOUGH_ON_DEVICES(ForwardPassOn);

ModelConfig wide_heads() {
  ModelConfig config = small_config();
  config.head_dim = 64;
  return config;
}

// Sequences grow by one token a pass, and some have a common prompt. The reference kernels
// (AttentionPath::kReference) run the same passes with another KvStorage. On CUDA the sizes repeat, so graphs
// are replayed with other lengths and sequences.
TEST_P(ForwardPassOn, PassesOfAnySizeEqualTheReference) {
  const at::NoGradGuard no_grad;
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const ModelConfig& config : {small_config(), wide_heads()}) {
      const auto model = small_rollout_model(dtype, 5, config, device());
      KvStorage pages(config, dtype, device(), 300), reference_pages(config, dtype, device(), 300);
      ForwardPass pass(*model, pages, AttentionPath::kFastest, 24);
      ForwardPass reference(*model, reference_pages, AttentionPath::kReference, 24);
      // There are 24 sequences. The first has a prompt of 80 tokens, and the next eleven share its pages.
      std::vector<std::vector<int32_t>> tables(24);
      std::vector<int64_t> lengths(24);
      int32_t next_page = 7;
      for (size_t s = 0; s < tables.size(); ++s) {
        if (s > 0 && s < 12) tables[s].assign(tables[0].begin(), tables[0].begin() + 5);
        lengths[s] = s < 12 ? 80 : 0;
        while (tables[s].size() < 9) tables[s].push_back(next_page++);
      }
      const auto expect_equal = [&](const std::vector<std::pair<size_t, int64_t>>& counts) {
        std::vector<int64_t> tokens, positions;
        std::vector<PagedSegment> segments;
        for (const auto& [s, count] : counts) {
          const int64_t begin = count > 1 ? 0 : lengths[s]++;
          segments.push_back({tables[s], begin, count});
          for (int64_t i = begin; i < begin + count; ++i) {
            tokens.push_back((i * 7 + static_cast<int64_t>(s) * 11) % config.vocab_size);
            positions.push_back(i);
          }
        }
        const auto expected = reference.run(tokens, positions, segments).to(at::kDouble);
        const auto got = pass.run(tokens, positions, segments).to(at::kDouble);
        const double tolerance = dtype == at::kFloat ? 1e-4 : 0.15;  // normed hidden states, two layers
        EXPECT_LT((got - expected).abs().max().item<double>(), tolerance)
            << counts.size() << " sequences, " << dtype << ", heads of " << config.head_dim;
      };
      expect_equal({{0, 80}});
      expect_equal({{13, 2}, {14, 3}});
      lengths[13] = 2;
      lengths[14] = 3;
      for (int round = 0; round < 3; ++round)
        for (const size_t size : {size_t{1}, size_t{3}, size_t{12}, size_t{24}, size_t{17}}) {
          std::vector<std::pair<size_t, int64_t>> counts;
          for (size_t s = 0; s < size; ++s) counts.emplace_back((s + static_cast<size_t>(round)) % 24, 1);
          expect_equal(counts);
        }
    }
}

// A pass may have several samples of one prompt, prefill chunks beside decode, and samples that join and
// leave.
using CudaKvStorage = OnCuda;

TEST_F(CudaKvStorage, TakesTheBytesOfItsPages) {
  const ModelConfig config = small_config();  // head_dim 12, which only the CPU pads
  const PeakBytes peak(at::kCUDA);
  const KvStorage storage(config, at::kFloat, at::kCUDA, /*max_pages=*/1024);
  const int64_t expected = 1024 * KvStorage::bytes_per_page(config, at::kFloat, {}, at::kCUDA);
  EXPECT_EQ(peak.bytes(), expected);
  EXPECT_LT(expected, 1024 * KvStorage::bytes_per_page(config, at::kFloat));
}

TEST_P(ForwardPassOn, GeneratedLogProbabilitiesEqualAFullForward) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto model = small_rollout_model(dtype, 6, wide_heads(), device());
    EmbeddedEngine engine(*model, engine_options(9, 24));
    std::vector<GenerationRequest> requests;
    for (uint64_t id = 0; id < 5; ++id)
      requests.push_back(request_of(id, random_tokens(id, 5 + static_cast<int64_t>(id) * 21, 97), 3, 20));
    for (const GenerationResult& result : engine.generate(requests)) {
      // Logits of order 10 are spaced by 2^-5 in bf16. The engine and the full forward round at different
      // places.
      EXPECT_LT(largest_log_prob_error(*model, result, 1.0), dtype == at::kFloat ? 1e-4 : 0.5)
          << "request " << result.id << ", " << dtype;
    }
  }
}

}  // namespace
}  // namespace bough
