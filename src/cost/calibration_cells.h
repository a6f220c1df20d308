// The measurements of calibration (calibrate.h). A cell is one kind of computation at one size, forward and
// backward, with the seconds of its runs.
#pragma once

#include <c10/core/TensorOptions.h>

#include <functional>
#include <memory>
#include <vector>

#include "cost/device_profile.h"
#include "models/model.h"

namespace bough {

struct CalibrationEffort;

double upper_median(std::vector<double> values);  // the greater of the two middle values; 0 if empty
// The mean, with each run capped at 1.5 times the lower quartile; 0 if empty.
double usual_seconds(std::vector<double> runs);

struct ForwardBackward {
  double forward, backward;  // seconds
};

struct Cell {
  std::function<ForwardBackward()> run;
  bool backward_includes_forward = false;  // true if the executor runs both at once
  std::vector<double> forward, backward;   // seconds of each counted run

  static double forward_seconds(const Cell& cell);
  static double backward_seconds(const Cell& cell);
};

// Cells of one kind of computation, by size (tokens; for lm_head, its rows).
struct WorkCells {
  double flops = 0;  // per unit of size, forward
  std::vector<int64_t> sizes;
  std::vector<Cell> cells;
};
using PassCells = WorkCells;

// Attention with heads of one size, in three forms: one path; one path on a prefix KV stack of kStackRows
// tokens; branches of kPieceTokens tokens each ("pieces").
struct AttentionCells {
  static constexpr int64_t kStackRows = 1000, kPieceTokens = 50;
  int64_t num_heads = 8, num_kv_heads = 4, head_dim = 0;
  std::vector<int64_t> sizes;
  std::vector<Cell> path, stack, pieces;
};

class CalibrationCells {
 public:
  static constexpr int kShallow = 1, kDeep = 9;  // layers of the tiny models

  CalibrationCells(at::Device device, at::ScalarType dtype, int64_t largest_pass,
                   const DeviceKernels& kernels);
  CalibrationCells(const CalibrationCells&) = delete;
  ~CalibrationCells();

  // Runs rounds, as many as `effort` says. In each round every cell has one turn, of one or more runs.
  // Returns the number of rounds, without the warm-up round. Throws Interrupted if effort.stop() returns
  // true.
  int measure(const CalibrationEffort& effort);

  // The slowdown by other programs: seconds of all runs / their seconds if each run took its cell's median.
  double disturbance() const;

  const ModelConfig& config() const;  // of the decoder behind `passes`

  PassCells passes;  // whole passes of one path with one head row
  WorkCells linear;  // products of one layer
  WorkCells head;
  AttentionCells narrow, wide;
  Cell tiny_linear, tiny_attention;  // one layer of the tiny models, two tokens
  // Products of one layer of half the width for kHalfTokens tokens. With `linear` they give the fixed cost of
  // the calls, including the start of threads. (The products of the tiny models are too small to start
  // threads.)
  static constexpr int64_t kHalfTokens = 16;
  Cell half_linear;
  double half_linear_flops = 0;  // per token, forward
  Cell tiny_shallow, tiny_deep;  // whole passes

 private:
  struct Models;
  Cell pass_cell(int64_t tokens);
  Cell linear_cell(int64_t tokens);
  Cell head_cell(int64_t rows);
  std::vector<Cell*> list();

  at::TensorOptions kind_;  // device and type
  std::unique_ptr<Models> models_;
  std::vector<Cell*> all_;
};

}  // namespace bough
