// Selects the class that computes an architecture. A new architecture is a file beside decoder.cpp and a line
// here.
#include "models/decoder.h"

#include "base/error.h"

namespace bough {

std::unique_ptr<Model> make_model(const ModelConfig& config, at::ScalarType dtype, at::Device device,
                                  const ModelRanks& ranks) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  switch (config.architecture) {
    case Architecture::kQwen3:
    case Architecture::kQwen2:
    case Architecture::kLlama:
    case Architecture::kMistral:
    case Architecture::kGemma2:
    case Architecture::kGemma3:
    case Architecture::kSmolLM3:
    case Architecture::kPhi3:
    case Architecture::kOlmo2: return make_decoder(config, options, ranks);
  }
  BOUGH_CHECK(false, "architecture ", static_cast<int>(config.architecture));
}

}  // namespace bough
