#include "run/run_folder.h"

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "report/run_control.h"
#include "report/run_follower.h"
#include "report/tensorboard.h"
#include "run/idle_settings.h"
#include "run/run_view.h"
#include "run/trace_store.h"
#include "text/chat_template.h"
#include "text/output_parser.h"

namespace bough {

namespace {

constexpr const char* kThreadsFile = "threads.json";

namespace fs = std::filesystem;

// Removes ".NAME.….tmp": files that a killed process was writing before their rename (base/file.h). This
// process holds the run's lock, so no other process writes them.
void remove_leftovers(const fs::path& folder) {
  std::error_code missing;  // a new run has no folder yet
  std::vector<fs::path> leftovers;
  for (const auto& entry : fs::directory_iterator(folder, missing)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(".") && name.ends_with(".tmp")) leftovers.push_back(entry.path());
  }
  for (const fs::path& file : leftovers) remove_tree(file);
}

}  // namespace

namespace {

// A chosen format of tool calls may be what `auto` selects from the model's chat template, and the other way
// round.
bool is_same_format(const SettingDifference& difference, const fs::path& model) {
  if (!difference.key.ends_with(".tool_call_parser")) return false;
  if (difference.left != kAutoParser && difference.right != kAutoParser) return false;
  try {
    const std::string found = ChatTemplate::from_directory(model).tool_call_parser();
    return (difference.left == kAutoParser ? difference.right : difference.left) == found;
  } catch (const UserError&) {
    return false;  // no usable template
  }
}

// An endpoint may move to another host or port: a program that trains by bough.train() has a new port in each
// process.
bool is_same_endpoint(const SettingDifference& difference) {
  if (difference.key != "reward" && difference.key != "environment.url") return false;
  const auto path = [](const std::string& value) -> std::optional<std::string> {
    constexpr std::string_view kScheme = "\"http://";  // differences show texts with a colon in quotes
    if (!value.starts_with(kScheme)) return std::nullopt;
    const size_t slash = value.find('/', kScheme.size());
    return slash == std::string::npos ? "" : value.substr(slash);
  };
  return path(difference.left) && path(difference.left) == path(difference.right);
}

}  // namespace

fs::path run_folder_of(const RunSettings& settings) {
  return fs::path(settings.fileroot) / settings.experiment_name / settings.trial_name;
}

std::vector<SettingDifference> check_resumed_settings(const RunSettings& saved, const RunSettings& now,
                                                      const fs::path& config_file) {
  const std::vector<SettingDifference> differences = settings_diff(saved, now);
  std::vector<GivenSetting> keys;
  for (const SettingDifference& difference : differences) keys.push_back({.key = difference.key});
  const std::vector<IdleSetting> idle_before = idle_settings(saved, keys),
                                 idle_now = idle_settings(now, keys);
  const auto has_no_effect = [&](const std::string& key) {
    const auto names = [&](const std::vector<IdleSetting>& idle) {
      return std::ranges::find(idle, key, &IdleSetting::key) != idle.end();
    };
    return names(idle_before) && names(idle_now);
  };
  std::vector<SettingDifference> harmless;
  std::string refused;
  for (const SettingDifference& difference : differences) {
    if (is_harmless_change(difference.key) || has_no_effect(difference.key) ||
        is_same_format(difference, now.model.path) || is_same_endpoint(difference))
      harmless.push_back(difference);
    else
      refused +=
          str("\n  ", difference.key, ": was ", quoted(difference.left), ", now ", quoted(difference.right));
  }
  if (!refused.empty()) {
    throw UserError(
        str(config_file.string(), ": this run was started with other settings:", refused,
            "\nRestore them to continue the run, or give another trial_name=... to start a new one"));
  }
  return harmless;
}

RunFolder::RunFolder(const RunSettings& settings) : path_(run_folder_of(settings)) {
  make_directories(path_);
  lock_.emplace(path_);
  clear_control_folder(path_);
  checkpoint_ = find_latest_checkpoint(path_);
  const fs::path config = path_ / "config.yaml";
  if (checkpoint_ && fs::exists(config)) {
    const auto harmless = check_resumed_settings(load_settings<RunSettings>(config), settings, config);
    for (const SettingDifference& difference : harmless) {
      log_info(str(difference.key, " is now ", quoted(difference.right), ", was ", quoted(difference.left)));
    }
  } else if (checkpoint_) {
    log_warning(str(config.string(), " is missing: the run continues from step ", checkpoint_->step,
                    ", but nothing shows whether its settings are the same"));
  }
  clean_run_checkpoints(path_);
  cut_after(checkpoint_ ? checkpoint_->step : -1);
  make_directories(path_ / "rollouts");
  write_file_atomically(config, settings_yaml(settings));
  set_log_file(path_ / "log.txt");
}

void write_thread_change(const fs::path& folder, const ThreadChange& change) {
  write_file_atomically(
      folder / kThreadsFile,
      Json{{"rollout.threads", change.generating}, {"actor.threads", change.training}}.dump());
}

ThreadChange read_thread_change(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::exists(folder / kThreadsFile, ignored)) return {};
  const Json json = Json::parse(read_file(folder / kThreadsFile), nullptr, /*allow_exceptions=*/false);
  const auto number = [&](const char* key) {
    const bool has = json.is_object() && json.contains(key) && json.at(key).is_number_integer();
    return has ? std::clamp<int64_t>(json.at(key).get<int64_t>(), 0, 4096) : 0;
  };
  return {number("rollout.threads"), number("actor.threads")};
}

RunFolder::~RunFolder() {
  set_log_file("");
}

void RunFolder::cut_after(int64_t step) {
  remove_leftovers(path_);
  remove_leftovers(path_ / "rollouts");
  truncate_metrics_after(path_ / "metrics.jsonl", step);
  cut_traces_after(path_, step);
  if (step >= 0) return;
  std::vector<fs::path> events;
  for (const auto& entry : fs::directory_iterator(path_))
    if (const std::string name = entry.path().filename();
        name.starts_with("events.") || name == "timeline.jsonl" || name == kThreadsFile)
      events.push_back(entry.path());
  for (const fs::path& file : events) remove_tree(file);
}

fs::path RunFolder::rollout_file(int64_t step) const {
  return kTrainedFiles.path(path_, step);
}

std::vector<int64_t> RunFolder::steps_with_rollouts() const {
  return kTrainedFiles.numbers(path_);
}

std::unique_ptr<Metrics> RunFolder::open_metrics() const {
  auto metrics = std::make_unique<Metrics>();
  metrics->add(std::make_unique<JsonlMetrics>(path_ / "metrics.jsonl"));
  TensorboardMetrics::Options options;
  if (checkpoint_) options.resumed_at = checkpoint_->step + 1;
  metrics->add(std::make_unique<TensorboardMetrics>(path_, options));
  return metrics;
}

fs::path RunFolder::write_report(const fs::path& folder) {
  const fs::path path = folder / "report.html";
  write_file_atomically(path, run_report(folder));
  return path;
}

}  // namespace bough
