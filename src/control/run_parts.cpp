#include "control/run_parts.h"

#include "cost/run_costs.h"

namespace bough {

namespace {

int64_t planned_steps(const RunSettings& settings, const Dataset& problems) {
  if (settings.total_train_steps > 0) return settings.total_train_steps;
  const auto size = static_cast<int64_t>(problems.size());
  const int64_t batch = settings.train_dataset.batch_size;
  return (settings.total_train_epochs * size + batch - 1) / batch;
}

std::unique_ptr<Model> load(const RunSettings& settings, const std::string& path) {
  return load_rollout_model(path, settings.rollout, scalar_type_of(settings.dtype),
                            settings.device == "cuda" ? at::kCUDA : at::kCPU);
}

// The reference has the model's element type and batch invariance, so that before the first step the two
// agree bit for bit.
std::unique_ptr<Model> load_reference(const RunSettings& settings) {
  if (settings.actor.loss.kl_loss_coef == 0.0) return nullptr;
  return load(settings, settings.ref.path.empty() ? settings.model.path : settings.ref.path);
}

}  // namespace

RunParts::RunParts(const RunSettings& run_settings, const std::function<bool()>& stop)
    : settings(run_settings),
      problems(read_dataset(settings.train_dataset)),
      valid(settings.valid_dataset.path.empty() ? Dataset() : read_dataset(settings.valid_dataset)),
      encoder(PromptEncoder::from_directory(settings.model.path)),
      reward(make_reward(settings.reward, settings.reward_service)),
      model(load(settings, settings.model.path)),
      reference(load_reference(settings)),
      total_steps(planned_steps(settings, problems)),
      trainer(*model, reference.get(), settings.actor, total_steps, clock),
      engine(make_engine(*model, settings.model.path, encoder.tokenizer(), settings.rollout)),
      controller({settings, problems, encoder, *engine, *reward, trainer, clock, model.get()}),
      folder(settings) {
  reward->check(problems);
  if (valid.size() > 0) reward->check(valid);
  trainer.use_costs(step_costs(run_costs(folder.path(), settings.calibration, *model, stop)));
}

}  // namespace bough
