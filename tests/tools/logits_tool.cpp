// Logits of whole sequences, for tests that compare them with transformers' logits.
//   logits_tool MODEL DTYPE OUT.safetensors < sequences
// Reads one sequence a line: token ids with blanks between them. Writes one tensor [T, V] for each sequence,
// named by the sequence's number.
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

// fp32 or fp64.
void run(const std::string& directory, const std::string& dtype, const std::string& out) {
  const auto model = load_model(directory, dtype == "fp64" ? at::kDouble : at::kFloat);
  NamedTensors logits;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::vector<int32_t> ids;
    for (int32_t id; words >> id;) ids.push_back(id);
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
