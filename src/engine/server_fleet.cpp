#include "engine/server_fleet.h"

#include <poll.h>

#include <algorithm>
#include <cmath>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/random.h"
#include "net/line_splitter.h"

namespace bough {

namespace {

using Steady = std::chrono::steady_clock;

// prefixes of the lengths 64, 128, ... tokens are indexed
constexpr size_t kPrefixBlock = 64;
constexpr double kFirstPause = 0.2, kLongestPause = 10;  // seconds before a lost server is retried
constexpr std::chrono::milliseconds kConnectPause{500};
constexpr double kLargestLoadRatio = 1.5;  // load of the server with the prefix over the smallest load
constexpr int64_t kComparedTokens = 16;
constexpr double kRawRatio = 4;  // how many times closer to temperature 1 log-probabilities count as raw
constexpr double kComparedTemperature = 2;  // at temperature 1 the two kinds of log-probability are equal

Steady::duration seconds(double count) {
  return std::chrono::duration_cast<Steady::duration>(std::chrono::duration<double>(count));
}

}  // namespace

ServerFleet::ServerFleet(const ServerEngineOptions& options)
    : options_(options), api_(server_api(options_.backend)) {
  if (options_.settings.addresses.empty())
    throw UserError(str("rollout.servers.addresses is empty, but rollout.backend is ", options_.backend,
                        "; expected addresses, for example [http://127.0.0.1:8000], of servers started with ",
                        how_to_start()));
  std::error_code missing;
  for (const auto& entry : std::filesystem::directory_iterator(options_.weights_folder, missing)) {
    const std::string name = entry.path().filename().string();  // weights left by a run that was killed
    if (name.size() > 1 && name[0] == 'v' && name.find_first_not_of("0123456789", 1) == std::string::npos)
      std::filesystem::remove_all(entry.path());
  }
  for (const std::string& address : options_.settings.addresses) {
    FleetServer& server = servers_.emplace_back();
    server.name = address;
    server.url = parse_http_url(address, "rollout.servers.addresses");
    server.address = wait_for_endpoint(str("rollout server ", address), server.url,
                                       options_.settings.timeout_seconds, "rollout.servers.timeout_seconds");
    connect(server);
  }
}

ServerFleet::~ServerFleet() {
  std::error_code ignored;  // a failed removal is harmless: nobody reads the weights any more
  if (!weights_.empty()) std::filesystem::remove_all(weights_, ignored);
  std::filesystem::remove(options_.weights_folder, ignored);  // removes the folder only if it is empty
}

std::unique_ptr<HttpCall> ServerFleet::call_to(const FleetServer& server) const {
  return std::make_unique<HttpCall>(server.url, server.address, options_.api_key, kStreamBytes);
}

// A server listens before it has loaded its model. Until then it may answer 503.
void ServerFleet::connect(FleetServer& server) {
  const auto deadline = Steady::now() + seconds(options_.settings.timeout_seconds);
  for (;;) {
    ServerSteps steps(call_to(server), {api_.describe()}, deadline);
    finish_all({&steps});
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
                          options_.backend, ", started with ", how_to_start()));
    if (Steady::now() + kConnectPause >= deadline)
      throw IoError(
          str("rollout server ", server.name, ": ", steps.error(), "; start it with ", how_to_start()));
    std::this_thread::sleep_for(kConnectPause);
  }
}

// A closed connection of a server with samples is opened again: the server still runs, or its streams break.
void ServerFleet::lose_restarted() {
  for (size_t i = 0; i < servers_.size(); ++i) {
    FleetServer& server = servers_[i];
    if (!server.has_weights || server.process->is_open()) continue;
    if (server.load == 0)
      lose(i, "it closed an idle connection, so it may have restarted with other weights");
    else server.process = std::make_unique<IdleConnection>(server.address);
  }
}

std::optional<size_t> ServerFleet::server_for(const std::vector<int32_t>& ids) {
  lose_restarted();
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

bool ServerFleet::lose(size_t index, const std::string& message) {
  FleetServer& server = servers_[index];
  if (!server.has_weights) return false;
  log_warning(str("rollout server ", server.name, ": ", message,
                  "; its samples continue on another server, or when this one is back"));
  server.has_weights = false;
  server.trouble = message;
  server.pause_seconds = kFirstPause;
  server.not_before = Steady::now() + seconds(server.pause_seconds);
  const bool none =
      std::none_of(servers_.begin(), servers_.end(), [](const FleetServer& s) { return s.has_weights; });
  if (none && !none_since_) none_since_ = Steady::now();
  return true;
}

std::string ServerFleet::troubles() const {
  std::string text;
  for (const FleetServer& server : servers_)
    if (!server.has_weights) text += str(text.empty() ? "" : "; ", server.name, ": ", server.trouble);
  return text;
}

void ServerFleet::bring_back() {
  const auto now = Steady::now();
  for (FleetServer& server : servers_) {
    if (server.has_weights || weights_.empty() || now < server.not_before) continue;
    if (!server.steps) {
      server.process = std::make_unique<IdleConnection>(server.address);
      std::vector<ServerCall> calls = api_.update_weights(weights_);
      calls.insert(calls.begin(), api_.describe());
      server.steps = std::make_unique<ServerSteps>(call_to(server), std::move(calls),
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

std::filesystem::path ServerFleet::write(int32_t version, const Model& model) const {
  const std::filesystem::path directory = options_.weights_folder / str("v", version);
  options_.write_weights(directory, model);
  return directory;
}

void ServerFleet::publish(const std::filesystem::path& directory, int32_t version, const Model& model) {
  const std::filesystem::path old = std::exchange(weights_, directory);
  version_ = version;
  load_weights(model);
  if (old.empty() || old == directory) return;
  std::error_code ignored;  // a failed removal is harmless
  std::filesystem::remove_all(old, ignored);
}

void ServerFleet::load_weights(const Model& model) {
  std::vector<std::unique_ptr<ServerSteps>> steps;
  std::vector<ServerSteps*> pointers;
  const auto deadline = Steady::now() + seconds(options_.settings.timeout_seconds);
  for (FleetServer& server : servers_) {
    server.steps.reset();
    server.process = std::make_unique<IdleConnection>(server.address);
    steps.push_back(std::make_unique<ServerSteps>(call_to(server), api_.update_weights(weights_), deadline));
    pointers.push_back(steps.back().get());
  }
  finish_all(pointers);
  server_of_prefix_.clear();
  none_since_.reset();
  for (FleetServer& server : servers_) server.has_weights = true;
  for (size_t i = 0; i < servers_.size(); ++i) {
    if (!steps[i]->error().empty()) lose(i, steps[i]->error());
    else if (options_.score) compare(i, model);
  }
  if (none_since_)
    throw IoError(str("no rollout server loaded the weights in ", weights_.string(), ": ", troubles(),
                      "; servers must see this path and be started with ", how_to_start()));
}

// Has a server sample a few tokens after the first few ids of the vocabulary. The temperature is not 1, to
// show whether the server's log-probabilities depend on the temperature. nullopt: the server is lost.
std::optional<ServerFleet::Sampled> ServerFleet::sample_some(size_t index) {
  const FleetServer& server = servers_[index];
  const auto lost = [&](const std::string& message) {
    lose(index, message);
    return std::nullopt;
  };
  ServerRequest asked{.id = str("bough-compare-", new_call_number()),
                      .input_ids = {},
                      .max_new_tokens = kComparedTokens,
                      .temperature = kComparedTemperature,
                      .ignore_eos = true,
                      .returns_experts = options_.experts.has_value()};
  for (int32_t token = 0; token < std::min<int64_t>(8, options_.limits.vocab_size); ++token)
    asked.input_ids.push_back(token);
  const auto call = call_to(server);
  const ServerCall said = api_.generate(asked, server.description.model);
  call->begin(said.method, said.target, dump_line(said.body));
  const auto deadline = Steady::now() + seconds(options_.settings.timeout_seconds);
  std::optional<HttpAnswer> answer;
  while (!(answer = call->advance())) {
    if (Steady::now() > deadline) return lost("no tokens in time after it loaded weights");
    pollfd watched{call->descriptor(), static_cast<short>(POLLIN | (call->wants_to_send() ? POLLOUT : 0)), 0};
    poll(&watched, 1, 50);
  }
  if (answer->kind == HttpAnswer::kAnswered && answer->status == 404)
    throw UserError(str("rollout server ", server.name, ": it has no route ", said.target, "; start it with ",
                        how_to_start()));
  if (!answer->is_success()) return lost(answer->message);
  Sampled sampled = read_sampled(server, asked, answer->body);
  if (sampled.logprobs.empty()) return lost("it sampled no token after it loaded weights");
  return sampled;
}

ServerFleet::Sampled ServerFleet::read_sampled(const FleetServer& server, const ServerRequest& asked,
                                               const std::string& body) const {
  Sampled sampled{.ids = asked.input_ids, .prompt = asked.input_ids.size(), .logprobs = {}, .routed = {}};
  LineSplitter lines(kStreamBytes);
  lines.append(body);
  while (const auto line = lines.next()) {
    if (!line->starts_with("data:") || line->find("[DONE]") != std::string::npos) continue;
    try {
      const Json json = parse_json(std::string_view(*line).substr(5), "the server's stream");
      const ServerEvent event = api_.event(json, sampled.logprobs.size(), 0);
      for (const ServerToken& token : event.tokens) {
        sampled.ids.push_back(token.id);
        sampled.logprobs.push_back(token.logprob);
      }
      if (options_.experts && event.is_complete())
        sampled.routed = api_.experts(event, *options_.experts, std::ssize(sampled.ids) - 1);
    } catch (const Json::exception&) {
      throw UserError(str("rollout server ", server.name, ": its stream is not in the format of ",
                          options_.backend, ": ", quoted(*line, 200)));
    } catch (const UserError& error) {
      throw UserError(str("rollout server ", server.name, ": ", error.what()));
    }
  }
  return sampled;
}

// Compares the server's log-probabilities with the model's.
void ServerFleet::compare(size_t index, const Model& model) {
  const FleetServer& server = servers_[index];
  const auto sampled = sample_some(index);
  if (!sampled) return;
  const auto difference = [&](double temperature) {
    const std::vector<double> own =
        options_.score(model, sampled->ids, sampled->prompt, temperature, sampled->routed);
    double sum = 0;
    for (size_t i = 0; i < own.size(); ++i) sum += std::abs(own[i] - sampled->logprobs[i]);
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
                      how_to_start()));
}

}  // namespace bough
