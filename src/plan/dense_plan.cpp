// `dense`: no sharing. The sequences of a flat batch in passes, long ones in chunks.
#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "plan/simulator.h"
#include "plan/strategies.h"

namespace bough {

namespace {

// Says which positions of which sequence train, without an index.
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
  // Where the sequence starts in the flat batch.
  int64_t offset(size_t sequence) const { return offsets_[sequence]; }
  int64_t length(size_t sequence) const { return offsets_[sequence + 1] - offsets_[sequence]; }
  bool trains(size_t sequence, int64_t position) const {
    return position > 0 && (request_.trained.empty() || request_.trained[offsets_[sequence] + position] != 0);
  }
  // How many of positions [begin, end) train.
  int64_t count(size_t sequence, int64_t begin, int64_t end) const {
    begin = std::max<int64_t>(begin, 1);
    if (begin >= end) return 0;
    if (request_.trained.empty()) return end - begin;
    const auto* own = request_.trained.data() + offsets_[sequence];
    return std::count_if(own + begin, own + end, [](uint8_t flag) { return flag != 0; });
  }
  // The position after the last that trains; 0 where none does.
  int64_t trained_end(size_t sequence) const {
    int64_t end = length(sequence);
    while (end > 0 && !trains(sequence, end - 1)) --end;
    return end;
  }

 private:
  const PlanRequest& request_;
  std::vector<int64_t> offsets_;
};

class DenseWalk {
 public:
  DenseWalk(const PlanRequest& request, int64_t limit, BlockSink& sink)
      : flags_(request), limit_(limit), sink_(sink) {}

  void run() {
    check_tree_size(flags_.num_flat_tokens());
    const size_t count = flags_.num_sequences();
    std::vector<int64_t> all(count);
    std::iota(all.begin(), all.end(), 0);
    int64_t stack_capacity = 0;
    for (size_t s = 0; s < count; ++s)
      stack_capacity = std::max(stack_capacity, chunk_begin(s, num_chunks(s) - 1));
    sink_.begin_tree(all, stack_capacity);
    Block pass;  // whole sequences
    const auto flush = [&] {
      pass.needed = pass.num_head_rows > 0;
      if (pass.num_tokens > 0) sink_.add_leaf(std::move(pass));
      pass = {};
    };
    for (size_t s = 0; s < count && !sink_.is_enough(); ++s) {
      const int64_t length = flags_.length(s);
      if (length == 0) continue;
      if (pass.num_tokens + length > limit_) flush();
      if (length > limit_) {
        run_in_chunks(s);
        continue;
      }
      if (pass.ranges.empty()) pass.ranges = {range(s, 0, 0)};
      pass.ranges.front().end += static_cast<int32_t>(length);
      pass.num_tokens += length;
      pass.num_pairs += length * (length + 1) / 2;
      pass.num_head_rows += flags_.count(s, 0, length);
      pass.num_loss_rows = pass.num_head_rows;
      ++pass.num_pieces;
    }
    flush();
  }

 private:
  int64_t num_chunks(size_t s) const {
    return std::max<int64_t>(1, (flags_.length(s) + limit_ - 1) / limit_);
  }
  int64_t chunk_begin(size_t s, int64_t chunk) const { return flags_.length(s) * chunk / num_chunks(s); }
  TokenRange range(size_t s, int64_t begin, int64_t end) const {
    return {static_cast<int32_t>(flags_.offset(s) + begin), static_cast<int32_t>(flags_.offset(s) + end)};
  }

  void run_in_chunks(size_t s) {
    const int64_t trained_end = flags_.trained_end(s);
    const int64_t last = num_chunks(s) - 1;
    for (int64_t i = 0; i <= last; ++i) {
      const int64_t begin = chunk_begin(s, i), end = chunk_begin(s, i + 1);
      Block chunk;
      chunk.interior = i < last;
      chunk.stack_rows = begin;
      chunk.ranges = {range(s, begin, end)};
      chunk.num_tokens = end - begin;
      chunk.num_pairs = (end * (end + 1) - begin * (begin + 1)) / 2;
      chunk.num_stack_pairs = (end - begin) * begin;
      chunk.num_pieces = 1;
      chunk.num_head_rows = chunk.num_loss_rows = flags_.count(s, begin, end);
      chunk.num_exits = chunk.interior && flags_.trains(s, end);
      chunk.needed = trained_end > begin;
      chunk.interior ? sink_.push(std::move(chunk)) : sink_.add_leaf(std::move(chunk));
    }
    for (int64_t i = 0; i < last; ++i) sink_.pop();
  }

  Flags flags_;
  int64_t limit_;
  BlockSink& sink_;
};

}  // namespace

void walk_dense(const PlanRequest& request, int64_t max_tokens_per_pass, BlockSink& sink) {
  DenseWalk(request, max_tokens_per_pass, sink).run();
}

Plan plan_dense(const PlanRequest& request, int64_t max_tokens_per_pass) {
  PlanWriter writer;
  walk_dense(request, max_tokens_per_pass, writer);
  Plan plan{"dense", max_tokens_per_pass, writer.finish()};
  plan.trees.front().tree = std::make_shared<const PrefixTree>(build_flat_forest(request.sequences));
  return plan;
}

Simulation simulate_dense(const PlanRequest& request, int64_t max_tokens_per_pass,
                          std::optional<int64_t> most_bytes, double most_seconds) {
  Simulator simulator(request.costs, most_bytes, most_seconds);
  walk_dense(request, max_tokens_per_pass, simulator);
  return simulator.finish();
}

}  // namespace bough
