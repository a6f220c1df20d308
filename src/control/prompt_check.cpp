#include "control/prompt_check.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "base/format.h"
#include "base/log.h"
#include "base/parallel.h"
#include "base/progress.h"

namespace bough {

namespace {

constexpr size_t kManyPrompts = 1000;  // progress is shown from here on

std::optional<std::vector<int64_t>> read_lengths(const std::filesystem::path& file, size_t count) {
  std::error_code absent;
  if (file.empty() || !std::filesystem::exists(file, absent)) return std::nullopt;
  try {
    auto lengths = read_json(file).get<std::vector<int64_t>>();
    if (lengths.size() == count) return lengths;
  } catch (const std::exception&) {  // a damaged file is written again
  }
  return std::nullopt;
}

void keep_lengths(const std::filesystem::path& file, const std::vector<int64_t>& lengths) {
  if (file.empty()) return;
  try {
    make_directories(file.parent_path());
    write_file_atomically(file, Json(lengths).dump());
  } catch (const std::exception& error) {
    log_warning(str("cannot save the lengths of the prompts for later runs: ", error.what()));
  }
}

std::vector<int64_t> lengths_of(const Dataset& dataset, const PromptEncoder& encoder,
                                const PromptCheckOptions& options) {
  const std::filesystem::path file = prompt_length_file(dataset, options.model);
  if (auto known = read_lengths(file, dataset.size())) return std::move(*known);
  const auto start = std::chrono::steady_clock::now();
  std::vector<int64_t> lengths(dataset.size());
  Progress progress(str("prompts of ", options.key), static_cast<int64_t>(dataset.size()), "prompts",
                    options.shows_progress && dataset.size() >= kManyPrompts ? ProgressStyle::kAutomatic
                                                                             : ProgressStyle::kSilent);
  parallel_for(dataset.size(), [&](size_t i) {
    const Problem& problem = dataset[i];
    try {
      lengths[i] = std::ssize(encoder.encode(problem).ids);
    } catch (const UserError& error) {
      if (problem.where.empty()) throw;
      throw UserError(str(problem.where, ": ", error.what()));
    }
    progress.advance();
  });
  if (seconds_since(start) > 1) keep_lengths(file, lengths);
  return lengths;
}

struct Limit {
  int64_t tokens = 0;
  std::string reason;
};

Limit limit_of(const DatasetSettings& settings, const PromptCheckOptions& options) {
  const ModelLimits& model = options.limits;
  if (settings.max_length > 0 && settings.max_length < model.max_length)
    return {settings.max_length, str(options.key, ".max_length is ", settings.max_length)};
  return {model.max_length - 1, str("the model takes ", model.max_length, " by ", model.max_length_reason,
                                    ", and a response needs at least one")};
}

}  // namespace

// By the data set's content and the files that decide about its tokens.
std::filesystem::path prompt_length_file(const Dataset& dataset, const std::filesystem::path& model) {
  const std::filesystem::path folder = cache_folder();
  if (folder.empty() || model.empty()) return {};
  std::string content = str("2 ", dataset.fingerprint(), " ", dataset.fields_fingerprint());
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json",
        "config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"}) {
    std::error_code absent;
    if (!std::filesystem::is_regular_file(model / name, absent)) continue;
    const std::string text = read_file(model / name);
    content += str(" ", name, " ", stable_hash(text.data(), text.size()));
  }
  return folder / str("prompt-lengths-", stable_hash(content.data(), content.size()), ".json");
}

Dataset fit_prompts(const Dataset& dataset, const DatasetSettings& settings, const PromptEncoder& encoder,
                    const PromptCheckOptions& options) {
  const std::vector<int64_t> lengths = lengths_of(dataset, encoder, options);
  const Limit limit = limit_of(settings, options);
  std::vector<Problem> fitting;
  int64_t num_overlong = 0, longest = 0;
  for (const int64_t length : lengths) {
    num_overlong += length > limit.tokens;
    longest = std::max(longest, length);
  }
  const std::string counts =
      str(options.key, ": ", format_thousands(num_overlong), " of ",
          format_thousands(static_cast<int64_t>(dataset.size())), " prompts have more than ", limit.tokens,
          " tokens (", limit.reason, "); the longest has ", longest);
  if (num_overlong == 0) return dataset;
  for (size_t i = 0; i < dataset.size(); ++i) {
    Problem problem = dataset[i];
    if (lengths[i] > limit.tokens) {
      const std::string place = problem.where.empty() ? dataset.source() : problem.where;
      if (settings.overlong_prompts == "error")
        throw UserError(str(place, ": the prompt has ", lengths[i], " tokens, expected at most ",
                            limit.tokens, ". ", counts, ". Shorten the prompts, or set ", options.key,
                            ".overlong_prompts to drop or truncate_left"));
      if (settings.overlong_prompts == "drop") continue;
      if (!problem.messages.empty())
        throw UserError(str(place, ": the conversation has ", lengths[i], " tokens, expected at most ",
                            limit.tokens, ", and ", options.key,
                            ".overlong_prompts is truncate_left, which cuts only plain prompts. ", counts,
                            ". Shorten the messages, or set it to drop"));
      problem.truncate_to = limit.tokens;
    }
    fitting.push_back(std::move(problem));
  }
  if (fitting.empty()) throw UserError(str(dataset.source(), ": no problem is left. ", counts));
  log_info(
      str(counts, "; they were ", settings.overlong_prompts == "drop" ? "left out" : "cut at their left"));
  return {std::move(fitting), dataset.source()};
}

}  // namespace bough
