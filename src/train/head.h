// The head of one block: log-probabilities of its trained tokens, their loss where asked, and the gradient of the
// hidden states they were predicted from, chunk by chunk (engine.md 3, "Head").
#pragma once

#include <functional>

#include "models/model.h"
#include "train/executor.h"
#include "train/row_map.h"

namespace bough {

// Gradients of log_probs and entropies of all loss rows, from a loss that was evaluated before the walk.
struct Seeds {
  at::Tensor d_log_probs_R, d_entropies_R;  // [R] of the batch, accumulator type; entropies may be undefined
};

class Head {
 public:
  // `loss` (token-separable) or `seeds`, or neither for a forward-only walk. `result` gets values of every row,
  // the loss and its metrics; it must outlive the head.
  Head(const Model& model, const TrainBatch& batch, const Loss* loss, const Seeds* seeds, int64_t chunk_rows,
       WalkResult* result);

  // source_SD: hidden states that rows.sources index. Returns their gradient (accumulator type), or an undefined
  // tensor in a forward-only walk.
  at::Tensor run(const BlockRows& rows, const at::Tensor& source_SD);

 private:
  Seeds chunk_seeds(const BlockRows& rows, int64_t begin, int64_t end, const at::Tensor& log_probs,
                    const at::Tensor& entropies);

  const Model& model_;
  const TrainBatch& batch_;
  const Loss* loss_;
  const Seeds* seeds_;
  int64_t chunk_rows_;
  WalkResult* result_;
};

}  // namespace bough
