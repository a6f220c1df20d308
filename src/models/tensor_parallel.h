// Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models
// Using Model Parallelism", section 3). The ranks of a communicator run every pass of a model together. Each
// rank has some of the heads, of the feed-forward elements and of the vocabulary. A layer's input and output
// are complete, and the same, on every rank:
//
//   x ─ copy ─▶ norm · local heads' q, k, v ─▶ attention ─▶ local columns of the output ─ sum ─▶ + x
//   x ─ copy ─▶ norm · local rows of gate, up ─▶ local columns of down                  ─ sum ─▶ + x
//
// `copy` is the identity; its backward sums d_x over the ranks. `sum` adds over the ranks; its backward is
// the identity. If there are fewer key heads than ranks, several ranks have a copy of the same key head.
//
// A rank holds pieces of a parameter (Parameter::Part): ranges of rows or columns of the unsharded tensor.
// Several ranks may hold copies of a piece. All copies get the same update, from the sum of their gradients
// (sum_copied_gradients).
//
// All ranks must run the same passes in the same order, because each sum is a collective call.
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

// Returns the config of rank `rank` of `size`: its heads and feed-forward elements. vocab_size stays that of
// the unsharded model. Throws UserError if the sizes cannot be split evenly.
ModelConfig shard_config(const ModelConfig& whole, int64_t rank, int64_t size);

// The range [first, first + count).
struct Slice {
  int64_t first = 0, count = 0;
};
// The token ids of a rank's part of the vocabulary: ceil(vocab_size / size), at the last ranks maybe fewer.
Slice vocabulary_slice(int64_t vocab_size, int64_t rank, int64_t size);

// The device on which a collective call of `ranks` takes `values`: the GPU of `values` if the communicator
// takes GPU buffers, else the CPU.
at::Device buffer_device(const at::Tensor& values, const Communicator& ranks);

// Sums `values` over the ranks in place. fp32, fp64, int64, or bf16 (summed in fp32). Every rank gets the
// same bits.
void all_reduce_(const at::Tensor& values, Communicator& ranks);
// Returns [size, ...]: the tensors `own` of all ranks, which must have the same sizes.
at::Tensor all_gather_stacked(const at::Tensor& own, Communicator& ranks);

// The differentiable `copy` and `sum` of the diagram above. `ranks` must outlive the autograd graph.
at::Tensor copy_to_ranks(const at::Tensor& x, Communicator& ranks);
at::Tensor sum_over_ranks(const at::Tensor& x, Communicator& ranks);

// unsharded_sizes: sizes of the unsharded tensor to which the part belongs. own_piece: a view of the part's
// piece in the unsharded tensor `whole`.
std::vector<int64_t> unsharded_sizes(const Parameter& parameter, const Parameter::Part& part);
at::Tensor own_piece(const at::Tensor& whole, const Parameter& parameter, const Parameter::Part& part);
// Collective call. Gathers the ranks' pieces of a part (`own`, in the part's sizes) and returns the unsharded
// tensor on the CPU of every rank. Returns `own` itself if the part is not sharded. If several parts have the
// same name, the elements of the other parts are 0.
at::Tensor gather_pieces(const at::Tensor& own, const Parameter& parameter, const Parameter::Part& part,
                         Communicator& ranks);
// Appends `pieces`, a result of gather_pieces(), under `name`. If a tensor of this name is already there,
// adds the elements of `pieces` to it.
void add_pieces(NamedTensors& tensors, const std::string& name, const at::Tensor& pieces);

// Collective call of all ranks that hold the model together, pipeline stages (pipeline_stage.h) included.
// Copies the trained parameters of the shards into the unsharded model `whole` of the first rank. Other ranks
// pass nullptr.
void gather_weights(Model& own, Model* whole);

// Returns a model for saving. If the model is sharded, this is a collective call: the first rank gets an
// unsharded model in CPU memory, the other ranks nullptr. Otherwise the result shares the tensors with
// `model`, except that with `copies` its trained parameters are copies in host memory.
std::shared_ptr<Model> snapshot_of(const Model& model, bool copies);

// Collective call. For each piece with copies on several ranks, sets main_grad on all of them to the gradient
// of the unsharded model. Call it once per optimizer step, after the step's last pass.
void sum_copied_gradients(const std::vector<Parameter*>& parameters, Communicator& ranks);

}  // namespace bough
