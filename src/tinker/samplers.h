// Engines that sample for clients: of the base model and of saved adapters. An engine is made when the first
// request for its weights comes, and at most kMostEngines stay; the least recently used idle one goes.
// Computation thread only.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "rollout/embedded_engine.h"
#include "tinker/wire.h"

namespace bough {

struct SampleRequest {
  std::filesystem::path
      adapter;  // directory of a checkpoint: an adapter or all weights; empty: the base model
  std::vector<int32_t> prompt;
  SamplingParameters sampling;
  uint64_t seed = 0;
  bool wants_prompt_log_probs = false;
  int64_t prompt_last_n = 0;  // 0: all
  int64_t prompt_top_k = 0;
  std::optional<WireTensor> prompt_targets;  // token ids at each prompt token from the second on; -1: none
};

class Samplers {
 public:
  static constexpr size_t kMostEngines = 2;
  // `base` must outlive the object. `options`: of each engine.
  Samplers(const Model& base, EmbeddedEngineOptions options);

  // Computes the prompt's values at once, and queues the rest. finish is called by step(). Throws UserError
  // if the request is refused.
  using Finish = std::function<void(SampleResult)>;
  void submit(const std::string& future, SampleRequest request, Finish finish);
  // Ends the request of this future. Returns false if there is none.
  bool cancel(const std::string& future);
  // The adapter's files have changed: an idle engine of the old ones goes, one that works finishes with them.
  void forget(const std::filesystem::path& adapter);
  // One pass of each engine that is not idle. Returns false if all are.
  bool step();

 private:
  struct Sampler {
    std::unique_ptr<Model> model;  // shares the base's weights
    std::unique_ptr<EmbeddedEngine> engine;
    bool is_whole = false;  // except if it has weights of its own
    uint64_t last_use = 0;
  };
  struct Pending {
    std::string future;
    std::filesystem::path adapter;
    SampleResult result;  // the prompt's values
    Finish finish;
  };
  Sampler& sampler(const std::filesystem::path& adapter);
  void drop_idle(bool is_whole);

  const Model& base_;
  const EmbeddedEngineOptions options_;
  std::map<std::filesystem::path, Sampler> samplers_;
  std::map<uint64_t, Pending> pending_;  // by the engine's request id
  uint64_t next_id_ = 0, num_uses_ = 0;
};

}  // namespace bough
