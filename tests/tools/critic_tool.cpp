// A critic's values, loss and gradients as files, for tests that compare them with a plain implementation.
//   critic_tool MODEL ROLLOUTS SETTINGS OUT
// MODEL: a Hugging Face directory. ROLLOUTS: a rollout file with rewards. SETTINGS: JSON of {"actor": ...,
// "critic": ..., "dtype": "fp64", "head": [...], "new_head": [...]}. The heads are value heads with the bias
// as the last number. "head" gives the old values. "new_head" gives the loss.
// OUT.safetensors: gradients by Hugging Face name, score.weight and score.bias. Standard output: one JSON
// object {"values": [[...]], "advantages": [[...]], "returns": [[...]], "loss", "clip_fraction",
// "new_values": [...]}, by sequence and trained token.
#include <ATen/ATen.h>

#include <iostream>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "base/error.h"
#include "base/json.h"
#include "data/rollout_file.h"
#include "models/checkpoint.h"
#include "train/critic.h"
#include "train/sequence_steps.h"
#include "train/trainer.h"

namespace bough {

namespace {

struct ToolSettings {
  ActorSettings actor;
  CriticSettings critic;
  std::string dtype = "fp64";
  std::vector<double> head, new_head;

  template <class V>
  void visit(V& v) {
    v("actor", actor, "how batches go through the model");
    v("critic", critic, "the critic");
    v("dtype", dtype, "fp32 or fp64");
    v("head", head, "of the old values");
    v("new_head", new_head, "of the loss");
  }
};

void set_head(ValueHead& head, const std::vector<double>& weights) {
  const auto all = at::tensor(weights, at::kDouble);
  head.weight.value.copy_(all.narrow(0, 0, all.numel() - 1).unsqueeze(0));
  head.bias.value.copy_(all.narrow(0, all.numel() - 1, 1));
}

Json lists(const std::vector<Trajectory>& rows, const char* column) {
  Json out = Json::array();
  for (const Trajectory& row : rows) out.push_back(trained_column(row, column));
  return out;
}

void run(const std::string& model_path, const std::string& rollouts, const std::string& settings_text,
         const std::string& out) {
  const auto settings = parse_settings<ToolSettings>(settings_text, "settings");
  const auto model = load_model(model_path, settings.dtype == "fp32" ? at::kFloat : at::kDouble);
  std::vector<Trajectory> batch = read_rollouts(rollouts);
  Critic critic(*model, settings.critic, settings.actor, 10);
  const SteadyClock clock;
  Trainer trainer(*model, nullptr, settings.actor, 10, clock, {.critic = &critic});
  set_head(critic.head(), settings.head);
  set_advantages(batch, settings.actor, {}, {},
                 [&](std::vector<Trajectory>& rows) { trainer.set_values(rows); });
  set_head(critic.head(), settings.new_head);
  std::vector<const Trajectory*> rows;
  for (const Trajectory& row : batch) rows.push_back(&row);
  const TrainBatch minis = make_batch(rows, settings.actor.aggregation, accumulator_type(model->dtype()));
  model->allocate_gradients();
  const ValueExecution walk = critic.add_gradient(critic.plan(minis), minis);
  NamedTensors gradients = named_gradients(*model);
  for (Parameter* parameter : critic.head().parameters())
    gradients.emplace_back(parameter->parts[0].name, parameter->main_grad);
  write_safetensors(out, gradients);
  Json advantages = Json::array();
  for (const Trajectory& row : batch) {
    Json own = Json::array();
    for (size_t i = 0; i < row.input_ids.size(); ++i)
      if (row.trains(i)) own.push_back(row.advantage.at(row.advantage.size() == 1 ? 0 : i));
    advantages.push_back(own);
  }
  const auto values_R = walk.values_R.to(at::kDouble).contiguous();
  const double* values = values_R.const_data_ptr<double>();
  std::cout << Json({{"values", lists(batch, kValuesColumn)},
                     {"advantages", advantages},
                     {"returns", lists(batch, kReturnsColumn)},
                     {"loss", walk.loss},
                     {"clip_fraction", walk.metrics.at("critic/clip_fraction").value()},
                     {"new_values", std::vector<double>(values, values + values_R.numel())}})
                   .dump()
            << "\n";
}

}  // namespace

}  // namespace bough

int main(int argc, char** argv) {
  bough::apply_cpu_workarounds();
  if (argc != 5) return 2;
  try {
    bough::run(argv[1], argv[2], argv[3], argv[4]);
  } catch (const bough::UserError& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
