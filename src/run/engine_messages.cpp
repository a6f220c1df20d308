#include "run/engine_messages.h"

#include <chrono>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/settings.h"
#include "control/controller.h"
#include "data/rollout_file.h"

namespace bough {

std::string packed(const Json& json) {
  const std::vector<uint8_t> bytes = Json::to_cbor(json);
  return {bytes.begin(), bytes.end()};
}

Json unpacked(const std::string& bytes) {
  return Json::from_cbor(bytes.begin(), bytes.end());
}

Json to_json(const GenerationRequest& request) {
  Json partial = Json::array();
  for (const PartialRollout& sample : request.partial) partial.push_back(partial_rollout_to_json(sample));
  return {{"do", "submit"},
          {"id", request.id},
          {"prompt", request.prompt_ids},
          {"drawn", request.sampled},
          {"sampling", settings_yaml(request.sampling)},
          {"seed", request.seed},
          {"sequence", request.sequence ? Json(*request.sequence) : Json()},
          {"begun", std::move(partial)}};
}

namespace {
GenerationRequest request_from_json(const Json& json) {
  GenerationRequest request;
  json.at("id").get_to(request.id);
  json.at("prompt").get_to(request.prompt_ids);
  json.at("drawn").get_to(request.sampled);
  request.sampling = parse_settings<SamplingParameters>(json.at("sampling").get<std::string>(), "rank 0");
  json.at("seed").get_to(request.seed);
  if (!json.at("sequence").is_null()) request.sequence = json.at("sequence").get<uint64_t>();
  for (const Json& sample : json.at("begun")) request.partial.push_back(partial_rollout_from_json(sample));
  return request;
}
}  // namespace

Json to_json(const GenerationResult& result) {
  Json samples = Json::array();
  for (const GeneratedSample& sample : result.samples)
    samples.push_back(partial_rollout_to_json({sample, true}));
  return {{"id", result.id},
          {"prompt", result.prompt_ids},
          {"temperature", result.temperature},
          {"samples", std::move(samples)}};
}

GenerationResult result_from_json(const Json& json) {
  GenerationResult result{.id = json.at("id").get<uint64_t>(),
                          .prompt_ids = json.at("prompt").get<std::vector<int32_t>>(),
                          .temperature = json.at("temperature").get<double>(),
                          .samples = {},
                          .metadata = {}};
  for (const Json& sample : json.at("samples"))
    result.samples.push_back(partial_rollout_from_json(sample).sample);
  return result;
}

Json to_json(const EngineStatistics& s) {
  return {s.new_tokens, s.prefill_tokens, s.recomputed_tokens, s.cached_tokens,    s.preemptions,
          s.steps,      s.blocks_read,    s.blocks_in_context, s.replayed_experts, s.rerouted_experts};
}

EngineStatistics statistics_from_json(const Json& json) {
  const auto at = [&](size_t i) { return json.at(i).get<int64_t>(); };
  return {.new_tokens = at(0),
          .prefill_tokens = at(1),
          .recomputed_tokens = at(2),
          .cached_tokens = at(3),
          .preemptions = at(4),
          .steps = at(5),
          .seconds = 0,
          .blocks_read = at(6),
          .blocks_in_context = at(7),
          .replayed_experts = at(8),
          .rerouted_experts = at(9)};
}

std::vector<GenerationResult> make_passes(Engine& engine, int64_t passes) {
  std::vector<GenerationResult> results;
  for (int64_t pass = 0; pass < passes && !engine.idle(); ++pass)
    for (GenerationResult& result : engine.step()) results.push_back(std::move(result));
  return results;
}

Json answer(const Json& message, Engine& engine,
            const std::function<WeightUpdate(const Json& command)>& take) {
  for (const Json& command : message.at("commands")) {
    const std::string name = command.at("do").get<std::string>();
    if (name == "submit") engine.submit(request_from_json(command));
    else if (name == "cancel") engine.cancel(command.at("id").get<uint64_t>());
    else if (name == "weights") engine.update_weights(take(command));
    else if (name == "pause") engine.pause();
    else if (name == "resume") engine.resume();
    else if (name == "park") engine.park();
    else if (name == "unpark") engine.unpark();
    else BOUGH_CHECK(false, "unknown command ", quoted(name));
  }
  Json results = Json::array(), running = Json::array();
  if (message.at("running").get<bool>()) {
    for (const RunningRequest& request : engine.running()) {
      Json samples = Json::array();
      for (const PartialRollout& sample : request.samples) samples.push_back(partial_rollout_to_json(sample));
      running.push_back({{"id", request.id}, {"samples", std::move(samples)}});
    }
  } else {
    for (const GenerationResult& result : make_passes(engine, message.at("passes").get<int64_t>()))
      results.push_back(to_json(result));
  }
  return {{"ready", engine.ready_for_weights()},
          {"statistics", to_json(engine.statistics())},
          {"results", std::move(results)},
          {"running", std::move(running)}};
}

void await_weights(const std::function<bool()>& are_there, int32_t version, const Communicator& ranks) {
  const auto start = std::chrono::steady_clock::now();
  while (!are_there()) {
    ranks.check_abort();
    if (seconds_since(start) > ranks.deadline())
      throw IoError(
          str("rank ", ranks.rank(), " waited ", ranks.deadline(), " s for weights of version ", version));
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

}  // namespace bough
