#include "plan/outline.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "plan/simulator.h"

namespace bough {

namespace {

// Which positions of which sequence train, without an index.
class Flags {
 public:
  explicit Flags(const PlanRequest& request) : request_(request), offsets_{0} {
    offsets_.reserve(request.sequences.size() + 1);
    for (const auto& sequence : request.sequences)
      offsets_.push_back(offsets_.back() + static_cast<int64_t>(sequence.size()));
    BOUGH_CHECK(request.trained.empty() || offsets_.back() == static_cast<int64_t>(request.trained.size()),
                "the batch has ", offsets_.back(), " tokens, but ", request.trained.size(),
                " flags say what trains");
  }

  size_t num_sequences() const { return request_.sequences.size(); }
  int64_t num_flat_tokens() const { return offsets_.back(); }
  int64_t length(size_t sequence) const { return offsets_[sequence + 1] - offsets_[sequence]; }
  bool trains(size_t sequence, int64_t position) const {
    return position > 0 && (request_.trained.empty() || request_.trained[offsets_[sequence] + position] != 0);
  }
  // Of positions [begin, end).
  int64_t count(size_t sequence, int64_t begin, int64_t end) const {
    begin = std::max<int64_t>(begin, 1);
    if (begin >= end) return 0;
    if (request_.trained.empty()) return end - begin;
    const auto* own = request_.trained.data() + offsets_[sequence];
    return std::count_if(own + begin, own + end, [](uint8_t flag) { return flag != 0; });
  }
  // One past the last position that trains; 0 where none does.
  int64_t trained_end(size_t sequence) const {
    int64_t end = length(sequence);
    while (end > 0 && !trains(sequence, end - 1)) --end;
    return end;
  }

 private:
  const PlanRequest& request_;
  std::vector<int64_t> offsets_;
};

constexpr auto kLeaf = Step::Kind::kForwardBackward;

// The blocks of plan_dense (path_plan.cpp), each priced and forgotten.
class DenseOutline {
 public:
  DenseOutline(const PlanRequest& request, int64_t limit, std::optional<int64_t> most_bytes,
               double most_seconds)
      : flags_(request), limit_(limit), simulator_(request.costs, most_bytes, most_seconds) {}

  Simulation run() {
    check_tree_size(flags_.num_flat_tokens());
    const size_t count = flags_.num_sequences();
    int64_t stack_capacity = 0;
    for (size_t s = 0; s < count; ++s)
      stack_capacity = std::max(stack_capacity, chunk_begin(s, num_chunks(s) - 1));
    simulator_.begin_tree(stack_capacity);
    Block pass;  // whole sequences
    const auto flush = [&] {
      pass.needed = pass.num_head_rows > 0;
      if (pass.num_tokens > 0) simulator_.step(kLeaf, pass);
      pass = {};
    };
    for (size_t s = 0; s < count && !simulator_.is_over_budget(); ++s) {
      const int64_t length = flags_.length(s);
      if (length == 0) continue;
      if (pass.num_tokens + length > limit_) flush();
      if (length > limit_) {
        run_in_chunks(s);
        continue;
      }
      pass.num_tokens += length;
      pass.num_pairs += length * (length + 1) / 2;
      pass.num_head_rows += flags_.count(s, 0, length);
      pass.num_loss_rows = pass.num_head_rows;
      ++pass.num_pieces;
    }
    flush();
    return simulator_.finish();
  }

 private:
  int64_t num_chunks(size_t s) const {
    return std::max<int64_t>(1, (flags_.length(s) + limit_ - 1) / limit_);
  }
  int64_t chunk_begin(size_t s, int64_t chunk) const { return flags_.length(s) * chunk / num_chunks(s); }

  void run_in_chunks(size_t s) {
    const int64_t trained_end = flags_.trained_end(s);
    chunks_.clear();
    for (int64_t i = 0; i < num_chunks(s); ++i) {
      const int64_t begin = chunk_begin(s, i), end = chunk_begin(s, i + 1);
      Block chunk;
      chunk.interior = i + 1 < num_chunks(s);
      chunk.stack_rows = begin;
      chunk.num_tokens = end - begin;
      chunk.num_pairs = (end * (end + 1) - begin * (begin + 1)) / 2;
      chunk.num_stack_pairs = (end - begin) * begin;
      chunk.num_pieces = 1;
      chunk.num_head_rows = chunk.num_loss_rows = flags_.count(s, begin, end);
      chunk.num_exits = chunk.interior && flags_.trains(s, end);
      chunk.needed = trained_end > begin;
      simulator_.step(chunk.interior ? Step::Kind::kForward : kLeaf, chunk);
      if (chunk.interior) chunks_.push_back(chunk);
    }
    for (auto it = chunks_.rbegin(); it != chunks_.rend(); ++it) simulator_.step(Step::Kind::kBackward, *it);
  }

  Flags flags_;
  int64_t limit_;
  Simulator simulator_;
  std::vector<Block> chunks_;  // open
};

// Tokens of a bin that train, each once, and once for each of the bin's sequences that trains it.
class TrainedRows {
 public:
  TrainedRows(const PlanRequest& request, const IndexedTree& whole)
      : tree_(*whole.tree),
        request_(request),
        last_bin_(request.trained.empty() ? 0 : tree_.num_tokens(), -1) {}

  void add(int32_t bin, const std::vector<int64_t>& sequences, Block& block) {
    for (const int64_t s : sequences) {
      const int64_t begin = tree_.sequence_offset[s], length = tree_.sequence_offset[s + 1] - begin;
      if (request_.trained.empty()) {
        block.num_loss_rows += std::max<int64_t>(0, length - 1);
        continue;
      }
      const uint8_t* own = request_.trained.data() + begin;
      for (int32_t t = tree_.sequence_end[s]; t >= 0;) {  // a run of consecutive numbers at a time
        const int32_t run = tree_.chain_begin[t], shift = tree_.depth[run] - run;
        for (; t >= run; --t) {
          if (own[t + shift] == 0 || tree_.parent[t] < 0) continue;
          ++block.num_loss_rows;
          block.num_head_rows += last_bin_[t] != bin;
          last_bin_[t] = bin;
        }
        t = tree_.parent[run];
      }
    }
  }

 private:
  const PrefixTree& tree_;
  const PlanRequest& request_;
  std::vector<int32_t> last_bin_;  // that trained the token
};

}  // namespace

Simulation simulate_dense(const PlanRequest& request, int64_t max_tokens_per_pass,
                          std::optional<int64_t> most_bytes, double most_seconds) {
  return DenseOutline(request, max_tokens_per_pass, most_bytes, most_seconds).run();
}

Simulation simulate_packed(const PlanRequest& request, const IndexedTree& whole, const Packing& packing) {
  const auto& nodes = whole.branches.nodes;
  Simulator simulator(request.costs, request.memory_bytes);
  TrainedRows rows(request, whole);
  std::vector<int32_t> last_bin(nodes.size(), -1);
  for (size_t b = 0; b < packing.bins.size(); ++b) {
    const auto& bin = packing.bins[b];
    const auto number = static_cast<int32_t>(b);
    Block block;
    int64_t num_roots = 0;
    for (const int64_t s : bin.sequences)
      for (int32_t n = whole.branches.sequence_leaf[s]; n >= 0 && last_bin[n] != number;
           n = nodes[n].parent) {
        last_bin[n] = number;
        block.num_tokens += nodes[n].end - nodes[n].begin;
        block.num_pairs += whole.num_pairs({nodes[n].begin, nodes[n].end});
        block.num_pieces += nodes[n].is_leaf();  // each piece ends in a leaf
        num_roots += nodes[n].parent < 0;
      }
    rows.add(number, bin.sequences, block);
    if (request.trained.empty()) block.num_head_rows = block.num_tokens - num_roots;
    block.needed = block.num_head_rows > 0;
    BOUGH_CHECK(block.num_tokens == bin.num_tokens, "bin ", b, " has ", block.num_tokens, " tokens, says ",
                bin.num_tokens);
    simulator.begin_tree(0);
    if (block.num_tokens > 0) simulator.step(kLeaf, block);
  }
  return simulator.finish();
}

}  // namespace bough
