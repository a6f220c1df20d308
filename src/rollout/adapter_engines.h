// Several low-rank adapters (LoRA) on one base model. GenerationRequest::adapter names the adapter. The base
// weights are in memory once. Each adapter has an embedded engine and a model that uses the base weights.
// Each engine has its own pages, because keys and values of one adapter are wrong for another. All engines
// get the same number of bytes for pages. step() runs one pass of each engine that is not idle.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "rollout/embedded_engine.h"

namespace bough {

// Returns the bytes for keys and values of each of `count` engines: `kv_memory` divided by `count`. auto on a
// GPU: kDeviceShare of the memory that is free now, divided. free(): that memory; called once at most, as
// it shrinks with every engine. auto on the CPU stays auto.
Bytes kv_memory_of_each(const Bytes& kv_memory, at::Device device, int64_t count,
                        const std::function<int64_t()>& free);

class AdapterEngines final : public Engine {
 public:
  // `base` must outlive this object. `adapters`: directories in PEFT's format, by name. `options`: of one
  // engine with all the memory; the constructor divides the memory. Throws UserError if a name is empty or a
  // directory holds no adapter for the base model.
  AdapterEngines(const Model& base, const std::map<std::string, std::filesystem::path>& adapters,
                 EmbeddedEngineOptions options);

  // Throws UserError as EmbeddedEngine::submit() does, and if no adapter has the name `request.adapter`.
  void submit(GenerationRequest request) override;
  std::vector<GenerationResult> step() override;
  bool idle() const override;
  bool cancel(uint64_t id) override;
  void pause() override;
  void resume() override;
  bool paused() const override { return members_.front().engine->paused(); }
  void park() override;
  void unpark() override;
  // Always throws InternalError: the weights come from directories and are never trained.
  void update_weights(const WeightUpdate& update) override;
  std::vector<RunningRequest> running() const override;
  int32_t version() const override { return members_.front().engine->version(); }
  EngineStatistics statistics() const override;

 private:
  struct Member {
    std::string name;  // empty: the base model
    std::unique_ptr<Model> model;
    std::unique_ptr<EmbeddedEngine> engine;
  };
  std::vector<Member> members_;  // the base model first
};

}  // namespace bough
