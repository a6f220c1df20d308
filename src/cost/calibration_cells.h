// What calibration times (calibrate.h): a cell is one piece of work of one size, forward and backward, with
// the seconds that its runs took.
#pragma once

#include <c10/core/TensorOptions.h>

#include <functional>
#include <memory>
#include <vector>

#include "cost/device_profile.h"
#include "models/model.h"

namespace bough {

struct CalibrationEffort;

double upper_median(std::vector<double> values);  // the greater of two in the middle; 0 of none
// The mean, of which few long runs are no great part; 0 of none.
double usual_seconds(std::vector<double> runs);

struct ForwardBackward {
  double forward, backward;  // seconds
};

struct Cell {
  std::function<ForwardBackward()> run;
  bool backward_includes_forward = false;  // the executor runs both at once
  std::vector<double> forward, backward;   // of each counted run

  static double forward_seconds(const Cell& cell);
  static double backward_seconds(const Cell& cell);
};

// Cells of one kind of work, by size.
struct WorkCells {
  double flops = 0;  // of a token or row, forward
  std::vector<int64_t> sizes;
  std::vector<Cell> cells;
};
using PassCells = WorkCells;

// Attention with heads of one size: of one path, over a stack of so many rows, and of pieces of so many
// tokens.
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
                   DeviceKernels::Attention attention);
  CalibrationCells(const CalibrationCells&) = delete;
  ~CalibrationCells();

  // Runs all cells in turns; returns how many turns were counted.
  int measure(const CalibrationEffort& effort);

  // What other programs cost: all runs' seconds over what they would have been at their medians.
  double disturbance() const;

  const ModelConfig& config() const;  // of the decoder behind `passes`

  PassCells passes;  // whole ones of one path, one head row
  WorkCells linear;  // of one layer
  WorkCells head;
  AttentionCells narrow, wide;
  Cell tiny_linear, tiny_attention;  // of one layer of the tiny models, two tokens
  // Products of one layer of half the width over kHalfTokens tokens: beside `linear` they show what calls
  // cost whatever their size, threads included, which the tiny models do not start.
  static constexpr int64_t kHalfTokens = 16;
  Cell half_linear;
  double half_linear_flops = 0;  // of a token, forward
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
