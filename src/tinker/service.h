// `bough serve --train`: Tinker's API (docs/tinker.md). Clients train adapters of one base model and sample
// from them. Their training loops stay in their own process.
//
//   HttpServer (I/O and preparation threads): parses, checks, answers with a future's id
//          │ works, by model in the order of seq_id              ▲ results (futures.h)
//          ▼                                                     │
//   run()'s thread: TrainingModel, Samplers, files ──────────────┘
//
// Works of one model run in the order of their seq_id, though requests arrive in any order. forward_backward
// requests that are queued one after another are computed as one tree if they have the same loss.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "models/model.h"
#include "rollout/embedded_engine.h"
#include "tinker/api_keys.h"
#include "tinker/settings.h"

namespace bough {

// The base model as clients see it.
struct TrainingBase {
  std::filesystem::path directory;
  std::unique_ptr<Model> model;
  EmbeddedEngineOptions engine;  // of the samplers
};

class TrainingService {
 public:
  // Listens when the constructor returns.
  // Throws UserError if the address cannot be used or the folder cannot be written.
  TrainingService(TrainingBase base, TrainingServiceSettings settings, ApiKeys keys);
  ~TrainingService();
  TrainingService(const TrainingService&) = delete;
  TrainingService& operator=(const TrainingService&) = delete;

  std::string url() const;
  // Computes until stop() returns true, which is asked between works and at least every 100 ms.
  void run(const std::function<bool()>& stop);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace bough
