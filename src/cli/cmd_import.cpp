// `bough import`: a GGUF file to a model directory that Bough and transformers load.
#include "base/error.h"
#include "base/format.h"
#include "cli/command.h"
#include "cli/torch_options.h"
#include "models/gguf_import.h"

namespace bough {

namespace {

struct Options {
  std::string file;
  std::string directory;
  std::string dtype;
  std::string pre;
  bool force = false;
  bool json = false;
};

void run_import(const Options& options) {
  ImportOptions import;
  if (!options.dtype.empty()) import.dtype = parse_dtype(options.dtype);
  if (import.dtype == at::kDouble) throw UserError("--dtype: got fp64; expected fp32 or bf16");
  import.pre = options.pre;
  import.force = options.force;
  const ImportReport report = import_gguf(options.file, options.directory, import);
  const char* dtype = report.dtype == at::kFloat ? "fp32" : "bf16";
  if (options.json) {
    print_json({{"model", options.directory},
                {"architecture", report.architecture},
                {"parameters", report.num_parameters},
                {"dtype", dtype},
                {"tokenizer", report.tokenizer},
                {"tokens", report.num_tokens}});
  } else {
    print_table({{"model", options.directory},
                 {"architecture", report.architecture},
                 {"parameters", str(format_thousands(report.num_parameters), ", ", dtype)},
                 {"tokenizer", str(report.tokenizer, ", ", format_thousands(report.num_tokens), " tokens")}});
  }
}

}  // namespace

void add_import_command(CommandLine& line) {
  auto options = std::make_shared<Options>();
  Command command =
      line.add("import", "A GGUF file to a Hugging Face model directory, tokenizer and chat template too",
               [options] { run_import(*options); });
  command
      .add_option("FILE", options->file,
                  "The file: llama, qwen2 or qwen3; F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K")
      .required()
      .type_name("");
  command.add_option("DIR", options->directory, "The folder to make").required().type_name("");
  command
      .add_option("--dtype", options->dtype,
                  "fp32 | bf16: what weights are stored in (default: bf16, or fp32 where a matrix of the "
                  "file is F32 or "
                  "F16)")
      .type_name("TEXT");
  command
      .add_option("--pre", options->pre,
                  "Cut text into words as this pre-tokenizer does, whatever the file says (gpt-2, qwen2, "
                  "llama-bpe, smollm, ...)")
      .type_name("NAME");
  command.add_flag("--force", options->force, "Replace a model directory that is there");
  add_json_flag(command, options->json);
}

}  // namespace bough
