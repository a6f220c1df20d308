// The experts of a mixture that an inference server reports for a request, as RoutedExperts.
//
// Both servers send them once, with the last token of the request, as base64 text of an array
// [rows, layers, K]. Row i belongs to token i of prompt and response. The last token has no row. `layers`
// counts all layers of the model. The entries of a dense layer are 0. Sources: SGLang 0.5.23
// (srt/state_capturer/routed_experts.py), vLLM 0.32.0 and 0.33.0
// (model_executor/layers/fused_moe/routed_experts_capturer.py, v1/engine/output_processor.py).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "data/trajectory.h"

namespace bough {

// The shape of a mixture (models/config.h).
struct ExpertLayout {
  int64_t num_layers = 0;             // of the model, with and without experts
  std::vector<uint8_t> dense_layers;  // by layer: 1 if it has no experts; empty: all have experts
  int64_t num_experts = 0, num_chosen = 0;
};

// Each function throws UserError if `text` is not of the format or of this layout, or has not num_rows rows.
// vLLM: the bytes of a .npy file with uint8, uint16 or int32 elements.
RoutedExperts experts_of_npy(const Json& text, const ExpertLayout& layout, int64_t num_rows);
// SGLang: int32 elements without a shape.
RoutedExperts experts_of_int32(const Json& text, const ExpertLayout& layout, int64_t num_rows);

}  // namespace bough
