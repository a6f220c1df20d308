// Random trees, strategies, pass sizes and memory budgets. Every plan is valid, stays within its budget, and
// gives the gradients of the flat batch (each sequence computed separately).
#include <gtest/gtest.h>

#include <ATen/Parallel.h>

#include "base/error.h"
#include "cost/cost_model.h"
#include "train/reference_comparison.h"

namespace bough {
namespace {

// A synthetic device: a pass costs as much as `overhead` tokens, plus a constant cost per token.
DeviceProfile device_of(double overhead, bool is_gpu) {
  const auto curve = [&](double seconds_per_unit) {
    return CostCurve{{1, 1'000'000},
                     {seconds_per_unit * (1 + overhead), seconds_per_unit * (1e6 + overhead)}};
  };
  const CostCurve rate{{1, 1'000'000}, {1e-10, 1e-10 * 1e6}};
  DeviceProfile device;
  device.name = device.source = "test";
  device.dtype = "fp64";
  device.memory_bytes = int64_t{1} << 40;
  if (is_gpu) device.kernels.attention = DeviceKernels::Attention::kFused;
  device.linear_forward = curve(1e-10);
  device.linear_backward = curve(2e-10);
  device.elementwise_forward = curve(1e-10);
  device.elementwise_backward = curve(2e-10);
  device.attention_forward = rate;
  device.attention_backward = CostCurve{{1, 1'000'000}, {2.5e-10, 2.5e-10 * 1e6}};
  device.head_forward = rate;
  device.head_backward = CostCurve{{1, 1'000'000}, {2e-10, 2e-10 * 1e6}};
  return device;
}

// A plan for the request, or nullopt if make_plan throws because of the memory limit. With the memory that
// the error message names, make_plan must succeed.
std::optional<Plan> plan_within(const std::string& strategy, PlanRequest request) {
  try {
    return make_plan(strategy, request);
  } catch (const UserError& error) {
    const std::string message = error.what();
    if (message.find("memory (") == std::string::npos) throw;
    const size_t at = message.find("that fits is ") + 13;
    request.memory_bytes = std::stoll(message.substr(at));
    EXPECT_NO_THROW(make_plan(strategy, request)) << message;
    return {};
  }
}

void expect_valid_within_memory_and_exact(int64_t begin, int64_t end) {
  at::set_num_threads(1);
  const auto loss = full_loss();
  int num_refused = 0;
  int64_t num_on_host = 0;
  for (int64_t seed = begin; seed < end; ++seed) {
    std::mt19937_64 random(static_cast<uint64_t>(seed) + 5);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
    const int64_t max_tokens = 10 + below(100);
    const auto r = random_batch(static_cast<uint64_t>(seed) + 100'000, max_tokens);
    auto model = random_model(static_cast<uint64_t>(seed), at::kDouble);
    auto flat = FlatReference(*model).run(r->batch, *loss);
    int64_t longest = 1;
    for (const auto& sequence : r->batch.sequences) longest = std::max<int64_t>(longest, sequence.size());

    const double overhead = static_cast<double>(below(60));
    const CostModel costs(device_of(overhead, /*is_gpu=*/below(2)), model_shape(model->config(), "fp64"));
    const std::vector<std::string> strategies = {"dense", "packed", "path", "blocks", "auto"};
    const std::string strategy = strategies[below(5)];
    const int64_t limit = (strategy == "packed" ? longest : 1) + below(max_tokens);
    PlanRequest request = plan_request(r->batch, limit);
    if (below(4) > 0) request.costs = &costs;
    request.layers = static_cast<LayerRecompute>(below(3));
    request.offload = static_cast<ActivationOffload>(below(3));
    if (request.costs && below(2)) {
      const int64_t roomy = simulate(make_plan("path", request), &costs).peak_bytes;
      request.memory_bytes = 1 + below(2 * roomy + 1);
    }
    const std::string what =
        str("seed ", seed, " ", strategy, " B ", limit, " memory ", request.memory_bytes.value_or(-1));
    const auto plan = plan_within(strategy, request);
    if (::testing::Test::HasFailure()) return;
    if (!plan) {
      ++num_refused;
      continue;
    }
    ASSERT_NO_THROW(validate(*plan, r->batch.sequences)) << what;
    num_on_host += simulate(*plan).num_on_host;
    if (request.memory_bytes) {
      ASSERT_LE(simulate(*plan, &costs).peak_bytes, *request.memory_bytes) << what;
    }
    expect_exact(*model, flat, *r, *plan, *loss, what);
    if (::testing::Test::HasFatalFailure()) return;
  }
  EXPECT_GT(num_refused, 0);
  EXPECT_LT(num_refused, (end - begin) / 4);
  EXPECT_GT(num_on_host, 0);
}

TEST(PlanFuzz, EveryPlanIsValidWithinItsMemoryAndExact) {
  expect_valid_within_memory_and_exact(0, 500);
}

TEST(SlowPlanFuzz, EveryPlanIsValidWithinItsMemoryAndExact) {
  if (!is_slow_suite()) GTEST_SKIP() << "in the slow suite";
  expect_valid_within_memory_and_exact(500, 10'000);
}

}  // namespace
}  // namespace bough
