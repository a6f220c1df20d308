#include "run/ranks_engine.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "control/controller.h"
#include "rollout/embedded_engine.h"
#include "run/engine_messages.h"
#include "run/engine_process.h"

namespace bough {

namespace {

// Passes per round: few enough that a finished turn is answered soon, enough that ranks seldom wait for each
// other.
constexpr int64_t kPasses = 8;

// Rank 0's engine if rank 0 generates nothing. No request ever enters it.
class NullEngine final : public Engine {
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
  void sample_from(SampledPolicy) override {}
  int32_t version() const override { return version_; }
  EngineStatistics statistics() const override { return {}; }

 private:
  bool paused_ = false;
  int32_t version_ = -1;
};

// Passes all tokens of a result to `on_token`, which would otherwise have got them one by one.
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
          .sampling_logprob = sample.sampling_logprobs[t],
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

}  // namespace

RanksEngine::RanksEngine(Engine* own, const ModelConfig& config, Communicator& ranks)
    : none_(own ? nullptr : std::make_unique<NullEngine>()),
      own_(own ? *own : *none_),
      limits_(model_limits(config)),
      ranks_(ranks),
      commands_(static_cast<size_t>(ranks.size()), Json::array()),
      samples_(static_cast<size_t>(ranks.size())),
      reports_(static_cast<size_t>(ranks.size())) {
  BOUGH_CHECK(ranks.rank() == 0, "requests are submitted on rank 0, got rank ", ranks.rank());
  BOUGH_CHECK(own || ranks.size() > 1, "no rank generates");
}

size_t RanksEngine::place(const GenerationRequest& request) {
  if (request.on_token && has_own()) return 0;  // tokens are not streamed between ranks
  if (const auto turn = rank_of_request_.find(request.id); turn != rank_of_request_.end())
    return turn->second;
  const std::string prompt(reinterpret_cast<const char*>(request.prompt_ids.data()),
                           request.prompt_ids.size() * sizeof(int32_t));
  const auto least =
      std::min_element(samples_.begin() + (has_own() ? 0 : 1), samples_.end()) - samples_.begin();
  return rank_of_prompt_.try_emplace(prompt, static_cast<size_t>(least)).first->second;
}

void RanksEngine::submit(GenerationRequest request) {
  check_request(request, limits_);
  BOUGH_CHECK(!in_flight_.contains(request.id), "request ", request.id, " is in flight already");
  BOUGH_CHECK(request.metadata.is_null(), "metadata is not sent between ranks");
  const uint64_t id = request.id;
  RequestPlace at{.rank = place(request), .samples = request.sampling.n_samples, .on_token = {}};
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
    const int64_t restarts = reply.value("restarts", int64_t{0});
    if (restarts > reports_[rank].restarts) {
      const int64_t ended = restarts - reports_[rank].restarts;
      num_restarts_.fetch_add(ended);
      log_warning(str("engine rank ", rank, " of ", replies.size() - 1, ": the engine process ",
                      reply.at("why").get<std::string>(), ended > 1 ? str(", the last of ", ended) : "",
                      "; a new process takes over its requests"));
    }
    reports_[rank] = {reply.at("ready").get<bool>(), statistics_from_json(reply.at("statistics")), restarts};
    for (const Json& result : reply.at("results")) round.results.push_back(result_from_json(result));
    for (const Json& request : reply.at("running")) {
      RunningRequest& running = round.running.emplace_back();
      running.id = request.at("id").get<uint64_t>();
      for (const Json& sample : request.at("samples"))
        running.samples.push_back(partial_rollout_from_json(sample));
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
    BOUGH_CHECK(found != in_flight_.end(), "got a result of request ", result.id, ", which is not in flight");
    const RequestPlace at = std::move(found->second);
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
  // Running requests stay on their rank.
  for (const auto* requests : {&in_flight_, &parked_})
    for (const auto& [id, at] : *requests) rank_of_request_[id] = at.rank;
  if (has_own()) return;
  // This round runs at once, even if no request is in flight: the next publication cannot begin before all
  // engines have these weights.
  const auto start = std::chrono::steady_clock::now();
  const Round taken = round(0, /*asks_running=*/false);
  BOUGH_CHECK(taken.results.empty(), "a round without a pass has results");
  longest_exchange_.store(std::max(longest_exchange_.load(), seconds_since(start)));
}

void RanksEngine::sample_from(SampledPolicy policy) {
  own_.sample_from(policy);
  tell_all({{"do", "policy"}, {"policy", static_cast<int>(policy)}});
}

bool RanksEngine::ready_for_weights() const {
  return own_.ready_for_weights() &&
         (!others_have_work() ||
          std::ranges::all_of(reports_, [](const Report& report) { return report.ready_for_weights; }));
}

std::vector<RunningRequest> RanksEngine::running() const {
  if (!others_have_work()) return own_.running();
  // A round without a pass changes no observable state.
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

namespace {
void serve(Communicator& ranks, const std::function<Json(const Json& message)>& of_message) {
  while (true) {
    Json message = unpacked(ranks.await_broadcast());
    if (message.contains("end")) return;
    Json own = message.at("commands").at(static_cast<size_t>(ranks.rank()));
    message["commands"] = std::move(own);
    ranks.all_gather(packed(of_message(message)));
  }
}
}  // namespace

void serve_engine(Engine& engine, WeightChannel& weights, Communicator& ranks) {
  std::optional<WeightUpdate> last;
  const auto take = [&](const Json& command) {
    const auto version = command.at("version").get<int32_t>();
    const auto are_there = [&] {
      if (const auto update = weights.take()) last = update;
      return last && last->version >= version;
    };
    await_weights(are_there, version, ranks);
    return *last;
  };
  serve(ranks, [&](const Json& message) { return answer(message, engine, take); });
}

void serve_engine(EngineProcess& engine, Communicator& ranks) {
  serve(ranks, [&](const Json& message) { return engine.answer(message); });
}

}  // namespace bough
