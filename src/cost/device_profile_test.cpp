#include "cost/device_profile.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "cost/cost_model.h"

namespace bough {
namespace {

TEST(CostCurve, LinearBetweenConstantBelowProportionalAbove) {
  const CostCurve curve{{10, 20, 40}, {1.0, 3.0, 4.0}};
  EXPECT_EQ(curve.at(1), 1);
  EXPECT_EQ(curve.at(10), 1);
  EXPECT_EQ(curve.at(15), 2);
  EXPECT_EQ(curve.at(20), 3);
  EXPECT_EQ(curve.at(30), 3.5);
  EXPECT_EQ(curve.at(40), 4);
  EXPECT_EQ(curve.at(80), 8);
  EXPECT_EQ(curve.clamped(80), 4);
  EXPECT_EQ(curve.clamped(15), 2);
  EXPECT_THROW(CostCurve{}.at(1), InternalError);
}

// Every member has a distinct value.
DeviceProfile full_profile() {
  double next = 1;
  const auto curve = [&] {
    next += 2;
    return CostCurve{{32, 64}, {next, next + 1}};
  };
  DeviceProfile profile;
  profile.name = "n";
  profile.source = "s";
  profile.dtype = "bf16";
  profile.memory_bytes = 5;
  profile.kernels.threads = 6;
  profile.kernels.attention = DeviceKernels::Attention::kFused;
  profile.launches_overlap = true;
  for (auto* member : {&profile.linear_forward, &profile.linear_backward, &profile.elementwise_forward,
                       &profile.elementwise_backward, &profile.head_forward, &profile.head_backward})
    *member = curve();
  for (auto* cost : {&profile.attention_forward, &profile.attention_backward}) {
    cost->by_queries = curve();
    cost->overhead_keys = curve();
    cost->score_flops = next += 2;
  }
  for (auto* member : {&profile.seconds_per_layer_forward, &profile.seconds_per_layer_backward,
                       &profile.seconds_per_pass_forward, &profile.seconds_per_pass_backward})
    *member = next += 2;
  return profile;
}

TEST(DeviceProfile, ComesBackFromJsonAsItWas) {
  const auto profile = full_profile();
  const auto again = DeviceProfile::from_json(parse_json(dump_line(profile.to_json()), "here"), "here");
  const auto same = [](const CostCurve& a, const CostCurve& b) {
    return a.sizes == b.sizes && a.values == b.values;
  };
  EXPECT_EQ(again.name + again.source + again.dtype, "nsbf16");
  EXPECT_EQ(again.memory_bytes, 5);
  EXPECT_EQ(again.kernels.threads, 6);
  EXPECT_EQ(again.kernels.attention, DeviceKernels::Attention::kFused);
  EXPECT_TRUE(again.launches_overlap);
  for (const auto member :
       {&DeviceProfile::linear_forward, &DeviceProfile::linear_backward, &DeviceProfile::elementwise_forward,
        &DeviceProfile::elementwise_backward, &DeviceProfile::head_forward, &DeviceProfile::head_backward})
    EXPECT_TRUE(same(again.*member, profile.*member));
  for (const auto member : {&DeviceProfile::attention_forward, &DeviceProfile::attention_backward}) {
    EXPECT_TRUE(same((again.*member).by_queries, (profile.*member).by_queries));
    EXPECT_TRUE(same((again.*member).overhead_keys, (profile.*member).overhead_keys));
    EXPECT_EQ((again.*member).score_flops, (profile.*member).score_flops);
  }
  for (const auto member :
       {&DeviceProfile::seconds_per_layer_forward, &DeviceProfile::seconds_per_layer_backward,
        &DeviceProfile::seconds_per_pass_forward, &DeviceProfile::seconds_per_pass_backward})
    EXPECT_EQ(again.*member, profile.*member);
}

TEST(DeviceProfile, JsonThatIsNotOneIsRefusedByKey) {
  const auto json = built_in_profile("a100", "bf16").to_json();
  const auto message = [](const Json& bad) -> std::string {
    try {
      DeviceProfile::from_json(bad, "calibration.json");
    } catch (const UserError& error) {
      return error.what();
    }
    return "accepted";
  };
  const auto expect_names = [&](const char* key, const Json& bad) {
    EXPECT_NE(message(bad).find("calibration.json"), std::string::npos) << message(bad);
    EXPECT_NE(message(bad).find(key), std::string::npos) << message(bad);
  };
  for (const auto& [key, value] : json.items()) {
    Json missing = json, other = json;
    missing.erase(key);
    other[key] = Json::array({Json::object()});
    // Profiles of older runs lack the fields that were not measured then.
    if (key == "memory_bytes_per_s") EXPECT_EQ(DeviceProfile::from_json(missing, "").memory_bytes_per_s, 0);
    else if (key == "copies_factors")
      EXPECT_FALSE(DeviceProfile::from_json(missing, "").kernels.copies_factors);
    else if (key == "widens_factors")
      EXPECT_FALSE(DeviceProfile::from_json(missing, "").kernels.widens_factors);
    else if (key == "host_bytes_per_s") EXPECT_EQ(DeviceProfile::from_json(missing, "").host_bytes_per_s, 0);
    else expect_names(key.c_str(), missing);
    expect_names(key.c_str(), other);
  }
  Json bad = json;
  bad["linear_forward"]["values"][0] = -1;
  expect_names("linear_forward: values", bad);
  bad = json;
  bad["head_forward"]["sizes"][1] = 1;
  expect_names("head_forward: sizes", bad);
  bad = json;
  bad["head_forward"]["values"].erase(0);
  expect_names("head_forward: values", bad);
  bad = json;
  bad["attention_backward"]["score_flops"] = "many";
  expect_names("attention_backward: score_flops", bad);
  bad = json;
  bad["attention"] = "dense";
  expect_names("attention", bad);
  EXPECT_NE(message(Json::array()).find("expected an object"), std::string::npos);
}

TEST(DeviceProfile, ImpossibleNumbersFailTheIntegrityCheck) {
  auto profile = built_in_profile("h200", "fp32");
  profile.check_integrity();
  profile.seconds_per_pass_forward = -1;
  EXPECT_THROW(profile.check_integrity(), InternalError);
  profile = built_in_profile("h200", "fp32");
  profile.linear_forward.sizes[1] = profile.linear_forward.sizes[0];
  EXPECT_THROW(profile.check_integrity(), InternalError);
}

TEST(BuiltInProfile, UnknownNamesAndTypesAreRefused) {
  try {
    built_in_profile("b200", "bf16");
    FAIL();
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("h100, h200 or a100"), std::string::npos) << error.what();
  }
  EXPECT_THROW(built_in_profile("h100", "fp64"), UserError);
}

TEST(BuiltInProfile, LargePassesRunAtAShareOfThePeakAndSmallOnesAtThatOfTheMemory) {
  const auto shape = named_model_shape("qwen3-8b", "bf16");
  const auto rate = [&](const char* name, int64_t tokens, bool backward) {
    const CostModel costs(built_in_profile(name, "bf16"), shape);
    const PassShape pass{.tokens = tokens, .pairs = tokens};
    const double seconds = backward ? costs.backward_seconds(pass) - costs.attention_backward_seconds(pass)
                                    : costs.forward_seconds(pass) - costs.attention_forward_seconds(pass);
    return shape.linear_flops_per_token() * static_cast<double>(tokens) * (backward ? 2 : 1) / seconds;
  };
  for (const auto& [name, peak] : {std::pair("h100", 989e12), {"h200", 989e12}, {"a100", 312e12}}) {
    for (const bool backward : {false, true}) {
      EXPECT_GT(rate(name, 8192, backward), 0.45 * peak) << name;
      EXPECT_LT(rate(name, 8192, backward), 0.8 * peak) << name;
      EXPECT_LT(rate(name, 64, backward), 0.4 * peak) << name;
    }
    // Gradient accumulation makes backward slower than forward for small passes.
    EXPECT_LT(rate(name, 128, true), rate(name, 128, false)) << name;
  }
  EXPECT_GT(rate("h200", 128, true), 1.2 * rate("h100", 128, true));  // memory bandwidth is 4.8 and 3.35 TB/s
}

TEST(BuiltInProfile, SaysWhereItsRatesComeFrom) {
  for (const char* name : {"h100", "h200", "a100"}) {
    const auto profile = built_in_profile(name, "bf16");
    EXPECT_NE(profile.source.find("data sheet"), std::string::npos);
    EXPECT_NE(profile.source.find(profile.name == "h100" ? "as measured" : "assumed"), std::string::npos);
    profile.check_integrity();
  }
  EXPECT_EQ(built_in_profile("h200", "bf16").memory_bytes, 141'000'000'000);
}

TEST(DeviceProfile, OnlyTheModuleItselfHasItsRates) {
  EXPECT_EQ(built_in_name("NVIDIA H100 80GB HBM3"), "h100");
  // Drivers and clouds write the same module in several ways.
  EXPECT_EQ(built_in_name("H100 SXM5 80GB HBM3"), "h100");
  // Other rates: cards, halves of a pair, parts of a GPU, another chip.
  for (const char* name : {"NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL",
                           "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H200", "NVIDIA A100-SXM4-80GB",
                           "NVIDIA A100 80GB PCIe", "NVIDIA GH200 480GB", "NVIDIA B200", ""})
    EXPECT_EQ(built_in_name(name), "") << name;
  EXPECT_EQ(built_in_name("cpu"), "");
}

}  // namespace
}  // namespace bough
