#include "engine/server_engine.h"

#include <poll.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace bough {

namespace {

using Steady = std::chrono::steady_clock;

constexpr int kWaitMilliseconds = 5;  // longest wait of one step()
constexpr int64_t kMostFailures = 5;  // maximum consecutive failures of a sample

}  // namespace

ServerEngine::ServerEngine(ServerEngineOptions options)
    : options_(std::move(options)), api_(server_api(options_.backend)), fleet_(options_) {}

// ---- Requests

void ServerEngine::submit(GenerationRequest request) {
  check_request(request, options_.limits);
  check_server_sampling(request, options_.backend);
  if (!request.sampling.stop.empty() && !options_.token_bytes)
    throw UserError(str("request ", request.id,
                        ": stop strings need a tokenizer, and the model directory has no tokenizer.json; use "
                        "stop_token_ids"));
  if (requests_.contains(request.id))
    throw UserError(str("request ", request.id, ": a request with this id is already in flight"));
  const uint64_t id = request.id;
  Request& entry = requests_[id];
  entry.asked = std::move(request);
  entry.stop_tokens.assign(entry.asked.sampling.stop_token_ids.begin(),
                           entry.asked.sampling.stop_token_ids.end());
  if (!entry.asked.sampling.ignore_eos)
    entry.stop_tokens.insert(entry.stop_tokens.end(), options_.stop_tokens.begin(),
                             options_.stop_tokens.end());
  std::sort(entry.stop_tokens.begin(), entry.stop_tokens.end());
  entry.stop_tokens.erase(std::unique(entry.stop_tokens.begin(), entry.stop_tokens.end()),
                          entry.stop_tokens.end());
  entry.samples = std::vector<Sample>(static_cast<size_t>(entry.asked.sampling.n_samples));
  for (size_t i = 0; i < entry.samples.size(); ++i) {
    Sample& sample = entry.samples[i];
    if (!entry.asked.sampling.stop.empty()) sample.stops.emplace(&entry.asked.sampling.stop);
    if (i < entry.asked.partial.size()) {
      sample.result = entry.asked.partial[i].sample;
      sample.waits_for_experts = entry.asked.partial[i].has_ended && lacks_experts(entry, sample);
      sample.is_ended = entry.asked.partial[i].has_ended && !sample.waits_for_experts;
      if (sample.stops)
        for (const int32_t token : sample.result.token_ids) sample.stops->push(options_.token_bytes(token));
    }
    if (sample.is_ended) ++entry.num_ended;
    else waiting_.push_back({id, i});
  }
  if (entry.num_ended == entry.samples.size()) end({id, 0}, FinishReason::kCancelled);
}

bool ServerEngine::cancel(uint64_t id) {
  const auto found = requests_.find(id);
  if (found == requests_.end()) return false;
  const size_t count = found->second.samples.size();
  for (size_t i = 0; i < count; ++i) {
    const auto entry = requests_.find(id);
    if (entry == requests_.end()) break;  // the last sample ended the request
    if (!entry->second.samples[i].is_ended) end({id, i}, FinishReason::kCancelled);
  }
  const auto is_gone = [id](const SampleKey& place) { return place.request == id; };
  std::erase_if(waiting_, is_gone);
  std::erase_if(running_, is_gone);
  return true;
}

std::vector<RunningRequest> ServerEngine::running() const {
  std::vector<RunningRequest> out;
  for (const auto& [id, request] : requests_) {
    RunningRequest& entry = out.emplace_back();
    entry.id = id;
    for (const Sample& sample : request.samples)
      entry.samples.push_back({sample.result, sample.is_ended || sample.waits_for_experts});
    // Samples start in order. The trailing samples without tokens have not started.
    while (!entry.samples.empty() && entry.samples.back().sample.token_ids.empty()) entry.samples.pop_back();
  }
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return out;
}

// ---- Samples and their servers

void ServerEngine::begin_waiting() {
  while (!waiting_.empty() && static_cast<int64_t>(running_.size()) < options_.max_concurrent) {
    const SampleKey place = waiting_.front();
    const Request& request = requests_.at(place.request);
    std::vector<int32_t> ids = request.asked.prompt_ids;
    const auto& sampled = request.samples[place.sample].result.token_ids;
    ids.insert(ids.end(), sampled.begin(), sampled.end());
    const auto server = fleet_.server_for(ids);
    if (!server) return;
    waiting_.pop_front();
    begin(place, *server);
  }
}

void ServerEngine::begin(const SampleKey& place, size_t index) {
  const Request& request = requests_.at(place.request);
  const SamplingParameters& sampling = request.asked.sampling;
  Sample& sample = at(place);
  const FleetServer& server = fleet_.server(index);
  ServerRequest asked{.id = str("bough-", place.request, "-", place.sample, "-", fleet_.new_call_number()),
                      .input_ids = request.asked.prompt_ids,
                      .max_new_tokens = 0,
                      .temperature = sampling.greedy ? 0 : sampling.temperature,
                      .top_logprobs = sampling.top_logprobs,
                      .stop_tokens = request.stop_tokens,
                      .ignore_eos = sampling.ignore_eos,
                      .returns_experts = options_.experts.has_value()};
  if (options_.experts) asked.stop = sampling.stop;
  const auto sampled = static_cast<int64_t>(sample.result.token_ids.size());
  const auto prompt = static_cast<int64_t>(asked.input_ids.size());
  const int64_t most = std::min(prompt + sampling.max_new_tokens, options_.limits.max_length);
  if (server.description.max_length > 0 && most > server.description.max_length)
    throw UserError(str("rollout server ", server.name, ": it accepts ", server.description.max_length,
                        " tokens of prompt and response, but request ", place.request, " may need ", most,
                        "; start it with --max-model-len ", most, " or more, or lower max_new_tokens"));
  asked.max_new_tokens = most - prompt - sampled;
  asked.input_ids.insert(asked.input_ids.end(), sample.result.token_ids.begin(),
                         sample.result.token_ids.end());
  if (sample.waits_for_experts) {  // the server samples one more token, for the record of those before it
    asked.input_ids.pop_back();
    asked.max_new_tokens = 1;
  }
  sample.sent = std::ssize(asked.input_ids);
  sample.call = fleet_.call_to(server);
  sample.server = index;
  sample.load = most;
  sample.lines = LineSplitter(kStreamBytes);
  sample.seen = 0;
  sample.finish_reason.clear();
  sample.heard = Steady::now();
  fleet_.add_load(index, sample.load);
  statistics_.prefill_tokens += sample.sent;
  statistics_.recomputed_tokens += sampled;
  if (options_.experts && sampled > 0 && sample.result.versions.back() != fleet_.version())
    statistics_.rerouted_experts += prompt + sampled - 1;
  const ServerCall call = api_.generate(asked, server.description.model);
  sample.call->begin(call.method, call.target, dump_line(call.body));
  running_.push_back(place);
}

void ServerEngine::leave_server(Sample& sample) {
  if (!sample.call) return;
  sample.call.reset();  // closes the connection, so the server stops generating
  fleet_.add_load(sample.server, -sample.load);
}

std::vector<GenerationResult> ServerEngine::step() {
  const auto start = Steady::now();
  if (!paused_) {
    fleet_.bring_back();
    begin_waiting();
    if (!requests_.empty()) {
      ++statistics_.steps;
      listen(finished_.empty() ? kWaitMilliseconds : 0);
    }
  }
  statistics_.seconds += seconds_since(start);
  return std::exchange(finished_, {});
}

void ServerEngine::listen(int wait_milliseconds) {
  std::vector<pollfd> watched;
  watched.reserve(running_.size());
  for (const SampleKey& place : running_) {
    const HttpCall& call = *at(place).call;
    const int events = POLLIN | (call.wants_to_send() ? POLLOUT : 0);
    watched.push_back({call.descriptor(), static_cast<short>(events), 0});
    if (call.has_failed()) wait_milliseconds = 0;
  }
  poll(watched.data(), watched.size(), wait_milliseconds);
  const std::vector<SampleKey> places = std::exchange(running_, {});
  for (const SampleKey& place : places) {
    if (is_on_server(place) && hear(place)) running_.push_back(place);
  }
}

bool ServerEngine::is_on_server(const SampleKey& place) const {
  const auto found = requests_.find(place.request);
  return found != requests_.end() && found->second.samples[place.sample].call != nullptr;
}

bool ServerEngine::hear(const SampleKey& place) {
  const auto answer = at(place).call->advance();
  const std::string text = answer ? (answer->is_success() ? answer->body : "") : at(place).call->take_body();
  if (!text.empty()) {
    at(place).heard = Steady::now();
    take_lines(place, text);
    if (!is_on_server(place)) return false;
  }
  Sample& sample = at(place);
  if (answer && !answer->is_success()) {
    if (answer->kind == HttpAnswer::kAnswered && !answer->is_transient())
      throw UserError(str("rollout server ", fleet_.server(sample.server).name, ": ", answer->message));
    fail(place, answer->message);
    return false;
  }
  if (answer) {  // the stream ended before the sample did
    fail(place, sample.finish_reason.empty()
                    ? "its stream ended before the sample"
                    : str("it ended an unfinished sample with finish reason ", quoted(sample.finish_reason)));
    return false;
  }
  if (seconds_since(sample.heard) > options_.settings.timeout_seconds) {
    fail(place,
         str("no token for ", options_.settings.timeout_seconds, " s (rollout.servers.timeout_seconds)"));
    return false;
  }
  return true;
}

// Reads the events of the stream: lines "data: {...}".
void ServerEngine::take_lines(const SampleKey& place, const std::string& text) {
  static constexpr std::string_view kData = "data:";
  const uint64_t id = place.request;
  at(place).lines.append(text);
  for (;;) {
    const auto line = at(place).lines.next();
    if (!line) return;
    if (!line->starts_with(kData)) continue;
    const std::string_view payload = std::string_view(*line).substr(kData.size());
    if (payload.find("[DONE]") != std::string_view::npos) continue;
    const std::string& name = fleet_.server(at(place).server).name;
    ServerEvent event;
    try {
      const Json json = parse_json(payload, "the server's stream");
      if (json.contains("error"))
        throw UserError(str("it reports the error ", quoted(dump_line(json.at("error")), 300)));
      event = api_.event(json, at(place).seen, requests_.at(id).asked.sampling.top_logprobs);
    } catch (const Json::exception& error) {
      throw UserError(str("rollout server ", name, ": its stream is not in the format of ", options_.backend,
                          ": ", quoted(payload, 200), " (", error.what(), ")"));
    } catch (const UserError& error) {
      throw UserError(str("rollout server ", name, ": ", error.what()));
    }
    if (!event.finish_reason.empty()) at(place).finish_reason = event.finish_reason;
    at(place).seen += event.tokens.size();
    for (const ServerToken& token : event.tokens) {
      if (at(place).waits_for_experts) break;
      append(place, token);
      if (!is_on_server(place)) return;
    }
    if (at(place).waits_for_experts && event.is_complete()) return take_experts(place, event);
  }
}

void ServerEngine::append(const SampleKey& place, const ServerToken& token) {
  Request& request = requests_.at(place.request);
  const SamplingParameters& sampling = request.asked.sampling;
  Sample& sample = request.samples[place.sample];
  if (token.id < 0 || token.id >= options_.limits.vocab_size)
    throw UserError(str("rollout server ", fleet_.server(sample.server).name, ": it sampled token ", token.id,
                        ", but the vocabulary has ", options_.limits.vocab_size,
                        "; check that it serves the trained model"));
  if (!std::isfinite(token.logprob) || token.logprob > 1e-3)
    throw UserError(str("rollout server ", fleet_.server(sample.server).name, ": it gave token ", token.id,
                        " the log-probability ", token.logprob, ", expected at most 0; start it with ",
                        fleet_.how_to_start()));
  GeneratedSample& result = sample.result;
  result.token_ids.push_back(token.id);
  result.logprobs.push_back(token.logprob);
  result.raw_logprobs.push_back(token.logprob);
  result.sampling_logprobs.push_back(token.logprob);
  result.versions.push_back(fleet_.version());
  if (sampling.top_logprobs > 0) {
    result.top_ids.push_back(token.top_ids);
    result.top_logprobs.push_back(token.top_logprobs);
  }
  sample.failures = 0;
  if (std::exchange(sample.must_make_progress, false)) --num_must_progress_;
  ++statistics_.new_tokens;
  const auto sampled = static_cast<int64_t>(result.token_ids.size());
  const auto length = static_cast<int64_t>(request.asked.prompt_ids.size()) + sampled;
  std::optional<FinishReason> reason;
  if (std::binary_search(request.stop_tokens.begin(), request.stop_tokens.end(), token.id))
    reason = FinishReason::kStop;
  else if (sample.stops && sample.stops->push(options_.token_bytes(token.id)))
    reason = FinishReason::kStopString;
  else if (sampled >= sampling.max_new_tokens || length >= options_.limits.max_length)
    reason = FinishReason::kLength;
  if (request.asked.on_token)
    request.asked.on_token({.id = place.request,
                            .sample = static_cast<int64_t>(place.sample),
                            .position = sampled - 1,
                            .token = token.id,
                            .logprob = token.logprob,
                            .raw_logprob = token.logprob,
                            .sampling_logprob = token.logprob,
                            .version = fleet_.version(),
                            .is_last = reason.has_value(),
                            .top_ids = token.top_ids,
                            .top_logprobs = token.top_logprobs});
  if (!reason) return;
  if (!options_.experts) return end(place, *reason);
  sample.waits_for_experts = true;
  result.finish_reason = *reason;
}

// ---- Experts

bool ServerEngine::lacks_experts(const Request& request, const Sample& sample) const {
  const GeneratedSample& result = sample.result;
  if (!options_.experts || result.token_ids.empty() || result.finish_reason == FinishReason::kCancelled)
    return false;
  return result.routed_experts.num_rows() !=
         std::ssize(request.asked.prompt_ids) + std::ssize(result.token_ids) - 1;
}

void ServerEngine::take_experts(const SampleKey& place, const ServerEvent& event) {
  Sample& sample = at(place);
  GeneratedSample& result = sample.result;
  // The server may have sampled tokens after the end of the sample.
  const int64_t known = sample.sent + static_cast<int64_t>(sample.seen);
  try {
    result.routed_experts = api_.experts(event, *options_.experts, known - 1);
  } catch (const UserError& error) {
    throw UserError(str("rollout server ", fleet_.server(sample.server).name, ": ", error.what()));
  }
  result.routed_experts.truncate(std::ssize(requests_.at(place.request).asked.prompt_ids) +
                                 std::ssize(result.token_ids) - 1);
  end(place, result.finish_reason);
}

// Ends a sample. Also called for a request whose samples had all ended before it was submitted.
void ServerEngine::end(const SampleKey& place, FinishReason reason) {
  Request& request = requests_.at(place.request);
  Sample& sample = request.samples[place.sample];
  if (!sample.is_ended) {
    leave_server(sample);
    if (std::exchange(sample.must_make_progress, false)) --num_must_progress_;
    sample.is_ended = true;
    sample.result.finish_reason = reason;
    ++request.num_ended;
  }
  if (request.num_ended < request.samples.size()) return;
  GenerationResult& result = finished_.emplace_back();
  result.id = place.request;
  result.prompt_ids = std::move(request.asked.prompt_ids);
  const double temperature = request.asked.sampling.temperature;
  result.temperature = temperature == 0 ? 1 : temperature;
  for (Sample& each : request.samples) result.samples.push_back(std::move(each.result));
  result.metadata = std::move(request.asked.metadata);
  requests_.erase(place.request);
}

// ---- Errors

// A broken connection does not show whether the server still runs. Before the server gets another sample, it
// is checked, and it gets the weights again, because it may have been started anew.
void ServerEngine::fail(const SampleKey& place, const std::string& message) {
  Sample& sample = at(place);
  const size_t server = sample.server;
  leave_server(sample);
  waiting_.push_front(place);
  if (++sample.failures > kMostFailures)
    throw IoError(str("rollout server ", fleet_.server(server).name, ": a sample of request ", place.request,
                      " failed ", sample.failures, " times without a new token, the last time: ", message));
  lose(server, message);
}

void ServerEngine::lose(size_t server, const std::string& message) {
  if (!fleet_.lose(server, message)) return;
  for (auto& [id, request] : requests_)
    for (size_t i = 0; i < request.samples.size(); ++i) {
      Sample& sample = request.samples[i];
      if (!sample.call || sample.server != server) continue;
      leave_server(sample);
      waiting_.push_front({id, i});
    }
  std::erase_if(running_, [this](const SampleKey& place) { return !at(place).call; });
}

// ---- Weights

// Tokens that have arrived keep the version that sampled them. The rest of each sample comes from the next
// version.
void ServerEngine::interrupt() {
  if (!running_.empty()) listen(0);
  for (auto place = running_.rbegin(); place != running_.rend(); ++place) {
    Sample& sample = at(*place);
    leave_server(sample);
    if (!std::exchange(sample.must_make_progress, true)) ++num_must_progress_;
    waiting_.push_front(*place);
  }
  running_.clear();
}

void ServerEngine::update_weights(const WeightUpdate& update) {
  BOUGH_CHECK(update.model != nullptr, "the weight update has no model");
  if (fleet_.has_weights(update.version)) return;
  // The servers keep generating while the weights are written.
  const std::filesystem::path directory = fleet_.write(update.version, *update.model);
  interrupt();
  fleet_.publish(directory, update.version, *update.model);
}

// ---- Parking

void ServerEngine::park() {
  BOUGH_CHECK(parked_.empty() && parked_finished_.empty(), "park: requests are already parked");
  interrupt();
  parked_ = std::exchange(requests_, {});
  parked_waiting_ = std::exchange(waiting_, {});
  parked_finished_ = std::exchange(finished_, {});
}

void ServerEngine::unpark() {
  BOUGH_CHECK(idle(), "unpark: the engine is not idle");
  requests_ = std::exchange(parked_, {});
  waiting_ = std::exchange(parked_waiting_, {});
  finished_ = std::exchange(parked_finished_, {});
}

}  // namespace bough
