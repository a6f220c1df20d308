#include "cost/device_profile.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/error.h"

namespace bough {

double CostCurve::clamped(int64_t size) const {
  BOUGH_CHECK(!sizes.empty() && sizes.size() == values.size(), "a cost curve has ", sizes.size(),
              " sizes and ", values.size(), " values; expected equally many, at least one");
  const auto above = std::lower_bound(sizes.begin(), sizes.end(), size) - sizes.begin();
  if (above == 0) return values.front();
  if (above == static_cast<int64_t>(sizes.size())) return values.back();
  const double share =
      static_cast<double>(size - sizes[above - 1]) / static_cast<double>(sizes[above] - sizes[above - 1]);
  return values[above - 1] + share * (values[above] - values[above - 1]);
}

double CostCurve::at(int64_t size) const {
  const double value = clamped(size);
  return size <= sizes.back() ? value : value * static_cast<double>(size) / static_cast<double>(sizes.back());
}

double DeviceProfile::matrix_product_rate() const {
  double rate = 0;
  for (size_t i = 0; i < linear_forward.sizes.size(); ++i)
    if (linear_forward.values[i] > 0)
      rate = std::max(rate, static_cast<double>(linear_forward.sizes[i]) / linear_forward.values[i]);
  return rate;
}

namespace {

constexpr const char* kAttentionNames[] = {"tiles", "bf16_tiles", "reference", "fused", "reference_on_gpu"};

// Visits every member with its key. Used for writing, reading and checking.
template <class Profile, class Visitor>
void visit(Profile& p, Visitor&& v) {
  v("name", p.name);
  v("source", p.source);
  v("dtype", p.dtype);
  v("memory_bytes", p.memory_bytes);
  v("memory_bytes_per_s", p.memory_bytes_per_s);
  v("host_bytes_per_s", p.host_bytes_per_s);
  v("threads", p.kernels.threads);
  v("attention", p.kernels.attention);
  v("packs_factors", p.kernels.packs_factors);
  v("copies_factors", p.kernels.copies_factors);
  v("widens_factors", p.kernels.widens_factors);
  v("launches_overlap", p.launches_overlap);
  v("linear_forward", p.linear_forward);
  v("linear_backward", p.linear_backward);
  v("elementwise_forward", p.elementwise_forward);
  v("elementwise_backward", p.elementwise_backward);
  v("attention_forward", p.attention_forward);
  v("attention_backward", p.attention_backward);
  v("head_forward", p.head_forward);
  v("head_backward", p.head_backward);
  v("seconds_per_layer_forward", p.seconds_per_layer_forward);
  v("seconds_per_layer_backward", p.seconds_per_layer_backward);
  v("seconds_per_pass_forward", p.seconds_per_pass_forward);
  v("seconds_per_pass_backward", p.seconds_per_pass_backward);
}

template <class Cost, class Visitor>
void visit_attention(Cost& cost, Visitor&& v) {
  v("by_queries", cost.by_queries);
  v("score_flops", cost.score_flops);
  v("overhead_keys", cost.overhead_keys);
}

struct Writer {
  Json& json;
  template <class T>
  void operator()(const char* key, const T& value) const {
    json[key] = value;
  }
  void operator()(const char* key, DeviceKernels::Attention value) const {
    json[key] = kAttentionNames[static_cast<int>(value)];
  }
  void operator()(const char* key, const CostCurve& curve) const {
    json[key] = {{"sizes", curve.sizes}, {"values", curve.values}};
  }
  void operator()(const char* key, const AttentionCost& cost) const {
    json[key] = Json::object();
    visit_attention(cost, Writer{json[key]});
  }
};

class Reader {
 public:
  Reader(const Json& json, std::string where) : json_(json), where_(std::move(where)) {
    if (!json.is_object()) throw UserError(str(where_, ": got ", json.type_name(), ", expected an object"));
  }

  void operator()(const char* key, std::string& value) const {
    value = find(key, &Json::is_string, "text").get<std::string>();
  }
  void operator()(const char* key, bool& value) const {
    value = find(key, &Json::is_boolean, "true or false").get<bool>();
  }
  void operator()(const char* key, int64_t& value) const {
    value = find(key, &Json::is_number_integer, "a whole number").get<int64_t>();
    require(value >= 0, key, "a whole number, at least 0");
  }
  void operator()(const char* key, double& value) const {
    value = find(key, &Json::is_number, "a number").get<double>();
    require(value >= 0, key, "a number, at least 0");
  }
  void operator()(const char* key, DeviceKernels::Attention& value) const {
    auto name = find(key, &Json::is_string, "text").get<std::string>();
    if (name == "amx_tiles") name = "bf16_tiles";  // name in files saved before 2026-11-22
    const auto* found = std::find(std::begin(kAttentionNames), std::end(kAttentionNames), name);
    require(found != std::end(kAttentionNames), key,
            "tiles, bf16_tiles, reference, fused or reference_on_gpu");
    value = static_cast<DeviceKernels::Attention>(found - std::begin(kAttentionNames));
  }
  void operator()(const char* key, CostCurve& curve) const {
    const Reader in(find(key, &Json::is_object, "an object"), str(where_, ": ", key));
    curve = {};
    for (const auto& size : in.find("sizes", &Json::is_array, "a list")) {
      in.require(size.is_number_integer() && size.get<int64_t>() > 0 &&
                     (curve.sizes.empty() || size.get<int64_t>() > curve.sizes.back()),
                 "sizes", "whole numbers above 0, ascending");
      curve.sizes.push_back(size.get<int64_t>());
    }
    for (const auto& value : in.find("values", &Json::is_array, "a list")) {
      in.require(value.is_number() && value.get<double>() >= 0, "values", "numbers, at least 0");
      curve.values.push_back(value.get<double>());
    }
    in.require(!curve.sizes.empty() && curve.sizes.size() == curve.values.size(), "values",
               "as many as sizes, and at least one");
  }
  void operator()(const char* key, AttentionCost& cost) const {
    visit_attention(cost, Reader(find(key, &Json::is_object, "an object"), str(where_, ": ", key)));
  }

 private:
  const Json& find(const char* key, bool (Json::*is)() const noexcept, const char* expected) const {
    const auto found = json_.find(key);
    if (found == json_.end()) throw UserError(str(where_, ": ", key, " is missing, expected ", expected));
    require(((*found).*is)(), key, expected);
    return *found;
  }
  void require(bool holds, const char* key, const char* expected) const {
    if (!holds)
      throw UserError(
          str(where_, ": ", key, ": got ", quoted(dump_line(json_.at(key)), 60), ", expected ", expected));
  }

  const Json& json_;
  std::string where_;
};

// Applies the checks of from_json to a profile built in code.
struct Checker {
  void operator()(const char*, const std::string&) const {}
  void operator()(const char*, bool) const {}
  void operator()(const char*, DeviceKernels::Attention) const {}
  void operator()(const char* key, int64_t value) const {
    BOUGH_CHECK(value >= 0, "device profile: ", key, " = ", value);
  }
  void operator()(const char* key, double value) const {
    BOUGH_CHECK(value >= 0 && std::isfinite(value), "device profile: ", key, " = ", value);
  }
  void operator()(const char* key, const CostCurve& curve) const {
    BOUGH_CHECK(!curve.sizes.empty() && curve.sizes.size() == curve.values.size() && curve.sizes[0] > 0 &&
                    std::is_sorted(curve.sizes.begin(), curve.sizes.end(), std::less_equal<>()),
                "device profile: ", key, " has ", curve.sizes.size(), " sizes and ", curve.values.size(),
                " values; expected equally many, at least one, and ascending sizes above 0");
    for (const double value : curve.values) (*this)(key, value);
  }
  void operator()(const char*, const AttentionCost& cost) const { visit_attention(cost, *this); }
};

}  // namespace

void DeviceProfile::check_integrity() const {
  visit(*this, Checker{});
}

Json DeviceProfile::to_json() const {
  Json json = Json::object();
  visit(*this, Writer{json});
  return json;
}

DeviceProfile DeviceProfile::from_json(const Json& json, const std::string& where) {
  DeviceProfile profile;
  Json complete = json;
  for (const char* key : {"memory_bytes_per_s", "host_bytes_per_s"})
    if (json.is_object() && !json.contains(key)) complete[key] = 0.0;
  for (const char* later : {"copies_factors", "widens_factors"})
    if (json.is_object() && !json.contains(later)) complete[later] = false;
  visit(profile, Reader(complete, where));
  return profile;
}

// Profiles of GPUs, for plans made without the GPU. Peaks and bandwidths are those of NVIDIA's data sheets of
// the SXM modules. The shares that Bough reaches of them, and the times of launches, were measured on one
// H100 (docs/performance.md, On an H100) and are assumed for the others:
// - The matrix products of a pass take the time of their FLOPs plus the time to read the weights. Backward
//   takes the time of its FLOPs plus the time to read and write the weights' gradients.
// - Attention costs as much as additional queries, because a pass gathers the keys of its paths first.
// - All other operations are bound by memory or by kernel launches.
namespace {

struct Gpu {
  const char* name;
  const char* source;
  double bf16_flops, fp32_flops;  // dense peak; fp32 without TF32
  double bytes_per_second;        // of device memory
  int64_t memory_bytes;
  double host_bytes_per_second;
};

constexpr std::array kGpus = {
    Gpu{"h100",
        "NVIDIA H100 SXM data sheet (989 TFLOP/s dense bf16, 67 fp32, 3.35 TB/s, 80 GB); shares of these "
        "rates, "
        "launches and 54 GB/s to the host as measured on an H100",
        989e12, 67e12, 3.35e12, 80'000'000'000, 54e9},
    Gpu{"h200",
        "NVIDIA H200 SXM data sheet (989 TFLOP/s dense bf16, 67 fp32, 4.8 TB/s, 141 GB); shares of these "
        "rates, "
        "launches and 54 GB/s to the host are assumed to be those measured on an H100",
        989e12, 67e12, 4.8e12, 141'000'000'000, 54e9},
    Gpu{"a100",
        "NVIDIA A100 80GB SXM data sheet (312 TFLOP/s dense bf16, 19.5 fp32, 2.0 TB/s, 80 GB); shares of "
        "these "
        "rates and launches are assumed to be those measured on an H100; an assumed 25 GB/s to the host",
        312e12, 19.5e12, 2.0e12, 80'000'000'000, kAssumedHostBytesPerS},
};

// Shares of the peaks: of large matrix products, of FlashAttention-2 on long causal sequences, of a copy.
constexpr double kProductShare = 0.73, kAttentionShare = 0.32, kBandwidthShare = 0.89;
// Queries that would cost as much as the keys that a pass gathers, and adds gradients to.
constexpr double kGatherForward = 60, kGatherBackward = 280;
// Element-wise operations read and write more than once.
constexpr double kTransfersForward = 2, kTransfersBackward = 3;
// Seconds of the host for the launches and the autograd nodes of a layer, and of the rest of a pass.
constexpr double kLayerForward = 200e-6, kLayerBackward = 480e-6;
constexpr double kPassForward = 0.7e-3, kPassBackward = 1.8e-3;
constexpr double kAccumulatorBytes = 4;
// Tensor cores compute whole tiles of this many matrix rows, so smaller passes cost as much as this size.
constexpr int64_t kSmallestTile = 64;
constexpr int64_t kLargestPass = 32768;

template <class Seconds>
CostCurve curve(Seconds&& seconds) {
  CostCurve curve;
  for (int64_t size = kSmallestTile; size <= kLargestPass; size *= 2) {
    curve.sizes.push_back(size);
    curve.values.push_back(seconds(static_cast<double>(size)));
  }
  return curve;
}

}  // namespace

std::string_view built_in_name(std::string_view driver_name) {
  bool is_h100 = false, is_module = false;
  std::istringstream text{std::string(driver_name)};
  for (std::string word; text >> word;) {
    // Cards with these words have other rates than the SXM module, or only a part of one.
    if (word == "PCIe" || word == "NVL" || word == "MIG" || word == "vGPU") return {};
    is_h100 |= word.starts_with("H100");
    is_module |= word.ends_with("HBM3");
  }
  return is_h100 && is_module ? "h100" : "";
}

DeviceProfile built_in_profile(std::string_view name, std::string_view dtype) {
  const auto gpu = std::find_if(kGpus.begin(), kGpus.end(), [&](const Gpu& g) { return g.name == name; });
  if (gpu == kGpus.end()) throw UserError(str("device: got ", quoted(name), ", expected h100, h200 or a100"));
  if (dtype != "bf16" && dtype != "fp32")
    throw UserError(str("dtype: got ", quoted(dtype), ", expected bf16 or fp32: the profile of ", name,
                        " has no rates for other dtypes"));
  const bool bf16 = dtype == "bf16";
  const double element_bytes = bf16 ? 2 : 4;
  const double peak = bf16 ? gpu->bf16_flops : gpu->fp32_flops;
  const double flops = peak * kProductShare;
  const double bytes = gpu->bytes_per_second * kBandwidthShare;
  DeviceProfile profile;
  profile.name = gpu->name;
  profile.source = gpu->source;
  profile.dtype = dtype;
  profile.memory_bytes = gpu->memory_bytes;
  profile.memory_bytes_per_s = bytes;
  profile.host_bytes_per_s = gpu->host_bytes_per_second;
  profile.kernels.attention = DeviceKernels::Attention::kFused;
  profile.launches_overlap = true;
  // A token needs two FLOPs per weight, so bytes per FLOP are half a weight's bytes.
  const double weight = element_bytes / 2, gradient = 2 * kAccumulatorBytes / 2;
  profile.linear_forward = curve([&](double tokens) { return tokens / flops + weight / bytes; });
  profile.linear_backward = curve([&](double tokens) { return 2 * tokens / flops + gradient / bytes; });
  profile.head_forward = profile.linear_forward;
  profile.head_backward = profile.linear_backward;
  const double element = element_bytes / bytes;
  profile.elementwise_forward = curve([&](double tokens) { return kTransfersForward * tokens * element; });
  profile.elementwise_backward = curve([&](double tokens) { return kTransfersBackward * tokens * element; });
  // Attention backward computes five products, forward two.
  const double attention = peak * kAttentionShare;
  profile.attention_forward.by_queries =
      curve([&](double queries) { return (queries + kGatherForward) / attention; });
  profile.attention_backward.by_queries =
      curve([&](double queries) { return 2.5 * (queries + kGatherBackward) / attention; });
  profile.seconds_per_layer_forward = kLayerForward;
  profile.seconds_per_layer_backward = kLayerBackward;
  profile.seconds_per_pass_forward = kPassForward;
  profile.seconds_per_pass_backward = kPassBackward;
  return profile;
}

}  // namespace bough
