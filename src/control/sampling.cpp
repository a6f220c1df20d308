#include "control/sampling.h"

#include <unordered_map>
#include <utility>

#include "base/error.h"

namespace bough {

std::optional<std::vector<GenerationResult>> sample_all(Engine& engine,
                                                        std::vector<GenerationRequest> requests,
                                                        const SamplingOptions& options) {
  const auto total = static_cast<int64_t>(requests.size());
  std::vector<GenerationResult> results(requests.size());
  std::unordered_map<uint64_t, size_t> index_of_id;  // of requests in flight
  int64_t samples_in_flight = 0, done = 0;
  size_t next = 0;
  const auto abandon = [&] {
    for (const auto& [id, index] : index_of_id) engine.cancel(id);
    engine.drain();
  };
  try {
    while (done < total) {
      if (options.stop && options.stop()) {
        abandon();
        return std::nullopt;
      }
      while (next < requests.size() && samples_in_flight < options.samples_in_flight) {
        const uint64_t id = requests[next].id;
        const int64_t n_samples = requests[next].n_samples;
        BOUGH_CHECK(!index_of_id.contains(id), "two requests with id ", id);
        engine.submit(std::move(requests[next]));
        index_of_id.emplace(id, next++);
        samples_in_flight += n_samples;
      }
      for (GenerationResult& result : engine.step()) {
        const auto found = index_of_id.find(result.id);
        BOUGH_CHECK(found != index_of_id.end(), "the engine returned request ", result.id,
                    ", which nobody submitted");
        samples_in_flight -= static_cast<int64_t>(result.samples.size());
        results[found->second] = std::move(result);
        index_of_id.erase(found);
        ++done;
        if (options.on_progress) options.on_progress(done, total);
      }
    }
  } catch (...) {
    abandon();
    throw;
  }
  return results;
}

}  // namespace bough
