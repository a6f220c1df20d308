#include "algo/minibatches.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "algo/groups.h"
#include "base/error.h"

namespace bough {

std::vector<std::vector<int64_t>> split_minibatches(std::span<const int64_t> groups,
                                                    std::span<const int64_t> tokens,
                                                    int64_t num_minibatches) {
  if (num_minibatches < 1)
    throw UserError(str("setting ppo_n_minibatches: got ", num_minibatches, ", expected 1 or more"));
  BOUGH_CHECK(groups.size() == tokens.size(), "groups ", groups.size(), ", tokens ", tokens.size());
  const std::vector<std::vector<int64_t>> members = members_by_group(groups);
  std::vector<int64_t> group_tokens(members.size(), 0);
  for (size_t g = 0; g < members.size(); ++g)
    for (const int64_t s : members[g]) group_tokens[g] += tokens[s];
  std::vector<size_t> heaviest_first(members.size());
  std::iota(heaviest_first.begin(), heaviest_first.end(), size_t{0});
  std::stable_sort(heaviest_first.begin(), heaviest_first.end(),
                   [&](size_t a, size_t b) { return group_tokens[a] > group_tokens[b]; });

  struct Bin {
    int64_t tokens = 0;
    int64_t groups = 0;
    std::vector<int64_t> sequences;
  };
  std::vector<Bin> bins(std::min<size_t>(members.size(), static_cast<size_t>(num_minibatches)));
  for (const size_t g : heaviest_first) {
    // A bin is a mini-batch. Comparing groups too leaves no bin empty, even if groups have no tokens.
    Bin& lightest = *std::min_element(bins.begin(), bins.end(), [](const Bin& a, const Bin& b) {
      return std::tie(a.tokens, a.groups) < std::tie(b.tokens, b.groups);
    });
    lightest.tokens += group_tokens[g];
    ++lightest.groups;
    lightest.sequences.insert(lightest.sequences.end(), members[g].begin(), members[g].end());
  }
  std::vector<std::vector<int64_t>> minibatches;
  for (Bin& bin : bins) {
    std::sort(bin.sequences.begin(), bin.sequences.end());
    minibatches.push_back(std::move(bin.sequences));
  }
  return minibatches;
}

}  // namespace bough
