// Model directories and rollout files for tests written in Python.
//
//   checkpoint_tool copy IN OUT [DTYPE [SHARD_BYTES]]   loads IN as DTYPE (fp32, bf16, fp64), saves it to OUT
//   checkpoint_tool new MODEL_TYPE OUT                  a new model: config.json made here, initial weights
//   checkpoint_tool rollouts IN OUT [VOCAB_SIZE]        reads a rollout file and writes it
//
// Errors go to stderr. Exit codes are those of the program: 2 is bad input, 3 is a failure at run time.
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "data/rollout_file.h"
#include "models/checkpoint.h"

namespace {

using namespace bough;

const std::map<std::string, at::ScalarType> kDtypes = {
    {"fp32", at::kFloat}, {"bf16", at::kBFloat16}, {"fp64", at::kDouble}};

void copy(const std::vector<std::string>& arguments) {
  const auto model = load_model(arguments[1], kDtypes.at(arguments.size() > 3 ? arguments[3] : "fp32"));
  SaveOptions options{.copy_from = arguments[1]};
  if (arguments.size() > 4) options.max_shard_bytes = std::stoll(arguments[4]);
  save_model(arguments[2], *model, options);
}

void make_new(const std::vector<std::string>& arguments) {
  const Family& family = family_named(arguments[1]);
  // Reading this config sets the family's own flags. Writing adds the family's other keys.
  const Json asked = {{"model_type", arguments[1]},
                      {"vocab_size", 61},
                      {"hidden_size", 24},
                      {"intermediate_size", 40},
                      {"num_hidden_layers", 2},
                      {"num_attention_heads", 4},
                      {"num_key_value_heads", 2},
                      {"head_dim", family.head_dim > 0 ? 16 : 6},
                      {"max_position_embeddings", 128},
                      {"rope_theta", 12345.0},
                      {"sliding_window", 128},
                      {"attn_logit_softcapping", nullptr},
                      {"final_logit_softcapping", nullptr},
                      {"num_experts", 4},
                      {"num_experts_per_tok", 2},
                      {"moe_intermediate_size", 16},
                      {"tie_word_embeddings", true}};
  const Json written = write_model_config(parse_model_config(asked, "new"));
  const auto model = make_model(parse_model_config(written, "new"), at::kFloat);
  initialise(*model, 1);
  save_model(arguments[2], *model);
}

void run(const std::vector<std::string>& arguments) {
  const std::string command = arguments.size() > 2 ? arguments[0] : "";
  if (command == "copy") copy(arguments);
  else if (command == "new") make_new(arguments);
  else if (command == "rollouts")
    write_rollouts(
        arguments[2],
        read_rollouts(arguments[1], {.vocab_size = arguments.size() > 3 ? std::stoll(arguments[3]) : 0}));
  else throw UserError("usage: checkpoint_tool copy|new|rollouts IN OUT ...");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run({argv + 1, argv + argc});
  } catch (const UserError& error) {
    std::cerr << error.what() << "\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 3;
  }
  return 0;
}
