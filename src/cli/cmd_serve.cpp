// `bough serve`: a model behind OpenAI's and Anthropic's HTTP APIs.
#include "base/error.h"
#include "base/given_settings.h"
#include "base/log.h"
#include "base/signals.h"
#include "cli/command.h"
#include "cli/served_model.h"
#include "cli/torch_options.h"
#include "net/http_client.h"
#include "rollout/adapter_engines.h"
#include "run/idle_settings.h"
#include "serve/server.h"

namespace bough {

namespace {

struct ServeOptions {
  std::string model, config;
  std::vector<std::string> overrides;
  std::optional<int64_t> port;
  TorchOptions torch;
  bool list_settings = false, json = false;
};

void run_serve(const ServeOptions& options) {
  if (options.list_settings) {
    print_text(settings_help<ServeSettings>());
    return;
  }
  if (options.model.empty()) throw UserError("--model is missing: a Hugging Face directory");
  ServeSettings settings = options.config.empty()
                               ? parse_settings<ServeSettings>("", "defaults", options.overrides)
                               : load_settings<ServeSettings>(options.config, options.overrides);
  const auto given = given_settings<ServeSettings>(options.config, options.overrides);
  if (const auto idle = idle_engine_settings(settings.rollout, given); !idle.empty())
    log_warning(describe(idle));
  if (options.port) settings.port = *options.port;
  if (settings.port < 0 || settings.port > 65535)
    throw UserError(str("--port: got ", settings.port, ", expected 0 (any free port) to 65535"));
  const std::string key = load_api_key("BOUGH_API_KEY", "api_key_file", settings.api_key_file);
  check_serving(settings, key);  // before the slow loading of the model
  if (!settings.lora_modules.empty() && settings.rollout.quantization == "int8")
    throw UserError(
        "lora_modules: adapters are not supported with int8 weights yet; leave rollout.quantization out, or "
        "merge an adapter into the model (bough merge) and serve the result");
  const TorchSetup setup = set_up_torch(options.torch);
  ServedModel served = load_served_model(options.model, settings);
  LoadedEngine loaded =
      load_engine(options.model, served.tokenizer, settings.rollout, setup.dtype, setup.device);
  std::unique_ptr<Engine> engine = std::move(loaded.engine);
  if (!settings.lora_modules.empty()) {
    engine.reset();  // frees the engine's memory
    std::map<std::string, std::filesystem::path> adapters;
    for (const LoraModule& each : settings.lora_modules) adapters[each.name] = each.path;
    engine = std::make_unique<AdapterEngines>(
        *loaded.model, adapters, load_engine_options(options.model, served.tokenizer, settings.rollout));
  }
  raise_descriptor_limit(settings.http.max_connections);
  const StopFlag stop;
  Server server(*engine, std::move(served), key);
  if (options.json) print_json({{"url", server.url()}});
  else print_text(server.url() + "\n");
  log_info(str("serve: ", options.model, " at ", server.url(), key.empty() ? ", without an API key" : ""));
  server.run([&stop] { return stop.requested(); });
  log_info("serve: stopped");
}

}  // namespace

void add_serve_command(CommandLine& line) {
  auto options = std::make_shared<ServeOptions>();
  Command command = line.add("serve", "Serves a model through OpenAI's and Anthropic's HTTP APIs",
                             [options] { run_serve(*options); });
  command.add_option("--model", options->model, "Hugging Face directory").type_name("DIR");
  command.add_option("--port", options->port, "Overrides the setting `port`; 0: any free port");
  command.add_option("--config", options->config, "YAML file of settings").type_name("FILE");
  command
      .add_option("overrides", options->overrides,
                  "Settings that override the file: tool_call_parser=hermes rollout.kv_memory=8GiB")
      .type_name("key=value");
  command.add_flag("--settings", options->list_settings, "List every setting with its default, and exit");
  add_torch_options(command, options->torch);
  add_json_flag(command, options->json);
}

}  // namespace bough
