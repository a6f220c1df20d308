#include "cost/calibrate.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "base/cpu.h"
#include "base/error.h"
#include "base/format.h"
#include "cost/calibration_cells.h"
#include "cost/cost_model.h"
#include "cost/rates.h"
#include "kernels/common/avx.h"
#include "kernels/common/cpu_allocator.h"
#include "kernels/common/cuda_library.h"
#include "kernels/common/device.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/tree_attention/tree_attention_cost.h"

namespace bough {

namespace {

// Selects which seconds of a cell a fit reads: those of its forward or of its backward pass.
struct Side {
  bool backward;
  double operator()(const Cell& cell) const {
    return backward ? Cell::backward_seconds(cell) : Cell::forward_seconds(cell);
  }
};

class AttentionFit {
 public:
  // constant: seconds of the smallest attention call, which the layer's constant already contains.
  AttentionFit(const DeviceProfile& profile, const CalibrationCells& cells, double constant, Side side)
      : profile_(profile), cells_{&cells.narrow, &cells.wide}, constant_(constant), side_(side) {}

  AttentionCost run() const {
    AttentionCost cost;
    const auto& sizes = cells_[0]->sizes;
    cost.score_flops = score_flops();
    cost.overhead_keys = {};
    for (size_t i = 0; i < sizes.size(); ++i) {
      double per_flop = 1;
      std::vector<double> overheads;
      for (const auto* cells : cells_) {
        const double key = seconds_per_key(*cells, i);
        per_flop *= key / (4.0 * static_cast<double>(cells->head_dim) + cost.score_flops);
        const double path_keys =
            (side_(cells->path[i]) - constant_) / (key * static_cast<double>(cells->num_heads));
        overheads.push_back((path_keys - path_work(*cells, i, 0)) / static_cast<double>(sizes[i]));
        const double piece_keys =
            (side_(cells->pieces[i]) - constant_) / (key * static_cast<double>(cells->num_heads));
        overheads.push_back((piece_keys - piece_work(*cells, i)) / static_cast<double>(sizes[i]));
      }
      cost.by_queries.sizes.push_back(sizes[i]);
      cost.by_queries.values.push_back(std::sqrt(per_flop) * static_cast<double>(sizes[i]));
      cost.overhead_keys.sizes.push_back(sizes[i]);
      cost.overhead_keys.values.push_back(
          std::max(0.0, std::accumulate(overheads.begin(), overheads.end(), 0.0) / 4));
    }
    return cost;
  }

 private:
  double path_work(const AttentionCells& cells, size_t i, int64_t stack_rows) const {
    const auto tokens = static_cast<double>(cells.sizes[i]);
    return work({cells.sizes[i], static_cast<double>(stack_rows), (tokens + 1) / 2, 1, cells.num_kv_heads});
  }
  double piece_work(const AttentionCells& cells, size_t i) const {
    const int64_t piece = std::min(cells.sizes[i], AttentionCells::kPieceTokens);
    return work(
        {cells.sizes[i], 0, static_cast<double>(piece + 1) / 2, cells.sizes[i] / piece, cells.num_kv_heads});
  }
  double work(const AttentionPass& pass) const { return attention_work(profile_.kernels, pass); }

  // Seconds of one head for one (query, key) pair: (seconds with a prefix - without) / additional pairs.
  double seconds_per_key(const AttentionCells& cells, size_t i) const {
    const double keys = path_work(cells, i, AttentionCells::kStackRows) - path_work(cells, i, 0);
    return std::max(1e-13, (side_(cells.stack[i]) - side_(cells.path[i])) /
                               (keys * static_cast<double>(cells.num_heads)));
  }

  // Fits seconds per key = a (4 head_dim + score_flops) from the two head sizes. Only passes that fill their
  // tiles count.
  double score_flops() const {
    std::vector<double> estimates;
    const auto &narrow = *cells_[0], &wide = *cells_[1];
    for (size_t i = 0; i < narrow.sizes.size(); ++i) {
      if (narrow.sizes[i] < 128) continue;
      const double a = seconds_per_key(narrow, i), b = seconds_per_key(wide, i);
      const double per_flop = (b - a) / (4.0 * static_cast<double>(wide.head_dim - narrow.head_dim));
      estimates.push_back(per_flop > 0 ? a / per_flop - 4.0 * static_cast<double>(narrow.head_dim) : 0);
    }
    return std::max(0.0, upper_median(estimates));
  }

  const DeviceProfile& profile_;
  std::array<const AttentionCells*, 2> cells_;
  double constant_;
  Side side_;
};

// Seconds of a whole pass minus the seconds that all other rates predict, divided by elements_per_token().
CostCurve fit_elementwise(const PassCells& cells, const CostModel& model, Side side) {
  CostCurve curve;
  for (size_t i = 0; i < cells.sizes.size(); ++i) {
    PassShape pass;
    pass.tokens = cells.sizes[i];
    pass.pairs = pass.tokens * (pass.tokens + 1) / 2;
    pass.head_rows = 1;
    const double explained = side.backward ? model.backward_seconds(pass) + model.head_backward_seconds(pass)
                                           : model.forward_seconds(pass) + model.head_forward_seconds(pass);
    curve.sizes.push_back(cells.sizes[i]);
    curve.values.push_back(std::max(0.0, side(cells.cells[i]) - explained) /
                           model.shape().elements_per_token());
  }
  return curve;
}

// The part of a layer's matrix product time that does not grow with its matrices, in seconds. Computed from
// two widths at the same number of tokens. The result is at least the time of the products in the tiny
// models.
double linear_constant(const CalibrationCells& cells, Side side) {
  const double tiny = side(cells.tiny_linear);
  const auto& sizes = cells.linear.sizes;
  const auto found = std::find(sizes.begin(), sizes.end(), CalibrationCells::kHalfTokens);
  if (found == sizes.end()) return tiny;
  const double whole = side(cells.linear.cells[static_cast<size_t>(found - sizes.begin())]);
  const double half = side(cells.half_linear);
  const double ratio = cells.linear.flops / cells.half_linear_flops;
  return std::clamp((ratio * half - whole) / (ratio - 1), tiny, std::max(tiny, half));
}

CostCurve fit_work(const WorkCells& cells, double constant, Side side) {
  CostCurve curve;
  for (size_t i = 0; i < cells.sizes.size(); ++i) {
    const double seconds = side(cells.cells[i]);
    curve.sizes.push_back(cells.sizes[i]);
    curve.values.push_back(std::max(0.1 * seconds, seconds - constant) / cells.flops);
  }
  return curve;
}

}  // namespace

const char* dtype_name(at::ScalarType dtype) {
  BOUGH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kDouble, "dtype: got ",
              c10::toString(dtype), ", expected fp32, bf16 or fp64");
  return dtype == at::kFloat ? "fp32" : dtype == at::kBFloat16 ? "bf16" : "fp64";
}

at::ScalarType scalar_type_of(const std::string& dtype) {
  return dtype == "bf16" ? at::kBFloat16 : dtype == "fp64" ? at::kDouble : at::kFloat;
}

DeviceKernels kernels_of(at::Device device, at::ScalarType dtype) {
  using Attention = DeviceKernels::Attention;
  if (!device.is_cpu())
    return {.attention = dtype != at::kDouble && has_cuda_kernel("bough::tree_attention_forward") &&
                                 has_cuda_kernel("bough::tree_attention_backward")
                             ? Attention::kFused
                             : Attention::kReferenceOnGpu,
            .packs_factors = false,
            .widens_factors = !has_cuda_kernel("bough::add_matrix_product_"),
            .threads = 1};
  const bool bf16_tiles = dtype == at::kBFloat16 && !copies_to_fp32(dtype);
  const bool tiles = dtype != at::kDouble && has_avx();
  return {.attention = bf16_tiles ? Attention::kBf16Tiles
                       : tiles    ? Attention::kTiles
                                  : Attention::kReference,
          .packs_factors = bf16_tiles || (dtype != at::kDouble && products_are_ours(at::kFloat)),
          .copies_factors = copies_to_fp32(dtype),
          .threads = at::get_num_threads()};
}

int64_t largest_pass_within(int64_t bytes) {
  constexpr int64_t kBytesPerToken = int64_t{1} << 20;
  int64_t largest = 16384;
  while (largest > 2048 && largest * kBytesPerToken > bytes) largest /= 2;
  return largest;
}

DeviceProfile calibrate(at::Device device, at::ScalarType dtype, const CalibrationEffort& effort) {
  const CpuAllocatorScope allocator;
  DeviceProfile profile;
  profile.name = device_name(device);
  profile.dtype = dtype_name(dtype);
  profile.memory_bytes = device_memory(device).total;
  constexpr int64_t kBeyondCaches = int64_t{256} << 20;
  profile.memory_bytes_per_s = read_rate(kBeyondCaches, device);
  if (!device.is_cpu()) profile.host_bytes_per_s = host_copy_rate(kBeyondCaches, device);
  profile.kernels = kernels_of(device, dtype);
  profile.launches_overlap = !device.is_cpu();
  const int64_t largest_pass = effort.largest_pass > 0 ? effort.largest_pass
                               : device.is_cpu()       ? 2048
                                                       : largest_pass_within(device_memory(device).free / 2);
  {
    CalibrationCells cells(device, dtype, largest_pass, profile.kernels);
    const int rounds = cells.measure(effort);
    const auto fit = [&](Side side, AttentionCost& attention, CostCurve& linear, CostCurve& head,
                         double& per_layer, double& per_pass) {
      // On a GPU a call's constant part is a launch. It passes while the GPU computes, so it is no part of
      // the computation's time that could be taken off.
      const bool overlap = profile.launches_overlap;
      attention = AttentionFit(profile, cells, overlap ? 0 : side(cells.tiny_attention), side).run();
      const double call = overlap ? 0 : linear_constant(cells, side);
      linear = fit_work(cells.linear, call, side);
      head = fit_work(cells.head, 0, side);
      const double shallow = side(cells.tiny_shallow);
      per_layer = std::max(
          0.0, (side(cells.tiny_deep) - shallow) / (CalibrationCells::kDeep - CalibrationCells::kShallow));
      per_pass = std::max(0.0, shallow - CalibrationCells::kShallow * per_layer);
      if (!overlap) per_layer += call - side(cells.tiny_linear);
    };
    const Side forward{false}, backward{true};
    fit(forward, profile.attention_forward, profile.linear_forward, profile.head_forward,
        profile.seconds_per_layer_forward, profile.seconds_per_pass_forward);
    fit(backward, profile.attention_backward, profile.linear_backward, profile.head_backward,
        profile.seconds_per_layer_backward, profile.seconds_per_pass_backward);
    profile.elementwise_forward = profile.elementwise_backward = {{1}, {0.0}};
    const CostModel model(profile, model_shape(cells.config(), dtype_name(dtype)));
    profile.elementwise_forward = fit_elementwise(cells.passes, model, forward);
    profile.elementwise_backward = fit_elementwise(cells.passes, model, backward);
    profile.source =
        str("measured on this machine, ",
            device.is_cpu() ? str(profile.kernels.threads, " threads") : profile.name, ", ", rounds,
            " rounds, disturbances ", format_significant(100 * (cells.disturbance() - 1), 2), "%");
  }
  release_freed_cpu_memory();
  profile.check_integrity();
  return profile;
}

}  // namespace bough
