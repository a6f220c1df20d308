#include "control/ranks_engine.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/settings.h"
#include "control/controller.h"
#include "data/rollout_file.h"

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
  for (const GeneratedSample& sample : result.samples) {
    samples.push_back(begun_to_json({sample, true}));
    if (!sample.page_choices.positions.empty()) samples.back()["pages"] = to_json(sample.page_choices);
  }
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
  for (const Json& sample : json.at("samples")) {
    result.samples.push_back(begun_from_json(sample).sample);
    if (sample.contains("pages"))
      result.samples.back().page_choices = page_choices_from_json(sample.at("pages"));
  }
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

// Rank 0's where it has none: nothing is ever in it.
class NoEngine final : public Engine {
 public:
  void submit(GenerationRequest request) override {
    BOUGH_CHECK(false, "request ", request.id, " is for rank 0, which does not generate");
  }
  std::vector<GenerationResult> step() override { return {}; }
  bool idle() const override { return true; }
  bool cancel(uint64_t) override { return false; }
  void pause() override { paused_ = true; }
  void resume() override { paused_ = false; }
  bool paused() const override { return paused_; }
  void park() override {}
  void unpark() override {}
  void update_weights(const WeightUpdate& update) override { version_ = update.version; }
  int32_t version() const override { return version_; }
  EngineStatistics statistics() const override { return {}; }

 private:
  bool paused_ = false;
  int32_t version_ = -1;
};

// Gives all tokens of a result to who would have got them one by one.
void stream(const GenerationResult& result, const std::function<void(const StreamedToken&)>& on_token) {
  for (size_t i = 0; i < result.samples.size(); ++i) {
    const GeneratedSample& sample = result.samples[i];
    for (size_t t = 0; t < sample.token_ids.size(); ++t) {
      StreamedToken token{
          .id = result.id,
          .sample = static_cast<int64_t>(i),
          .position = static_cast<int64_t>(t),
          .token = sample.token_ids[t],
          .logprob = sample.logprobs[t],
          .raw_logprob = sample.raw_logprobs[t],
          .truncated_logprob = sample.truncated_logprobs[t],
          .version = sample.versions[t],
          .is_last = t + 1 == sample.token_ids.size() && sample.finish_reason != FinishReason::kCancelled,
          .top_ids = {},
          .top_logprobs = {}};
      if (t < sample.top_ids.size()) token.top_ids = sample.top_ids[t];
      if (t < sample.top_logprobs.size()) token.top_logprobs = sample.top_logprobs[t];
      on_token(token);
    }
  }
}

std::vector<GenerationResult> make_passes(Engine& engine, int64_t passes) {
  std::vector<GenerationResult> results;
  for (int64_t pass = 0; pass < passes && !engine.idle(); ++pass)
    for (GenerationResult& result : engine.step()) results.push_back(std::move(result));
  return results;
}

// A rank's engine, and all that another one in its place would have to be told.
class ServedEngine {
 public:
  ServedEngine(std::unique_ptr<Engine>& engine, const std::function<std::unique_ptr<Engine>()>& make_again)
      : engine_(engine), make_again_(make_again) {}

  void submit(GenerationRequest request) {
    if (make_again_) asked_.push_back({request, false});
    engine_->submit(std::move(request));
  }
  void cancel(uint64_t id) {
    for (Asked& asked : asked_) asked.is_cancelled |= asked.request.id == id;
    engine_->cancel(id);
  }
  void update_weights(const WeightUpdate& update) {
    weights_ = update;
    engine_->update_weights(update);
  }
  void pause() { engine_->pause(); }
  void resume() { engine_->resume(); }
  void park() {
    engine_->park();
    parked_ = std::exchange(asked_, {});
  }
  void unpark() {
    engine_->unpark();
    asked_ = std::exchange(parked_, {});
  }

  std::vector<GenerationResult> make_passes(int64_t passes) {
    std::vector<GenerationResult> results;
    for (int64_t pass = 0; pass < passes && !engine_->idle(); ++pass) {
      std::vector<GenerationResult> finished = step();
      for (GenerationResult& result : finished) {
        std::erase_if(asked_, [&](const Asked& asked) { return asked.request.id == result.id; });
        results.push_back(std::move(result));
      }
    }
    return results;
  }

  EngineStatistics statistics() const { return lost_ + engine_->statistics(); }
  int64_t num_restarts() const { return num_restarts_; }
  const std::string& why() const { return why_; }

 private:
  struct Asked {
    GenerationRequest request;
    bool is_cancelled = false;
  };

  std::vector<GenerationResult> step() {
    try {
      std::vector<GenerationResult> finished = engine_->step();
      if (!finished.empty()) in_a_row_ = 0;
      return finished;
    } catch (const UserError&) {
      throw;
    } catch (const std::exception& error) {
      if (!make_again_ || ++in_a_row_ > kMostRestarts) throw;
      ++num_restarts_;
      why_ = error.what();
    }
    start_again();
    return {};
  }

  void start_again() {
    const bool paused = engine_->paused(), parked = !parked_.empty();
    lost_ = statistics();
    engine_.reset();  // before another one takes memory
    engine_ = make_again_();
    if (weights_) engine_->update_weights(*weights_);
    if (parked) {
      submit_again(parked_);
      engine_->park();
    }
    submit_again(asked_);
    if (paused) engine_->pause();
  }
  void submit_again(const std::vector<Asked>& all) {
    for (const Asked& asked : all) {
      engine_->submit(asked.request);
      if (asked.is_cancelled) engine_->cancel(asked.request.id);
    }
  }

  std::unique_ptr<Engine>& engine_;
  const std::function<std::unique_ptr<Engine>()>& make_again_;
  std::vector<Asked> asked_, parked_;  // in flight, in the order in which they came
  std::optional<WeightUpdate> weights_;
  EngineStatistics lost_;  // of the engines before this one
  int64_t num_restarts_ = 0, in_a_row_ = 0;
  std::string why_;  // the last one threw
};

}  // namespace

RanksEngine::RanksEngine(Engine* own, const ModelConfig& config, Communicator& ranks)
    : none_(own ? nullptr : std::make_unique<NoEngine>()),
      own_(own ? *own : *none_),
      config_(config),
      ranks_(ranks),
      commands_(static_cast<size_t>(ranks.size()), Json::array()),
      samples_(static_cast<size_t>(ranks.size())),
      reports_(static_cast<size_t>(ranks.size())) {
  BOUGH_CHECK(ranks.rank() == 0, "rank ", ranks.rank(), " serves");
  BOUGH_CHECK(own || ranks.size() > 1, "no rank generates");
}

size_t RanksEngine::place(const GenerationRequest& request) {
  if (request.on_token && has_own()) return 0;  // tokens as they come do not travel
  if (const auto turn = rank_of_request_.find(request.id); turn != rank_of_request_.end())
    return turn->second;
  const std::string prompt(reinterpret_cast<const char*>(request.prompt_ids.data()),
                           request.prompt_ids.size() * sizeof(int32_t));
  const auto least =
      std::min_element(samples_.begin() + (has_own() ? 0 : 1), samples_.end()) - samples_.begin();
  return rank_of_prompt_.try_emplace(prompt, static_cast<size_t>(least)).first->second;
}

void RanksEngine::submit(GenerationRequest request) {
  check_request(request, config_);
  BOUGH_CHECK(!in_flight_.contains(request.id), "request ", request.id, " is in flight");
  BOUGH_CHECK(request.metadata.is_null(), "metadata do not travel");
  const uint64_t id = request.id;
  Place at{.rank = place(request), .samples = request.sampling.n_samples, .on_token = {}};
  rank_of_request_[id] = at.rank;
  samples_[at.rank] += at.samples;
  if (at.rank == 0) {
    own_.submit(std::move(request));
  } else {
    commands_[at.rank].push_back(to_json(request));
    at.on_token = std::move(request.on_token);
  }
  in_flight_.emplace(id, std::move(at));
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
    const int64_t restarts = reply.at("restarts").get<int64_t>();
    if (restarts > reports_[rank].restarts) {
      num_restarts_.fetch_add(restarts - reports_[rank].restarts);
      log_warning(str("engine rank ", rank, " of ", replies.size() - 1,
                      ": its engine was made again and has its requests again; it had failed with: ",
                      reply.at("why").get<std::string>()));
    }
    reports_[rank] = {reply.at("ready").get<bool>(), statistics_from_json(reply.at("statistics")), restarts};
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
    const Place at = std::move(found->second);
    in_flight_.erase(found);
    samples_[at.rank] -= at.samples;
    if (at.on_token) stream(result, at.on_token);
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
  if (has_own()) return;
  // At once, also where nothing runs: the next publication waits for it.
  const auto start = std::chrono::steady_clock::now();
  const Round taken = round(0, /*asks_running=*/false);
  BOUGH_CHECK(taken.results.empty(), "a round without a pass has results");
  longest_exchange_.store(std::max(longest_exchange_.load(), seconds_since(start)));
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

void serve_engine(std::unique_ptr<Engine>& engine, WeightChannel& weights, Communicator& ranks,
                  const std::function<std::unique_ptr<Engine>()>& make_again) {
  ServedEngine served(engine, make_again);
  std::optional<WeightUpdate> last;
  const auto take = [&](int32_t version) {
    const auto start = std::chrono::steady_clock::now();
    while (!last || last->version < version) {
      if (const auto update = weights.take()) {
        last = update;
        continue;
      }
      ranks.look();
      if (seconds_since(start) > ranks.deadline())
        throw IoError(str("rank ", ranks.rank(), " waited ", ranks.deadline(),
                          " s for its trainer's weights of version ", version));
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    served.update_weights(*last);
  };
  while (true) {
    const Json message = unpacked(ranks.await_broadcast());
    if (message.contains("end")) return;
    for (const Json& command : message.at("commands").at(static_cast<size_t>(ranks.rank()))) {
      const std::string name = command.at("do").get<std::string>();
      if (name == "submit") served.submit(request_from_json(command));
      else if (name == "cancel") served.cancel(command.at("id").get<uint64_t>());
      else if (name == "weights") take(command.at("version").get<int32_t>());
      else if (name == "pause") served.pause();
      else if (name == "resume") served.resume();
      else if (name == "park") served.park();
      else if (name == "unpark") served.unpark();
    }
    Json results = Json::array(), running = Json::array();
    if (message.at("running").get<bool>()) {
      for (const RunningRequest& request : engine->running()) {
        Json samples = Json::array();
        for (const BegunSample& sample : request.samples) samples.push_back(begun_to_json(sample));
        running.push_back({{"id", request.id}, {"samples", std::move(samples)}});
      }
    } else {
      for (const GenerationResult& result : served.make_passes(message.at("passes").get<int64_t>()))
        results.push_back(to_json(result));
    }
    ranks.all_gather(packed({{"ready", engine->ready_for_weights()},
                             {"statistics", to_json(served.statistics())},
                             {"restarts", served.num_restarts()},
                             {"why", served.why()},
                             {"results", std::move(results)},
                             {"running", std::move(running)}}));
  }
}

}  // namespace bough
