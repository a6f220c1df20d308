#include "train/token_marks.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <string_view>
#include <unordered_map>

#include "base/error.h"
#include "train/make_batch.h"
#include "tree/prefix_tree.h"

namespace bough {

namespace {

using Numbers = std::span<const uint16_t>;
// By sequence, then by token. An empty record: none.
using Records = std::vector<std::vector<Numbers>>;

size_t hash_of(Numbers numbers) {
  return std::hash<std::string_view>()({reinterpret_cast<const char*>(numbers.data()), numbers.size_bytes()});
}

// Numbers tokens by their id and records: equal ones get the same number.
class ReplayedTokens {
 public:
  int32_t number_of(const ReplayedToken& token) {
    const size_t hash =
        hash_of(token.pages) * 31 + hash_of(token.experts) * 7 + static_cast<size_t>(token.token);
    const auto [first, last] = numbers_.equal_range(hash);
    for (auto found = first; found != last; ++found) {
      const ReplayedToken& other = (*tokens_)[static_cast<size_t>(found->second)];
      if (other.token == token.token && std::ranges::equal(other.pages, token.pages) &&
          std::ranges::equal(other.experts, token.experts))
        return found->second;
    }
    const auto number = static_cast<int32_t>(tokens_->size());
    BOUGH_CHECK(number < kReplayMark, "too many recorded tokens in one batch");
    tokens_->push_back(token);
    numbers_.emplace(hash, number);
    return number;
  }
  std::shared_ptr<const std::vector<ReplayedToken>> tokens() const { return tokens_; }

 private:
  std::shared_ptr<std::vector<ReplayedToken>> tokens_ = std::make_shared<std::vector<ReplayedToken>>();
  std::unordered_multimap<size_t, int32_t> numbers_;  // by hash
};

Records records_of(const std::vector<const Trajectory*>& rows, const std::vector<RoutedExperts>* instead) {
  Records records;
  for (size_t s = 0; s < rows.size(); ++s) {
    std::vector<Numbers>& own = records.emplace_back(rows[s]->input_ids.size());
    const RoutedExperts& routed = instead ? (*instead)[s] : rows[s]->routed_experts;
    const int64_t recorded = std::min(routed.num_rows(), std::ssize(own));
    for (int64_t i = 0; i < recorded; ++i) own[static_cast<size_t>(i)] = routed.row(i);
  }
  return records;
}

// Counts the records of each token of the tree of `sequences`, and the records unlike the most frequent one.
// Ties: the record of the earliest sequence. With `adopt`, every sequence gets the most frequent records.
RouteDifferences compare_records(const std::vector<TokenSpan>& sequences, Records& records, bool adopt) {
  struct Count {
    Numbers record;
    int64_t count = 0;
  };
  const PrefixTree tree = build_prefix_tree(sequences);
  std::vector<std::vector<Count>> counts(static_cast<size_t>(tree.num_tokens()));
  std::vector<std::vector<int32_t>> paths;
  RouteDifferences differences;
  for (size_t s = 0; s < records.size(); ++s) {
    paths.push_back(tree.path(static_cast<int64_t>(s)));
    for (size_t i = 0; i < records[s].size(); ++i) {
      if (records[s][i].empty()) continue;
      ++differences.rows;
      auto& at_token = counts[static_cast<size_t>(paths[s][i])];
      const auto same = std::ranges::find_if(
          at_token, [&](const Count& count) { return std::ranges::equal(count.record, records[s][i]); });
      if (same == at_token.end()) at_token.push_back({records[s][i], 1});
      else ++same->count;
    }
  }
  std::vector<Numbers> most(counts.size());
  for (size_t t = 0; t < counts.size(); ++t) {
    if (counts[t].empty()) continue;
    const auto largest = std::ranges::max_element(counts[t], {}, &Count::count);
    most[t] = largest->record;
    for (const Count& count : counts[t]) differences.different += count.count;
    differences.different -= largest->count;
  }
  if (adopt)
    for (size_t s = 0; s < records.size(); ++s)
      for (size_t i = 0; i < records[s].size(); ++i) records[s][i] = most[static_cast<size_t>(paths[s][i])];
  return differences;
}

}  // namespace

RouteDifferences mark_tokens(TrainBatch& batch, const std::vector<const Trajectory*>& trajectories,
                             const MarkSettings& settings) {
  std::vector<const Trajectory*> rows;
  for (const Trajectory* trajectory : trajectories)
    if (trajectory->in_loss()) rows.push_back(trajectory);
  BOUGH_CHECK(rows.size() == batch.sequences.size(), "got marks for ", rows.size(), " of ",
              batch.sequences.size(), " sequences");
  auto marked = std::make_shared<std::vector<std::vector<int32_t>>>();
  for (const Trajectory* row : rows) {
    std::vector<int32_t>& tokens = marked->emplace_back(row->input_ids);
    if (!settings.sampled) continue;
    const std::vector<uint8_t> sampled = row->sampled();
    for (size_t i = 1; i < tokens.size(); ++i)
      if (sampled[i] != 0) tokens[i] |= kDrawnMark;
  }
  RouteDifferences differences;
  Records experts;
  if (settings.experts) {
    experts = records_of(rows, batch.routed_experts.get());
    differences =
        compare_records(std::vector<TokenSpan>(marked->begin(), marked->end()), experts, settings.majority);
  }
  ReplayedTokens replayed;
  for (size_t s = 0; s < rows.size(); ++s) {
    std::vector<int32_t>& tokens = (*marked)[s];
    std::vector<Numbers> pages(tokens.size());
    const PageChoices& choices = rows[s]->page_choices;
    for (size_t i = 0; settings.sampled && i < choices.positions.size(); ++i) {
      const auto position = static_cast<size_t>(choices.positions[i]);
      if ((tokens.at(position) & kDrawnMark) != 0) pages[position] = choices.of(i);
    }
    for (size_t i = 0; i < tokens.size(); ++i) {
      const Numbers own = experts.empty() ? Numbers() : experts[s][i];
      if (pages[i].empty() && own.empty()) continue;
      tokens[i] =
          (tokens[i] & kDrawnMark) | kReplayMark | replayed.number_of({token_id(tokens[i]), pages[i], own});
    }
  }
  for (size_t s = 0; s < rows.size(); ++s) batch.sequences[s] = (*marked)[s];
  batch.marked = std::move(marked);
  batch.replayed = replayed.tokens();
  return differences;
}

}  // namespace bough
