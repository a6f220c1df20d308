// Summaries and choices of blocks after forks, copies, evictions, releases and new weights. Random requests
// of several turns go through the engine's scheduler, pool and storage. Made-up queries and keys replace the
// model. Each choice is compared with a plain reference, which works on token sequences without pages in
// memory.
//
// Keys are small numbers, so that sums are exact in any order and many scores are equal. A token's keys and
// query depend on all tokens of its path, on which of them were sampled, and on the weight version. The
// choices returned with finished samples are compared, too.
#include <cstdlib>
#include <map>
#include <span>

#include "base/random.h"
#include "rollout/rollout_test_util.h"

namespace bough {
namespace {

constexpr int64_t kHeads = 4, kGroups = 2, kHeadDim = 8, kMaxPages = 40;

struct Case {
  at::ScalarType dtype;
  BlockSummary summary;
  int32_t range;  // elements of keys are the multiples of 1/4 from -range/4 to range/4
  int64_t block = kPageTokens, budget = 5, first = 1, last = 2;  // SparsePolicy
};

uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t x = (a ^ (b + 0x9E3779B97F4A7C15u)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 29)) * 0x94D049BB133111EBu;
  return x ^ (x >> 32);
}

struct Counts {
  int64_t operations = 0, appended = 0, forks = 0, copies = 0, releases = 0, updates = 0, choices = 0,
          ties = 0, kept = 0;
};

class Machine {
 public:
  Machine(const Case& c, uint64_t seed)
      : case_(c),
        random_(seed, Purpose::test),
        policy_{.budget_blocks = c.budget,
                .summary = c.summary,
                .dense_layers = 0,
                .keeps_choices = true,
                .block_tokens = c.block,
                .first_blocks = c.first,
                .last_blocks = c.last},
        scheduler_(/*max_running=*/9, /*prefill_chunk_tokens=*/64, kMaxPages, /*is_sparse=*/true),
        storage_(config(), c.dtype, at::kCPU, kMaxPages, policy_) {}

  void run(int64_t num_operations) {
    while (counts_.operations < num_operations) {
      while (static_cast<int64_t>(in_flight_.size()) < 6) submit();
      step();
      if (::testing::Test::HasFatalFailure()) return;
      if (below(120) == 0) {
        ++version_;
        scheduler_.preempt_all();
        ++counts_.updates, ++counts_.operations;
      }
      if (below(200) == 0) {
        const uint64_t id = in_flight_.begin()->first;
        ASSERT_TRUE(scheduler_.cancel(id));
        take(id);
      }
      if (below(40) == 0) scheduler_.check_integrity();
    }
  }

  const Counts& counts() const { return counts_; }
  const Scheduler& scheduler() const { return scheduler_; }

 private:
  static ModelConfig config() {
    ModelConfig config;
    config.num_layers = 1;
    config.num_heads = kHeads;
    config.num_kv_heads = kGroups;
    config.head_dim = kHeadDim;
    return config;
  }
  int64_t below(uint64_t n) { return static_cast<int64_t>(random_.below(n, 0, draws_++)); }

  // New prompts begin with common tokens. Later turns continue generated text, marked as sampled or not.
  void submit() {
    GenerationRequest request = request_of(next_id_++, {}, 1 + below(3), 20 + below(90));
    auto& prompt = request.prompt_ids;
    if (!finished_.empty() && below(3) == 0) {
      const auto& [tokens, sampled] = finished_[static_cast<size_t>(below(finished_.size()))];
      prompt = tokens;
      if (below(4) != 0) request.sampled = sampled;
      request.sampling.max_new_tokens = 20 + below(30);
    } else {
      const int64_t header = 10 + below(2) * 30;
      for (int64_t i = 0; i < header; ++i) prompt.push_back(static_cast<int32_t>(i % 5));
    }
    for (int64_t i = 1 + below(40); i > 0; --i) prompt.push_back(static_cast<int32_t>(below(3)));
    in_flight_[request.id] = request.sampled;
    scheduler_.add(std::move(request), {});
  }

  void step() {
    Pass pass = scheduler_.plan();
    copy(pass.page_copies);
    if (!pass.entries.empty()) compute(pass);
    scheduler_.commit(pass);
    std::vector<std::pair<int32_t, int32_t>> page_copies;
    const std::vector<ActiveSample*> started = scheduler_.start_samples(page_copies);
    copy(page_copies);
    ASSERT_TRUE(!pass.entries.empty() || !started.empty());
    counts_.forks += std::ssize(started);
    counts_.operations += std::ssize(started) + std::ssize(pass.entries);
    std::vector<ActiveSample*> sampling = started;
    for (const PassEntry& entry : pass.entries)
      if (entry.sample && entry.reaches_end()) sampling.push_back(entry.sample);
    for (ActiveSample* sample : sampling) append_token(*sample);
  }

  void copy(const std::vector<std::pair<int32_t, int32_t>>& pairs) {
    storage_.copy_pages(pairs);
    counts_.copies += std::ssize(pairs), counts_.operations += std::ssize(pairs);
  }

  void append_token(ActiveSample& sample) {
    sample.must_make_progress = false;
    sample.tokens.push_back(static_cast<int32_t>(below(3)));
    sample.result.token_ids.push_back(sample.tokens.back());
    ActiveRequest& request = *sample.request;
    if (std::ssize(sample.result.token_ids) < request.request.sampling.max_new_tokens) return;
    if (sample.tokens.size() < 110) {
      std::vector<uint8_t> sampled = in_flight_.at(request.request.id);
      sampled.resize(request.request.prompt_ids.size(), 0);
      sampled.resize(sample.tokens.size(), 1);
      finished_.emplace_back(sample.tokens, sampled);
      if (finished_.size() > 8) finished_.erase(finished_.begin());
    }
    check_kept({.sample = &sample, .request = &request});
    scheduler_.finish(sample, FinishReason::kLength);
    ++counts_.releases, ++counts_.operations;
    if (request.num_done == request.request.sampling.n_samples) take(request.request.id);
  }

  void check_kept(const PassEntry& entry) {
    const int64_t computed = entry.sample->num_computed;
    const PageChoices kept =
        storage_.kept_choices(entry.table().pages, computed, [&](int64_t i) { return entry.is_sampled(i); });
    const std::vector<uint64_t> hashes = path_hashes(entry, computed);
    size_t next = 0;
    for (int64_t i = 0; i < computed; ++i) {
      if (!entry.is_sampled(i) || policy_.blocks_for(i + 1) <= policy_.budget_blocks) continue;
      ASSERT_EQ(kept.positions.at(next), i);
      const std::span<const uint16_t> blocks = kept.of(next++);
      const int64_t chosen = policy_.chosen_of(policy_.budget_blocks);
      ASSERT_EQ(std::ssize(blocks), kGroups * chosen);
      const std::vector<float> q = query_of(hashes[static_cast<size_t>(i)]);
      for (int64_t g = 0; g < kGroups; ++g) {
        const std::vector<int32_t> expected = expected_choice(hashes, i, g, q.data());
        ASSERT_TRUE(std::equal(expected.begin() + policy_.first_blocks, expected.end() - policy_.last_blocks,
                               blocks.begin() + g * chosen))
            << "position " << i << ", head " << g << ", after " << counts_.operations << " operations";
        ++counts_.kept;
      }
    }
    ASSERT_EQ(next, kept.positions.size());
  }

  void take(uint64_t id) {
    scheduler_.take(*scheduler_.find(id));
    in_flight_.erase(id);
  }

  // Returns one hash per token of the path: a hash of everything that the token's keys depend on.
  std::vector<uint64_t> path_hashes(const PassEntry& entry, int64_t end) const {
    std::vector<uint64_t> hashes;
    uint64_t hash = static_cast<uint64_t>(version_);
    for (int64_t i = 0; i < end; ++i) {
      hash =
          mix(hash, static_cast<uint64_t>(entry.tokens()[static_cast<size_t>(i)]) * 2 + entry.is_sampled(i));
      hashes.push_back(hash);
    }
    return hashes;
  }
  float key(uint64_t hash, int64_t g, int64_t h) const {
    const uint64_t x = mix(hash, static_cast<uint64_t>(g * kHeadDim + h));
    return static_cast<float>(static_cast<int32_t>(x % static_cast<uint64_t>(2 * case_.range + 1)) -
                              case_.range) /
           4;
  }
  static std::vector<float> query_of(uint64_t hash) {
    std::vector<float> q;
    for (uint64_t n = 0; n < kHeads * kHeadDim; ++n)
      q.push_back(static_cast<float>(static_cast<int32_t>(mix(hash + 1, n) % 3) - 1));
    return q;
  }
  // Rounds to the cache's dtype.
  double rounded(double x) const {
    return case_.dtype == at::kBFloat16 ? static_cast<double>(at::BFloat16(static_cast<float>(x))) : x;
  }
  // Returns the mean of a complete block's keys, or their least and largest elements, from its tokens'
  // hashes.
  std::vector<double> summary(std::span<const uint64_t> hashes, int64_t g) const {
    std::vector<double> mean(kHeadDim, 0), least(kHeadDim, INFINITY), most(kHeadDim, -INFINITY);
    for (int64_t h = 0; h < kHeadDim; ++h) {
      const auto i = static_cast<size_t>(h);
      for (const uint64_t hash : hashes) {
        const double x = key(hash, g, h);
        mean[i] += x / static_cast<double>(hashes.size());
        least[i] = std::min(least[i], x), most[i] = std::max(most[i], x);
      }
      mean[i] = rounded(mean[i]);
    }
    if (case_.summary == BlockSummary::kMean) return mean;
    least.insert(least.end(), most.begin(), most.end());
    return least;
  }

  void compute(const Pass& pass) {
    std::vector<PagedSegment> segments;
    std::vector<uint8_t> is_sampled;
    std::vector<float> k, v, q;
    std::vector<std::vector<uint64_t>> hashes;
    for (const PassEntry& entry : pass.entries) {
      const int64_t end = entry.begin + entry.count;
      hashes.push_back(path_hashes(entry, end));
      segments.push_back({entry.table().pages, entry.begin, entry.count});
      counts_.appended += entry.count;
      for (int64_t i = entry.begin; i < end; ++i) {
        is_sampled.push_back(entry.is_sampled(i));
        for (int64_t g = 0; g < kGroups; ++g)
          for (int64_t h = 0; h < kHeadDim; ++h)
            k.push_back(key(hashes.back()[static_cast<size_t>(i)], g, h));
        const std::vector<float> own_q = query_of(hashes.back()[static_cast<size_t>(i)]);
        q.insert(q.end(), own_q.begin(), own_q.end());
      }
    }
    const auto T = static_cast<int64_t>(is_sampled.size());
    const auto tensor = [&](const std::vector<float>& values, int64_t heads) {
      return at::tensor(values).view({T, heads, kHeadDim}).to(case_.dtype);
    };
    const at::Tensor q_TNH = tensor(q, kHeads), k_TGH = tensor(k, kGroups);
    const PagedShape shape{kHeads, kGroups, kHeadDim, case_.dtype, at::kCPU};
    SparseContext attention(storage_, shape, AttentionPath::kFastest, 1.0, segments, is_sampled);
    attention.attend(0, q_TNH, k_TGH, k_TGH);

    const at::Tensor summaries = storage_.summaries(0).to(at::kFloat);
    for (size_t e = 0; e < pass.entries.size(); ++e) check_summaries(pass.entries[e], hashes[e], summaries);
    if (!attention.chooser().chooses()) return;
    const BlockChooser::Lists chosen = attention.chooser().choose(q_TNH, storage_.summaries(0));
    size_t next = 0;
    int64_t token = 0;
    for (size_t e = 0; e < pass.entries.size(); ++e)
      for (int64_t i = pass.entries[e].begin; i < pass.entries[e].begin + pass.entries[e].count;
           ++i, ++token) {
        if (is_sampled[static_cast<size_t>(token)] == 0 || policy_.blocks_for(i + 1) <= policy_.budget_blocks)
          continue;
        for (int64_t g = 0; g < kGroups; ++g)
          ASSERT_EQ(chosen.at(next++), expected_choice(hashes[e], i, g, q.data() + token * kHeads * kHeadDim))
              << "position " << i << ", head " << g << ", after " << counts_.operations << " operations";
      }
    ASSERT_EQ(next, chosen.size());
  }

  void check_summaries(const PassEntry& entry, const std::vector<uint64_t>& hashes,
                       const at::Tensor& summaries) {
    const float* all = summaries.const_data_ptr<float>();
    const auto tokens = static_cast<size_t>(policy_.block_tokens);
    for (size_t block = 0; block < hashes.size() / tokens; ++block)
      for (int64_t g = 0; g < kGroups; ++g) {
        const std::vector<double> expected = summary(std::span(hashes).subspan(block * tokens, tokens), g);
        // The summary is stored under the part of a page that has the block's last token.
        const auto last = static_cast<int64_t>((block + 1) * tokens - 1);
        const int64_t parts = kPageTokens / std::min(policy_.block_tokens, kPageTokens);
        const int64_t part = entry.table().pages[static_cast<size_t>(last / kPageTokens)] * parts +
                             last % kPageTokens / (kPageTokens / parts);
        const float* own = all + part * summaries.stride(0) + g * summaries.stride(1);
        for (size_t i = 0; i < expected.size(); ++i)
          ASSERT_EQ(own[static_cast<int64_t>(i / kHeadDim) * summaries.stride(2) +
                        static_cast<int64_t>(i % kHeadDim)],
                    expected[i])
              << "block " << block << " of " << hashes.size() << " tokens, after " << counts_.operations
              << " operations";
      }
  }

  std::vector<int32_t> expected_choice(const std::vector<uint64_t>& hashes, int64_t position, int64_t g,
                                       const float* q) {
    const int64_t tokens = case_.block, blocks = position / tokens + 1, heads = kHeads / kGroups;
    std::vector<std::pair<double, int32_t>> ranked;  // (negative score, block)
    for (int64_t block = case_.first; block < blocks - case_.last; ++block) {
      const std::vector<double> s = summary(
          std::span(hashes).subspan(static_cast<size_t>(block * tokens), static_cast<size_t>(tokens)), g);
      double score = 0;
      for (int64_t h = 0; h < kHeadDim; ++h) {
        double mean = 0;
        for (int64_t n = g * heads; n < (g + 1) * heads; ++n) mean += q[n * kHeadDim + h] / heads;
        const double first = mean * s[static_cast<size_t>(h)];
        score += s.size() == kHeadDim ? first : std::max(first, mean * s[static_cast<size_t>(kHeadDim + h)]);
      }
      ranked.emplace_back(-score, static_cast<int32_t>(block));
    }
    std::sort(ranked.begin(), ranked.end());
    ++counts_.choices;
    const auto chosen = static_cast<size_t>(case_.budget - case_.first - case_.last);
    counts_.ties += ranked[chosen - 1].first == ranked[chosen].first;
    std::vector<int32_t> kept;
    for (int64_t block = 0; block < case_.first; ++block) kept.push_back(static_cast<int32_t>(block));
    for (int64_t block = blocks - case_.last; block < blocks; ++block)
      kept.push_back(static_cast<int32_t>(block));
    for (size_t i = 0; i < chosen; ++i) kept.push_back(ranked[i].second);
    std::sort(kept.begin(), kept.end());
    return kept;
  }

  const Case case_;
  const CounterRandom random_;
  const SparsePolicy policy_;
  uint64_t draws_ = 0, next_id_ = 1;
  int64_t version_ = 0;
  Scheduler scheduler_;
  KvStorage storage_;
  std::map<uint64_t, std::vector<uint8_t>> in_flight_;  // request id -> which tokens are marked as sampled
  std::vector<std::pair<std::vector<int32_t>, std::vector<uint8_t>>> finished_;
  Counts counts_;
};

// About 170,000 operations in total: sequence segments in passes, forks, copies, releases, new weights.
TEST(SparsePages, SummariesAndChoicesEqualAPlainReference) {
  const Case cases[] = {{at::kFloat, BlockSummary::kMean, 1},
                        {at::kFloat, BlockSummary::kMinMax, 1},
                        {at::kBFloat16, BlockSummary::kMean, 100},
                        {at::kFloat, BlockSummary::kMean, 1, 4, 20, 4, 8},
                        {at::kBFloat16, BlockSummary::kMinMax, 1, 8, 8, 0, 1},
                        {at::kFloat, BlockSummary::kMean, 1, 32, 3, 1, 1}};
  for (const Case& c : cases) {
    Machine machine(c, static_cast<uint64_t>(c.range) + static_cast<uint64_t>(c.summary));
    machine.run(34000);
    if (HasFatalFailure()) return;
    const Counts& counts = machine.counts();
    EXPECT_GT(counts.forks, 300);
    EXPECT_GT(counts.copies, 300);
    EXPECT_GT(counts.releases, 200);
    EXPECT_GT(counts.updates, 20);
    EXPECT_GT(counts.choices, 10000);
    EXPECT_GT(counts.kept, 5000);
    if (c.range == 1) {
      EXPECT_GT(counts.ties, 300);
    }
    EXPECT_GT(machine.scheduler().preemptions(), 50);
    EXPECT_GT(machine.scheduler().cached_tokens(), 2000);
    EXPECT_EQ(machine.scheduler().pool().num_pages(), kMaxPages) << "nothing was evicted";
  }
}

}  // namespace
}  // namespace bough
