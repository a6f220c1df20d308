// RLOO (Ahmadian et al. 2024): A = R - mean of the n - 1 rewards of the group's other sequences. A group of
// one is an error.
#include "algo/advantages/estimators.h"
#include "base/error.h"

namespace bough {

EstimatorKind rloo_estimator() {
  return {[](const EstimatorInput& input) {
    return one_a_sequence(input.by_group(input.batch.rewards, [](const AdvantageSettings&,
                                                                 std::vector<double>& values,
                                                                 const std::vector<int64_t>&) {
      if (values.size() < 2)
        throw UserError(
            "adv_estimator rloo: a group has one sequence, expected two or more (its baseline is the mean "
            "of the others); raise gconfig.n_samples or choose another estimator");
      const double count = static_cast<double>(values.size());
      const double mean = mean_of(values);
      // R_i - (n mean - R_i)/(n - 1) = (R_i - mean) n/(n - 1)
      for (double& value : values) value = (value - mean) * (count / (count - 1.0));
    }));
  }};
}

}  // namespace bough
