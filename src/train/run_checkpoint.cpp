#include "train/run_checkpoint.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <system_error>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "models/checkpoint.h"
#include "models/lora.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

constexpr int kFormat = 1;
constexpr const char* kState = "state.json";

std::string step_name(int64_t step) {
  return "step_" + std::to_string(step);
}

fs::path checkpoints_of(const fs::path& run_dir) {
  return run_dir / "checkpoints";
}

// Names of a step's folder while it is written, replaced or removed. If the process was killed meanwhile,
// clean_run_checkpoints removes or restores the folders with these names.
fs::path unfinished_path(const fs::path& checkpoints, int64_t step) {
  return checkpoints / ("." + step_name(step) + ".tmp");
}
fs::path replaced_path(const fs::path& checkpoints, int64_t step) {
  return checkpoints / ("." + step_name(step) + ".old");
}
fs::path removed_path(const fs::path& checkpoints, int64_t step) {
  return checkpoints / ("." + step_name(step) + ".gone");
}

std::optional<int64_t> parse_step_name(const std::string& name) {
  constexpr std::string_view kPrefix = "step_";
  if (!name.starts_with(kPrefix)) return {};
  int64_t step = -1;
  std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step);
  if (step < 0 || step_name(step) != name) return {};  // this program does not write "step_007"
  return step;
}

// Complete checkpoints, oldest first.
std::vector<int64_t> complete_steps(const fs::path& checkpoints) {
  std::vector<int64_t> steps;
  if (!fs::is_directory(checkpoints)) return steps;
  for (const auto& entry : fs::directory_iterator(checkpoints))
    if (const auto step = parse_step_name(entry.path().filename().string()); step && entry.is_directory())
      steps.push_back(*step);
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::string list_steps(const std::vector<int64_t>& steps) {
  std::string text;
  for (const int64_t step : steps) text += (text.empty() ? "" : ", ") + step_name(step);
  return text.empty() ? "none" : text;
}

void rename_path(const fs::path& from, const fs::path& to) {
  std::error_code code;
  fs::rename(from, to, code);
  if (code) throw IoError(str("cannot rename ", from.string(), " to ", to.string(), ": ", code.message()));
}

// Renames the folder before removal, because a partly removed folder must not look like a checkpoint.
void remove_checkpoint(const fs::path& checkpoints, int64_t step) {
  const fs::path gone = removed_path(checkpoints, step);
  remove_tree(gone);
  rename_path(checkpoints / step_name(step), gone);
  remove_tree(gone);
}

void prune(const fs::path& checkpoints, int64_t latest, int64_t keep_last) {
  const auto steps = complete_steps(checkpoints);
  int64_t num_kept = 0;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step)
    if (*step > latest || ++num_kept > keep_last) remove_checkpoint(checkpoints, *step);
}

// Removes an unfinished folder in its destructor, whatever stopped the writing.
class Unfinished {
 public:
  explicit Unfinished(fs::path path) : path_(std::move(path)) { remove_tree(path_); }
  ~Unfinished() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Unfinished(const Unfinished&) = delete;
  Unfinished& operator=(const Unfinished&) = delete;

  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

void write_contents(const fs::path& directory, int64_t step, Model& model, const OptimizerSnapshot& optimizer,
                    const Json& state, const RunCheckpointOptions& options) {
  make_directories(directory);
  if (has_adapter(model)) save_adapter(directory / "adapter", model, options.source_model.string());
  else save_model(directory / "model", model, {.copy_from = options.source_model});
  optimizer.save(directory);
  if (options.write_more) options.write_more(directory);
  write_file_atomically(directory / kState,
                        dump_pretty({{"format", kFormat}, {"step", step}, {"state", state}}));
}

// Makes `unfinished` the run's latest checkpoint, step_N. On failure the earlier state is restored.
void publish(const fs::path& run_dir, int64_t step, const fs::path& unfinished) {
  const fs::path checkpoints = checkpoints_of(run_dir);
  const fs::path final_path = checkpoints / step_name(step);
  const fs::path replaced = replaced_path(checkpoints, step);
  remove_tree(replaced);
  const bool replaces = fs::exists(final_path);
  try {
    if (replaces) rename_path(final_path, replaced);
    publish_directory(unfinished, final_path);
    write_file_atomically(run_dir / "latest", step_name(step) + "\n");
  } catch (...) {
    std::error_code ignored;
    if (!replaces || fs::exists(replaced)) fs::remove_all(final_path, ignored);
    if (replaces && fs::exists(replaced)) fs::rename(replaced, final_path, ignored);
    throw;
  }
  remove_tree(replaced);
}

Json read_state(const RunCheckpoint& checkpoint) {
  const fs::path path = checkpoint.directory / kState;
  Json json = read_json(path);
  const auto has = [&](const char* key, int64_t value) {
    return json.contains(key) && json[key].is_number_integer() && json[key].get<int64_t>() == value;
  };
  if (!json.is_object() || !has("format", kFormat) || !has("step", checkpoint.step) ||
      !json.contains("state"))
    throw UserError(str(path.string(), ": got ", quoted(dump_line(json)), "; expected an object with format ",
                        kFormat, ", step ", checkpoint.step,
                        " and state, as this version of Bough writes it"));
  return std::move(json["state"]);
}

}  // namespace

void save_run_checkpoint(const fs::path& run_dir, int64_t step, Model& model,
                         const OptimizerSnapshot& optimizer, const Json& state,
                         const RunCheckpointOptions& options) {
  BOUGH_CHECK(step >= 0 && options.keep_last >= 1, "step ", step, ", keep_last ", options.keep_last);
  const fs::path checkpoints = checkpoints_of(run_dir);
  make_directories(checkpoints);
  try {
    const Unfinished unfinished(unfinished_path(checkpoints, step));
    write_contents(unfinished.path(), step, model, optimizer, state, options);
    publish(run_dir, step, unfinished.path());
  } catch (const IoError& error) {
    throw IoError(str(error.what(), "\n  the checkpoint of step ", step,
                      " was not written; complete checkpoints in ", quoted(checkpoints.string(), 300), ": ",
                      list_steps(complete_steps(checkpoints))));
  }
  prune(checkpoints, step, options.keep_last);
}

std::optional<RunCheckpoint> find_latest_checkpoint(const fs::path& run_dir) {
  const fs::path checkpoints = checkpoints_of(run_dir);
  const fs::path latest = run_dir / "latest";
  const auto steps = complete_steps(checkpoints);
  if (!fs::exists(latest)) {
    if (steps.empty()) return {};
    return RunCheckpoint{steps.back(), checkpoints / step_name(steps.back())};
  }
  std::string name = read_file(latest);
  name.erase(std::find_if(name.rbegin(), name.rend(), [](unsigned char c) { return c > ' '; }).base(),
             name.end());
  const auto step = parse_step_name(name);
  if (!step || !std::binary_search(steps.begin(), steps.end(), *step))
    throw UserError(str(latest.string(), ": got ", quoted(name), "; expected the name of a folder in ",
                        quoted(checkpoints.string(), 300), ": write one of these names into the file (",
                        list_steps(steps), "), or remove the file to use the last checkpoint"));
  return RunCheckpoint{*step, checkpoints / name};
}

void clean_run_checkpoints(const fs::path& run_dir) {
  const fs::path checkpoints = checkpoints_of(run_dir);
  std::vector<fs::path> leftovers;
  if (fs::is_directory(checkpoints))
    for (const auto& entry : fs::directory_iterator(checkpoints))
      if (entry.path().filename().string().starts_with(".step_")) leftovers.push_back(entry.path());
  if (fs::is_directory(run_dir))
    for (const auto& entry : fs::directory_iterator(run_dir)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with(".latest.") && name.ends_with(".tmp")) leftovers.push_back(entry.path());
    }
  for (const fs::path& path : leftovers) {
    const auto step = parse_step_name(path.stem().string().substr(1));
    // If step_N is missing, the process was killed after it renamed the old step_N and before it published
    // the new one. The old folder then gets its name back.
    if (step && path == replaced_path(checkpoints, *step) && !fs::exists(checkpoints / step_name(*step)))
      rename_path(path, checkpoints / step_name(*step));
    else remove_tree(path);
  }
}

Json load_run_checkpoint(const RunCheckpoint& checkpoint, Model& model, Optimizer& optimizer,
                         const std::function<void(const fs::path& directory)>& load_more) {
  try {
    Json state = read_state(checkpoint);
    if (has_adapter(model)) load_adapter(checkpoint.adapter_directory(), model);
    else load_weights(checkpoint.model_directory(), model);
    optimizer.load(checkpoint.directory);
    if (load_more) load_more(checkpoint.directory);
    return state;
  } catch (const UserError& error) {
    auto others = complete_steps(checkpoint.directory.parent_path());
    std::erase(others, checkpoint.step);
    throw UserError(
        str("cannot resume from ", quoted(checkpoint.directory.string(), 300), ": ", error.what(),
            "\n  other checkpoints: ", list_steps(others),
            others.empty() ? "" : "; to go back to one, write its name into the run's file 'latest'"));
  }
}

}  // namespace bough
