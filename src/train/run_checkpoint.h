// Checkpoints of a run: everything that a resumed run needs to continue bit for bit.
//
//   <run>/checkpoints/step_N/model/                 a Hugging Face directory, tokenizer files included
//                           /adapter/               replaces model/ if adapters are trained (models/lora.h)
//                           /optimizer.safetensors  moments, fp32 masters, counts (train/optimizer.h)
//                           /state.json             {"format", "step", "state": the controller's state}
//                           /critic/                if the run has a critic (train/critic.h)
//   <run>/latest                                    text: "step_N"
//
// step_N is written under a name that begins with a dot, flushed and renamed, so it is complete or absent.
// Then `latest` is replaced atomically, which makes step_N the latest checkpoint. A process killed at any
// moment leaves the previous checkpoint or the new one. The model has a folder of its own because other
// engines read every *.safetensors file of a model's folder.
//
// Only one process may write a run's folder at a time: the caller holds a FolderLock (base/file.h).
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
  int64_t keep_last = 2;               // >= 1: number of checkpoints to keep, the new one included
  // Writes further files into step_N before it is published. Empty: nothing.
  std::function<void(const std::filesystem::path& directory)> write_more = {};
};

struct RunCheckpoint {
  int64_t step;
  std::filesystem::path directory;  // <run>/checkpoints/step_N

  std::filesystem::path model_directory() const { return directory / "model"; }
  std::filesystem::path adapter_directory() const { return directory / "adapter"; }
};

// Writes step_N and makes it the latest. Then removes the oldest checkpoints beyond keep_last, and those of
// steps after N, which exist if the run was resumed from an earlier step. Throws IoError if writing fails,
// for example on a full disk. Then the previous checkpoint stays the latest, and the new one is removed.
void save_run_checkpoint(const std::filesystem::path& run_dir, int64_t step, Model& model,
                         const OptimizerSnapshot& optimizer, const Json& state,
                         const RunCheckpointOptions& options = {});

// Returns the checkpoint that `latest` names. If `latest` is missing, because the process died during its
// first save, returns the complete checkpoint of the highest step. nullopt if there is no checkpoint. Throws
// UserError if `latest` names a checkpoint that does not exist.
std::optional<RunCheckpoint> find_latest_checkpoint(const std::filesystem::path& run_dir);

// Cleans up after an interrupted save: removes unfinished folders, and renames a folder back that was renamed
// in order to be replaced. A run that writes checkpoints must call this before find_latest_checkpoint.
void clean_run_checkpoints(const std::filesystem::path& run_dir);

// Restores model and optimizer (made for the same model and dtype) and returns the controller's state.
// `load_more` restores the files that write_more wrote. Throws UserError if a file is missing, damaged or
// from another run; the message names the file and the other checkpoints. After an error, model and optimizer
// may be partly restored and must not be used.
Json load_run_checkpoint(const RunCheckpoint& checkpoint, Model& model, Optimizer& optimizer,
                         const std::function<void(const std::filesystem::path& directory)>& load_more = {});

}  // namespace bough
