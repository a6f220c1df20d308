// Makes a mixture of experts of a dense model, as a start for training (Komatsuzaki et al. 2022, "Sparse
// upcycling"; the feed-forward layers are cut, as in He et al. 2024, "Upcycling LLMs into MoE", virtual
// groups).
//
// Each feed-forward layer of F elements is cut into E experts of F / E elements, whose down-projections are
// multiplied by E. A token's weights sum to 1, so with a router of zeros and K = E the mixture computes what
// the dense model does. With K < E it does not, and has to be trained: SmolLM2-135M with K = 2 of 8 starts
// worse than a uniform guess.
#pragma once

#include <cstdint>
#include <memory>

#include "models/model.h"

namespace bough {

struct UpcycleOptions {
  int64_t num_experts = 8;
  int64_t experts_per_token = 2;
  double router_noise = 0.02;  // standard deviation of the routers' weights; 0: zeros
  uint64_t seed = 1;           // of the noise
};

// Returns a Mixtral with the dtype of `dense`, a Llama or Mistral without biases. Throws UserError if the
// model is another one, or F is not a multiple of num_experts.
std::unique_ptr<Model> upcycle(Model& dense, const UpcycleOptions& options);

}  // namespace bough
