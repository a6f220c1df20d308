// Losses and advantages as numbers, for tests that compare them with implementations written from their
// equations.
//   algorithms_tool < cases
// reads one JSON object a line:
//   {"actor": SETTINGS as YAML or JSON text, "rows": {"log_probs": [...], "entropies": [...], "advantages":
//   [...],
//    "behaviour": [...], "proximal": [...], "reference": [...], "weights": [...], "versions": [...],
//    "sequences": [...]}, "proximal_is_current": bool, "version": n}
// (null is -inf; lists may be left out) and writes one a line:
//   {"loss", "d_log_probs", "d_entropies", "metrics", "separable", "aggregation"} or {"error": text};
// or reads {"actor": SETTINGS, "rewards": [...], "groups": [...], "tokens": [...], "parts": [[...], ...]}
// and writes {"advantages": [[...], ...]}.
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

std::vector<double> list(const at::Tensor& x) {
  return {x.const_data_ptr<double>(), x.const_data_ptr<double>() + x.numel()};
}

Json estimate(const ActorSettings& settings, const Json& request) {
  const auto rewards = request.at("rewards").get<std::vector<double>>();
  const auto groups = request.at("groups").get<std::vector<int64_t>>();
  const auto tokens = request.at("tokens").get<std::vector<int64_t>>();
  const auto parts = request.at("parts").get<std::vector<std::vector<double>>>();
  return {{"advantages", compute_advantages(settings.advantages, {rewards, groups, tokens, parts})}};
}

Json evaluate(const Json& request) {
  const auto settings = parse_settings<ActorSettings>(request.at("actor").get<std::string>(), "actor");
  if (request.contains("rewards")) return estimate(settings, request);
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
  rows.weights_R = column(given, "weights");
  if (given.contains("versions")) rows.versions_R = column(given, "versions").to(at::kInt);
  rows.sequences_R = column(given, "sequences").to(at::kLong);
  rows.proximal_is_current = request.value("proximal_is_current", false);
  rows.version = request.value("version", int64_t{0});
  const LossOutput out = (*loss)(rows);
  out.loss.backward();
  const auto gradient = [](const at::Tensor& x) {
    return x.defined() && x.grad().defined() ? list(x.grad()) : std::vector<double>();
  };
  Json metrics = Json::object();
  for (const auto& [name, metric] : out.metrics) metrics[name] = metric.value();
  return {{"loss", out.loss.item<double>()},           {"d_log_probs", gradient(rows.log_probs_R)},
          {"d_entropies", gradient(rows.entropies_R)}, {"metrics", metrics},
          {"separable", loss->token_separable()},      {"aggregation", loss->aggregation()}};
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
