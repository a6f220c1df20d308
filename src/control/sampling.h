// Many requests through an engine, a bounded number in flight, with progress and a way out.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "base/json.h"
#include "rollout/engine.h"

namespace bough {

struct SamplingOptions {
  int64_t samples_in_flight = 256;  // requests are submitted while fewer samples than this are in flight
  std::function<void(int64_t done, int64_t total)> on_progress;  // in requests; may be empty
  std::function<bool()> stop;  // looked at between engine steps; may be empty
};

// Results in the order of `requests`, whose ids must differ. nullopt: stop() said so; the engine is then idle
// and nothing is left of the requests. Errors of the engine are passed on with the engine idle.
std::optional<std::vector<GenerationResult>> sample_all(Engine& engine,
                                                        std::vector<GenerationRequest> requests,
                                                        const SamplingOptions& options);

}  // namespace bough
