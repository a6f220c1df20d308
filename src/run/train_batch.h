// From the groups of a step to the trained step: batch, advantages, filters, the trainer, and what the step's
// metrics say of rewards and samples.
#pragma once

#include "control/controller.h"
#include "run/run_settings.h"
#include "train/trainer.h"

namespace bough {

// Trains on the order's groups, in their order. Metrics of rewards, samples and training; the record's batch
// has every sample, those that a filter left out too. A problem that the batch has twice, across the end of
// an epoch, is two groups.
StepRecord train_batch(const TrainOrder& order, const RunSettings& settings, BatchTrainer& trainer);

}  // namespace bough
