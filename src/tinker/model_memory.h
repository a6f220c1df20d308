// The memory of a training service. The bytes that are free when it starts are divided once: a half for
// training passes, a quarter for models in training, a quarter for the engines that sample. Models that do
// not fit beside those that are used are parked (TrainingModel::park) until their next request.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "models/lora_settings.h"
#include "models/model.h"
#include "tinker/settings.h"

namespace bough {

// Bytes that a model in training holds beyond the base's weights, which all models share.
struct ModelNeed {
  int64_t weights = 0;    // of the adapter, or the copy of all weights
  int64_t gradients = 0;  // in the accumulator type
  int64_t optimizer = 0;  // both moments, and the master weights of bf16 models
  int64_t sampler = 0;    // a sampler's copy of all weights; 0 for an adapter

  int64_t bytes() const { return weights + gradients + optimizer + sampler; }
};
// adapter.rank 0: all weights are trained.
ModelNeed need_of(const Model& base, const LoraSettings& adapter);

struct ServiceMemory {
  int64_t free = 0;     // when the service started
  int64_t models = 0;   // for models in training that are not parked
  int64_t passes = 0;   // bound of a training pass
  int64_t sampler = 0;  // keys and values of one engine
  bool on_host =
      true;  // models are in host memory, and are parked in files; else they are parked in host memory
};
// free: bytes of the device after the base model was loaded. Settings that are not auto count as they are.
ServiceMemory plan_memory(const TrainingServiceSettings& settings, const c10::Device& device, int64_t free);

// Bytes that are free for parked models: in the folder's file system, or in host memory.
int64_t parking_space(const std::filesystem::path& folder, bool on_host);

// Models that exist, and what parking has left for more.
struct ModelsHeld {
  int64_t count = 0, bytes = 0;  // of all models, parked ones included
  int64_t parking = 0;           // bytes for parked models, those that parked models take included
  std::string place;             // of parked models, for messages
};
// Returns why one more model does not fit: what it needs, what is there, and what helps. Empty if it fits.
std::string why_no_memory(const ModelNeed& need, const LoraSettings& adapter, const ServiceMemory& memory,
                          const ModelsHeld& held);

}  // namespace bough
