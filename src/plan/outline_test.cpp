#include "plan/outline.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "tree/random_tree.h"
#include "plan/strategies.h"
#include "plan/test_costs.h"

namespace bough {
namespace {

void expect_same(const Simulation& ours, const Simulation& plans) {
  EXPECT_EQ(ours.num_passes, plans.num_passes);
  EXPECT_EQ(ours.tokens_forwarded, plans.tokens_forwarded);
  EXPECT_EQ(ours.tokens_recomputed, plans.tokens_recomputed);
  EXPECT_EQ(ours.peak_stack_tokens, plans.peak_stack_tokens);
  EXPECT_EQ(ours.peak_pass_tokens, plans.peak_pass_tokens);
  EXPECT_EQ(ours.peak_kept_tokens, plans.peak_kept_tokens);
  EXPECT_EQ(ours.seconds, plans.seconds);  // the same sum in the same order
  EXPECT_EQ(ours.peak_bytes, plans.peak_bytes);
}

// All train, a third of the tokens does, or a third of every second sequence's.
std::vector<uint8_t> random_flags(uint64_t seed, const std::vector<TokenSpan>& sequences) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> flags;
  if (seed % 3 == 0) return flags;
  for (const auto& sequence : sequences) {
    const bool idle = seed % 3 == 1 && random() % 2 == 0;
    for (size_t i = 0; i < sequence.size(); ++i) flags.push_back(!idle && random() % 3 == 0);
  }
  return flags;
}

// Tiles, references and a GPU's attention read different parts of a pass's shape.
CostModel costs_of(uint64_t seed) {
  if (seed % 2 == 0) return test_costs(static_cast<double>(seed % 100));
  return CostModel(built_in_profile("h100", "bf16"), named_model_shape("small", "bf16"));
}

TEST(Outline, PricesDenseAndPackedAsTheirPlans) {
  for (uint64_t seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE(str("seed ", seed));
    const auto sequences = random_sequences(seed, seed % 5 == 0 ? 2000 : 200);
    const auto costs = costs_of(seed);
    PlanRequest request{.sequences = as_spans(sequences), .costs = &costs};
    request.trained = random_flags(seed, request.sequences);
    const auto indexed = [&](PrefixTree tree) {
      return index_tree(std::move(tree), all_sequences(request), request);
    };
    const auto whole = indexed(build_prefix_tree(request.sequences));
    const auto flat = indexed(build_flat_forest(request.sequences));
    for (const int64_t limit : {1, 3, 16, 100, 3000}) {
      SCOPED_TRACE(str("limit ", limit));
      request.max_tokens_per_pass = limit;
      const auto dense = simulate(plan_dense(flat, limit), &costs);
      expect_same(simulate_dense(request, limit), dense);
      std::optional<Plan> packed;
      try {
        packed = plan_packed(request, whole, limit);
      } catch (const UserError&) {  // a longer path
        continue;
      }
      expect_same(simulate_packed(request, whole, pack(*whole.tree, limit)), simulate(*packed, &costs));
    }
    if (testing::Test::HasFailure()) break;
  }
}

}  // namespace
}  // namespace bough
