// Logits of whole sequences, for tests that compare them with transformers'.
//   logits_tool MODEL DTYPE OUT.safetensors < sequences
// reads one sequence a line, token ids with blanks between, and writes one
// tensor [tokens, V] a sequence, named by its number.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <exception>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "models/model.h"
#include "models/safetensors.h"
#include "train/tree_context.h"

namespace bough {

namespace {

at::Tensor sequence_logits(const Model& model, const std::vector<int64_t>& ids) {
  const at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(ids.size());
  KvStack stack(model.config(), 0, model.dtype(), at::kCPU, false);
  // Every key is seen by all tokens after it: a sequence by itself.
  TreeContext context(
      {&stack, 0, false, false, at::full({count}, count, at::kInt), model.config().attention_scale()});
  return model.logits(model.forward(at::tensor(ids, at::kLong), at::arange(count, at::kLong), context));
}

// fp32 or fp64.
void run(const std::string& directory, const std::string& dtype, const std::string& out) {
  const auto model = load_model(directory, dtype == "fp64" ? at::kDouble : at::kFloat);
  NamedTensors logits;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::vector<int64_t> ids;
    for (int64_t id; words >> id;) ids.push_back(id);
    logits.emplace_back(std::to_string(logits.size()), sequence_logits(*model, ids));
  }
  write_safetensors(out, logits);
}

}  // namespace

}  // namespace bough

int main(int argc, char** argv) {
  bough::apply_cpu_workarounds();
  if (argc != 4) {
    std::cerr << "usage: logits_tool MODEL DTYPE OUT.safetensors < sequences\n";
    return 2;
  }
  try {
    bough::run(argv[1], argv[2], argv[3]);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 3;
  }
}
