// Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models
// Using Model Parallelism", section 3): the ranks of a group make every pass of a model together, each with
// some of the heads, of the feed-forward layer's elements and of the vocabulary. What enters a layer and what
// leaves it is whole, and the same, on every rank:
//
//   x ─ copy ─▶ norm · own heads' q, k, v ─▶ attention ─▶ own columns of the output ─ sum ─▶ + x
//   x ─ copy ─▶ norm · own rows of gate, up ─▶ own columns of down                  ─ sum ─▶ + x
//
// A copy does nothing, and its backward sums d_x over the ranks; a sum sums, and its backward does nothing.
// Where key heads are fewer than ranks, several ranks have the same one.
//
// Of a parameter a rank holds pieces (Parameter::Part). What all have, or several, is updated by each alike,
// from the sum of their gradients (sum_copied_gradients).
//
// All ranks must make the same passes in the same order: each sum is a collective call.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "kernels/parameter.h"
#include "models/config.h"
#include "models/safetensors.h"

namespace bough {

class Model;

// What rank `rank` of `size` has of a model: its heads, its elements of the feed-forward layer. The
// vocabulary's size is the whole one. UserError where the ranks cannot share it evenly.
ModelConfig shard_config(const ModelConfig& whole, int64_t rank, int64_t size);

// A run of `count` from `first` on.
struct Slice {
  int64_t first = 0, count = 0;
};
// A rank's tokens of the vocabulary: as many as the others', the last ranks' fewer.
Slice vocabulary_slice(int64_t vocab_size, int64_t rank, int64_t size);

// Where a collective of these ranks takes such a tensor from: the tensor's own GPU, or the host.
at::Device buffer_device(const at::Tensor& values, const Communicator& ranks);

// Sum over ranks of fp32, fp64, int64 or (by way of fp32) bf16, in place; every rank gets the same bits.
void all_reduce_(const at::Tensor& values, Communicator& ranks);
// [size, ...]: every rank's `own`, of the same sizes.
at::Tensor all_gather_stacked(const at::Tensor& own, Communicator& ranks);

// Differentiable: the identity whose gradient is summed, and the sum whose gradient is as it is. The
// group must outlive the graph.
at::Tensor copy_to_ranks(const at::Tensor& x, Communicator& ranks);
at::Tensor sum_over_ranks(const at::Tensor& x, Communicator& ranks);

// The sizes of the tensor that a part of a parameter is a piece of, and that piece of it.
std::vector<int64_t> whole_sizes(const Parameter& parameter, const Parameter::Part& part);
at::Tensor own_piece(const at::Tensor& whole, const Parameter& parameter, const Parameter::Part& part);
// Of what every rank has of a part (`own`, of the part's sizes): the whole tensor, on every rank. Where the
// named tensor has several parts, the elements of the others are 0.
at::Tensor gather_pieces(const at::Tensor& own, const Parameter& parameter, const Parameter::Part& part,
                         Communicator& ranks);
// Appends what gather_pieces() gave of a part, or adds it to what is there of the same tensor.
void add_pieces(NamedTensors& tensors, const std::string& name, const at::Tensor& pieces);

// What is trained of a model that ranks share, to the same of a whole one: a call of all of them, stages
// (pipeline.h) included, of whom the first has the whole one.
void gather_weights(Model& own, Model* whole);

// A model as it is saved: over the same tensors, or with `copies` with what is trained in tensors of its own.
// Of ranks that share it a call of all, of whom the first gets the whole, in the host's memory, and the
// others null.
std::shared_ptr<Model> snapshot_of(const Model& model, bool copies);

// main_grad of what several ranks hold becomes that of the whole model. Once, after the last pass.
void sum_copied_gradients(const std::vector<Parameter*>& parameters, Communicator& ranks);

}  // namespace bough
