// The tree engine as a class that Python finds as torch.classes.bough.TreeEngine (python/bough/tree_engine.py
// is the interface for users). It has no weights of its own: Python sets the values of its parameters, of
// which the tensors of the user's model are views.
//
// Errors: a UserError becomes a RuntimeError whose text begins with kUserError, so that Python can tell it
// from a bug.
#pragma once

#include <torch/custom_class.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cost/cost_model.h"
#include "models/model.h"
#include "train/executor.h"
#include "train/head.h"
#include "train/plan_execution.h"

namespace bough {

inline constexpr const char* kUserError = "bough.UserError: ";

// The sequences of one call, their plan, and, between forward and backward, the held activations.
class EngineBatch : public torch::CustomClassHolder {
 public:
  // tokens_N: int32, CPU, the tokens of all sequences, one sequence after another. lengths_S: int64, CPU.
  // trained_N: uint8, CPU, 1 for each token that has a loss row; the flag of a sequence's first token must be
  // 0.
  EngineBatch(const at::Tensor& tokens_N, const at::Tensor& lengths_S, const at::Tensor& trained_N,
              double temperature, int64_t vocab_size);

  int64_t num_rows() const { return batch_.num_rows(); }

 private:
  friend class TreeEngine;
  std::vector<int32_t> tokens_;
  TrainBatch batch_;
  std::optional<Plan> plan_;
  bool holds_ = false;  // the plan holds all activations between forward and backward
  std::unique_ptr<HeldForward> held_;
  std::unique_ptr<TwoPhases> held_hidden_;
  std::vector<at::Tensor> gradients_;  // to which the backward of held_ adds: its graph refers to them
};
using BatchHandle = c10::intrusive_ptr<EngineBatch>;

class TreeEngine : public torch::CustomClassHolder {
 public:
  // config: the text of a config.json. dtype: fp32, bf16 or fp64. device: cpu or cuda. has_lm_head: false for
  // a backbone alone, of which only hidden() is computed.
  TreeEngine(const std::string& config, const std::string& dtype, const std::string& device,
             bool has_lm_head);

  // The parts of the parameters. adapters: of the adapters' A and B, else of the weights. By part: the
  // Hugging Face or PEFT name, the parameter's index, and its rows [begin, end).
  std::tuple<std::vector<std::string>, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>>
  parts(bool adapters) const;
  // The shape of each parameter, [rows, columns] or [rows].
  std::vector<std::vector<int64_t>> shapes(bool adapters) const;
  // Sets a parameter's value, which this object then refers to. Shape, dtype and device must be the
  // parameter's.
  void set_weight(bool adapters, int64_t parameter, const at::Tensor& value);
  // models/lora.h, set_adapted_modules(). The adapters' values must then be set.
  void set_adapted_modules(const std::vector<std::string>& modules, int64_t rank, double scale);

  // The batch. Throws if a token is outside the vocabulary or a sequence is too long for the model.
  BatchHandle make_batch(const at::Tensor& tokens_N, const at::Tensor& lengths_S, const at::Tensor& trained_N,
                         double temperature) const;

  // Plans the batch. memory_bytes: over weights and gradients; 0: what the device has. max_tokens_per_pass:
  // 0: by device. separate: the caller needs the values before the gradients (autograd), so the plan either
  // holds all activations in between or runs the forward twice, whichever is predicted to be faster within
  // the memory. Returns a JSON object that describes the plan.
  std::string plan(const BatchHandle& batch, const std::string& strategy, int64_t max_tokens_per_pass,
                   int64_t memory_bytes, bool separate);

  // Returns log-probabilities and entropies, [R] each, accumulator type, CPU. holds: keep the activations for
  // backward(), if the plan says so.
  std::tuple<at::Tensor, at::Tensor> forward(const BatchHandle& batch, bool holds);
  // Computes the gradients of sum(d_log_probs_R · log_probs_R + d_entropies_R · entropies_R).
  void backward(const BatchHandle& batch, const at::Tensor& d_log_probs_R, const at::Tensor& d_entropies_R);
  // Final hidden states from which the trained tokens are predicted, those of the tokens before them: [R, D],
  // model dtype, on the model's device. holds: as in forward().
  at::Tensor hidden(const BatchHandle& batch, bool holds);
  // Computes the gradients of sum(d_hidden_RD · hidden_RD). d_hidden_RD: accumulator type, on the model's
  // device.
  void hidden_backward(const BatchHandle& batch, const at::Tensor& d_hidden_RD);
  // Gradient of the loss that `callback` computes. callback: the address of a C function `int f(void)`, which
  // returns 0 after it has called rows() and set_loss(), anything else if it failed. coupling: the rows that
  // one call of the function needs together: token, sequence or batch. Returns loss, log-probabilities,
  // entropies.
  std::tuple<double, at::Tensor, at::Tensor> step(const BatchHandle& batch, int64_t callback,
                                                  const std::string& coupling);
  // Within the callback: log-probabilities and entropies, leaves that require grad, and the rows' indices.
  std::tuple<at::Tensor, at::Tensor, at::Tensor> rows() const;
  void set_loss(const at::Tensor& loss);

  // The gradient of each trained parameter (the adapters' A and B if there are adapters), accumulator type:
  // that of the last backward() or step() alone. Later calls do not change these tensors as long as Python
  // holds them.
  std::vector<at::Tensor> gradients();

  // Peak bytes of tensors in the last forward(), backward() or step(), over those before it. CPU and GPU.
  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  friend class PythonLoss;
  class Computation;
  const CostModel& costs();
  // Zeroes the gradients. Those that are missing, or that anything else refers to, are allocated.
  void zero_gradients();

  // For held activations: new buffers for the gradients, to which the backward's graph will refer.
  void hold_gradients(EngineBatch& batch);
  void return_gradients(EngineBatch& batch);

  std::unique_ptr<Model> model_;
  const ExecutorOptions options_;
  std::optional<CostModel> costs_;
  int64_t peak_bytes_ = 0;
  std::tuple<at::Tensor, at::Tensor, at::Tensor> rows_;  // during a callback
  at::Tensor loss_;
};

}  // namespace bough
