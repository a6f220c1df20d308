#include "rollout/sparse_attention.h"

#include <map>

#include "base/error.h"

namespace bough {

SparsePolicy sparse_policy(const SparseSettings& settings, at::Device device) {
  std::map<int64_t, int64_t> budgets = settings.budget_blocks();
  if (budgets.empty()) return {};
  if (!device.is_cpu() && settings.summary == "exact")
    throw UserError(str("rollout.sparse.summary is exact, but the device is ", device.str(),
                        ": single keys are chosen on the CPU only; expected device cpu, or mean or minmax"));
  const int64_t of_short_contexts = budgets.extract(0).mapped();
  SparsePolicy policy{.budget_blocks = of_short_contexts,
                      .summary = block_summary(settings.summary),
                      .dense_layers = settings.dense_layers,
                      .larger_budgets = std::move(budgets),
                      .keeps_choices = settings.replay,
                      .block_tokens = settings.block,
                      .first_blocks = settings.first_blocks(),
                      .last_blocks = settings.last_blocks()};
  if (!device.is_cpu() && policy.block_tokens != kPageTokens)
    throw UserError(str("rollout.sparse.block is ", settings.block, ", but the device is ", device.str(),
                        ": a GPU chooses blocks of ", kPageTokens, " tokens only; expected ", kPageTokens,
                        ", or device cpu"));
  if (!device.is_cpu() && !policy.is_by_pages())
    throw UserError(str("rollout.sparse.sink_tokens and recent_tokens keep ", policy.first_blocks, " and ",
                        policy.last_blocks, " blocks, but the device is ", device.str(),
                        ": a GPU keeps the first block and the last two; expected sink_tokens 16 and "
                        "recent_tokens 32, or device cpu"));
  return policy;
}

}  // namespace bough
