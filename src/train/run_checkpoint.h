// Checkpoints of a run: everything it needs to go on bit for bit.
//
//   <run>/checkpoints/step_N/model/                 a Hugging Face directory, tokenizer files included
//                           /adapter/               in its place where adapters are trained (models/lora.h)
//                           /optimizer.safetensors  moments, fp32 masters, counts (train/optimizer.h)
//                           /state.json             {"format", "step", "state": what the controller gave}
//                           /critic/                where the run has one (train/critic.h)
//   <run>/latest                                    text: "step_N"
//
// step_N is prepared under a name that begins with a dot, flushed and renamed, so it is complete or absent;
// `latest`, replaced atomically afterwards, is what makes it count. A process killed at any moment leaves the
// former checkpoint or the new one. The model has a folder of its own because other engines read every
// *.safetensors file of a model's folder.
//
// One process writes a run's folder at a time (base/file.h FolderLock is the caller's).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>

#include "base/json.h"
#include "models/model.h"
#include "train/optimizer.h"

namespace bough {

struct RunCheckpointOptions {
  std::filesystem::path source_model;  // where tokenizer files and generation_config.json come from
  int64_t keep_last = 2;               // >= 1; older ones go, the new one never
  // Writes more of the run into step_N before it counts; none: nothing.
  std::function<void(const std::filesystem::path& directory)> write_more = {};
};

struct RunCheckpoint {
  int64_t step;
  std::filesystem::path directory;  // <run>/checkpoints/step_N

  std::filesystem::path model_directory() const { return directory / "model"; }
  std::filesystem::path adapter_directory() const { return directory / "adapter"; }
};

// Writes step_N, makes it the latest, then removes what keep_last no longer covers, and checkpoints of later
// steps: the run went back before them. IoError on a full disk: the former checkpoint stays the latest, and
// nothing of this one remains.
void save_run_checkpoint(const std::filesystem::path& run_dir, int64_t step, Model& model,
                         const OptimizerSnapshot& optimizer, const Json& state,
                         const RunCheckpointOptions& options = {});

// The one that `latest` names; where that file is missing (the process died before its first), the complete
// one of the highest step; none: nullopt. UserError where `latest` names no checkpoint that is there.
std::optional<RunCheckpoint> find_latest_checkpoint(const std::filesystem::path& run_dir);

// Settles what an interrupted save left behind: removes what is unfinished, puts back what was replaced.
// A run that writes calls it first of all, before find_latest_checkpoint.
void clean_run_checkpoints(const std::filesystem::path& run_dir);

// Restores model and optimizer (made for the same model and dtype) and returns the controller's state.
// UserError names the file that is missing, damaged or of another run, and other checkpoints to go back to.
// `load_more`: restores what write_more wrote. After an error all may be restored in part: of no use any
// more.
Json load_run_checkpoint(const RunCheckpoint& checkpoint, Model& model, Optimizer& optimizer,
                         const std::function<void(const std::filesystem::path& directory)>& load_more = {});

}  // namespace bough
