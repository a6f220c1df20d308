// Every conversation of a run, once: what the page's samples and `bough trace` read.
//
//   rollouts/step_N.jsonl.zst    the groups that step N was trained on, as they were trained
//   traces/dropped_N.jsonl.zst   the groups that were dropped while step N was in work. Each row has the
//                                field `dropped`, the reason
//   traces/waiting_K.jsonl.zst   a group that has its rewards and waits for its step; K: order of scoring.
//                                Removed when the step's file has the group
//   traces/evaluation_N.jsonl.zst   samples of the validation set by the weights after step N. Each row has
//                                the field `evaluation`, the prefix of the metrics: eval or eval_sparse
//   traces/index.jsonl           a line a step: rewards and lengths of its conversations, without tokens
//
// Each group is a zstd frame of its own, so that it is read without the others. A step is bound to a
// checkpoint: the run that resumes from step N removes what has a later step, and makes those groups again.
// Files grow at their ends only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "control/controller.h"
#include "data/rollout_file.h"

namespace bough {

// The field of a dropped group's rows that says why.
inline constexpr const char* kDroppedField = "dropped";
inline constexpr const char* kEvaluationField = "evaluation";

// A conversation's numbers. Its id, "12.3.2", is the step, the number of the group and that of the
// conversation in the group, both from 1.
struct TraceRecord {
  int64_t step = 0, group = 0, number = 0;  // counted from 0
  std::optional<double> reward, advantage;  // advantage: the mean over the trained tokens
  int64_t tokens = 0;                       // sampled
  bool has_failed = false;                  // its reward or its episode
  bool is_dropped = false;                  // its group
  bool is_evaluation = false;

  std::string id() const;
};
// The step, group and number of an id. Throws UserError if it is none.
TraceRecord parse_trace_id(const std::string& id);

// Written by the run's control thread. Throws IoError if the disk is full.
class TraceWriter {
 public:
  // max_bytes: of all steps together; 0: no bound.
  TraceWriter(std::filesystem::path folder, int64_t max_bytes);

  // A group has its rewards. `reason`: why it is dropped; empty: it waits for a step.
  void add_group(const ScoredGroup& group, int64_t step, const std::string& reason);
  // Groups that were dropped after `step` belong to it from now on: a checkpoint of it knows of them.
  void bind_dropped(int64_t step);
  void end_step(const StepRecord& record);
  // The weights after `step` were evaluated. By name of the metrics; replaces what the step has.
  void add_evaluation(int64_t step, std::map<std::string, std::vector<Trajectory>> samples);

 private:
  void count_bytes(int64_t step);
  void remove_oldest();

  const std::filesystem::path folder_;
  const int64_t max_bytes_;
  AppendFile index_;
  int64_t num_waiting_ = 0;              // numbers given so far
  std::map<uint64_t, int64_t> waiting_;  // numbers of files, by group
  // The dropped groups of each step that has not ended; `group` counts them alone.
  std::map<int64_t, std::vector<TraceRecord>> dropped_;
  std::map<int64_t, int64_t> step_bytes_;  // of the files of a step
  int64_t num_bytes_ = 0;
  bool has_said_it_removes_ = false;
};

// Removes what a run that resumes from `step` makes again; -1: everything.
void cut_traces_after(const std::filesystem::path& folder, int64_t step);

// The groups of a step: first those that it was trained on (of the step in work: those that wait), then those
// that were dropped, then those of the evaluation after it. Step 0 has an evaluation only.
class StepGroups {
 public:
  // Throws UserError if the step has no groups. The step in work may have none.
  StepGroups(const std::filesystem::path& folder, int64_t step);

  size_t size() const { return size_; }
  size_t num_kept() const { return size_ - num_dropped_ - num_evaluated_; }  // trained or waiting
  size_t first_evaluated() const { return size_ - num_evaluated_; }          // size(): there is no evaluation
  bool is_evaluation(size_t i) const { return i >= first_evaluated(); }
  bool is_dropped(size_t i) const { return i >= num_kept() && !is_evaluation(i); }
  std::vector<Trajectory> read(size_t i) const;

 private:
  std::vector<RolloutGroups> files_;
  size_t size_ = 0, num_dropped_ = 0, num_evaluated_ = 0;
};

// Steps with groups of training, ascending; the step in work is the last one.
std::vector<int64_t> list_traced_steps(const std::filesystem::path& folder);

// All conversations of training in the steps, in their order, by the index. A step that the index does not
// have as its files are is read.
std::vector<TraceRecord> list_traces(const std::filesystem::path& folder, const std::vector<int64_t>& steps);
// Those of one step, or of the evaluation after it, by its files.
std::vector<TraceRecord> read_traces(const std::filesystem::path& folder, int64_t step, bool evaluation);

// The rows of the batch that belong to the record's conversation. Sets the record's numbers by them. Throws
// UserError if there is none.
std::vector<Trajectory> rows_of(const StepGroups& groups, TraceRecord& record);

// For people and for programs: the conversation with its numbers and texts.
std::string trace_text(const TraceRecord& record, std::span<const Trajectory> rows);
Json trace_json(const TraceRecord& record, std::span<const Trajectory> rows);

}  // namespace bough
