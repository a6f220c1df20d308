#include "train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace bough {

double Schedule::learning_rate(int64_t step) const {
  BOUGH_CHECK(step >= 0, "step ", step);
  if (step < num_warmup_steps)
    return peak * static_cast<double>(step + 1) / static_cast<double>(num_warmup_steps);
  if (shape == Shape::kConstant) return peak;
  const double length = static_cast<double>(std::max<int64_t>(1, num_steps - num_warmup_steps));
  const double progress = std::min(1.0, static_cast<double>(step - num_warmup_steps) / length);
  const double left =
      shape == Shape::kLinear ? 1 - progress : (1 + std::cos(std::numbers::pi * progress)) / 2;
  return peak * (min_ratio + (1 - min_ratio) * left);
}

Schedule::Shape schedule_shape(const std::string& name) {
  if (name == "constant") return Schedule::Shape::kConstant;
  if (name == "linear") return Schedule::Shape::kLinear;
  if (name == "cosine") return Schedule::Shape::kCosine;
  throw UserError(str("lr_scheduler_type: got ", quoted(name), "; expected constant, linear or cosine"));
}

}  // namespace bough
