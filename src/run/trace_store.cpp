#include "run/trace_store.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <set>
#include <sstream>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "base/format.h"
#include "base/log.h"
#include "control/conversation.h"
#include "report/metrics.h"
#include "report/run_follower.h"

namespace bough {

namespace fs = std::filesystem;

namespace {

constexpr std::array kFilesOfStep = {kTrainedFiles, kDroppedFiles, kEvaluationFiles};

fs::path traces_folder(const fs::path& run) {
  return run / "traces";
}

fs::path index_file(const fs::path& run) {
  make_directories(traces_folder(run));
  return traces_folder(run) / "index.jsonl";
}

int64_t size_or_zero(const fs::path& file) {
  std::error_code missing;
  const uintmax_t size = fs::file_size(file, missing);
  return missing ? 0 : static_cast<int64_t>(size);
}

// Bytes of the step's trained and dropped groups: as long as they are the same, so is the step's index line.
Json sizes_of_step(const fs::path& run, int64_t step) {
  return {size_or_zero(kTrainedFiles.path(run, step)), size_or_zero(kDroppedFiles.path(run, step))};
}

// The files of a step, which are removed with it.
void remove_step(const fs::path& run, int64_t step) {
  for (const SampleFiles& files : kFilesOfStep) remove_tree(files.path(run, step));
}

RolloutReadOptions as_written() {
  RolloutReadOptions options;
  options.require_reward_or_advantage = false;
  options.allow_greedy = true;  // evaluations
  options.columns.insert(options.columns.end(), {kMismatchColumn, kEntropyColumn});
  return options;
}

// Appends the conversations of rows. `of_group` is of the first group, and the others follow it.
void add_records(std::span<const Trajectory> rows, TraceRecord of_group, std::vector<TraceRecord>& out) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const Trajectory& row = rows[i];
    if (begins_trajectory(rows, i)) {
      if (i > 0 && row.group != rows[i - 1].group) {
        ++of_group.group;
        of_group.number = 0;
      }
      out.push_back(of_group);
      ++of_group.number;
    }
    TraceRecord& record = out.back();
    if (row.reward) record.reward = *row.reward;
    record.tokens += row.num_generated();
    record.has_failed = record.has_failed || !row.valid || row.reward_failure.has_value();
    if (row.advantage.empty() || record.advantage) continue;
    double sum = 0, count = 0;
    for (size_t token = 0; token < row.advantage.size(); ++token) {
      if (row.advantage.size() > 1 && !row.trains(token)) continue;
      sum += row.advantage[token];
      ++count;
    }
    if (count > 0) record.advantage = sum / count;
  }
}

Json number_json(const std::optional<double>& value) {
  if (!value) return nullptr;
  return std::round(*value * 1e6) / 1e6;
}

// A conversation in a line of the index: group, number, reward, advantage, tokens, has_failed, is_dropped.
using IndexEntry = std::tuple<int64_t, int64_t, Json, Json, int64_t, bool, bool>;

Json index_line(const fs::path& run, int64_t step, const std::vector<TraceRecord>& records) {
  Json list = Json::array();
  for (const TraceRecord& one : records)
    list.push_back(IndexEntry{one.group, one.number, number_json(one.reward), number_json(one.advantage),
                              one.tokens, one.has_failed, one.is_dropped});
  return {{"step", step}, {"bytes", sizes_of_step(run, step)}, {"conversations", std::move(list)}};
}

// The inverse. Throws if the line is no index line.
std::vector<TraceRecord> records_of(const Json& line) {
  const auto number = [](const Json& value) {
    return value.is_null() ? std::nullopt : std::optional(value.get<double>());
  };
  std::vector<TraceRecord> records;
  for (const Json& entry : line.at("conversations")) {
    const auto [group, place, reward, advantage, tokens, failed, dropped] = entry.get<IndexEntry>();
    records.push_back({line.at("step").get<int64_t>(), group, place, number(reward), number(advantage),
                       tokens, failed, dropped});
  }
  return records;
}

TraceRecord record_of_group(const StepGroups& groups, int64_t step, size_t i) {
  return {.step = step,
          .group = static_cast<int64_t>(i),
          .is_dropped = groups.is_dropped(i),
          .is_evaluation = groups.is_evaluation(i)};
}

}  // namespace

// ---- Writing.

TraceWriter::TraceWriter(fs::path folder, int64_t max_bytes)
    : folder_(std::move(folder)), max_bytes_(max_bytes), index_(index_file(folder_)) {
  for (const SampleFiles& files : kFilesOfStep)
    for (const int64_t step : files.numbers(folder_)) count_bytes(step);
}

void TraceWriter::count_bytes(int64_t step) {
  int64_t& bytes = step_bytes_[step];
  num_bytes_ -= std::exchange(bytes, 0);
  for (const SampleFiles& files : kFilesOfStep) bytes += size_or_zero(files.path(folder_, step));
  num_bytes_ += bytes;
}

void TraceWriter::add_group(const ScoredGroup& group, int64_t step, const std::string& reason) {
  std::vector<Trajectory> rows = group.rows();
  if (rows.empty()) return;
  if (reason.empty()) {
    waiting_[group.group->id] = num_waiting_;
    // Readers see whole groups only. There is no fsync, because a run that resumes removes waiting groups.
    const fs::path part = traces_folder(folder_) / "new.part",
                   whole = kWaitingFiles.path(folder_, num_waiting_++);
    remove_tree(part);
    AppendFile(part).append(rollouts_frame(rows));
    std::error_code error;
    fs::rename(part, whole, error);
    if (error) throw IoError(str("cannot write ", whole.string(), ": ", error.message()));
    return;
  }
  for (Trajectory& row : rows) row.fields[kDroppedField] = reason;
  AppendFile(kDroppedFiles.path(folder_, step)).append(rollouts_frame(rows));
  std::vector<TraceRecord>& dropped = dropped_[step];
  const int64_t number = dropped.empty() ? 0 : dropped.back().group + 1;
  add_records(rows, {.step = step, .group = number, .is_dropped = true}, dropped);
}

// The index does not know of these groups, so the reader reads the step.
void TraceWriter::bind_dropped(int64_t step) {
  const fs::path later = kDroppedFiles.path(folder_, step + 1);
  if (dropped_.erase(step + 1) == 0) return;
  AppendFile(kDroppedFiles.path(folder_, step)).append(read_file(later));
  remove_tree(later);
}

void TraceWriter::end_step(const StepRecord& record) {
  write_rollouts(kTrainedFiles.path(folder_, record.step), record.batch);
  std::vector<TraceRecord> records;
  add_records(record.batch, {.step = record.step}, records);
  const int64_t num_groups = records.empty() ? 0 : records.back().group + 1;
  if (const auto dropped = dropped_.extract(record.step))
    for (TraceRecord& one : dropped.mapped()) {
      one.group += num_groups;
      records.push_back(one);
    }
  index_.append(dump_line(index_line(folder_, record.step, records)) + "\n");
  for (const uint64_t id : record.groups)
    if (const auto waiting = waiting_.extract(id)) remove_tree(kWaitingFiles.path(folder_, waiting.mapped()));
  count_bytes(record.step);
  remove_oldest();
}

void TraceWriter::add_evaluation(int64_t step, std::map<std::string, std::vector<Trajectory>> samples) {
  std::vector<Trajectory> rows;
  for (auto& [name, of_policy] : samples)
    for (Trajectory& row : of_policy) {
      row.fields[kEvaluationField] = name;
      rows.push_back(std::move(row));
    }
  write_rollouts(kEvaluationFiles.path(folder_, step), rows);
  count_bytes(step);
  remove_oldest();
}

void TraceWriter::remove_oldest() {
  while (max_bytes_ > 0 && num_bytes_ > max_bytes_ && step_bytes_.size() > 1) {
    const auto [step, bytes] = *step_bytes_.begin();
    if (!std::exchange(has_said_it_removes_, true))
      log_info(str("rollouts/ and traces/ have reached saver.max_rollouts (",
                   Bytes{.count = max_bytes_}.to_string(),
                   "): from now on those of the oldest steps are removed, beginning with step ", step));
    remove_step(folder_, step);
    num_bytes_ -= bytes;
    step_bytes_.erase(step_bytes_.begin());
  }
}

void cut_traces_after(const fs::path& folder, int64_t step) {
  for (const SampleFiles& files : kFilesOfStep)
    for (const int64_t later : files.numbers(folder))
      if (later > step) remove_step(folder, later);
  for (const int64_t number : kWaitingFiles.numbers(folder)) remove_tree(kWaitingFiles.path(folder, number));
  if (step < 0) return remove_tree(traces_folder(folder));
  truncate_metrics_after(traces_folder(folder) / "index.jsonl", step);
}

// ---- Reading.

std::vector<int64_t> list_traced_steps(const fs::path& folder) {
  std::vector<int64_t> steps = kTrainedFiles.numbers(folder);
  std::ranges::copy(kDroppedFiles.numbers(folder), std::back_inserter(steps));
  if (!kWaitingFiles.numbers(folder).empty()) steps.push_back(step_in_work(folder));
  std::sort(steps.begin(), steps.end());
  steps.erase(std::unique(steps.begin(), steps.end()), steps.end());
  return steps;
}

StepGroups::StepGroups(const fs::path& folder, int64_t step) {
  const auto add = [&](const fs::path& file) {
    // It may have been removed since it was listed, or be new and empty.
    if (size_or_zero(file) == 0) return size_t{0};
    files_.emplace_back(file, as_written());
    size_ += files_.back().size();
    return files_.back().size();
  };
  const fs::path trained = kTrainedFiles.path(folder, step);
  bool is_in_work = false;
  if (add(trained) == 0) {
    is_in_work = step == step_in_work(folder);
    if (is_in_work)
      for (const int64_t number : kWaitingFiles.numbers(folder)) add(kWaitingFiles.path(folder, number));
    // The run writes the step's file first and then removes the groups that waited. If it has done so
    // meanwhile, groups may be missing.
    if (fs::exists(trained)) {
      files_.clear();
      size_ = 0;
      add(trained);
    }
  }
  num_dropped_ = add(kDroppedFiles.path(folder, step));
  num_evaluated_ = add(kEvaluationFiles.path(folder, step));
  if (size_ == 0 && !is_in_work)
    throw UserError(str(folder.string(), " has no samples of step ", step,
                        ": the step has not begun, its samples were removed (saver.max_rollouts), or the run "
                        "keeps none (saver.rollouts)"));
}

std::vector<Trajectory> StepGroups::read(size_t i) const {
  for (const RolloutGroups& file : files_) {
    if (i < file.size()) return file.read(i);
    i -= file.size();
  }
  throw UserError(str("group ", i + 1, " is not one of the step's ", size_));
}

std::string TraceRecord::id() const {
  return str(step, ".", group + 1, ".", number + 1);
}

TraceRecord parse_trace_id(const std::string& id) {
  TraceRecord record;
  char dot = 0, second_dot = 0;
  std::istringstream in(id);
  in >> std::noskipws >> record.step >> dot >> record.group >> second_dot >> record.number;
  if (!in || in.peek() != EOF || dot != '.' || second_dot != '.' || --record.group < 0 || --record.number < 0)
    throw UserError(str("--id: got ", quoted(id), ", expected STEP.GROUP.CONVERSATION, such as 12.3.2"));
  return record;
}

std::vector<TraceRecord> read_traces(const fs::path& folder, int64_t step, bool evaluation) {
  const StepGroups groups(folder, step);
  std::vector<TraceRecord> records;
  for (size_t i = 0; i < groups.size(); ++i)
    if (groups.is_evaluation(i) == evaluation)
      add_records(groups.read(i), record_of_group(groups, step, i), records);
  return records;
}

std::vector<TraceRecord> list_traces(const fs::path& folder, const std::vector<int64_t>& steps) {
  std::map<int64_t, std::vector<TraceRecord>> by_step;
  LineTail(traces_folder(folder) / "index.jsonl").read([&](std::string_view text) {
    const Json line = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!line.is_object()) return;
    try {
      const int64_t step = line.at("step").get<int64_t>();
      if (!std::binary_search(steps.begin(), steps.end(), step)) return;
      if (line.at("bytes") == sizes_of_step(folder, step)) by_step[step] = records_of(line);
    } catch (const Json::exception&) {  // not an index line: the step is read
    }
  });
  std::vector<TraceRecord> all;
  for (const int64_t step : steps) {
    const auto found = by_step.find(step);
    std::ranges::copy(
        found != by_step.end() ? found->second : read_traces(folder, step, /*evaluation=*/false),
        std::back_inserter(all));
  }
  return all;
}

std::vector<Trajectory> rows_of(const StepGroups& groups, TraceRecord& record) {
  const auto group = static_cast<size_t>(record.group);
  const std::vector<Trajectory> rows = group < groups.size() ? groups.read(group) : std::vector<Trajectory>{};
  std::vector<Trajectory> out;
  int64_t number = -1;
  for (size_t i = 0; i < rows.size(); ++i) {
    number += begins_trajectory(rows, i);
    if (number == record.number) out.push_back(rows[i]);
  }
  if (out.empty()) throw UserError(str("there is no conversation ", record.id()));
  TraceRecord of_group = record_of_group(groups, record.step, group);
  of_group.number = record.number;
  std::vector<TraceRecord> records;
  add_records(out, of_group, records);
  record = records.front();
  return out;
}

std::string trace_text(const TraceRecord& record, std::span<const Trajectory> rows) {
  const Trajectory& last = rows.back();
  std::string out = str("== ", record.id(), " ", last.group);
  const char* separator = ": ";
  const auto add = [&](const auto&... parts) { out += str(std::exchange(separator, ", "), parts...); };
  if (record.reward) add("reward ", format_significant(*record.reward, 4));
  else add("no reward");
  for (const auto& [name, value] : last.rewards) add(name, " ", format_significant(value, 4));
  if (record.advantage) add("advantage ", format_significant(*record.advantage, 4));
  add(record.tokens, " tokens");
  std::set<int32_t> versions;  // without those of tokens that no weights sampled
  for (const Trajectory& row : rows)
    std::ranges::copy_if(row.versions, std::inserter(versions, versions.end()),
                         [](int32_t version) { return version >= 0; });
  if (versions.size() == 1) add("version ", *versions.begin());
  else if (!versions.empty()) add("versions ", *versions.begin(), " to ", *versions.rbegin());
  if (last.finish_reason) add(*last.finish_reason);
  if (last.baseline) add("greedy baseline");
  if (!last.trained) add("filtered out");
  if (last.answer) add("expected ", quoted(*last.answer, 200));
  if (record.is_dropped) add("dropped: ", last.fields.value(kDroppedField, ""));
  if (record.is_evaluation) add("evaluation (", last.fields.value(kEvaluationField, ""), ")");
  out += "\n";
  if (const std::string conversation = describe_conversation(last); !conversation.empty())
    return out + conversation;
  const auto section = [&](const char* name, const std::optional<std::string>& text) {
    if (!text) return;
    out += str("[", name, "] ");
    for (const char c : *text) out += c == '\n' ? "\n    " : std::string(1, c);
    out += "\n";
  };
  section("prompt", last.prompt);
  section("completion", last.completion);
  section("failure", last.reward_failure);
  return out;
}

Json trace_json(const TraceRecord& record, std::span<const Trajectory> rows) {
  Json out = {{"id", record.id()},
              {"step", record.step},
              {"reward", number_json(record.reward)},
              {"advantage", number_json(record.advantage)},
              {"tokens", record.tokens},
              {"failed", record.has_failed},
              {"rows", Json::array()}};
  if (record.is_dropped) out["dropped"] = rows.back().fields.value(kDroppedField, "");
  if (record.is_evaluation) out["evaluation"] = rows.back().fields.value(kEvaluationField, "");
  for (const Trajectory& row : rows) out["rows"].push_back(rollout_to_json(row));
  return out;
}

}  // namespace bough
