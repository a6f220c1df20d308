// A whole run: builds its components, resumes, trains step by step, evaluates, writes checkpoints and
// reports.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "comm/communicator.h"
#include "control/external_rollouts.h"
#include "report/display.h"
#include "run/run_settings.h"

namespace bough {

struct RunOptions {
  DisplayStyle display = DisplayStyle::kAutomatic;
  std::vector<std::string> warnings;  // logged when the run starts, except those that are ""
  std::function<bool()> stop;  // returns true to stop: a checkpoint is written, then Interrupted is thrown
  // Makes the object that lets external agents hold the conversations. Called once, before the first step.
  // Empty function: the run itself holds the conversations.
  std::function<std::unique_ptr<ExternalRollouts>(const RunSettings&, Engine&)> external;
  // Processes that train together. All call run_training() with the same settings. Rank 0 drives the run. The
  // other ranks compute what rank 0 asks for, and return an empty summary when the run is over. nullptr: one
  // process. Not owned.
  Communicator* ranks = nullptr;
  // For ranks that only generate: the command that starts a process that calls run_engine_process() with the
  // engine of engine_job(). The program's path comes first.
  std::vector<std::string> engine_command;
  // Called on rank 0 when the other ranks know that the run is over. Until then they wait for rank 0.
  std::function<void()> on_ranks_ended;
};

struct Accuracy {
  int64_t step = 0;
  double avg_at_k = 0, low = 0, high = 1;  // with its 95% interval
};

struct Comparison {
  int64_t num_batches = 0;
  double seconds = 0;        // of the gradient of one batch, as it is trained; median
  double dense_seconds = 0;  // of the gradient without the prefix tree
};

struct RunSummary {
  std::string folder;
  std::string report;
  std::string model;  // of the last checkpoint: a Hugging Face directory
  int64_t steps = 0;
  std::optional<Accuracy> before, after;  // first and last evaluation of the run
  std::optional<Accuracy> after_sparse;   // of the sparse policy in the last evaluation of the run
  double compression = 0;                 // mean over steps: flat tokens over tree tokens
  std::optional<Comparison> comparison;
};

// Throws UserError or IoError. If options.stop() returns true, rank 0 writes a checkpoint and throws
// Interrupted, and the other ranks return. If any other exception ends one rank, the other ranks wait for
// that rank, and the caller must end them.
RunSummary run_training(const RunSettings& settings, const RunOptions& options);

Json to_json(const RunSummary& summary);

}  // namespace bough
