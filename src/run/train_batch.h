// Turns the groups of a TrainOrder into one training step: batch, advantages, filters, trainer, and metrics
// of rewards and samples.
#pragma once

#include "control/controller.h"
#include "run/run_settings.h"
#include "train/trainer.h"

namespace bough {

// Trains on the groups of `order`, in that order. Returns metrics of rewards, samples and training. The
// record's batch has every sample, also samples that a filter left out. If a problem occurs twice (across the
// end of an epoch), its two groups stay separate.
StepRecord train_batch(const TrainOrder& order, const RunSettings& settings, BatchTrainer& trainer);

}  // namespace bough
