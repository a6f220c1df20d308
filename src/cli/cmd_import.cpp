// `bough import`: a GGUF file to a model directory that Bough and transformers load. The Python script
// import_gguf.py does the work; this file runs it, checks config.json, and puts the complete folder in place.
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <optional>

#include "base/error.h"
#include "base/file.h"
#include "base/format.h"
#include "base/log.h"
#include "base/progress.h"
#include "cli/command.h"
#include "cli/import_script.h"  // generated from import_gguf.py and the modules it imports
#include "cli/torch_options.h"
#include "env/process_reward.h"
#include "models/config.h"
#include "net/worker_process.h"

namespace bough {

namespace {

namespace fs = std::filesystem;

struct ImportOptions {
  std::string file;
  std::string directory;
  std::string dtype;
  std::string pre;
  bool force = false;
  bool json = false;
};

// Runs the import script. Its arguments: the sources of two modules and of import_gguf.py, then the command
// line of import_gguf.py. Modules in the working directory cannot be imported.
constexpr char kStart[] = R"PY(
import sys

sys.path[:] = [folder for folder in sys.path if folder]

import json, os, types

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy computes no matrix product here
*modules, program = sys.argv[1:4]
del sys.argv[1:4]
try:
    for name, source in zip(("gguf_container", "gguf_tokenizer"), modules):
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(source, name + ".py", "exec"), module.__dict__)
except ImportError as error:
    install = f"{sys.executable} -m pip install gguf==0.19.0"
    missing = f"{sys.executable} cannot load the Python package gguf ({error}); install it with `{install}`"
    print(json.dumps({"missing": f"import: {missing}, or set BOUGH_PYTHON to a Python that has it"}))
else:
    exec(compile(program, "import_gguf.py", "exec"))
)PY";

// Returns the directory's path without a slash at its end and through symbolic links, so that a rename puts
// the new directory in place. UserError if something is there that may not be replaced.
fs::path checked_target(const fs::path& directory, bool force) {
  std::error_code error;
  if (directory.empty()) throw UserError("DIR: the folder's name is empty");
  fs::path target = fs::weakly_canonical(directory, error);
  if (error) target = fs::absolute(directory);
  if (!target.has_filename()) target = target.parent_path();
  if (!fs::exists(target, error)) return target;
  if (!fs::is_directory(target, error))
    throw UserError(str("DIR: ", quoted(directory.string()), " is a file; name a folder"));
  if (fs::is_empty(target, error)) return target;
  if (!force)
    throw UserError(str("DIR: ", quoted(directory.string()),
                        " is not empty; name a new folder, or give --force to replace the model in it"));
  if (!fs::exists(target / "config.json", error))
    throw UserError(str("DIR: ", quoted(directory.string()),
                        " contains no config.json, so it is not a model that --force may replace "
                        "(the whole folder would be deleted); name another"));
  return target;
}

// Runs the script, whose docstring lists its messages, and fills a folder beside the target.
class ImportScript {
 public:
  ImportScript(const ImportOptions& options, const fs::path& folder)
      : file_(options.file),
        folder_(folder),
        python_(find_python("")),
        process_({python_, "-u", "-c", kStart, kImportModules[0], kImportModules[1], kImportModules[2],
                  options.file, folder.string(), options.dtype, options.pre}) {
    log_debug(str("import: ", python_, " runs the script"));
  }

  // Returns the script's report when the folder is complete.
  Json run() {
    std::string received;
    for (;;) {
      const size_t end = received.find('\n');
      if (end != std::string::npos) {
        const Json message = parse_json(std::string_view(received).substr(0, end), "the import script");
        received.erase(0, end + 1);
        if (message.contains("report")) return message["report"];
        handle(message);
        continue;
      }
      pollfd waiting{process_.descriptor(), POLLIN, 0};
      ::poll(&waiting, 1, -1);
      if (!process_.receive(received) && received.find('\n') == std::string::npos) fail_after_end();
    }
  }

  const ModelConfig& config() const { return *config_; }

 private:
  void handle(const Json& message) {
    if (message.contains("refused")) throw UserError(str(file_, ": ", text(message, "refused")));
    if (message.contains("missing")) throw UserError(text(message, "missing"));
    if (message.contains("failed"))
      throw IoError(str("import of ", quoted(file_, 300), " to ", quoted(folder_.string(), 300), ": ",
                        text(message, "failed")));
    if (message.contains("config")) {
      config_ = parse_model_config(message["config"], file_ + " (as config.json)");
      make_directories(folder_);
      process_.send("write\n");
    }
    if (message.contains("tensors"))
      progress_.emplace("import", message["tensors"].get<int64_t>(), "tensors");
    if (message.contains("written") && progress_) progress_->advance();
  }

  static std::string text(const Json& message, const char* key) { return message[key].get<std::string>(); }

  [[noreturn]] void fail_after_end() {
    throw IoError(str("import: the script, run by ", python_, ", ", process_.end(std::chrono::seconds(2)),
                      " before it was done; it needs Python 3.10 or later: set BOUGH_PYTHON to one"));
  }

  std::string file_;
  fs::path folder_;
  std::string python_;
  WorkerProcess process_;
  std::optional<ModelConfig> config_;
  std::optional<Progress> progress_;
};

struct TemporaryFolder {
  fs::path path;
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);  // nothing is left of it after publish_directory()
  }
};

void run_import(const ImportOptions& options) {
  if (!options.dtype.empty() && parse_dtype(options.dtype) == at::kDouble)
    throw UserError("--dtype: got fp64; expected fp32 or bf16");
  const fs::path target = checked_target(options.directory, options.force);
  const MappedFile readable(options.file);  // UserError: missing, empty, a folder
  const TemporaryFolder aside{target.parent_path() /
                              str(".", target.filename().string(), ".importing.", ::getpid())};
  ImportScript script(options, aside.path);
  const Json report = script.run();
  publish_directory(aside.path, target);

  const ModelConfig& config = script.config();
  const std::string dtype = report["dtype"], tokenizer = report["tokenizer"];
  const int64_t tokens = report["tokens"];
  const int64_t parameters = config.num_parameters();
  if (options.json) {
    print_json({{"model", options.directory},
                {"architecture", report["architecture"]},
                {"parameters", parameters},
                {"dtype", dtype},
                {"tokenizer", tokenizer},
                {"tokens", tokens}});
  } else {
    print_table({{"model", options.directory},
                 {"architecture", report["architecture"].get<std::string>()},
                 {"parameters", str(format_thousands(parameters), ", ", dtype)},
                 {"tokenizer", str(tokenizer, ", ", format_thousands(tokens), " tokens")}});
  }
}

}  // namespace

void add_import_command(CommandLine& line) {
  auto options = std::make_shared<ImportOptions>();
  Command command = line.add(
      "import", "Converts a GGUF file to a Hugging Face model directory with tokenizer and chat template",
      [options] { run_import(*options); });
  command
      .add_option("FILE", options->file,
                  "GGUF file of a llama, qwen2 or qwen3 model; tensors in F32, F16, BF16, Q8_0, Q4_0, Q4_1, "
                  "Q4_K, Q6_K")
      .required()
      .type_name("");
  command.add_option("DIR", options->directory, "Folder to create").required().type_name("");
  command
      .add_option("--dtype", options->dtype,
                  "Type of the stored weights: fp32 | bf16 (default: bf16, or fp32 if a matrix of the file "
                  "is F32 or F16)")
      .type_name("TEXT");
  command
      .add_option("--pre", options->pre,
                  "Pre-tokenizer that replaces the one named in the file: gpt-2, qwen2, llama-bpe, smollm, "
                  "...")
      .type_name("NAME");
  command.add_flag("--force", options->force, "Replace an existing model directory");
  add_json_flag(command, options->json);
}

}  // namespace bough
