// The speed of a device: curves of seconds per unit (one FLOP or element per token) by the size of a pass. A
// profile is measured once on the machine (cost/calibrate.h) or built in. A run saves its profile as
// calibration.json, so that a plan is a function of the batch and that file. The curves, not assumptions,
// contain the best pass size (a few hundred tokens on a CPU because of its caches, thousands on a GPU) and
// the cost of parameter gradients.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "kernels/common/device_kernels.h"

namespace bough {

// Seconds of a pass by its size (tokens; for lm_head, its rows), for one unit per token. Linear between the
// measured sizes, constant below the first one because a pass has a minimum cost.
struct CostCurve {
  std::vector<int64_t> sizes;          // ascending, at least one, all positive
  std::vector<double> values;          // one per size, none negative
  double at(int64_t size) const;       // proportional to size above the last one
  double clamped(int64_t size) const;  // constant above the last size: for curves that are not seconds
};

// Attention's seconds, with attention_work() and attention_rows() of
// kernels/tree_attention/tree_attention_cost.h. A query counts with as many keys as attention_work() says,
// plus overhead_keys. A key costs 4 * head_dim FLOPs for the products and score_flops for the softmax of one
// score.
struct AttentionCost {
  CostCurve by_queries;                 // by attention_rows() of the pass; a unit is one FLOP per such row
  double score_flops = 0;               // FLOPs that cost as much as one score's softmax
  CostCurve overhead_keys{{1}, {0.0}};  // by queries: masks and loading of query tiles; in keys, not seconds

  AttentionCost() = default;
  AttentionCost(CostCurve by_queries) : by_queries(std::move(by_queries)) {}
};

struct DeviceProfile {
  std::string name;    // "cpu", "h100"
  std::string source;  // where the rates come from
  std::string dtype;   // fp32 | bf16 | fp64
  int64_t memory_bytes = 0;
  double memory_bytes_per_s = 0;  // reading more than the caches hold; 0: not measured (old files)
  // Copies between the device and pinned host memory, in the slower direction. 0: not measured, or a CPU.
  double host_bytes_per_s = 0;
  DeviceKernels kernels;
  // Launches overlap with computation: a pass takes max(constants below, parts by size), not the sum.
  bool launches_overlap = false;

  // By tokens of the pass. A unit is one forward FLOP per token. Backward includes both products (for inputs
  // and weights) and the accumulation into main_grad.
  CostCurve linear_forward, linear_backward;
  // By tokens of the pass. A unit is one element per token.
  CostCurve elementwise_forward, elementwise_backward;
  AttentionCost attention_forward, attention_backward;
  // By rows of one chunk of lm_head. A unit is one forward FLOP per row, as for `linear`.
  CostCurve head_forward, head_backward;
  // Constants for any size: kernel launches, autograd nodes, the loss.
  double seconds_per_layer_forward = 0, seconds_per_layer_backward = 0;
  double seconds_per_pass_forward = 0, seconds_per_pass_backward = 0;

  // FLOP/s of the layers' forward matrix products at their fastest size. 0 if no size was timed.
  double matrix_product_rate() const;

  // Throws InternalError if a curve or a number is impossible.
  void check_integrity() const;

  Json to_json() const;
  // Throws UserError, with `where` and the key, if a value is missing or wrong.
  static DeviceProfile from_json(const Json& json, const std::string& where);
};

// An estimate, not a measurement: the usable part of the 32 GB/s of 16 lanes of PCIe 4. PCIe 5 is faster.
constexpr double kAssumedHostBytesPerS = 25e9;

// The name of the built-in profile that was measured on a GPU of this kind, by the words of the driver's
// name: "NVIDIA H100 80GB HBM3" is h100. Empty for other GPUs, also PCIe cards and parts of a GPU (MIG).
std::string_view built_in_name(std::string_view driver_name);

// The profile of h100, h200 or a100 (SXM modules) for dtype fp32 or bf16, for plans without this GPU. Its
// `source` says which rates are published, measured and assumed. Throws UserError, with the list of names,
// for any other name.
DeviceProfile built_in_profile(std::string_view name, std::string_view dtype);

}  // namespace bough
