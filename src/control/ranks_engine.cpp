#include "control/ranks_engine.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/settings.h"
#include "control/controller.h"

namespace bough {

namespace {

// Of a round: few enough that a finished turn is soon answered, enough that ranks seldom wait for each other.
constexpr int64_t kPasses = 8;

std::string packed(const Json& json) {
  const std::vector<uint8_t> bytes = Json::to_cbor(json);
  return {bytes.begin(), bytes.end()};
}

Json unpacked(const std::string& bytes) {
  return Json::from_cbor(bytes.begin(), bytes.end());
}

Json to_json(const GenerationRequest& request) {
  Json begun = Json::array();
  for (const BegunSample& sample : request.begun) begun.push_back(begun_to_json(sample));
  return {{"do", "submit"},
          {"id", request.id},
          {"prompt", request.prompt_ids},
          {"drawn", request.drawn},
          {"sampling", settings_yaml(request.sampling)},
          {"seed", request.seed},
          {"sequence", request.sequence ? Json(*request.sequence) : Json()},
          {"begun", std::move(begun)}};
}

GenerationRequest request_from_json(const Json& json) {
  GenerationRequest request;
  json.at("id").get_to(request.id);
  json.at("prompt").get_to(request.prompt_ids);
  json.at("drawn").get_to(request.drawn);
  request.sampling = parse_settings<SamplingParameters>(json.at("sampling").get<std::string>(), "rank 0");
  json.at("seed").get_to(request.seed);
  if (!json.at("sequence").is_null()) request.sequence = json.at("sequence").get<uint64_t>();
  for (const Json& sample : json.at("begun")) request.begun.push_back(begun_from_json(sample));
  return request;
}

Json to_json(const GenerationResult& result) {
  Json samples = Json::array();
  for (const GeneratedSample& sample : result.samples) samples.push_back(begun_to_json({sample, true}));
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
  for (const Json& sample : json.at("samples")) result.samples.push_back(begun_from_json(sample).sample);
  return result;
}

Json to_json(const EngineStatistics& s) {
  return {s.new_tokens,  s.prefill_tokens, s.recomputed_tokens, s.cached_tokens,
          s.preemptions, s.steps,          s.pages_read,        s.pages_in_context};
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
          .pages_read = at(6),
          .pages_in_context = at(7)};
}

std::vector<GenerationResult> make_passes(Engine& engine, int64_t passes) {
  std::vector<GenerationResult> results;
  for (int64_t pass = 0; pass < passes && !engine.idle(); ++pass)
    for (GenerationResult& result : engine.step()) results.push_back(std::move(result));
  return results;
}

}  // namespace

RanksEngine::RanksEngine(Engine& own, const ModelConfig& config, Communicator& ranks)
    : own_(own),
      config_(config),
      ranks_(ranks),
      commands_(static_cast<size_t>(ranks.size()), Json::array()),
      samples_(static_cast<size_t>(ranks.size())),
      reports_(static_cast<size_t>(ranks.size())) {
  BOUGH_CHECK(ranks.rank() == 0, "rank ", ranks.rank(), " serves");
}

size_t RanksEngine::place(const GenerationRequest& request) {
  if (request.on_token) return 0;  // tokens as they come do not travel
  if (const auto turn = rank_of_request_.find(request.id); turn != rank_of_request_.end())
    return turn->second;
  const std::string prompt(reinterpret_cast<const char*>(request.prompt_ids.data()),
                           request.prompt_ids.size() * sizeof(int32_t));
  const auto least = std::ranges::min_element(samples_) - samples_.begin();
  return rank_of_prompt_.try_emplace(prompt, static_cast<size_t>(least)).first->second;
}

void RanksEngine::submit(GenerationRequest request) {
  check_request(request, config_);
  BOUGH_CHECK(!in_flight_.contains(request.id), "request ", request.id, " is in flight");
  BOUGH_CHECK(request.metadata.is_null(), "metadata do not travel");
  const uint64_t id = request.id;
  const Place at{place(request), request.sampling.n_samples};
  if (at.rank == 0) own_.submit(std::move(request));
  else commands_[at.rank].push_back(to_json(request));
  in_flight_.emplace(id, at);
  rank_of_request_[id] = at.rank;
  samples_[at.rank] += at.samples;
}

void RanksEngine::tell_all(const Json& command) {
  for (size_t rank = 1; rank < commands_.size(); ++rank) commands_[rank].push_back(command);
}

bool RanksEngine::others_have_work() const {
  return std::any_of(samples_.begin() + 1, samples_.end(), [](int64_t count) { return count > 0; });
}

RanksEngine::Round RanksEngine::round(int64_t passes, bool asks_running) {
  const Json message = {{"passes", passes}, {"running", asks_running}, {"commands", commands_}};
  for (Json& commands : commands_) commands = Json::array();
  ranks_.broadcast(packed(message));
  Round round;
  if (asks_running) round.running = own_.running();
  else round.results = make_passes(own_, passes);
  const std::vector<std::string> replies = ranks_.all_gather("");
  for (size_t rank = 1; rank < replies.size(); ++rank) {
    const Json reply = unpacked(replies[rank]);
    reports_[rank] = {reply.at("ready").get<bool>(), statistics_from_json(reply.at("statistics"))};
    for (const Json& result : reply.at("results")) round.results.push_back(result_from_json(result));
    for (const Json& request : reply.at("running")) {
      RunningRequest& running = round.running.emplace_back();
      running.id = request.at("id").get<uint64_t>();
      for (const Json& sample : request.at("samples")) running.samples.push_back(begun_from_json(sample));
    }
  }
  return round;
}

std::vector<GenerationResult> RanksEngine::step() {
  const auto start = std::chrono::steady_clock::now();
  std::vector<GenerationResult> results =
      others_have_work() ? round(kPasses, /*asks_running=*/false).results : own_.step();
  for (const GenerationResult& result : results) {
    const auto found = in_flight_.find(result.id);
    BOUGH_CHECK(found != in_flight_.end(), "a result of request ", result.id);
    samples_[found->second.rank] -= found->second.samples;
    in_flight_.erase(found);
  }
  seconds_ += seconds_since(start);
  return results;
}

bool RanksEngine::idle() const {
  return own_.idle() && !others_have_work();
}

bool RanksEngine::cancel(uint64_t id) {
  const auto found = in_flight_.find(id);
  if (found == in_flight_.end()) return false;
  if (found->second.rank == 0) return own_.cancel(id);
  commands_[found->second.rank].push_back({{"do", "cancel"}, {"id", id}});
  return true;
}

void RanksEngine::pause() {
  own_.pause();
  tell_all({{"do", "pause"}});
}

void RanksEngine::resume() {
  own_.resume();
  tell_all({{"do", "resume"}});
}

void RanksEngine::park() {
  own_.park();
  tell_all({{"do", "park"}});
  parked_ = std::exchange(in_flight_, {});
  std::ranges::fill(samples_, 0);
}

void RanksEngine::unpark() {
  own_.unpark();
  tell_all({{"do", "unpark"}});
  in_flight_ = std::exchange(parked_, {});
  for (const auto& [id, at] : in_flight_) samples_[at.rank] += at.samples;
}

void RanksEngine::update_weights(const WeightUpdate& update) {
  own_.update_weights(update);
  tell_all({{"do", "weights"}, {"version", update.version}});
  rank_of_request_.clear();
  rank_of_prompt_.clear();
  // What runs stays where it is.
  for (const auto* requests : {&in_flight_, &parked_})
    for (const auto& [id, at] : *requests) rank_of_request_[id] = at.rank;
}

bool RanksEngine::ready_for_weights() const {
  return own_.ready_for_weights() &&
         (!others_have_work() ||
          std::ranges::all_of(reports_, [](const Report& report) { return report.ready_for_weights; }));
}

std::vector<RunningRequest> RanksEngine::running() const {
  if (!others_have_work()) return own_.running();
  // A round without a pass changes nothing that anybody sees.
  return const_cast<RanksEngine*>(this)->round(0, /*asks_running=*/true).running;
}

EngineStatistics RanksEngine::statistics() const {
  EngineStatistics sum = own_.statistics();
  for (const Report& report : reports_) sum = sum + report.statistics;
  sum.seconds = seconds_;
  return sum;
}

void RanksEngine::end() {
  ranks_.broadcast(packed({{"end", true}}));
}

void serve_engine(Engine& engine, WeightChannel& weights, Communicator& ranks) {
  std::optional<WeightUpdate> last;
  const auto take = [&](int32_t version) {
    const auto start = std::chrono::steady_clock::now();
    while (true) {
      if (const auto update = weights.take()) last = update;
      if (last && last->version >= version) return engine.update_weights(*last);
      ranks.look();
      if (seconds_since(start) > ranks.deadline())
        throw IoError(str("rank ", ranks.rank(), " waited ", ranks.deadline(),
                          " s for its trainer's weights of version ", version));
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  };
  while (true) {
    const Json message = unpacked(ranks.await_broadcast());
    if (message.contains("end")) return;
    for (const Json& command : message.at("commands").at(static_cast<size_t>(ranks.rank()))) {
      const std::string name = command.at("do").get<std::string>();
      if (name == "submit") engine.submit(request_from_json(command));
      else if (name == "cancel") engine.cancel(command.at("id").get<uint64_t>());
      else if (name == "weights") take(command.at("version").get<int32_t>());
      else if (name == "pause") engine.pause();
      else if (name == "resume") engine.resume();
      else if (name == "park") engine.park();
      else if (name == "unpark") engine.unpark();
    }
    Json results = Json::array(), running = Json::array();
    if (message.at("running").get<bool>()) {
      for (const RunningRequest& request : engine.running()) {
        Json samples = Json::array();
        for (const BegunSample& sample : request.samples) samples.push_back(begun_to_json(sample));
        running.push_back({{"id", request.id}, {"samples", std::move(samples)}});
      }
    } else {
      for (const GenerationResult& result : make_passes(engine, message.at("passes").get<int64_t>()))
        results.push_back(to_json(result));
    }
    ranks.all_gather(packed({{"ready", engine.ready_for_weights()},
                             {"statistics", to_json(engine.statistics())},
                             {"results", std::move(results)},
                             {"running", std::move(running)}}));
  }
}

}  // namespace bough
