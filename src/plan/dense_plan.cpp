// Strategy `dense`: common prefixes are computed once per sequence. Each micro-batch of the flat batch is one
// pass. A sequence longer than a pass is cut into chunks.
#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "base/error.h"
#include "plan/plan_strategies.h"
#include "plan/recompute_policy.h"
#include "plan/simulator.h"

namespace bough {

namespace {

// Tells which positions of each sequence train. Scans the request's flags at each call; no table is built
// from them.
class Flags {
 public:
  explicit Flags(const PlanRequest& request) : request_(request), offsets_{0} {
    offsets_.reserve(request.sequences.size() + 1);
    for (const auto& sequence : request.sequences)
      offsets_.push_back(offsets_.back() + static_cast<int64_t>(sequence.size()));
    BOUGH_CHECK(request.trained.empty() || offsets_.back() == static_cast<int64_t>(request.trained.size()),
                "the batch has ", offsets_.back(), " tokens, but ", request.trained.size(),
                " training flags");
  }

  size_t num_sequences() const { return request_.sequences.size(); }
  int64_t num_flat_tokens() const { return offsets_.back(); }
  int64_t length(size_t sequence) const { return offsets_[sequence + 1] - offsets_[sequence]; }
  bool trains(size_t sequence, int64_t position) const {
    return position > 0 && (request_.trained.empty() || request_.trained[offsets_[sequence] + position] != 0);
  }
  // Number of positions in [begin, end) that train.
  int64_t count(size_t sequence, int64_t begin, int64_t end) const {
    begin = std::max<int64_t>(begin, 1);
    if (begin >= end) return 0;
    if (request_.trained.empty()) return end - begin;
    const auto* own = request_.trained.data() + offsets_[sequence];
    return std::count_if(own + begin, own + end, [](uint8_t flag) { return flag != 0; });
  }
  // One past the last trained position of the sequence; 0 if no position is trained.
  int64_t trained_end(size_t sequence) const {
    int64_t end = length(sequence);
    while (end > 0 && !trains(sequence, end - 1)) --end;
    return end;
  }

 private:
  const PlanRequest& request_;
  std::vector<int64_t> offsets_;
};

class DenseTraversal {
 public:
  DenseTraversal(const PlanRequest& request, int64_t limit, BlockSink& sink, LayerRecompute layers)
      : request_(request),
        flags_(request),
        layout_(lay_out_dense(request, limit)),
        limit_(layout_.max_tokens),
        sink_(sink),
        layers_(layers) {}

  void run() {
    check_tree_size(flags_.num_flat_tokens());
    int64_t stack_capacity = 0;
    for (size_t s = 0; s < flags_.num_sequences(); ++s)
      stack_capacity = std::max(stack_capacity, chunk_begin(s, num_chunks(s) - 1));
    if (layers_ != LayerRecompute::kNever) {
      int64_t num_rows = 0;
      for (size_t s = 0; s < flags_.num_sequences(); ++s) num_rows += flags_.count(s, 0, flags_.length(s));
      room_ = room_for_passes(request_, num_rows, stack_capacity);
    }
    sink_.begin_tree(layout_.order(), stack_capacity);
    for (const std::vector<int64_t>& micro_batch : layout_.micro_batches) {
      if (sink_.is_enough()) return;
      const auto first = static_cast<size_t>(micro_batch.front());
      flags_.length(first) > limit_ ? run_in_chunks(first) : run_at_once(micro_batch);
      for (const int64_t s : micro_batch) next_token_ += flags_.length(static_cast<size_t>(s));
    }
  }

  int64_t max_tokens() const { return limit_; }

 private:
  int64_t num_chunks(size_t s) const {
    return std::max<int64_t>(1, (flags_.length(s) + limit_ - 1) / limit_);
  }
  int64_t chunk_begin(size_t s, int64_t chunk) const { return flags_.length(s) * chunk / num_chunks(s); }
  // Offsets are relative to the tree's next token.
  TokenRange range(int64_t begin, int64_t end) const {
    return {static_cast<int32_t>(next_token_ + begin), static_cast<int32_t>(next_token_ + end)};
  }

  void run_at_once(const std::vector<int64_t>& micro_batch) {
    Block pass;
    for (const int64_t index : micro_batch) {
      const auto s = static_cast<size_t>(index);
      const int64_t length = flags_.length(s);
      pass.num_tokens += length;
      pass.num_pairs += length * (length + 1) / 2;
      pass.num_head_rows += flags_.count(s, 0, length);
      ++pass.num_pieces;
    }
    pass.ranges = {range(0, pass.num_tokens)};
    pass.num_loss_rows = pass.num_head_rows;
    pass.needed = pass.num_head_rows > 0;
    choose({&pass, 1});
    sink_.add_leaf(std::move(pass));
  }

  void choose(std::span<Block> chain) const {
    if (layers_ != LayerRecompute::kNever)
      choose_recompute_policies(chain, *request_.costs, room_,
                                {.layers = layers_, .offload = request_.offload});
  }

  void run_in_chunks(size_t s) {
    const int64_t trained_end = flags_.trained_end(s);
    const int64_t last = num_chunks(s) - 1;
    std::vector<Block> chain;
    for (int64_t i = 0; i <= last; ++i) {
      const int64_t begin = chunk_begin(s, i), end = chunk_begin(s, i + 1);
      Block chunk;
      chunk.interior = i < last;
      chunk.above = static_cast<int32_t>(i) - 1;
      if (chunk.interior) chunk.keep = RecomputePolicy::kKeysValues;
      chunk.stack_rows = begin;
      chunk.ranges = {range(begin, end)};
      chunk.num_tokens = end - begin;
      chunk.num_pairs = (end * (end + 1) - begin * (begin + 1)) / 2;
      chunk.num_stack_pairs = (end - begin) * begin;
      chunk.num_pieces = 1;
      chunk.num_head_rows = chunk.num_loss_rows = flags_.count(s, begin, end);
      chunk.num_boundary_tokens = chunk.interior && flags_.trains(s, end);
      chunk.needed = trained_end > begin;
      chain.push_back(std::move(chunk));
    }
    choose(chain);
    for (Block& chunk : chain)
      chunk.interior ? sink_.push(std::move(chunk)) : sink_.add_leaf(std::move(chunk));
    for (int64_t i = 0; i < last; ++i) sink_.pop();
  }

  const PlanRequest& request_;
  Flags flags_;
  DenseLayout layout_;
  int64_t limit_;
  BlockSink& sink_;
  LayerRecompute layers_;
  int64_t room_ = 0;        // bytes of one pass; used if layers may be recomputed
  int64_t next_token_ = 0;  // first token of the next sequence in the tree; the tree has the layout's order
};

// The sequences that are not empty.
std::vector<int64_t> with_tokens(const PlanRequest& request) {
  std::vector<int64_t> sequences;
  for (size_t s = 0; s < request.sequences.size(); ++s)
    if (!request.sequences[s].empty()) sequences.push_back(static_cast<int64_t>(s));
  return sequences;
}

// Micro-batches ordered by number of sequences, then by tokens. take() tries each distinct number of
// sequences once. There are at most sqrt(2 S) distinct numbers.
class FewestSequences {
 public:
  void add(size_t index, size_t num_sequences, int64_t num_tokens) {
    by_count_[num_sequences].insert({num_tokens, index});
  }
  // Among the micro-batches that have room for `length` tokens within `capacity`, removes and returns the one
  // with the fewest sequences; ties go to the fewest tokens, then to the lowest index. Returns nullopt if no
  // micro-batch has room.
  std::optional<size_t> take(int64_t length, int64_t capacity) {
    for (auto it = by_count_.begin(); it != by_count_.end(); ++it) {
      const auto [num_tokens, index] = *it->second.begin();
      if (num_tokens + length > capacity) continue;
      it->second.erase(it->second.begin());
      if (it->second.empty()) by_count_.erase(it);
      return index;
    }
    return {};
  }

 private:
  std::map<size_t, std::set<std::pair<int64_t, size_t>>> by_count_;
};

// AReaL's dynamic allocation (papers/areal-async.zh.txt, Algorithm 1): longest sequences first. A sequence
// opens a new micro-batch if there are fewer than `least`, or if it fits into none. Otherwise it goes into
// the micro-batch with the fewest sequences among those that it fits into.
std::vector<std::vector<int64_t>> allocate(const PlanRequest& request, int64_t capacity, int64_t least) {
  std::vector<int64_t> order = with_tokens(request);
  const auto length = [&](int64_t s) { return std::ssize(request.sequences[static_cast<size_t>(s)]); };
  std::ranges::stable_sort(order, std::greater{}, length);
  std::vector<std::vector<int64_t>> micro_batches;
  std::vector<int64_t> num_tokens;
  FewestSequences open;
  for (const int64_t s : order) {
    std::optional<size_t> chosen;
    if (std::ssize(micro_batches) >= least) chosen = open.take(length(s), capacity);
    if (!chosen) {
      chosen = micro_batches.size();
      micro_batches.emplace_back();
      num_tokens.push_back(0);
    }
    micro_batches[*chosen].push_back(s);
    num_tokens[*chosen] += length(s);
    open.add(*chosen, micro_batches[*chosen].size(), num_tokens[*chosen]);
  }
  return micro_batches;
}

// Splits the sequences in batch order into `count` micro-batches. Their numbers of sequences differ by at
// most one. Lengths are ignored.
std::vector<std::vector<int64_t>> split_evenly(const PlanRequest& request, int64_t count) {
  const std::vector<int64_t> order = with_tokens(request);
  count = std::min<int64_t>(count, std::ssize(order));
  std::vector<std::vector<int64_t>> micro_batches;
  for (int64_t i = 0; i < count; ++i)
    micro_batches.emplace_back(order.begin() + std::ssize(order) * i / count,
                               order.begin() + std::ssize(order) * (i + 1) / count);
  return micro_batches;
}

}  // namespace

std::vector<int64_t> DenseLayout::order() const {
  std::vector<int64_t> sequences;
  for (const auto& micro_batch : micro_batches)
    sequences.insert(sequences.end(), micro_batch.begin(), micro_batch.end());
  sequences.insert(sequences.end(), empty.begin(), empty.end());
  return sequences;
}

DenseLayout lay_out_dense(const PlanRequest& request, int64_t max_tokens_per_pass) {
  BOUGH_CHECK(request.num_micro_batches >= 1, "micro-batches ", request.num_micro_batches);
  DenseLayout layout{.micro_batches = {}, .empty = {}, .max_tokens = max_tokens_per_pass};
  if (request.fixed_micro_batches) {
    layout.micro_batches = split_evenly(request, request.num_micro_batches);
    layout.max_tokens = 1;
    for (const auto& micro_batch : layout.micro_batches) {
      int64_t num_tokens = 0;
      for (const int64_t s : micro_batch) num_tokens += std::ssize(request.sequences[static_cast<size_t>(s)]);
      layout.max_tokens = std::max(layout.max_tokens, num_tokens);
    }
  } else {
    layout.micro_batches = allocate(request, max_tokens_per_pass, request.num_micro_batches);
  }
  for (size_t s = 0; s < request.sequences.size(); ++s)
    if (request.sequences[s].empty()) layout.empty.push_back(static_cast<int64_t>(s));
  return layout;
}

int64_t emit_dense(const PlanRequest& request, int64_t max_tokens_per_pass, BlockSink& sink,
                   LayerRecompute layers) {
  DenseTraversal traversal(request, max_tokens_per_pass, sink, layers);
  traversal.run();
  return traversal.max_tokens();
}

Plan plan_dense(const PlanRequest& request, int64_t max_tokens_per_pass, LayerRecompute layers) {
  PlanWriter writer;
  const int64_t max_tokens = emit_dense(request, max_tokens_per_pass, writer, layers);
  Plan plan{"dense", max_tokens, writer.finish()};
  PlannedTree& planned = plan.trees.front();
  std::vector<TokenSpan> sequences;
  for (const int64_t s : planned.sequences) sequences.push_back(request.sequences[static_cast<size_t>(s)]);
  planned.tree = std::make_shared<const PrefixTree>(build_flat_forest(sequences));
  return plan;
}

Simulation simulate_dense(const PlanRequest& request, int64_t max_tokens_per_pass,
                          std::optional<int64_t> most_bytes, double most_seconds, LayerRecompute layers) {
  Simulator simulator(request.costs, most_bytes, most_seconds);
  emit_dense(request, max_tokens_per_pass, simulator, layers);
  return simulator.finish();
}

}  // namespace bough
