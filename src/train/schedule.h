// The learning rate of each optimizer step: linear warm-up, then constant, linear or cosine decay.
#pragma once

#include <cstdint>
#include <string>

namespace bough {

// With w = num_warmup_steps and n = num_steps, step s = 0, 1, ... runs at peak times
//   (s + 1) / w                                            for s < w: the first step moves already
//   1                                                      constant
//   min_ratio + (1 - min_ratio) · (1 - p)                  linear,  p = (s - w) / (n - w), at most 1
//   min_ratio + (1 - min_ratio) · (1 + cos(pi · p)) / 2    cosine
// so that step w is at the peak and every step from n on at min_ratio. Pure: a resumed run computes the same.
struct Schedule {
  enum class Shape { kConstant, kLinear, kCosine };

  double peak = 0;
  Shape shape = Shape::kConstant;
  double min_ratio = 0;
  int64_t num_warmup_steps = 0;
  int64_t num_steps = 0;

  double learning_rate(int64_t step) const;
};

// UserError: a name that is none of constant, linear, cosine.
Schedule::Shape schedule_shape(const std::string& name);

}  // namespace bough
