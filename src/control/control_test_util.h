// What this room's tests share beside its fakes: a trainer that only looks, the byte-level tokenizer. For
// tests only.
#pragma once

#include <vector>

#include "control/fakes.h"
#include "control/prompt_encoder.h"
#include "models/tokenizer.h"
#include "train/trainer.h"

namespace bough::testing {

class FakeTrainer final : public BatchTrainer {
 public:
  MetricValues train(const std::vector<Trajectory>& batch) override {
    batches.push_back(batch);
    return {{"loss/policy", 0.25}};
  }
  std::vector<std::vector<Trajectory>> batches;
};

inline PromptEncoder byte_level_encoder() {
  return PromptEncoder(Tokenizer::from_json(byte_level_tokenizer_json(), "tokenizer.json"), ChatTemplate());
}

}  // namespace bough::testing
