// Generates in this process, with a model that somebody else owns and changes. update_weights() copies no
// weights: it sets the version, and keys and values are recomputed.
//
// One step(): plan a pass (scheduler.h), run the model on its tokens with attention to the pages of the KV
// cache (forward_pass.h), compute the logits at the ends of prompts and samples, sample a token for each
// sample (sampler.h), append it. Samples that end leave, and waiting samples join, at every step().
//
// Memory: keys and values in pages, bounded by RolloutSettings::kv_memory and allocated once; logits in
// chunks of at most 64 MiB. The model must outlive the engine and must not be trained while step() runs. Call
// update_weights() after every change of the weights.
//
// With RolloutSettings::sparse, sampled tokens attend only to the pages with the highest scores. Prompt
// tokens attend to everything, also the last prompt token, whose logits give the first response token. If a
// preempted sample is recomputed, each token has the same kind of attention (sparse or full) as before.
//
// With RolloutSettings::quantization int8, the passes run a quantized copy of the model (quantized_model.h),
// unless the model is quantized already. update_weights() quantizes the new weights. Log-probabilities are
// those of the copy, which is the behavior policy. If a trainer recomputes them with the source model, the
// metrics mismatch/* show the difference.
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
#include "rollout/sparse_attention.h"
#include "text/tokenizer.h"

namespace bough {

// Numbers that the cost of one pass of the model depends on.
struct PassWork {
  int64_t tokens = 0;           // through the layers
  int64_t decoding = 0;         // part of `tokens`: in samples that compute only their newest token
  int64_t logits_rows = 0;      // through the lm_head: tokens whose logits are computed
  int64_t attention_pairs = 0;  // (query token, visible key), of one head and layer
  int64_t kv_tokens = 0;        // whose keys and values are read; a page of several sequences counts once
};

// Maximum size of the logits computed at once on a GPU.
inline constexpr int64_t kLogitsBytesOfGpu = int64_t{512} << 20;

// Default fraction of a GPU's free memory for keys and values, if the process has no trainer. In a run, its
// memory plan says how many bytes (run/memory_plan.h).
inline constexpr double kDeviceShare = 0.85;

struct EmbeddedEngineOptions {
  RolloutSettings settings;
  std::vector<int32_t> stop_tokens;  // the model's own (load_stop_tokens)
  // Returns the bytes of a token (Tokenizer::id_to_bytes). The function need not be set if no request has
  // stop strings.
  std::function<std::string(int32_t)> token_bytes;
  int32_t version = 0;  // of the current weights
  AttentionPath attention = AttentionPath::kFastest;
  std::function<void(const PassWork&)> on_pass;  // called after each pass, if set
};

// Loads a model for generation from a Hugging Face directory. RolloutSettings::batch_invariant says whether
// the model is batch-invariant: a token's output bits do not depend on the other tokens of the pass. If the
// setting is nullopt, an fp32 model on a CPU that supports it is batch-invariant, at a cost of some 5% of the
// speed. Throws UserError if batch invariance is asked for and not possible.
std::unique_ptr<Model> load_rollout_model(const std::filesystem::path& directory,
                                          const RolloutSettings& settings, at::ScalarType dtype,
                                          at::Device device, const ModelRanks& ranks = {});

// The limits that requests to an engine with this model are checked against.
ModelLimits model_limits(const ModelConfig& config);

// If RolloutSettings::quantization is int8, quantizes the model in place and frees the original matrices. So
// an engine over the model needs no copy. The model must only be used for generation. Returns the bytes of
// the layers' matrices, as they are then and unquantized.
MatrixBytes apply_quantization(const RolloutSettings& settings, Model& model);

class EmbeddedEngine : public Engine {
 public:
  // Throws UserError if kv_memory is below one page or a stop token is outside the vocabulary. Throws
  // UserError if the model or device does not support the sparse settings.
  EmbeddedEngine(const Model& model, EmbeddedEngineOptions options);
  ~EmbeddedEngine() override;  // waits for the device

  // Throws UserError as Engine::submit() says. Also if one sample alone could exceed kv_memory, if a request
  // with this id is in flight, or if there are stop strings but no token_bytes.
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
  // Notes that the weights of the model have changed. `update.model` must be the model that the constructor
  // got.
  void update_weights(const WeightUpdate& update) override;
  void sample_from(SampledPolicy policy) override;
  bool ready_for_weights() const override { return !scheduler_.must_work(); }
  std::vector<RunningRequest> running() const override;
  int32_t version() const override { return version_; }
  EngineStatistics statistics() const override;
  // The model that the passes run: the given one or its quantized copy.
  const Model& generating_model() const { return quantized_ ? quantized_->model() : model_; }

  void check_integrity() const { scheduler_.check_integrity(); }

 private:
  at::Tensor run_pass(const Pass& pass);
  PassWork work_of(const Pass& pass) const;
  void sample_from_pass(const Pass& pass, const at::Tensor& hidden_TD,
                        const std::vector<ActiveSample*>& waiting);
  std::vector<ActiveSample*> sample_from_prompts(const std::vector<ActiveSample*>& started);
  void sample_rows(const at::Tensor& logits_RV,
                   const std::vector<std::pair<ActiveSample*, int64_t>>& samples_and_rows);
  void append(ActiveSample& sample, const SampledToken& sampled);
  // The records of a sample's tokens but the last, which has not been computed. Empty if there are none.
  RoutedExperts routed_experts_of(const ActiveSample& sample) const;

  const Model& model_;
  EmbeddedEngineOptions options_;
  const ModelLimits limits_;
  int32_t version_;
  bool paused_ = false;
  std::optional<QuantizedModel> quantized_;
  SparsePolicy sparse_;
  Scheduler scheduler_;
  KvStorage storage_;
  std::optional<ExpertRecords> experts_;  // with RolloutSettings::return_routed_experts
  ForwardPass forward_pass_;
  // For SampledPolicy::kDenseWithoutAdapter: the model's weights without the adapter. It uses the same pages.
  struct WithoutAdapter {
    std::unique_ptr<Model> model;
    ForwardPass pass;
  };
  SampledPolicy policy_ = SampledPolicy::kGenerating;
  std::optional<WithoutAdapter> without_adapter_;
  std::vector<GenerationResult> finished_;         // returned by the next step
  std::vector<GenerationResult> parked_finished_;  // finished_ of parked requests
  EngineStatistics statistics_;
};

// Returns options for an engine over the model of `directory`, with its stop tokens. Without a tokenizer,
// requests with stop strings are refused. Throws UserError if the settings name servers.
EmbeddedEngineOptions load_engine_options(const std::filesystem::path& directory,
                                          const std::optional<Tokenizer>& tokenizer,
                                          const RolloutSettings& settings);
std::unique_ptr<EmbeddedEngine> make_engine(const Model& model, const std::filesystem::path& directory,
                                            const std::optional<Tokenizer>& tokenizer,
                                            const RolloutSettings& settings,
                                            std::function<void(const PassWork&)> on_pass = {});

// A model that is only used for generation, and its engine.
struct LoadedEngine {
  std::unique_ptr<Model> model;
  MatrixBytes matrices;  // of the layers
  std::unique_ptr<EmbeddedEngine> engine;
};
LoadedEngine load_engine(const std::filesystem::path& directory, const std::optional<Tokenizer>& tokenizer,
                         const RolloutSettings& settings, at::ScalarType dtype, at::Device device,
                         const Precisions& precisions = {});

}  // namespace bough
