#include "engine/server_engine.h"

#include <poll.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/random.h"

namespace bough {

namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;
using Steady = std::chrono::steady_clock;

// prefixes of the lengths 64, 128, ... tokens are indexed
constexpr size_t kPrefixBlock = 64;
constexpr int kWaitMilliseconds = 5;                     // longest wait of one step()
constexpr int64_t kMostFailures = 5;                     // maximum consecutive failures of a sample
constexpr uint64_t kStreamBytes = uint64_t{1} << 32;     // maximum bytes of a sample's event stream
constexpr double kFirstPause = 0.2, kLongestPause = 10;  // seconds before a lost server is retried
constexpr milliseconds kRepeatPause{50}, kConnectPause{500};
constexpr double kLargestLoadRatio = 1.5;  // load of the server with the prefix over the smallest load
constexpr int64_t kComparedTokens = 16;
constexpr double kRawRatio = 4;  // how many times closer to temperature 1 log-probabilities count as raw
constexpr double kComparedTemperature = 2;  // at temperature 1 the two kinds of log-probability are equal

Steady::duration seconds(double count) {
  return duration_cast<Steady::duration>(std::chrono::duration<double>(count));
}

Json parsed(const std::string& text) {
  try {
    return parse_json(text, "the server's answer");
  } catch (const UserError&) {
    return nullptr;  // for example SGLang's "Cache flushed."
  }
}

}  // namespace

class ServerSteps {
 public:
  ServerSteps(std::unique_ptr<HttpCall> call, std::vector<ServerCall> calls, Steady::time_point deadline)
      : call_(std::move(call)), calls_(std::move(calls)), deadline_(deadline) {
    begin();
  }

  int descriptor() const { return call_->descriptor(); }
  bool wants_to_send() const { return call_->wants_to_send(); }
  bool is_done() const { return next_ == calls_.size() || !error_.empty(); }
  const std::string& error() const { return error_; }  // empty if there was no error
  bool is_refused() const { return is_refused_; }      // asking again would not help
  const Json& last_answer() const { return answer_; }

  void advance() {
    if (is_done()) return;
    const auto now = Steady::now();
    const std::string& target = calls_[next_].target;
    if (now > deadline_) {
      call_->hang_up();
      error_ = str(target, ": no answer in time");
      return;
    }
    if (waits_until_) {
      if (now < *waits_until_) return;
      waits_until_.reset();
      return begin();
    }
    const auto answer = call_->advance();
    if (!answer) return;
    if (answer->kind == HttpAnswer::kAnswered && answer->status == 404 && calls_[next_].is_optional)
      return go_on();
    if (!answer->is_success()) {
      error_ = str(target, ": ", answer->message);
      is_refused_ = answer->kind == HttpAnswer::kAnswered && !answer->is_transient();
      if (answer->status == 401)
        error_ += "; set the key: BOUGH_ROLLOUT_API_KEY or rollout.servers.api_key_file";
      return;
    }
    answer_ = parsed(answer->body);
    const bool has_failed = answer_.is_object() && answer_.value("success", Json(true)) == Json(false);
    if (has_failed && calls_[next_].is_repeated) {
      waits_until_ = now + kRepeatPause;
      return;
    }
    if (has_failed) {
      error_ = str(target, ": ", quoted(answer->body, 200));
      return;
    }
    go_on();
  }

 private:
  void begin() {
    const ServerCall& call = calls_[next_];
    call_->begin(call.method, call.target, call.body.is_null() ? "" : dump_line(call.body));
  }
  void go_on() {
    if (++next_ < calls_.size()) begin();
  }

  const std::unique_ptr<HttpCall> call_;
  const std::vector<ServerCall> calls_;
  const Steady::time_point deadline_;
  size_t next_ = 0;
  std::optional<Steady::time_point> waits_until_;
  Json answer_;
  std::string error_;
  bool is_refused_ = false;
};

namespace {

// Runs the steps until all are done. They end, because each has a deadline.
void finish(const std::vector<ServerSteps*>& all) {
  for (;;) {
    std::vector<pollfd> watched;
    bool is_done = true;
    for (ServerSteps* steps : all) {
      steps->advance();
      if (steps->is_done()) continue;
      is_done = false;
      const int events = POLLIN | (steps->wants_to_send() ? POLLOUT : 0);
      watched.push_back({steps->descriptor(), static_cast<short>(events), 0});
    }
    if (is_done) return;
    poll(watched.data(), watched.size(), static_cast<int>(kRepeatPause.count()));
  }
}

}  // namespace

ServerEngine::ServerEngine(ServerEngineOptions options)
    : options_(std::move(options)), api_(server_api(options_.backend)) {
  if (options_.settings.addresses.empty())
    throw UserError(str("rollout.servers.addresses is empty, but rollout.backend is ", options_.backend,
                        "; expected addresses, for example [http://127.0.0.1:8000], of servers started with ",
                        api_.how_to_start()));
  std::error_code missing;
  for (const auto& entry : std::filesystem::directory_iterator(options_.weights_folder, missing)) {
    const std::string name = entry.path().filename().string();  // weights left by a run that was killed
    if (name.size() > 1 && name[0] == 'v' && name.find_first_not_of("0123456789", 1) == std::string::npos)
      std::filesystem::remove_all(entry.path());
  }
  for (const std::string& address : options_.settings.addresses) {
    Server& server = servers_.emplace_back();
    server.name = address;
    server.url = parse_http_url(address, "rollout.servers.addresses");
    server.address = wait_for_endpoint(str("rollout server ", address), server.url,
                                       options_.settings.timeout_seconds, "rollout.servers.timeout_seconds");
    connect(server);
  }
}

ServerEngine::~ServerEngine() {
  std::error_code ignored;  // a failed removal is harmless: nobody reads the weights any more
  if (!weights_.empty()) std::filesystem::remove_all(weights_, ignored);
  std::filesystem::remove(options_.weights_folder, ignored);  // removes the folder only if it is empty
}

std::unique_ptr<HttpCall> ServerEngine::call_of(const Server& server) const {
  return std::make_unique<HttpCall>(server.url, server.address, options_.api_key, kStreamBytes);
}

// A server listens before it has loaded its model. Until then it may answer 503.
void ServerEngine::connect(Server& server) {
  const auto deadline = Steady::now() + seconds(options_.settings.timeout_seconds);
  for (;;) {
    ServerSteps steps(call_of(server), {api_.describe()}, deadline);
    finish({&steps});
    if (steps.error().empty()) {
      try {
        server.description = api_.description(steps.last_answer());
        return;
      } catch (const Json::exception&) {
        throw UserError(str("rollout server ", server.name, ": it answered ", api_.describe().target,
                            " with ", quoted(dump_line(steps.last_answer()), 200), ", expected an answer of ",
                            options_.backend, "; check rollout.backend"));
      }
    }
    if (steps.is_refused())
      throw UserError(str("rollout server ", server.name, ": ", steps.error(), "; expected a server of ",
                          options_.backend, ", started with ", api_.how_to_start()));
    if (Steady::now() + kConnectPause >= deadline)
      throw IoError(
          str("rollout server ", server.name, ": ", steps.error(), "; start it with ", api_.how_to_start()));
    std::this_thread::sleep_for(kConnectPause);
  }
}

// ---- Requests

void ServerEngine::submit(GenerationRequest request) {
  check_request(request, options_.limits);
  const SamplingParameters& sampling = request.sampling;
  const auto refuse = [&](const char* name, const auto& value, const char* expected) {
    throw UserError(str("request ", request.id, ": ", name, " is ", value, ", but ", options_.backend,
                        " applies it to the log-probabilities, which would then differ from the policy's; "
                        "expected ",
                        expected));
  };
  if (sampling.top_p < 1) refuse("top_p", sampling.top_p, "1");
  if (sampling.top_k > 0) refuse("top_k", sampling.top_k, "0");
  if (sampling.min_p > 0) refuse("min_p", sampling.min_p, "0");
  if (sampling.repetition_penalty != 1) refuse("repetition_penalty", sampling.repetition_penalty, "1");
  if (sampling.presence_penalty != 0) refuse("presence_penalty", sampling.presence_penalty, "0");
  if (sampling.frequency_penalty != 0) refuse("frequency_penalty", sampling.frequency_penalty, "0");
  if (sampling.min_new_tokens > 0) refuse("min_new_tokens", sampling.min_new_tokens, "0");
  if (sampling.greedy && sampling.temperature != 0 && sampling.temperature != 1)
    refuse("temperature of a greedy request", sampling.temperature, "0 or 1");
  if (!sampling.stop.empty() && !options_.token_bytes)
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
      sample.is_ended = entry.asked.partial[i].has_ended;
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
    for (const Sample& sample : request.samples) entry.samples.push_back({sample.result, sample.is_ended});
    // Samples start in order. The trailing samples without tokens have not started.
    while (!entry.samples.empty() && entry.samples.back().sample.token_ids.empty()) entry.samples.pop_back();
  }
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return out;
}

// ---- Samples and their servers

std::optional<size_t> ServerEngine::server_for(const std::vector<int32_t>& ids) {
  std::optional<size_t> least, known;
  for (size_t i = 0; i < servers_.size(); ++i)
    if (servers_[i].has_weights && (!least || servers_[i].load < servers_[*least].load)) least = i;
  if (!least) return std::nullopt;
  std::vector<uint64_t> hashes;
  for (size_t end = std::min(kPrefixBlock, ids.size());; end = std::min(end + kPrefixBlock, ids.size())) {
    hashes.push_back(stable_hash(ids.data(), end * sizeof ids[0]));
    if (end == ids.size()) break;
  }
  for (size_t i = hashes.size(); i-- > 0 && !known;)
    if (const auto found = server_of_prefix_.find(hashes[i]); found != server_of_prefix_.end())
      known = found->second;
  const auto most = static_cast<int64_t>(kLargestLoadRatio * static_cast<double>(servers_[*least].load)) +
                    static_cast<int64_t>(ids.size());
  const size_t chosen =
      known && servers_[*known].has_weights && servers_[*known].load <= most ? *known : *least;
  for (const uint64_t hash : hashes) server_of_prefix_[hash] = chosen;
  return chosen;
}

void ServerEngine::begin_waiting() {
  while (!waiting_.empty() && static_cast<int64_t>(running_.size()) < options_.max_concurrent) {
    const SampleKey place = waiting_.front();
    const Request& request = requests_.at(place.request);
    std::vector<int32_t> ids = request.asked.prompt_ids;
    const auto& sampled = request.samples[place.sample].result.token_ids;
    ids.insert(ids.end(), sampled.begin(), sampled.end());
    const auto server = server_for(ids);
    if (!server) return;
    waiting_.pop_front();
    begin(place, *server);
  }
}

void ServerEngine::begin(const SampleKey& place, size_t index) {
  const Request& request = requests_.at(place.request);
  const SamplingParameters& sampling = request.asked.sampling;
  Sample& sample = at(place);
  Server& server = servers_[index];
  ServerRequest asked{.id = str("bough-", place.request, "-", place.sample, "-", ++num_calls_),
                      .input_ids = request.asked.prompt_ids,
                      .max_new_tokens = 0,
                      .temperature = sampling.greedy ? 0 : sampling.temperature,
                      .top_logprobs = sampling.top_logprobs,
                      .stop_tokens = request.stop_tokens,
                      .ignore_eos = sampling.ignore_eos};
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
  sample.call = call_of(server);
  sample.server = index;
  sample.load = most;
  sample.lines = {};
  sample.seen = 0;
  sample.finish_reason.clear();
  sample.heard = Steady::now();
  server.load += sample.load;
  statistics_.prefill_tokens += static_cast<int64_t>(asked.input_ids.size());
  if (sampled > 0) statistics_.recomputed_tokens += sampled;
  const ServerCall call = api_.generate(asked, server.description.model);
  sample.call->begin(call.method, call.target, dump_line(call.body));
  running_.push_back(place);
}

void ServerEngine::leave_server(Sample& sample) {
  if (!sample.call) return;
  sample.call.reset();  // closes the connection, so the server stops generating
  servers_[sample.server].load -= sample.load;
}

std::vector<GenerationResult> ServerEngine::step() {
  const auto start = Steady::now();
  if (!paused_) {
    bring_back();
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
    const auto found = requests_.find(place.request);
    if (found == requests_.end() || !found->second.samples[place.sample].call) continue;
    if (hear(place)) running_.push_back(place);
  }
}

bool ServerEngine::hear(const SampleKey& place) {
  const auto is_running = [&] {
    const auto found = requests_.find(place.request);
    return found != requests_.end() && found->second.samples[place.sample].call != nullptr;
  };
  const auto answer = at(place).call->advance();
  const std::string text = answer ? (answer->is_success() ? answer->body : "") : at(place).call->take_body();
  if (!text.empty()) {
    at(place).heard = Steady::now();
    take_lines(place, text);
    if (!is_running()) return false;
  }
  Sample& sample = at(place);
  if (answer && !answer->is_success()) {
    if (answer->kind == HttpAnswer::kAnswered && !answer->is_transient())
      throw UserError(str("rollout server ", servers_[sample.server].name, ": ", answer->message));
    fail(place, answer->message);
    return false;
  }
  if (answer) {  // the stream ended before the sample did
    fail(place, sample.finish_reason.empty()
                    ? "its stream ended before the sample"
                    : str("it ended an unfinished sample with finish reason ", quoted(sample.finish_reason)));
    return false;
  }
  if (Steady::now() - sample.heard > seconds(options_.settings.timeout_seconds)) {
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
    const std::string& name = servers_[at(place).server].name;
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
      append(place, token);
      const auto found = requests_.find(id);
      if (found == requests_.end() || found->second.samples[place.sample].is_ended) return;
    }
  }
}

void ServerEngine::append(const SampleKey& place, const ServerToken& token) {
  Request& request = requests_.at(place.request);
  const SamplingParameters& sampling = request.asked.sampling;
  Sample& sample = request.samples[place.sample];
  if (token.id < 0 || token.id >= options_.limits.vocab_size)
    throw UserError(str("rollout server ", servers_[sample.server].name, ": it sampled token ", token.id,
                        ", but the vocabulary has ", options_.limits.vocab_size,
                        "; check that it serves the trained model"));
  if (!std::isfinite(token.logprob) || token.logprob > 1e-3)
    throw UserError(str("rollout server ", servers_[sample.server].name, ": it gave token ", token.id,
                        " the log-probability ", token.logprob, ", expected at most 0; start it with ",
                        api_.how_to_start()));
  GeneratedSample& result = sample.result;
  result.token_ids.push_back(token.id);
  result.logprobs.push_back(token.logprob);
  result.raw_logprobs.push_back(token.logprob);
  result.sampling_logprobs.push_back(token.logprob);
  result.versions.push_back(version_);
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
                            .version = version_,
                            .is_last = reason.has_value(),
                            .top_ids = token.top_ids,
                            .top_logprobs = token.top_logprobs});
  if (reason) end(place, *reason);
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
  Server& server = servers_[sample.server];
  leave_server(sample);
  waiting_.push_front(place);
  if (++sample.failures > kMostFailures)
    throw IoError(str("rollout server ", server.name, ": a sample of request ", place.request, " failed ",
                      sample.failures, " times without a new token, the last time: ", message));
  lose(server, message);
}

void ServerEngine::lose(Server& server, const std::string& message) {
  if (!server.has_weights) return;
  log_warning(str("rollout server ", server.name, ": ", message,
                  "; its samples continue on another server, or when this one is back"));
  server.has_weights = false;
  server.trouble = message;
  for (auto& [id, request] : requests_)
    for (size_t i = 0; i < request.samples.size(); ++i) {
      Sample& sample = request.samples[i];
      if (!sample.call || &servers_[sample.server] != &server) continue;
      leave_server(sample);
      waiting_.push_front({id, i});
    }
  std::erase_if(running_, [this](const SampleKey& place) { return !at(place).call; });
  server.pause_seconds = kFirstPause;
  server.not_before = Steady::now() + seconds(server.pause_seconds);
  const bool none =
      std::none_of(servers_.begin(), servers_.end(), [](const Server& s) { return s.has_weights; });
  if (none && !none_since_) none_since_ = Steady::now();
}

std::string ServerEngine::troubles() const {
  std::string text;
  for (const Server& server : servers_)
    if (!server.has_weights) text += str(text.empty() ? "" : "; ", server.name, ": ", server.trouble);
  return text;
}

void ServerEngine::bring_back() {
  const auto now = Steady::now();
  for (Server& server : servers_) {
    if (server.has_weights || weights_.empty() || now < server.not_before) continue;
    if (!server.steps) {
      std::vector<ServerCall> calls = api_.update_weights(weights_);
      calls.insert(calls.begin(), api_.describe());
      server.steps = std::make_unique<ServerSteps>(call_of(server), std::move(calls),
                                                   now + seconds(options_.settings.timeout_seconds));
    }
    server.steps->advance();
    if (!server.steps->is_done()) continue;
    const std::string error = server.steps->error();
    server.steps.reset();
    if (!error.empty()) {
      server.trouble = error;
      server.pause_seconds = std::min(2 * server.pause_seconds, kLongestPause);
      server.not_before = now + seconds(server.pause_seconds);
      continue;
    }
    server.has_weights = true;
    std::erase_if(server_of_prefix_, [&](const auto& entry) { return &servers_[entry.second] == &server; });
    none_since_.reset();
    log_info(str("rollout server ", server.name, " is back, with weights of version ", version_));
  }
  if (none_since_ && now - *none_since_ > seconds(options_.settings.timeout_seconds))
    throw IoError(str("no rollout server was available for ", options_.settings.timeout_seconds,
                      " s (rollout.servers.timeout_seconds): ", troubles()));
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
  if (!weights_.empty() && update.version == version_) return;  // the servers have this version
  const std::filesystem::path directory = options_.weights_folder / str("v", update.version);
  options_.write_weights(directory, *update.model);  // the servers keep generating meanwhile
  interrupt();
  const std::filesystem::path old = std::exchange(weights_, directory);
  version_ = update.version;
  publish(*update.model);
  if (old.empty() || old == directory) return;
  std::error_code ignored;  // a failed removal is harmless
  std::filesystem::remove_all(old, ignored);
}

void ServerEngine::publish(const Model& model) {
  std::vector<std::unique_ptr<ServerSteps>> steps;
  std::vector<ServerSteps*> pointers;
  const auto deadline = Steady::now() + seconds(options_.settings.timeout_seconds);
  for (Server& server : servers_) {
    server.steps.reset();
    steps.push_back(std::make_unique<ServerSteps>(call_of(server), api_.update_weights(weights_), deadline));
    pointers.push_back(steps.back().get());
  }
  finish(pointers);
  server_of_prefix_.clear();
  none_since_.reset();
  for (Server& server : servers_) server.has_weights = true;
  for (size_t i = 0; i < servers_.size(); ++i) {
    if (!steps[i]->error().empty()) lose(servers_[i], steps[i]->error());
    else if (options_.score) compare(servers_[i], model);
  }
  if (none_since_)
    throw IoError(str("no rollout server loaded the weights in ", weights_.string(), ": ", troubles(),
                      "; servers must see this path and be started with ", api_.how_to_start()));
}

// Compares the server's log-probabilities with the model's. The prompt is the first few ids of the
// vocabulary. The temperature is not 1, to show whether the server's log-probabilities depend on the
// temperature.
void ServerEngine::compare(Server& server, const Model& model) {
  ServerRequest asked{.id = str("bough-compare-", ++num_calls_),
                      .input_ids = {},
                      .max_new_tokens = kComparedTokens,
                      .temperature = kComparedTemperature,
                      .ignore_eos = true};
  for (int32_t token = 0; token < std::min<int64_t>(8, options_.limits.vocab_size); ++token)
    asked.input_ids.push_back(token);
  const size_t prompt = asked.input_ids.size();
  const auto call = call_of(server);
  const ServerCall said = api_.generate(asked, server.description.model);
  call->begin(said.method, said.target, dump_line(said.body));
  const auto deadline = Steady::now() + seconds(options_.settings.timeout_seconds);
  std::optional<HttpAnswer> answer;
  while (!(answer = call->advance())) {
    if (Steady::now() > deadline) return lose(server, "no tokens in time after it loaded weights");
    pollfd watched{call->descriptor(), static_cast<short>(POLLIN | (call->wants_to_send() ? POLLOUT : 0)), 0};
    poll(&watched, 1, 50);
  }
  if (!answer->is_success()) return lose(server, answer->message);
  std::vector<int32_t> ids = asked.input_ids;
  std::vector<double> said_logprobs;
  LineSplitter lines;
  lines.append(answer->body);
  while (const auto line = lines.next()) {
    if (!line->starts_with("data:") || line->find("[DONE]") != std::string::npos) continue;
    try {
      const Json json = parse_json(std::string_view(*line).substr(5), "the server's stream");
      for (const ServerToken& token : api_.event(json, said_logprobs.size(), 0).tokens) {
        ids.push_back(token.id);
        said_logprobs.push_back(token.logprob);
      }
    } catch (const Json::exception&) {
      throw UserError(str("rollout server ", server.name, ": its stream is not in the format of ",
                          options_.backend, ": ", quoted(*line, 200)));
    }
  }
  if (said_logprobs.empty()) return lose(server, "it sampled no token after it loaded weights");
  const auto difference = [&](double temperature) {
    const std::vector<double> own = options_.score(model, ids, prompt, temperature);
    double sum = 0;
    for (size_t i = 0; i < own.size(); ++i) sum += std::abs(own[i] - said_logprobs[i]);
    return sum / static_cast<double>(own.size());
  };
  const double found = difference(kComparedTemperature), at_one = difference(1);
  const double most = options_.settings.max_logprob_difference;
  // The server ignores the temperature if its log-probabilities fit temperature 1 far better. `found` alone
  // does not show this if the model's distribution is nearly uniform: both differences are then small.
  const bool is_raw = kRawRatio * at_one < found;
  if (found <= most && !is_raw) return;
  throw UserError(str("rollout server ", server.name, ": its log-probabilities at temperature ",
                      kComparedTemperature, " differ by ", found,
                      " from the trained model's on average, expected at most ", most,
                      " (rollout.servers.max_logprob_difference); ",
                      is_raw ? "they are those of temperature 1; start it with "
                             : "check that it serves this model with these weights; start it with ",
                      api_.how_to_start()));
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
