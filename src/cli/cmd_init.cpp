// `bough init`: a new small model directory that Bough and transformers load.
#include <filesystem>
#include <optional>

#include "base/error.h"
#include "base/file.h"
#include "base/format.h"
#include "cli/command.h"
#include "cli/torch_options.h"
#include "models/checkpoint.h"
#include "text/tokenizer.h"

namespace bough {

namespace {

namespace fs = std::filesystem;

// Ids of byte_level_tokenizer_json().
constexpr int64_t kPadToken = 256;
constexpr int64_t kStopToken = 258;
constexpr int64_t kTokenizerSize = 259;

struct InitOptions {
  std::string directory;
  std::string arch;  // default: qwen3, or qwen3_moe if an option of experts is given
  int64_t hidden_size = 256;
  int64_t layers = 4;
  int64_t heads = 8;
  std::optional<int64_t> kv_heads;  // default: half the query heads, or all of an odd number
  std::optional<int64_t> head_dim;  // default: hidden_size / heads
  // default: three times hidden_size, as in SwiGLU models of this size
  std::optional<int64_t> intermediate_size;
  // For families with experts. Default of the size: so that a token uses intermediate_size elements.
  std::optional<int64_t> experts, experts_per_token, expert_size;
  int64_t vocab_size = 272;  // the tokenizer's 259, rounded up to a multiple of 16
  int64_t max_positions = 32768;
  bool tie = false;
  int64_t seed = 1;
  std::string dtype = "fp32";
  bool force = false;
  bool json = false;
};

void check_sizes(const InitOptions& options) {
  check_at_least("--hidden-size", options.hidden_size, 1);
  check_at_least("--layers", options.layers, 1);
  check_at_least("--heads", options.heads, 1);
  if (options.kv_heads) check_at_least("--kv-heads", *options.kv_heads, 1);
  if (options.kv_heads && options.heads % *options.kv_heads != 0)
    throw UserError(str("--kv-heads ", *options.kv_heads, " does not divide --heads ", options.heads,
                        "; each key and value head serves as many query heads"));
  if (options.head_dim) check_at_least("--head-dim", *options.head_dim, 1);
  if (options.intermediate_size) check_at_least("--intermediate-size", *options.intermediate_size, 1);
  if (options.experts) check_at_least("--experts", *options.experts, 1);
  if (options.experts_per_token) check_at_least("--experts-per-token", *options.experts_per_token, 1);
  if (options.expert_size) check_at_least("--expert-size", *options.expert_size, 1);
  check_at_least("--max-positions", options.max_positions, 1);
  check_at_least("--seed", options.seed, 0);
  check_at_least("--vocab-size", options.vocab_size, kTokenizerSize,
                 "the byte-level tokenizer has that many tokens");
  if (!options.head_dim && options.hidden_size % options.heads != 0)
    throw UserError(str("--hidden-size ", options.hidden_size, " is no multiple of --heads ", options.heads,
                        "; change one of them, or give --head-dim"));
}

const Family& family_of(const InitOptions& options) {
  const bool has_experts = options.experts || options.experts_per_token || options.expert_size;
  const std::string arch = !options.arch.empty() ? options.arch : has_experts ? "qwen3_moe" : "qwen3";
  try {
    return family_named(arch);
  } catch (const UserError& error) {
    throw UserError(str("--arch: ", error.what()));
  }
}

// Adds the keys of experts to `asked`. Throws UserError if an option has no effect in the family.
void ask_for_experts(const InitOptions& options, const Family& family, Json& asked) {
  if (!family.experts.any()) {
    for (const auto& [name, value] : {std::pair("--experts", options.experts),
                                      std::pair("--experts-per-token", options.experts_per_token),
                                      std::pair("--expert-size", options.expert_size)})
      if (value)
        throw UserError(str(name, ": got ", *value, " for --arch ", family.model_type,
                            ", which has no experts; expected mixtral, qwen3_moe or olmoe"));
    return;
  }
  const std::string size_key = family.experts.size_key;
  const bool has_dense_size = size_key != "intermediate_size";
  if (!has_dense_size && options.expert_size && options.intermediate_size)
    throw UserError(str("--intermediate-size: got ", *options.intermediate_size,
                        " beside --expert-size, but --arch ", family.model_type,
                        " has no dense layers; expected --expert-size only"));
  const int64_t per_token = options.experts_per_token.value_or(2);
  const int64_t dense = asked.at("intermediate_size").get<int64_t>();
  const bool is_given = !has_dense_size && options.intermediate_size;
  asked["num_experts"] = options.experts.value_or(8);
  asked["num_experts_per_tok"] = per_token;
  asked[size_key] = options.expert_size.value_or(is_given ? dense : std::max<int64_t>(1, dense / per_token));
  asked["norm_topk_prob"] = true;
}

// Writes the config.json that a user would write, then reads it like any other: one place decides what is
// possible.
ModelConfig make_config(const InitOptions& options) {
  const Family& family = family_of(options);
  const int64_t kv_heads = options.kv_heads.value_or(options.heads / (options.heads % 2 == 0 ? 2 : 1));
  const int64_t head_dim = options.head_dim.value_or(options.hidden_size / options.heads);
  Json asked = {
      {"model_type", family.model_type},
      {"vocab_size", options.vocab_size},
      {"hidden_size", options.hidden_size},
      {"intermediate_size", options.intermediate_size.value_or(3 * options.hidden_size)},
      {"num_hidden_layers", options.layers},
      {"num_attention_heads", options.heads},
      {"num_key_value_heads", kv_heads},
      {"head_dim", head_dim},
      {"max_position_embeddings", options.max_positions},
      {"rms_norm_eps", 1e-6},
      {"rope_theta", 1e6},
      {"tie_word_embeddings", options.tie},
      {"query_pre_attn_scalar", head_dim},
      {"attn_logit_softcapping", nullptr},
      {"final_logit_softcapping", nullptr},
      // If the family has windows: a window that holds every sequence, so that attention is exact.
      {"sliding_window", options.max_positions},
  };
  ask_for_experts(options, family, asked);
  ModelConfig config = parse_model_config(asked, "bough init");
  config.source = write_model_config(config);
  config.source["eos_token_id"] = kStopToken;
  config.source["pad_token_id"] = kPadToken;
  return config;
}

void check_directory(const InitOptions& options) {
  std::error_code error;
  if (options.directory.empty()) throw UserError("DIR: the folder's name is empty");
  const fs::path path = options.directory;
  if (fs::exists(path, error) && !fs::is_directory(path, error))
    throw UserError(str("DIR: ", quoted(options.directory), " is a file; name a folder"));
  if (!options.force && fs::is_directory(path, error) && !fs::is_empty(path, error))
    throw UserError(str("DIR: ", quoted(options.directory),
                        " is not empty; name a new folder, or give --force to replace the model in it"));
}

void run_init(const InitOptions& options) {
  check_sizes(options);
  const at::ScalarType dtype = parse_dtype(options.dtype);
  check_directory(options);
  const ModelConfig config = make_config(options);
  const std::unique_ptr<Model> model = make_model(config, dtype);
  initialise(*model, static_cast<uint64_t>(options.seed));
  SaveOptions save;
  save.generation_config = {{"eos_token_id", kStopToken}, {"pad_token_id", kPadToken}, {"do_sample", true}};
  // The tokenizer is written first and the weights last: a folder with weights is complete.
  make_directories(options.directory);
  write_file_atomically(fs::path(options.directory) / "tokenizer.json", byte_level_tokenizer_json());
  write_file_atomically(fs::path(options.directory) / "tokenizer_config.json",
                        byte_level_tokenizer_config_json());
  save_model(options.directory, *model, save);
  const int64_t parameters = config.num_parameters();
  const std::string arch = config.family->model_type;
  if (options.json) {
    print_json({{"model", options.directory}, {"architecture", arch}, {"parameters", parameters}});
  } else {
    const std::string experts =
        config.is_mixture() ? str(", ", config.num_experts, " experts of ", config.expert_intermediate_size,
                                  ", ", config.experts_per_token, " a token")
                            : "";
    print_table({{"model", options.directory},
                 {"parameters", format_thousands(parameters)},
                 {"shape", str(arch, ", ", options.layers, " layers of width ", options.hidden_size, ", ",
                               options.heads, " heads, vocabulary ", options.vocab_size, experts)}});
  }
}

}  // namespace

void add_init_command(CommandLine& line) {
  auto options = std::make_shared<InitOptions>();
  Command command =
      line.add("init", "A new small model directory: random weights, byte-level tokenizer, ChatML",
               [options] { run_init(*options); });
  command.add_option("DIR", options->directory, "The folder to make").required().type_name("");
  command
      .add_option("--arch", options->arch,
                  family_names(&Family::model_type, " | ", " | ") +
                      "\n(default: qwen3; qwen3_moe if experts are asked for)")
      .type_name("NAME");
  command.add_option("--hidden-size", options->hidden_size, "Width of the hidden states");
  command.add_option("--layers", options->layers, "Decoder layers");
  command.add_option("--heads", options->heads, "Query heads");
  command.add_option("--kv-heads", options->kv_heads, "Key and value heads (default: half of --heads)");
  command.add_option("--head-dim", options->head_dim, "Size of a head (default: hidden size / heads)")
      .type_name("INT");
  command
      .add_option("--intermediate-size", options->intermediate_size,
                  "Width of the feed-forward part (default: 3 x hidden size)")
      .type_name("INT");
  command
      .add_option("--experts", options->experts,
                  "Feed-forward networks of each layer, for a mixture of experts (default: 8)")
      .type_name("INT");
  command
      .add_option("--experts-per-token", options->experts_per_token,
                  "Experts that each token uses (default: 2)")
      .type_name("INT");
  command
      .add_option("--expert-size", options->expert_size,
                  "Width of an expert (default: intermediate size / experts per token)")
      .type_name("INT");
  command.add_option("--vocab-size", options->vocab_size, "Rows of the embedding, at least 259");
  command.add_option("--max-positions", options->max_positions, "Longest sequence");
  command.add_flag("--tie", options->tie, "Use the embedding as the head");
  command.add_option("--seed", options->seed, "Weights are a function of it");
  command.add_option("--dtype", options->dtype, "fp32 | bf16: what weights are stored in");
  command.add_flag("--force", options->force, "Replace the model in a folder that is not empty");
  add_json_flag(command, options->json);
}

}  // namespace bough
