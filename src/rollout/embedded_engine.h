// The engine in the trainer's own process, over the trainer's own weights: publication is a new version
// number.
//
// One step(): plan a pass (scheduler.h), run the model over it with attention to the pages
// (forward_pass.h), take the logits of the tokens that end a prompt or a sample, draw (sampler.h), append.
// Finished samples leave and waiting ones join at every step.
//
// Memory: keys and values in pages, bounded by RolloutSettings::kv_memory and reused from step to step;
// logits in chunks of rows. The model must outlive the engine and must not be trained while step() runs; call
// update_weights() after every change of the weights.
//
// With RolloutSettings::sparse the tokens that the policy draws attend to the pages that matter most to them;
// prompts, and the token that draws the first one of a response, attend to everything. What is computed again
// after it was set back is computed as it was before. CPU only.
//
// With RolloutSettings::quantization int8 the passes run a quantized copy of the model (quantized_model.h),
// which update_weights() makes anew, unless the model is quantized already. Log-probabilities are those of
// the copy, the policy that draws; a trainer that recomputes them with the model sees the difference as
// mismatch.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "models/model.h"
#include "models/quantized_model.h"
#include "rollout/forward_pass.h"
#include "rollout/kv_storage.h"
#include "rollout/sampler.h"
#include "rollout/scheduler.h"
#include "text/tokenizer.h"

namespace bough {

// What one pass of the model had to compute and read.
struct PassWork {
  int64_t tokens = 0;           // through the layers
  int64_t decoding = 0;         // of them, the newest of a sample
  int64_t logits_rows = 0;      // through the head
  int64_t attention_pairs = 0;  // (query token, visible key), of one head and layer
  int64_t kv_tokens = 0;        // keys and values read, those that several sequences share once
};

// Of a GPU's free memory, what keys and values take where nothing bounds them: beside a trainer, whose passes
// need the rest, and by themselves.
inline constexpr double kDeviceShareBesideTraining = 0.45, kDeviceShareAlone = 0.85;

struct EmbeddedEngineOptions {
  RolloutSettings settings;
  std::vector<int32_t> stop_tokens;  // the model's own (load_stop_tokens)
  // Gives the bytes that a token stands for (Tokenizer::id_to_bytes); needed by requests with stop strings.
  std::function<std::string(int32_t)> token_bytes;
  int32_t version = 0;  // of the weights as they are now
  AttentionPath attention = AttentionPath::kFastest;
  std::function<void(const PassWork&)> on_pass;  // after each, if set
  double device_share = kDeviceShareAlone;       // of a GPU's free memory, where kv_memory is auto
};

// What an engine on the device chooses pages by. UserError: a budget on another device than the CPU.
SparsePolicy sparse_policy(const SparseSettings& settings, at::Device device);

// Loads a model to generate with from a Hugging Face directory, batch-invariant or not as
// RolloutSettings::batch_invariant says; where that says nothing, in fp32 on a CPU that can: it costs some 5%
// there. UserError where it is asked for and cannot be had.
std::unique_ptr<Model> load_rollout_model(const std::filesystem::path& directory,
                                          const RolloutSettings& settings, at::ScalarType dtype,
                                          at::Device device, const ModelRanks& ranks = {});

// The limits that requests to an engine with this model are checked against.
ModelLimits model_limits(const ModelConfig& config);

// Quantizes a model that is there for generation alone where RolloutSettings::quantization says so, and
// releases what was there, so that an engine over it needs no copy. Returns the bytes of its layers'
// matrices.
MatrixBytes apply_quantization(const RolloutSettings& settings, Model& model);

class EmbeddedEngine : public Engine {
 public:
  // UserError if the memory setting does not hold a single page, or a stop token is outside the vocabulary.
  EmbeddedEngine(const Model& model, EmbeddedEngineOptions options);

  // UserError as Engine says, and also for a request of which one sample alone could outgrow the memory
  // setting, for an id in flight, and for stop strings without token_bytes.
  void submit(GenerationRequest request) override;
  std::vector<GenerationResult> step() override;
  bool idle() const override { return scheduler_.idle() && finished_.empty(); }
  bool contains(uint64_t id) const { return scheduler_.contains(id); }  // in flight
  bool cancel(uint64_t id) override;
  void pause() override { paused_ = true; }
  void resume() override { paused_ = false; }
  bool paused() const override { return paused_; }
  void park() override;
  void unpark() override;
  // Takes note that the weights, which are the model's own, have changed: `update` names that model.
  void update_weights(const WeightUpdate& update) override;
  bool ready_for_weights() const override { return !scheduler_.owes_work(); }
  std::vector<RunningRequest> running() const override { return scheduler_.running_requests(); }
  int32_t version() const override { return version_; }
  EngineStatistics statistics() const override;
  // What the passes run: the model, or its quantized copy.
  const Model& generating_model() const { return quantized_ ? quantized_->model() : model_; }

  void check_integrity() const { scheduler_.check_integrity(); }

 private:
  at::Tensor run_pass(const Pass& pass);
  PassWork work_of(const Pass& pass) const;
  void draw_from_pass(const Pass& pass, const at::Tensor& hidden_TD,
                      const std::vector<ActiveSample*>& waiting);
  std::vector<ActiveSample*> draw_from_prompts(const std::vector<ActiveSample*>& started);
  void draw(const at::Tensor& logits_RV,
            const std::vector<std::pair<ActiveSample*, int64_t>>& samples_and_rows);
  void append(ActiveSample& sample, const Draw& draw);

  const Model& model_;
  EmbeddedEngineOptions options_;
  int32_t version_;
  bool paused_ = false;
  std::optional<QuantizedModel> quantized_;
  SparsePolicy sparse_;
  Scheduler scheduler_;
  KvStorage storage_;
  ForwardPass forward_pass_;
  std::vector<GenerationResult> finished_;  // to be returned by the next step
  std::vector<GenerationResult> parked_finished_;
  EngineStatistics statistics_;
};

// Of an engine over a model of `directory`: with that model's stop tokens. Without a tokenizer stop strings
// are refused.
EmbeddedEngineOptions load_engine_options(const std::filesystem::path& directory,
                                          const std::optional<Tokenizer>& tokenizer,
                                          const RolloutSettings& settings, double device_share);
std::unique_ptr<EmbeddedEngine> make_engine(const Model& model, const std::filesystem::path& directory,
                                            const std::optional<Tokenizer>& tokenizer,
                                            const RolloutSettings& settings, double device_share,
                                            std::function<void(const PassWork&)> on_pass = {});

// A model that is there for generation alone, and the engine over it.
struct LoadedEngine {
  std::unique_ptr<Model> model;
  MatrixBytes matrices;  // of the layers
  std::unique_ptr<EmbeddedEngine> engine;
};
LoadedEngine load_engine(const std::filesystem::path& directory, const std::optional<Tokenizer>& tokenizer,
                         const RolloutSettings& settings, at::ScalarType dtype, at::Device device);

}  // namespace bough
