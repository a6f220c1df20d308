// The cost model that a run's plans are made from.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "models/model.h"
#include "cost/cost_model.h"
#include "train/trainer.h"

namespace bough {

// The profile of the model's device: a CPU is measured once on this machine and cached, a GPU's is built in.
// Interrupted where `stop` says so meanwhile.
DeviceProfile profile_of(const Model& model, const std::function<bool()>& stop);

// A run's own calibration.json in `folder`: what stands there; else a copy of `from` (another run's, where it is not
// empty); else profile_of(model, stop), saved. So plans of a run, and of one resumed, are a function of its batches alone.
// UserError: `from` is missing, malformed, or of another element type than the model.
CostModel run_costs(const std::filesystem::path& folder, const std::string& from, const Model& model,
                    const std::function<bool()>& stop);

// The same as the trainer takes it.
StepCosts step_costs(CostModel costs);

}  // namespace bough
