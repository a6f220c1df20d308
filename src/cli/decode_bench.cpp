#include "cli/decode_bench.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "base/clock.h"
#include "base/error.h"
#include "base/format.h"
#include "base/median.h"
#include "base/random.h"
#include "cli/command.h"
#include "cost/rates.h"
#include "rollout/embedded_engine.h"

namespace bough {

namespace {

// The KV cache repeats this many random pages. Two equal pages are at least this many pages apart.
constexpr int64_t kRandomPages = 1021;
constexpr int64_t kStepsPerRun = 4;

// One KV storage and each sample's page table into it. Runs decoding steps.
class Decoder {
 public:
  Decoder(const Model& model, const DecodeBench& bench, int64_t context, bool shared,
          const SparsePolicy& sparse)
      : model_(model),
        context_(context),
        num_own_(pages_for(context + kStepsPerRun) - (shared ? context / kPageTokens : 0)),
        storage_(model.config(), model.dtype(), at::kCPU,
                 bench.samples * num_own_ + (shared ? context / kPageTokens : 0), sparse),
        pass_(model, storage_, AttentionPath::kFastest, bench.samples),
        tables_(static_cast<size_t>(bench.samples)) {
    int32_t next = shared ? static_cast<int32_t>(context / kPageTokens) : 0;
    for (auto& table : tables_) {
      if (shared) {
        table.resize(static_cast<size_t>(context / kPageTokens));
        std::iota(table.begin(), table.end(), 0);
      }
      for (int64_t i = 0; i < num_own_; ++i) table.push_back(next++);
    }
    std::vector<PagedSegment> contexts;
    for (const auto& table : tables_)
      contexts.push_back({.pages = table, .begin = 0, .count = std::ssize(table) * kPageTokens});
    const std::vector<int32_t> complete =
        sparse.has_summaries() ? complete_blocks(contexts, sparse) : std::vector<int32_t>();
    for (int64_t layer = 0; layer < storage_.num_layers(); ++layer) {
      const at::Tensor& pages = storage_.pages(layer);
      const at::Tensor random =
          at::randn({std::min<int64_t>(kRandomPages, next), pages.stride(0)}, pages.options());
      for (int64_t begin = 0; begin < next; begin += random.size(0)) {
        const int64_t count = std::min(random.size(0), next - begin);
        pages.narrow(0, begin, count).flatten(1).copy_(random.narrow(0, 0, count));
      }
      if (storage_.summaries(layer).defined())
        summarise_blocks(pages, complete, sparse, storage_.head_dim(), storage_.summaries(layer));
    }
  }

  // Seconds of one decoding step: the layers and lm_head.
  double step(int64_t number, bool is_sparse) {
    const at::NoGradGuard no_grad;
    const CounterRandom random(1, Purpose::sample);
    const int64_t position = context_ + number % kStepsPerRun;
    std::vector<int64_t> tokens, positions(tables_.size(), position);
    std::vector<PagedSegment> segments;
    for (size_t i = 0; i < tables_.size(); ++i) {
      tokens.push_back(static_cast<int64_t>(
          random.below(static_cast<uint64_t>(model_.config().vocab_size), i, static_cast<uint64_t>(number))));
      segments.push_back({tables_[i], position, 1});
    }
    const std::vector<uint8_t> is_sampled(tokens.size(), is_sparse);
    const auto start = std::chrono::steady_clock::now();
    model_.logits(pass_.run(tokens, positions, segments, is_sampled));
    return seconds_since(start);
  }

  // Bytes of keys, values and summaries of blocks (sparse attention) that a decoding step reads, if nothing
  // is read twice.
  int64_t kv_bytes(bool is_sparse) const {
    const ModelConfig& config = model_.config();
    const auto element = static_cast<int64_t>(c10::elementSize(model_.dtype()));
    const auto samples = static_cast<int64_t>(tables_.size());
    const SparsePolicy& sparse = storage_.sparse();
    const int64_t block = 2 * config.num_kv_heads * config.head_dim * sparse.block_tokens * element;
    const int64_t page = block * kPageTokens / sparse.block_tokens;
    const int64_t in_context = pages_for(context_ + 1), budget = sparse.budget_of(context_ + 1);
    const int64_t all_pages = in_context - num_own_ >= 0 && num_own_ < in_context
                                  ? (in_context - num_own_) + samples * num_own_
                                  : samples * in_context;
    if (!is_sparse || sparse.blocks_for(context_ + 1) <= budget) return config.num_layers * all_pages * page;
    const int64_t dense = std::min(config.num_layers, sparse.dense_layers);
    const int64_t of_summaries =
        (sparse.summary == BlockSummary::kMean ? 1 : 2) * config.num_kv_heads * config.head_dim * element;
    return dense * all_pages * page +
           (config.num_layers - dense) * (std::min(all_pages * page, samples * budget * block) +
                                          all_pages * kPageTokens / sparse.block_tokens * of_summaries);
  }

  const BlocksRead& blocks_read() const { return pass_.blocks_read(); }

 private:
  const Model& model_;
  int64_t context_, num_own_;
  KvStorage storage_;
  ForwardPass pass_;
  std::vector<std::vector<int32_t>> tables_;
};

}  // namespace

std::vector<DecodeTimes> run_decode_bench(const Model& model, const DecodeBench& bench) {
  const SparsePolicy sparse = sparse_policy(bench.sparse, model.device());
  if (!sparse.has_summaries())
    throw UserError(
        "--contexts: compares dense with sparse attention, which needs a budget; give "
        "rollout.sparse.budget=512, and rollout.sparse.summary=mean or minmax");
  if (!model.device().is_cpu())
    throw UserError(str("--contexts: got the device ", model.device().str(),
                        "; dense and sparse steps are compared on the CPU only; expected cpu"));
  for (const int64_t context : bench.contexts)
    if (context < kPageTokens || context + kStepsPerRun > model.config().max_length())
      throw UserError(str("--contexts: got ", context, ", expected ", kPageTokens, " to ",
                          model.config().max_length() - kStepsPerRun, ", by ",
                          model.config().max_length_reason()));
  std::vector<DecodeTimes> all;
  for (const int64_t context : bench.contexts)
    for (const bool shared : {false, true}) {
      Decoder decoder(model, bench, context, shared, sparse);
      std::vector<double> dense, chosen;
      double rate = 0;
      for (int64_t i = -1; i < bench.repeat; ++i) {  // in turns, after one that is not counted
        rate = std::max(rate, read_rate(bench.weight_bytes + decoder.kv_bytes(true), at::kCPU));
        for (const bool is_sparse : {false, true}) {
          std::vector<double> seconds;
          for (int64_t step = 0; step < kStepsPerRun; ++step)
            seconds.push_back(decoder.step(step, is_sparse));
          if (i >= 0) (is_sparse ? chosen : dense).push_back(median(seconds));
        }
      }
      const auto bound = [&](bool is_sparse) {
        return static_cast<double>(bench.weight_bytes + decoder.kv_bytes(is_sparse)) / rate;
      };
      all.push_back({.context = context,
                     .shared = shared,
                     .dense_seconds = median(dense),
                     .sparse_seconds = median(chosen),
                     .dense_bound = bound(false),
                     .sparse_bound = bound(true),
                     .active_fraction = static_cast<double>(decoder.blocks_read().blocks) /
                                        static_cast<double>(decoder.blocks_read().of)});
    }
  return all;
}

void print_decode_bench(const std::vector<DecodeTimes>& times, bool json) {
  if (json) {
    Json rows = Json::array();
    for (const DecodeTimes& row : times)
      rows.push_back({{"context", row.context},
                      {"shared", row.shared},
                      {"dense_seconds", row.dense_seconds},
                      {"sparse_seconds", row.sparse_seconds},
                      {"dense_bound_seconds", row.dense_bound},
                      {"sparse_bound_seconds", row.sparse_bound},
                      {"active_fraction", row.active_fraction}});
    print_json(rows);
    return;
  }
  std::vector<std::pair<std::string, std::string>> lines;
  for (const DecodeTimes& row : times) {
    const double gain = row.dense_seconds / row.sparse_seconds, possible = row.dense_bound / row.sparse_bound;
    lines.emplace_back(
        str(format_thousands(row.context), row.shared ? " shared" : " distinct"),
        str("dense ", format_duration(row.dense_seconds), ", sparse ", format_duration(row.sparse_seconds),
            ": ", format_significant(gain, 3), " times as fast, ", format_significant(possible, 3),
            " by the bytes read (", format_duration(row.dense_bound), ", ", format_duration(row.sparse_bound),
            "); ", format_significant(100 * row.active_fraction, 3), "% of the blocks"));
  }
  print_table(lines);
}

}  // namespace bough
