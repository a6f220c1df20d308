// Low-rank adapters on the layers' matrices and the lm_head (Hu et al. 2021, "LoRA: Low-Rank Adaptation of
// Large Language Models"): y = W x + (alpha / rank) · B A x, with W frozen. kernels/linear computes the
// adapter's term, in training and in generation. The term is added to W only by merge_adapter(), for export.
// If the lm_head is tied, its adapter acts on the logits only, as in PEFT.
//
// An adapter belongs to a model object, not to the tensors of W. Models made by share() use the same tensors
// W, but may have different adapters or none. The reference policy of a run is its model without_adapter().
//
// A and B have the model's element type. The optimizer keeps fp32 master weights for bf16, as for any
// parameter. The files are PEFT's: adapter_config.json and adapter_model.safetensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/lora_settings.h"
#include "models/model.h"

namespace bough {

bool has_adapter(const Model& model);

// Adds adapters to the model. With settings.path, they come from its files (load_adapter). Otherwise they are
// new: A ~ U(-1/sqrt(inputs), 1/sqrt(inputs)) as in PEFT, a function of the seed only, and B = 0. W becomes
// frozen: its main_grads are released. Throws UserError if the model lacks a target, is quantized, or has
// both fused projections and tensor ranks.
void add_adapter(Model& model, const LoraSettings& settings, uint64_t seed);

// The number of elements that add_adapter() would add to the unsharded model with settings.rank and targets.
int64_t count_adapter_elements(const Model& model, const LoraSettings& settings);

// Adds uninitialized adapters of one rank to exactly these modules (model.layers.0.self_attn.q_proj), in
// place of those that the model has. `modules` empty: the model then has no adapters, and its weights are
// trained. Throws UserError if the model has no such module.
void set_adapted_modules(Model& model, const std::vector<std::string>& modules, int64_t rank, double scale);

// Makes the model's adapters frozen ones (Parameter::frozen_adapter), which act beside the adapters that it
// gets next. Does nothing if the model has no adapters. If the tensors are shared with another model, its
// in-place changes act here too.
void freeze_adapter(Model& model);
// The A and B of all frozen adapters.
std::vector<Parameter*> frozen_adapters(Model& model);

// Returns a model over the same weights, without adapters.
std::unique_ptr<Model> without_adapter(const Model& model);
// The same, but frozen adapters stay. So add_adapter() after freeze_adapter() is undone.
std::unique_ptr<Model> without_last_adapter(const Model& model);

// Adds (alpha / rank) · B A of all adapters to each W and removes the adapters. Computed in the accumulator
// type (fp32, or fp64 for an fp64 model). Each sum is rounded once. No other model may share the weights. A
// tied lm_head with an adapter becomes a matrix of its own (Model::untie_head).
void merge_adapter(Model& model);

// Every A and B under its PEFT name, as views.
std::vector<std::pair<std::string, at::Tensor>> adapter_tensors(Model& model);

// Writes PEFT's two files into the directory, which is created if it is missing. `base`: directory or name of
// the base model, written to adapter_config.json.
void save_adapter(const std::filesystem::path& directory, Model& model, const std::string& base);

// Loads the adapters of a PEFT directory. A model without adapters gets new ones. If the model has adapters,
// their modules, rank and alpha must be those of the files. Throws UserError if
//   - the files are not PEFT's LoRA, or belong to another model,
//   - they need something unsupported (DoRA, different ranks, biases, other trained modules),
//   - the model has other adapters.
void load_adapter(const std::filesystem::path& directory, Model& model);

}  // namespace bough
