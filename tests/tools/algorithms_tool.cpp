// Losses and advantages as numbers, for tests that compare them with implementations written from their
// equations.
//   algorithms_tool < cases
// Reads one JSON object a line and writes one JSON object a line. In the input, null is -inf, and lists may
// be left out. There are four kinds of requests.
// 1. A loss:
//   {"actor": SETTINGS as YAML or JSON text, "rows": {"log_probs": [...], "entropies": [...], "advantages":
//   [...],
//    "behaviour": [...], "proximal": [...], "reference": [...], "weights": [...], "versions": [...],
//    "sequences": [...], "teacher": [...], "given": [[...], ...], "behaviour_given", "proximal_given",
//    "teacher_given": the same}, "proximal_is_current": bool, "version": n, "entropy_coef": x}
//   The answer is {"loss", "d_log_probs", "d_entropies", "d_given": flat, "metrics", "separable",
//   "aggregation"} or {"error": text}.
// 2. The coefficients after each step of the controllers:
//   {"actor": SETTINGS, "kl": [{"kl", "sequences", "entropy"} a step, ...]}
//   The answer is {"kl_ctl": [...], "entropy_coef": [...]}.
// 3. The KL to go:
//   {"kl_to_go": [...], "sequences": [...]}
//   The answer is {"kl_to_go": [...], "mean": x}.
// 4. Advantages:
//   {"actor": SETTINGS, "rewards": [...], "groups": [...], "tokens": [...], "parts": [[...], ...],
//    "baselines": [...] if there are any}
//   The answer is {"advantages": [[...], ...]}.
#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/autograd.h>

#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "base/error.h"
#include "base/json.h"
#include "train/settings.h"

#include "algo/controllers.h"
#include "algo/loss.h"

namespace bough {

namespace {

at::Tensor column(const Json& rows, const char* name) {
  if (!rows.contains(name)) return {};
  std::vector<double> values;
  for (const Json& value : rows.at(name))
    values.push_back(value.is_null() ? -std::numeric_limits<double>::infinity() : value.get<double>());
  return at::tensor(at::ArrayRef<double>(values), at::kDouble);
}

at::Tensor matrix(const Json& rows, const char* name) {
  if (!rows.contains(name)) return {};
  std::vector<double> values;
  int64_t width = 0;
  for (const Json& row : rows.at(name)) {
    width = static_cast<int64_t>(row.size());
    for (const Json& value : row)
      values.push_back(value.is_null() ? -std::numeric_limits<double>::infinity() : value.get<double>());
  }
  return at::tensor(at::ArrayRef<double>(values), at::kDouble)
      .view({static_cast<int64_t>(rows.at(name).size()), width});
}

std::vector<double> list(const at::Tensor& x) {
  return {x.const_data_ptr<double>(), x.const_data_ptr<double>() + x.numel()};
}

Json estimate(const ActorSettings& settings, const Json& request) {
  const auto rewards = request.at("rewards").get<std::vector<double>>();
  const auto groups = request.at("groups").get<std::vector<int64_t>>();
  const auto tokens = request.at("tokens").get<std::vector<int64_t>>();
  const auto parts = request.at("parts").get<std::vector<std::vector<double>>>();
  AdvantageInput batch{rewards, groups, tokens, parts};
  batch.baselines = request.value("baselines", std::vector<double>());
  return {{"advantages", compute_advantages(settings.advantages, batch)}};
}

Json follow_controllers(const ActorSettings& settings, const Json& request) {
  make_loss(settings.loss);  // refuses contradictory settings
  KlController kl(settings.loss);
  EntropyController entropy(settings.loss);
  std::vector<double> kl_values, entropy_values;
  for (const Json& step : request.at("kl")) {
    kl.update(step.at("kl").get<double>(), step.at("sequences").get<int64_t>());
    entropy.update(step.at("entropy").get<double>());
    kl_values.push_back(kl.value);
    entropy_values.push_back(entropy.coefficient().value_or(settings.loss.entropy_coef));
  }
  return {{"kl_ctl", kl_values}, {"entropy_coef", entropy_values}};
}

Json evaluate(const Json& request) {
  if (request.contains("kl_to_go")) {
    const at::Tensor kl_R = column(request, "kl_to_go");
    const at::Tensor sequences_R = column(request, "sequences").to(at::kLong);
    return {{"kl_to_go", list(kl_to_go(kl_R, sequences_R))},
            {"mean", mean_of_sequence_means(kl_R, sequences_R)}};
  }
  const auto settings = parse_settings<ActorSettings>(request.at("actor").get<std::string>(), "actor");
  if (request.contains("rewards")) return estimate(settings, request);
  if (request.contains("kl")) return follow_controllers(settings, request);
  const std::unique_ptr<Loss> loss = make_loss(settings.loss);
  const Json& given = request.at("rows");
  LossRows rows;
  rows.log_probs_R = column(given, "log_probs").requires_grad_(true);
  rows.entropies_R = column(given, "entropies");
  if (rows.entropies_R.defined()) rows.entropies_R.requires_grad_(true);
  rows.advantages_R = column(given, "advantages");
  rows.behaviour_log_probs_R = column(given, "behaviour");
  rows.proximal_log_probs_R = column(given, "proximal");
  rows.reference_log_probs_R = column(given, "reference");
  rows.teacher_log_probs_R = column(given, "teacher");
  rows.top_k_log_probs_RK = matrix(given, "given");
  if (rows.top_k_log_probs_RK.defined()) rows.top_k_log_probs_RK.requires_grad_(true);
  rows.behaviour_top_k_RK = matrix(given, "behaviour_given");
  rows.proximal_top_k_RK = matrix(given, "proximal_given");
  rows.reference_top_k_RK = matrix(given, "reference_given");
  rows.teacher_top_k_RK = matrix(given, "teacher_given");
  if (request.contains("entropy_coef")) rows.entropy_coef = request.at("entropy_coef").get<double>();
  rows.weights_R = column(given, "weights");
  if (given.contains("versions")) rows.versions_R = column(given, "versions").to(at::kInt);
  rows.sequences_R = column(given, "sequences").to(at::kLong);
  rows.rows_R = at::arange(rows.log_probs_R.numel(), at::kLong);
  rows.proximal_is_current = request.value("proximal_is_current", false);
  rows.version = request.value("version", int64_t{0});
  const LossOutput out = (*loss)(rows);
  out.loss.backward();
  const auto gradient = [](const at::Tensor& x) {
    return x.defined() && x.grad().defined() ? list(x.grad()) : std::vector<double>();
  };
  Json metrics = Json::object();
  for (const auto& [name, metric] : out.metrics) metrics[name] = metric.value();
  return {{"loss", out.loss.item<double>()},
          {"d_log_probs", gradient(rows.log_probs_R)},
          {"d_entropies", gradient(rows.entropies_R)},
          {"d_given", gradient(rows.top_k_log_probs_RK)},
          {"metrics", metrics},
          {"separable", loss->token_separable()},
          {"aggregation", loss->aggregation()}};
}

}  // namespace

}  // namespace bough

int main() {
  bough::apply_cpu_workarounds();
  for (std::string line; std::getline(std::cin, line);) {
    bough::Json answer;
    try {
      answer = bough::evaluate(bough::Json::parse(line));
    } catch (const bough::UserError& error) {
      answer = {{"error", error.what()}};
    }
    std::cout << answer.dump() << "\n";
  }
}
