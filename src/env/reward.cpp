#include "env/reward.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <future>
#include <set>

#include "base/error.h"
#include "env/http_reward.h"
#include "env/process_reward.h"

namespace bough {

namespace {

struct BuiltinReward {
  const char* name;
  std::unique_ptr<RewardFunction> (*make)(const RewardSettings& settings);
};

template <class Function>
std::unique_ptr<RewardFunction> make(const RewardSettings& settings) {
  return std::make_unique<Function>(settings);
}

constexpr std::array kBuiltinRewards = {
    BuiltinReward{"number", make<VerifierReward>},
    BuiltinReward{"math", [](const RewardSettings& settings) { return make_math_reward(settings.math); }},
    BuiltinReward{"code",
                  [](const RewardSettings& settings) {
                    CodeVerifierOptions options = settings.code;
                    options.workers = settings.workers;
                    options.failure_reward = settings.failure_reward;
                    return make_code_reward(options);
                  }},
};

std::string names_of_builtins() {
  std::string out;
  for (const BuiltinReward& builtin : kBuiltinRewards)
    out += (out.empty() ? "" : ", ") + std::string(builtin.name);
  return out;
}

bool is_url(const std::string& text) {
  return text.find("://") != std::string::npos;
}

// The setting `reward` alone, so that a command line's text can be parsed like a settings file.
struct RewardHolder {
  RewardEntries reward;

  template <class V>
  void visit(V& v) {
    v("reward", reward, "");
  }
};

std::unique_ptr<RewardFunction> make_part(const RewardEntry& entry, const RewardSettings& common) {
  RewardSettings settings = common;
  settings.workers = entry.workers.value_or(common.workers);
  settings.timeout_seconds = entry.timeout_seconds.value_or(common.timeout_seconds);
  if (!entry.function.empty()) return make_python_reward(entry.function, settings);
  if (!entry.command.empty()) return make_command_reward(entry.command, entry.ready_line, settings);
  if (!entry.url.empty()) return make_http_reward(entry.url, settings);
  return make_builtin_reward(entry.verifier, settings);
}

}  // namespace

// ---- Making the reward of a setting ----

void RewardEntry::check() const {
  const std::array sources = {&function, &command, &url, &verifier};
  const auto num_given = std::count_if(sources.begin(), sources.end(),
                                       [](const std::string* source) { return !source->empty(); });
  if (num_given != 1)
    throw UserError(str("got ", num_given == 0 ? "none" : "several",
                        " of function, command, url and verifier, expected one of them"));
  const bool named = std::all_of(name.begin(), name.end(), [](const unsigned char c) {
    return std::isalnum(c) || c == '_' || c == '-' || c == '.';
  });
  if (!named)
    throw UserError(str("name: got ", quoted(name),
                        ", expected letters, digits, '_', '-' and '.' only: it is "
                        "part of a metric's name"));
  if (ready_line && command.empty()) throw UserError("ready_line applies to a command only; remove it");
  const auto builtins = builtin_reward_names();
  if (!verifier.empty() && std::find(builtins.begin(), builtins.end(), verifier) == builtins.end())
    throw UserError(str("verifier: got ", quoted(verifier), ", expected one of ", names_of_builtins()));
}

RewardEntry RewardEntry::from_text(const std::string& text) {
  RewardEntry entry;
  const auto builtins = builtin_reward_names();
  if (std::find(builtins.begin(), builtins.end(), text) != builtins.end()) entry.verifier = text;
  else if (is_url(text)) entry.url = text;
  else entry.function = text;
  return entry;
}

std::optional<std::string> RewardEntry::to_text() const {
  const bool is_plain =
      name.empty() && command.empty() && weight == 1 && !workers && !timeout_seconds && !ready_line;
  const std::string text = function + url + verifier;
  if (!is_plain || text.empty()) return std::nullopt;
  const RewardEntry back = from_text(text);
  const bool same = back.function == function && back.url == url && back.verifier == verifier;
  return same ? std::optional(text) : std::nullopt;
}

std::string RewardEntry::metric_name() const {
  if (!name.empty()) return name;
  if (!function.empty()) return function.substr(function.rfind(':') + 1);
  return verifier;
}

std::vector<std::string> builtin_reward_names() {
  std::vector<std::string> names;
  for (const BuiltinReward& builtin : kBuiltinRewards) names.emplace_back(builtin.name);
  return names;
}

std::unique_ptr<RewardFunction> make_builtin_reward(const std::string& name, const RewardSettings& settings) {
  for (const BuiltinReward& builtin : kBuiltinRewards)
    if (name == builtin.name) return builtin.make(settings);
  throw UserError(
      str("reward: no verifier is named ", quoted(name), "; expected one of ", names_of_builtins()));
}

std::unique_ptr<RewardFunction> make_reward(const RewardEntries& entries, const RewardSettings& settings) {
  if (entries.empty()) return std::make_unique<VerifierReward>(settings);
  const RewardEntry& first = entries.front();
  if (entries.size() == 1 && first.name.empty() && first.weight == 1) return make_part(first, settings);
  std::set<std::string> names;
  for (const RewardEntry& entry : entries) {
    const std::string name = entry.metric_name();
    if (name.empty())
      throw UserError(str("reward: the entry with ", entry.url.empty() ? "command " : "url ",
                          quoted(entry.command + entry.url), " has no name; give it one for its metrics"));
    if (!names.insert(name).second)
      throw UserError(str("reward: two entries are named ", quoted(name), "; give each a name of its own"));
  }
  std::vector<WeightedReward::Part> parts;
  for (const RewardEntry& entry : entries)
    parts.push_back({entry.metric_name(), entry.weight, make_part(entry, settings)});
  return std::make_unique<WeightedReward>(std::move(parts), settings.failure_reward);
}

std::unique_ptr<RewardFunction> make_reward(const std::string& text, const RewardSettings& settings) {
  return make_reward(parse_settings<RewardHolder>("", "", {"reward=" + text}).reward, settings);
}

// ---- Results ----

RewardResult failed_reward(std::optional<double> failure_reward, std::string message) {
  return {failure_reward.value_or(0), true, std::move(message), failure_reward.has_value(), {}};
}

void set_reward(Trajectory& sample, RewardResult result) {
  sample.valid = result.valid;
  if (result.valid) sample.reward = result.reward;
  if (result.failed) sample.reward_failure = std::move(result.message);
  sample.rewards = std::move(result.rewards);
}

int64_t count_failures(std::span<const RewardResult> results) {
  return std::count_if(results.begin(), results.end(),
                       [](const RewardResult& result) { return result.failed; });
}

// ---- The verifier of the final number ----

VerifierReward::VerifierReward(const RewardSettings& settings)
    : verifier_(settings.verifier), failure_reward_(settings.failure_reward) {}

std::vector<RewardResult> VerifierReward::score_all(std::span<const RewardRequest> requests) {
  std::vector<RewardResult> results;
  results.reserve(requests.size());
  for (const RewardRequest& request : requests) {
    BOUGH_CHECK(request.problem != nullptr, "request ", results.size(), " has no problem");
    try {
      const ExactNumber gold = verifier_.gold(request.problem->answer, request.problem->id);
      Verdict verdict = verifier_.verify(request.completion, gold);
      results.push_back({.reward = verdict.score, .message = std::move(verdict.reason)});
    } catch (const UserError& error) {  // only if check() was not called
      results.push_back(failed_reward(failure_reward_, error.what()));
    }
  }
  return results;
}

void VerifierReward::check(const Dataset& dataset) const {
  for (const Problem& problem : dataset.problems()) {
    verifier_.gold(problem.answer, str(dataset.source(), ": problem ", quoted(problem.id)));
  }
}

// ---- Several rewards ----

WeightedReward::WeightedReward(std::vector<Part> parts, std::optional<double> failure_reward)
    : parts_(std::move(parts)), failure_reward_(failure_reward) {
  BOUGH_CHECK(!parts_.empty(), "no rewards to add up");
}

std::vector<RewardResult> WeightedReward::score_all(std::span<const RewardRequest> requests) {
  // Each part of the sum waits for its own workers, so each part is scored on a thread of its own. The first
  // part is scored on this thread.
  std::vector<std::future<std::vector<RewardResult>>> others;
  for (size_t p = 1; p < parts_.size(); ++p)
    others.push_back(
        std::async(std::launch::async, [&, p] { return parts_[p].function->score_all(requests); }));
  std::vector<std::vector<RewardResult>> of_part;
  of_part.push_back(parts_[0].function->score_all(requests));
  for (auto& other : others) of_part.push_back(other.get());

  std::vector<RewardResult> results(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    RewardResult& result = results[i];
    std::string failures;
    for (size_t p = 0; p < parts_.size(); ++p) {
      BOUGH_CHECK(of_part[p].size() == requests.size(), parts_[p].name, ": ", of_part[p].size(),
                  " results for ", requests.size(), " requests");
      const RewardResult& part = of_part[p][i];
      if (part.failed) {
        failures += str(failures.empty() ? "" : "; ", parts_[p].name, ": ", part.message);
        continue;
      }
      result.reward += parts_[p].weight * part.reward;
      result.rewards[parts_[p].name] = part.reward;
      if (!part.message.empty())
        result.message += str(result.message.empty() ? "" : "; ", parts_[p].name, ": ", part.message);
    }
    if (failures.empty() && !std::isfinite(result.reward))
      failures = str("the weighted sum of its rewards is ", result.reward, ", expected a finite number");
    if (failures.empty()) continue;
    auto rewards = std::move(result.rewards);
    result = failed_reward(failure_reward_, std::move(failures));
    result.rewards = std::move(rewards);
  }
  return results;
}

void WeightedReward::cancel() {
  for (const Part& part : parts_) part.function->cancel();
}

void WeightedReward::check(const Dataset& dataset) const {
  for (const Part& part : parts_) part.function->check(dataset);
}

}  // namespace bough
