// `bough merge`: merges a model and an adapter into one model, for engines that load no adapters.
#include <filesystem>

#include "base/error.h"
#include "cli/command.h"
#include "cli/torch_options.h"
#include "models/checkpoint.h"
#include "models/lora.h"

namespace bough {

namespace {

struct MergeOptions {
  std::string model, adapter, out;
  std::string dtype;
  bool json = false;
};

std::string stored_dtype(const std::string& directory) {
  const at::ScalarType type = stored_type(directory);
  for (const char* name : {"fp32", "fp64", "bf16"})
    if (parse_dtype(name) == type) return name;
  throw UserError(str("DIR is stored in ", c10::toString(type),
                      ", which cannot be written; choose the type of the merged model with --dtype fp32 "
                      "or bf16"));
}

// The merged weights are computed in fp32 (fp64 if they are stored in fp64) and rounded once when stored.
void run_merge(const MergeOptions& options) {
  const std::string dtype = options.dtype.empty() ? stored_dtype(options.model) : options.dtype;
  const at::ScalarType stored = parse_dtype(dtype);
  std::error_code absent;  // if a path is missing, the two are not the same
  for (const std::string& source : {options.model, options.adapter})
    if (std::filesystem::equivalent(options.out, source, absent))
      throw UserError(
          str("OUT: ", quoted(options.out),
              " is the model or the adapter itself, which would be overwritten; name another folder"));
  const auto model = load_model(options.model, stored == at::kDouble ? at::kDouble : at::kFloat);
  load_adapter(options.adapter, *model);
  merge_adapter(*model);
  save_model(options.out, *model, {.dtype = stored, .copy_from = options.model});
  if (options.json) print_json({{"model", options.out}, {"dtype", dtype}});
  else print_table({{"model", options.out}, {"stored in", dtype}});
}

}  // namespace

void add_merge_command(CommandLine& line) {
  auto options = std::make_shared<MergeOptions>();
  Command command =
      line.add("merge", "Merges a model and a LoRA adapter, Bough's or PEFT's, into one model directory",
               [options] { run_merge(*options); });
  command.add_option("DIR", options->model, "Hugging Face directory of the base model")
      .required()
      .type_name("");
  command
      .add_option("ADAPTER", options->adapter,
                  "Folder with adapter_config.json and adapter_model.safetensors")
      .required()
      .type_name("");
  command.add_option("OUT", options->out, "Folder to create").required().type_name("");
  command.add_option("--dtype", options->dtype,
                     "Type of the stored weights: fp32 | bf16 | fp64 (default: that of DIR);\n"
                     "sums are computed in fp32, for fp64 in fp64");
  add_json_flag(command, options->json);
}

}  // namespace bough
