#include "cost/rollout_cost.h"

#include <algorithm>
#include <deque>
#include <map>

#include "base/error.h"

namespace bough {

namespace {

struct Sample {
  size_t group;
  int64_t sampled, left;
};

// The reads and the computation of one layer in a decoding pass. A "key" is a key and its value. A summary is
// the summary of one block.
struct LayerReads {
  double keys_read = 0, keys_attended = 0, summaries_read = 0, summaries_scored = 0;
};

// Sums over the running samples of one group. Each sample attends to the fraction `share` of its context.
class GroupReads {
 public:
  GroupReads(int64_t prompt_tokens, int64_t block_tokens)
      : prompt_(static_cast<double>(prompt_tokens)), block_(static_cast<double>(block_tokens)) {}

  void add(int64_t sampled, const SparseAttention& sparse) {
    const double own = static_cast<double>(sampled), context = prompt_ + own;
    const double budget =
        sparse.is_sparse() ? static_cast<double>(sparse.budget_at(static_cast<int64_t>(context))) : context;
    const bool is_chosen = context > budget;
    const double share = is_chosen ? budget / context : 1;
    unread_ *= 1 - share;
    own_keys_ += share * own;
    attended_ += share * context;
    if (!is_chosen) return;
    chooses_ = true;
    own_summaries_ += own / block_;
    scored_ += context / block_;
  }
  void add_to(LayerReads& reads) const {
    reads.keys_read += prompt_ * (1 - unread_) + own_keys_;
    reads.keys_attended += attended_;
    reads.summaries_read += (chooses_ ? prompt_ / block_ : 0) + own_summaries_;
    reads.summaries_scored += scored_;
  }

 private:
  double prompt_, block_, unread_ = 1, own_keys_ = 0, attended_ = 0, own_summaries_ = 0, scored_ = 0;
  bool chooses_ = false;
};

LayerReads reads_of(const std::vector<Sample>& running, const std::vector<SampledGroup>& groups,
                    const SparseAttention& sparse) {
  LayerReads reads;
  for (size_t i = 0; i < running.size();) {  // samples of a group are adjacent
    const size_t group = running[i].group;
    GroupReads own(groups[group].prompt_tokens, sparse.block_tokens);
    for (; i < running.size() && running[i].group == group; ++i) own.add(running[i].sampled, sparse);
    own.add_to(reads);
  }
  return reads;
}

}  // namespace

RolloutCost rollout_cost(const CostModel& costs, const std::vector<SampledGroup>& groups,
                         const SparseAttention& sparse, int64_t max_running) {
  const ModelShape& shape = costs.shape();
  const double memory_rate = costs.device().memory_bytes_per_s;
  const double product_rate = costs.device().matrix_product_rate();
  BOUGH_CHECK(memory_rate > 0 && product_rate > 0 && max_running > 0, "memory ", memory_rate, ", products ",
              product_rate, ", running ", max_running);
  const double layers = static_cast<double>(shape.num_layers);
  const double sparse_layers =
      sparse.is_sparse() ? static_cast<double>(std::max<int64_t>(0, shape.num_layers - sparse.dense_layers))
                         : 0;
  const double vector_bytes = static_cast<double>(shape.num_kv_heads * shape.head_dim * shape.element_bytes);
  const double vector_flops = 2.0 * static_cast<double>(shape.num_kv_heads * shape.head_dim);
  const double summary_vectors = static_cast<double>(sparse.vectors_per_summary);
  const double flops_per_key = shape.flops_per_pair() / layers;

  RolloutCost cost;
  std::deque<Sample> waiting;
  for (size_t g = 0; g < groups.size(); ++g) {
    const int64_t prompt = groups[g].prompt_tokens;
    if (prompt > 0 && !groups[g].response_tokens.empty())
      cost.prefill_seconds +=
          costs.forward_seconds({.tokens = prompt, .pairs = prompt * (prompt + 1) / 2, .stack_pairs = 0});
    for (const int64_t tokens : groups[g].response_tokens)
      if (tokens > 0) waiting.push_back({g, 0, tokens});
  }
  std::vector<Sample> running;
  std::map<int64_t, double> products;  // seconds by number of running samples
  while (!waiting.empty() || !running.empty()) {
    while (!waiting.empty() && std::ssize(running) < max_running) {
      running.push_back(waiting.front());
      waiting.pop_front();
    }
    const int64_t count = std::ssize(running);
    const auto [found, is_new] = products.try_emplace(count);
    if (is_new)
      found->second = costs.forward_seconds({.tokens = count, .pairs = 0, .stack_pairs = 0}) +
                      costs.head_forward_seconds({.head_rows = count});
    cost.product_seconds += found->second;
    const LayerReads dense = reads_of(running, groups, {});
    const LayerReads chosen = sparse_layers > 0 ? reads_of(running, groups, sparse) : LayerReads();
    const double kv_bytes =
        2 * vector_bytes * ((layers - sparse_layers) * dense.keys_read + sparse_layers * chosen.keys_read);
    const double summary_bytes = sparse_layers * chosen.summaries_read * summary_vectors * vector_bytes;
    const double keys = (layers - sparse_layers) * dense.keys_attended + sparse_layers * chosen.keys_attended;
    const double flops =
        keys * flops_per_key + sparse_layers * chosen.summaries_scored * summary_vectors * vector_flops;
    cost.attention_seconds += (kv_bytes + summary_bytes) / memory_rate + flops / product_rate;
    cost.kv_bytes += kv_bytes;
    cost.summary_bytes += summary_bytes;
    cost.keys += keys;
    cost.tokens += count;
    ++cost.passes;
    for (Sample& sample : running) ++sample.sampled, --sample.left;
    std::erase_if(running, [](const Sample& sample) { return sample.left == 0; });
  }
  return cost;
}

}  // namespace bough
