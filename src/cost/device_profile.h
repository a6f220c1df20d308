// How fast a device is: curves of seconds per unit of work by the size of a pass, measured once on the
// machine (cost/calibrate.h) or built in, and saved with a run as calibration.json, so that a plan is a
// function of the batch and that file. A CPU's cache likes passes of a few hundred tokens, a GPU thousands;
// every backward pass also reads and writes all parameter gradients: both show in the curves, neither is
// assumed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "kernels/common/device_kernels.h"

namespace bough {

// Seconds of a pass of so many tokens (or rows), for one unit of work a token: linear between the measured
// sizes, constant below the first (a pass has a least price).
struct CostCurve {
  std::vector<int64_t> sizes;          // ascending, at least one, all positive
  std::vector<double> values;          // one a size, none negative
  double at(int64_t size) const;       // proportional above the last size
  double clamped(int64_t size) const;  // constant above it: for what is not a price of the whole pass
};

// Attention's seconds: one FLOP a key, of so many keys a query as attention_work() says and overhead_keys
// more. A key takes 4 * head_dim FLOPs and the softmax of one score.
struct AttentionCost {
  CostCurve by_queries;                 // by queries of the pass, padded; a unit is one FLOP a query
  double score_flops = 0;               // one score's softmax costs as much as so many FLOPs
  CostCurve overhead_keys{{1}, {0.0}};  // by queries: masks, loading the queries' tiles; keys, not seconds

  AttentionCost() = default;
  AttentionCost(CostCurve by_queries) : by_queries(std::move(by_queries)) {}
};

struct DeviceProfile {
  std::string name;    // "cpu", "h100"
  std::string source;  // where the rates come from
  std::string dtype;   // fp32 | bf16 | fp64
  int64_t memory_bytes = 0;
  double memory_bytes_per_s = 0;  // reading more than caches hold; 0 in files of runs that did not measure it
  // Of copies between the device and pinned memory of the host, either way; 0: not measured, or a CPU's
  double host_bytes_per_s = 0;
  DeviceKernels kernels;
  // Launches run ahead of the device: of the constants below and the work, the larger counts, not the sum.
  bool launches_overlap = false;

  // By tokens of the pass; a unit is one FLOP a token (of the forward pass; backward includes both products
  // and the accumulation into the gradients).
  CostCurve linear_forward, linear_backward;
  // By tokens of the pass; a unit is one element a token.
  CostCurve elementwise_forward, elementwise_backward;
  AttentionCost attention_forward, attention_backward;
  // By rows of one chunk of the head; a unit is one FLOP a row (of the forward pass, as
  // for `linear`).
  CostCurve head_forward, head_backward;
  // Whatever the size: launches, autograd's nodes, the loss.
  double seconds_per_layer_forward = 0, seconds_per_layer_backward = 0;
  double seconds_per_pass_forward = 0, seconds_per_pass_backward = 0;

  // FLOP/s of the layers' matrix products at the size where they are fastest; 0 where no size was timed.
  double matrix_product_rate() const;

  // InternalError where a curve or a number is impossible.
  void check_integrity() const;

  Json to_json() const;
  static DeviceProfile from_json(const Json& json, const std::string& where);  // UserError names the key
};

// An estimate, not a measurement: what 16 lanes of PCIe 4 carry of their 32 GB/s. PCIe 5 carries more.
constexpr double kAssumedHostBytesPerS = 25e9;

// The built-in profile's name of a GPU that its driver calls so: "NVIDIA H100 80GB HBM3" is h100. Empty for
// any other, PCIe cards and cut-down ones among them, whose rates differ.
std::string_view built_in_name(std::string_view driver_name);

// h100, h200, a100 (the SXM modules), dtype fp32 | bf16: from published rates; `source` says which. UserError
// lists the names.
DeviceProfile built_in_profile(std::string_view name, std::string_view dtype);

}  // namespace bough
