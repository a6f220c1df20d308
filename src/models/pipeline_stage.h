// Pipeline parallelism (Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream"). Each rank of a
// communicator is a stage and holds consecutive layers of the decoder. The first stage also has the
// embedding, the last one the final norm and the lm_head. A stage gets its input from the previous stage, and
// in backward returns the input's gradient. plan/pipeline_schedule.h has the schedule.
//
// If the lm_head is tied to the embedding, the first and the last stage both hold it. Both update it from the
// sum of their gradients, so the two copies stay equal.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "models/config.h"
#include "models/safetensors.h"

namespace bough {

// The communicators of the ranks that hold one model together. nullptr for the kind, tensor or pipeline, that
// is off. Not owned.
struct ModelRanks {
  Communicator* tensor = nullptr;  // ranks with shards of the same layers (tensor_parallel.h)
  // The stages in order. There are two communicators, because messages to later stages must not wait for
  // messages to earlier stages.
  Communicator* stages = nullptr;
  Communicator* stages_back = nullptr;
};

struct Stage {
  int64_t index = 0, size = 1;
  int64_t first_layer = 0, num_layers = 0;
  bool is_first() const { return index == 0; }
  bool is_last() const { return index + 1 == size; }
};

// Returns the first layer of each stage, then the number of layers. The cut minimizes the largest cost of a
// stage: the forward FLOPs of a token that attends to kCutContext tokens. The lm_head counts as if every
// token were trained. Throws UserError if there are more stages than layers.
inline constexpr int64_t kCutContext = 1024;
std::vector<int64_t> cut_layers(const ModelConfig& whole, int64_t num_stages);
Stage stage_of(const ModelConfig& whole, int64_t index, int64_t size);
// The config of a model with only the stage's layers.
ModelConfig stage_config(const ModelConfig& whole, const Stage& stage);

// A message with the bytes of a contiguous buffer, to or from rank `other`. `buffer` must outlive it.
Collective message_of(Collective::Kind kind, const at::Tensor& buffer, int64_t other);

// Collective call of all stages. On the first stage, calls use() with the tensors of all stages, stage by
// stage, each name once. A received tensor is freed after its use(), unless use() keeps a reference.
void gather_to_first_stage(const NamedTensors& own, Communicator& stages,
                           const std::function<void(const std::string& name, const at::Tensor& tensor)>& use);

// Called by the first and the last stage: replaces `values` on both by the elementwise sum of the two
// tensors, the same bits on both.
void sum_over_ends_(const at::Tensor& values, Communicator& stages);

}  // namespace bough
