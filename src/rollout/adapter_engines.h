// Several low-rank adapters over one base, by name: a request says whose policy it asks (GenerationRequest::
// adapter). The base's weights are there once; each adapter is an embedded engine of its own over a model
// that shares them, with an equal part of the memory for keys and values, for what one policy has computed is
// of no use to another. A step is a pass of each that has something to do.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "rollout/embedded_engine.h"

namespace bough {

class AdapterEngines final : public Engine {
 public:
  // `base` must outlive this object. `adapters`: directories in PEFT's format, by name. `options`: of one
  // engine that had all memory. UserError: a name that is empty, a directory that holds no adapter of the
  // base.
  AdapterEngines(const Model& base, const std::map<std::string, std::filesystem::path>& adapters,
                 EmbeddedEngineOptions options);

  // UserError as the embedded engine's; an adapter that is not there.
  void submit(GenerationRequest request) override;
  std::vector<GenerationResult> step() override;
  bool idle() const override;
  bool cancel(uint64_t id) override;
  void pause() override;
  void resume() override;
  bool paused() const override { return members_.front().engine->paused(); }
  void park() override;
  void unpark() override;
  // Weights come from directories alone: nobody trains these.
  void update_weights(const WeightUpdate& update) override;
  std::vector<RunningRequest> running() const override;
  int32_t version() const override { return members_.front().engine->version(); }
  EngineStatistics statistics() const override;

 private:
  struct Member {
    std::string name;  // the base's is empty
    std::unique_ptr<Model> model;
    std::unique_ptr<EmbeddedEngine> engine;
  };
  std::vector<Member> members_;  // the base first
};

}  // namespace bough
