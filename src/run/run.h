// A whole run: builds the parts that the settings name, resumes, loops, evaluates, checkpoints, reports.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "comm/communicator.h"
#include "control/outside.h"
#include "report/display.h"
#include "run/run_settings.h"

namespace bough {

struct RunOptions {
  DisplayStyle display = DisplayStyle::kAutomatic;
  std::function<bool()> stop;  // asked to stop: a checkpoint is written, then Interrupted is thrown
  // Makes what holds the conversations, where they are held outside; called once, before the first step.
  std::function<std::unique_ptr<OutsideGroups>(const RunSettings&, Engine&)> outside;
  // Processes that train together, all of which call run_training() with the same settings: rank 0 is the
  // run, the others compute what it has them compute and return an empty summary when it is over. Not owned.
  Communicator* ranks = nullptr;
  // What starts a process that calls run_engine_process() and makes its engine of engine_job(), the
  // program's path first: of ranks that only generate.
  std::vector<std::string> engine_command;
  // Rank 0 calls it when the others know that the run is over; before, they wait for it.
  std::function<void()> on_ranks_ended;
};

struct Accuracy {
  int64_t step = 0;
  double avg_at_k = 0, low = 0, high = 1;  // with its 95% interval
};

struct Comparison {
  int64_t num_batches = 0;
  double seconds = 0;        // of the gradient of one batch as it is trained, median
  double dense_seconds = 0;  // of the gradient without sharing
};

struct RunSummary {
  std::string folder;
  std::string report;
  std::string model;  // of the last checkpoint: a Hugging Face directory
  int64_t steps = 0;
  std::optional<Accuracy> before, after;  // first and last evaluation of the run
  double compression = 0;                 // mean over steps: flat tokens over tree tokens
  std::optional<Comparison> comparison;
};

// UserError, IoError; Interrupted after the checkpoint: the other ranks return then. After any other error of
// a rank the rest wait for it, and whoever started them has to end them.
RunSummary run_training(const RunSettings& settings, const RunOptions& options);

Json to_json(const RunSummary& summary);

}  // namespace bough
