#include "control/run_parts.h"

#include <ATen/Parallel.h>

#include <algorithm>

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

std::unique_ptr<WeightChannel> make_channel(const RunSettings& settings, const Model& trained,
                                            Model* generating) {
  if (!generating) return std::make_unique<SharedWeights>(&trained);
  const bool in_place = trained.device().is_cuda() || settings.rollout.quantization != "none";
  return std::make_unique<CopiedWeights>(trained, *generating, in_place);
}

}  // namespace

ThreadSplit split_threads(const RunSettings& settings, int threads) {
  if (settings.rollout.max_head_offpolicyness == 0) return {threads, threads};
  const auto half = std::max(1, threads / 2);
  ThreadSplit split;
  split.generating = settings.rollout.threads > 0 ? static_cast<int>(settings.rollout.threads) : half;
  split.training = settings.actor.threads > 0 ? static_cast<int>(settings.actor.threads)
                                              : std::max(1, threads - split.generating);
  return split;
}

RunParts::RunParts(const RunSettings& run_settings, const std::function<bool()>& stop)
    : settings(run_settings),
      threads(split_threads(settings, at::get_num_threads())),
      problems(read_dataset(settings.train_dataset)),
      valid(settings.valid_dataset.path.empty() ? Dataset() : read_dataset(settings.valid_dataset)),
      encoder(PromptEncoder::from_directory(settings.model.path)),
      reward(make_reward(settings.reward, settings.reward_service)),
      filter(settings.filter.empty()
                 ? nullptr
                 : std::make_unique<GroupFilter>(settings.filter, settings.reward_service)),
      model(load(settings, settings.model.path)),
      generating(settings.rollout.max_head_offpolicyness > 0 ? copy_of(*model) : nullptr),
      reference(load_reference(settings)),
      total_steps(planned_steps(settings, problems)),
      trainer(*model, reference.get(), settings.actor, total_steps, clock),
      weights(make_channel(settings, *model, generating.get())),
      engine(make_engine(generating ? *generating : *model, settings.model.path, encoder.tokenizer(),
                         settings.rollout)),
      folder(settings) {
  at::set_num_threads(threads.training);
  reward->check(problems);
  if (valid.size() > 0) reward->check(valid);
  trainer.use_costs(step_costs(run_costs(folder.path(), settings.calibration, *model, stop)));
}

}  // namespace bough
