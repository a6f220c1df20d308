#include "algo/aggregation.h"

#include <ATen/ops/empty.h>

#include "algo/groups.h"
#include "base/error.h"

namespace bough {

namespace {

// Weights of group_mean. The denominator of group g: (sum over g's sequences of share * trained tokens) * G.
// G is the number of groups with a trained token. A share is 1/N, see sequence_weights().
std::vector<double> group_mean_weights(std::span<const int64_t> trained_tokens,
                                       std::span<const int64_t> groups, std::span<const double> shares) {
  BOUGH_CHECK(groups.size() == trained_tokens.size(), "groups ", groups.size(), ", sequences ",
              trained_tokens.size());
  const std::vector<std::vector<int64_t>> members = members_by_group(groups);
  std::vector<double> group_tokens(members.size(), 0.0);
  int64_t num_groups = 0;
  for (size_t g = 0; g < members.size(); ++g) {
    for (const int64_t s : members[g]) group_tokens[g] += shares[s] * static_cast<double>(trained_tokens[s]);
    num_groups += group_tokens[g] > 0.0;
  }
  std::vector<double> weights(trained_tokens.size(), 0.0);
  for (size_t g = 0; g < members.size(); ++g)
    for (const int64_t s : members[g])
      if (trained_tokens[s] > 0) weights[s] = shares[s] / (static_cast<double>(num_groups) * group_tokens[g]);
  return weights;
}

}  // namespace

std::vector<double> sequence_weights(const AggregationSettings& settings,
                                     std::span<const int64_t> trained_tokens, std::span<const int64_t> groups,
                                     std::span<const double> shares) {
  const std::vector<double> whole(shares.empty() ? trained_tokens.size() : 0, 1.0);
  if (shares.empty()) shares = whole;
  BOUGH_CHECK(shares.size() == trained_tokens.size(), "shares ", shares.size(), ", sequences ",
              trained_tokens.size());
  const std::string how = settings.loss_aggregation == "auto" ? "token_mean" : settings.loss_aggregation;
  if (how == "group_mean") return group_mean_weights(trained_tokens, groups, shares);
  if (how != "token_mean" && how != "sequence_mean" && how != "constant_length")
    throw UserError(str("setting loss_aggregation: got ", quoted(how),
                        ", expected one of auto, token_mean, sequence_mean, constant_length, group_mean"));
  if (how == "constant_length" && settings.loss_constant_length <= 0)
    throw UserError(str("setting loss_constant_length: got ", settings.loss_constant_length,
                        ", expected a length above 0 with loss_aggregation: constant_length (for instance "
                        "gconfig.max_new_tokens)"));
  double tokens = 0, sequences = 0;
  for (size_t s = 0; s < trained_tokens.size(); ++s) {
    BOUGH_CHECK(trained_tokens[s] >= 0, "trained tokens ", trained_tokens[s]);
    tokens += shares[s] * static_cast<double>(trained_tokens[s]);
    if (trained_tokens[s] > 0) sequences += shares[s];
  }
  std::vector<double> weights(trained_tokens.size(), 0.0);
  for (size_t s = 0; s < weights.size(); ++s) {
    if (trained_tokens[s] == 0) continue;
    if (how == "token_mean") weights[s] = shares[s] / tokens;
    else if (how == "sequence_mean")
      weights[s] = shares[s] / (sequences * static_cast<double>(trained_tokens[s]));
    else weights[s] = shares[s] / (sequences * static_cast<double>(settings.loss_constant_length));
  }
  return weights;
}

at::Tensor expand_to_rows(std::span<const double> per_sequence, const at::Tensor& sequences_R,
                          at::ScalarType dtype) {
  BOUGH_CHECK(sequences_R.dim() == 1 && sequences_R.scalar_type() == at::kLong,
              "sequences_R must be int64 [R]");
  const at::Tensor indices_R = sequences_R.cpu().contiguous();
  const int64_t* indices = indices_R.const_data_ptr<int64_t>();
  at::Tensor values_R = at::empty({indices_R.numel()}, at::kDouble);
  double* values = values_R.mutable_data_ptr<double>();
  for (int64_t r = 0; r < indices_R.numel(); ++r) {
    BOUGH_CHECK(indices[r] >= 0 && indices[r] < static_cast<int64_t>(per_sequence.size()), "row ", r,
                " belongs to sequence ", indices[r], " of ", per_sequence.size());
    values[r] = per_sequence[indices[r]];
  }
  return values_R.to(dtype).to(sequences_R.device());
}

}  // namespace bough
