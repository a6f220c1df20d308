// Pipeline parallelism (Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream"): the ranks of a group
// are stages, of which each has a run of the decoder's layers, the first one the embedding too, and the last
// the final norm and the head. A stage's input is what the one before returned, and in backward it sends the
// gradient of that back. When which stage makes which pass: plan/pipeline.h.
//
// A head that is the embedding (tied) is the first stage's and the last one's: both hold it, and step it
// alike from the sum of their gradients.
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

// The ranks that have the other pieces of a model; null: none. Not owned.
struct ModelRanks {
  Communicator* tensor = nullptr;  // that share every layer (tensor_parallel.h)
  // The stages, in their order, twice: what goes on to later stages must not wait for what comes back.
  Communicator* stages = nullptr;
  Communicator* stages_back = nullptr;
};

struct Stage {
  int64_t index = 0, size = 1;
  int64_t first_layer = 0, num_layers = 0;
  bool is_first() const { return index == 0; }
  bool is_last() const { return index + 1 == size; }
};

// The first layer of each stage, and the number of all. Cut so that the largest predicted work of a stage is
// least: FLOPs of a token that sees kCutContext others, and of the head, as if every token were trained.
// UserError: more stages than layers.
inline constexpr int64_t kCutContext = 1024;
std::vector<int64_t> cut_layers(const ModelConfig& whole, int64_t num_stages);
Stage stage_of(const ModelConfig& whole, int64_t index, int64_t size);
// Of the stage's layers alone.
ModelConfig stage_config(const ModelConfig& whole, const Stage& stage);

// The bytes of a contiguous buffer, to or from the rank `other`.
Collective message_of(Collective::Kind kind, const at::Tensor& buffer, int64_t other);

// Calls use() on the first stage with the tensors of all, stage by stage, each name once: a call of all
// stages. What is used lives as long as the call, but its own.
void gather_to_first_stage(const NamedTensors& own, Communicator& stages,
                           const std::function<void(const std::string& name, const at::Tensor& tensor)>& use);

// On the first stage and the last, which call it: the sum of their `values`, the same bits on both.
void sum_over_ends_(const at::Tensor& values, Communicator& stages);

}  // namespace bough
