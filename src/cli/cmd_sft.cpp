// `bough sft`: supervised fine-tuning of one model directory into another.
#include "base/error.h"
#include "base/file.h"
#include "base/format.h"
#include "base/given_settings.h"
#include "base/log.h"
#include "base/signals.h"
#include "cli/command.h"
#include "cli/torch_options.h"
#include "report/display.h"
#include "run/idle_settings.h"

namespace bough {

namespace {

struct SftCommand {
  std::vector<std::string> arguments;  // CONFIG, if the first has no '='; then key=value
  std::string model, data, out, shots_from;
  std::optional<int64_t> epochs, batch_size, max_steps, seed, shots;
  std::optional<double> lr;
  TorchOptions torch;
  bool list_settings = false;
  bool json = false;
};

// Flags are shorter names of settings. They take precedence over the file and over key=value.
std::vector<std::string> overrides_of(const SftCommand& command, const std::vector<std::string>& given) {
  std::vector<std::string> overrides = given;
  const auto add_text = [&](const char* key, const std::string& value) {
    if (!value.empty()) overrides.push_back(str(key, "=", value));
  };
  const auto add_number = [&](const char* key, const auto& value) {
    if (value) overrides.push_back(str(key, "=", *value));
  };
  add_text("model.path", command.model);
  add_text("train_dataset.path", command.data);
  add_text("out", command.out);
  add_text("train_dataset.few_shot.path", command.shots_from);
  add_number("train_dataset.few_shot.shots", command.shots);
  add_number("epochs", command.epochs);
  add_number("train_dataset.batch_size", command.batch_size);
  add_number("max_steps", command.max_steps);
  add_number("seed", command.seed);
  if (command.lr) add_text("optimizer.lr", format_shortest(*command.lr));
  add_text("dtype", command.torch.dtype);
  add_text("device", command.torch.device);
  return overrides;
}

SftSettings settings_of(const SftCommand& command) {
  std::vector<std::string> overrides = command.arguments;
  std::string config;
  if (!overrides.empty() && overrides.front().find('=') == std::string::npos) {
    config = overrides.front();
    overrides.erase(overrides.begin());
  }
  overrides = overrides_of(command, overrides);
  SftSettings settings = config.empty() ? parse_settings<SftSettings>("", "command line", overrides)
                                        : load_settings<SftSettings>(config, overrides);
  const auto idle = idle_settings(settings, given_settings<SftSettings>(config, overrides));
  if (!idle.empty()) log_warning(describe(idle));
  return settings;
}

void run_command(const SftCommand& command) {
  if (command.list_settings) {
    print_text(settings_help<SftSettings>());
    return;
  }
  const SftSettings settings = settings_of(command);
  TorchOptions torch = command.torch;
  torch.dtype = settings.dtype;
  torch.device = settings.device;
  set_up_torch(torch);
  print_changed_settings(settings_rows(settings), "bough sft --settings");
  make_directories(settings.out);  // before the training, whose result an error here would lose
  const StopFlag stop;
  SftOptions options;
  options.stop = [&stop] { return stop.requested(); };
  const SftSummary summary = run_sft(settings, options);
  if (command.json) {
    Json object = to_json(summary);
    object["model"] = settings.out;
    print_json(object);
    return;
  }
  std::vector<std::pair<std::string, std::string>> rows = {
      {"model", settings.out},
      {"examples", format_thousands(summary.examples)},
      {"steps", format_thousands(summary.steps)},
      {"loss", str(format_significant(summary.first_loss, 3), " -> ",
                   format_significant(summary.last_loss, 3), " nats per token")}};
  if (summary.aux_loss) rows.emplace_back("aux loss", format_significant(*summary.aux_loss, 3));
  if (summary.z_loss) rows.emplace_back("z-loss", format_significant(*summary.z_loss, 3));
  rows.emplace_back("compression", str(format_significant(summary.compression, 3), "x"));
  rows.emplace_back("time", format_duration(summary.seconds));
  print_table(rows);
}

}  // namespace

void add_sft_command(CommandLine& line) {
  auto options = std::make_shared<SftCommand>();
  options->torch = {.dtype = "", .threads = {}, .device = ""};
  Command command =
      line.add("sft", "Supervised fine-tuning on prompts and completions, questions and answers, or chats",
               [options] { run_command(*options); });
  command.add_option("arguments", options->arguments, "Optional YAML file of settings, then key=value")
      .type_name("[CONFIG] [key=value ...]");
  command.add_option("--model", options->model, "Hugging Face directory to start from").type_name("DIR");
  command.add_option("--data", options->data, "Training examples as JSON Lines").type_name("FILE");
  command.add_option("--out", options->out, "Folder for the trained model").type_name("DIR");
  command.add_option("--shots", options->shots, "Number of worked examples before each question");
  command.add_option("--shots-from", options->shots_from, "File whose first records are the worked examples")
      .type_name("FILE");
  command.add_option("--epochs", options->epochs, "Passes over the data");
  command.add_option("--batch-size", options->batch_size, "Examples per step");
  command.add_option("--lr", options->lr, "Peak learning rate");
  command.add_option("--max-steps", options->max_steps, "Stop after this many steps");
  command.add_option("--seed", options->seed, "Seed of the order of the examples");
  command.add_option("--dtype", options->torch.dtype, "fp32 | bf16 | fp64");
  command.add_option("--device", options->torch.device, "cpu | cuda");
  command.add_option("--threads", options->torch.threads, "Threads to compute with (default: all cores)");
  command.add_flag("--settings", options->list_settings, "List every setting with its default, and exit");
  add_json_flag(command, options->json);
}

}  // namespace bough
