// `bough serve`: a model behind OpenAI's and Anthropic's HTTP APIs, or with --train behind Tinker's.
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
#include "tinker/service.h"

namespace bough {

namespace {

struct ServeOptions {
  std::string model, config;
  std::vector<std::string> overrides;
  std::optional<int64_t> port;
  TorchOptions torch;
  bool train = false, list_settings = false, json = false;
};

template <class Settings>
Settings serve_settings(const ServeOptions& options) {
  Settings settings = options.config.empty() ? parse_settings<Settings>("", "defaults", options.overrides)
                                             : load_settings<Settings>(options.config, options.overrides);
  const auto given = given_settings<Settings>(options.config, options.overrides);
  if (const auto idle = idle_engine_settings(settings.rollout, given); !idle.empty())
    log_warning(describe(idle));
  if (options.port) settings.port = *options.port;
  if (settings.port < 0 || settings.port > 65535)
    throw UserError(str("--port: got ", settings.port, ", expected 0 (any free port) to 65535"));
  return settings;
}

void print_url(const ServeOptions& options, const std::string& url) {
  if (options.json) print_json({{"url", url}});
  else print_text(url + "\n");
}

void run_training_service(const ServeOptions& options) {
  if (options.list_settings) {
    print_text(settings_help<TrainingServiceSettings>());
    return;
  }
  if (options.model.empty()) throw UserError("--model is missing: a Hugging Face directory");
  const auto settings = serve_settings<TrainingServiceSettings>(options);
  const ApiKeys keys = ApiKeys::load(settings.api_key_file);
  if (!is_loopback(settings.host) && keys.empty())
    throw UserError(
        str("host: ", settings.host,
            " is reached from other machines; give a key that begins with tml- in api_key_file or "
            "BOUGH_API_KEY"));
  if (settings.rollout.quantization == "int8")
    throw UserError("rollout.quantization: int8 is not served with adapters; leave it out");
  const TorchSetup setup = set_up_torch(options.torch);
  TrainingBase base{
      .directory = options.model,
      .model = load_model(options.model, setup.dtype, setup.device),
      .engine = load_engine_options(options.model, Tokenizer::load(options.model), settings.rollout)};
  base.model->set_precisions(setup.precisions);
  raise_descriptor_limit(settings.http.max_connections);
  const StopFlag stop;
  TrainingService service(std::move(base), settings, keys);
  print_url(options, service.url());
  log_info(str("serve: training ", options.model, " at ", service.url(),
               keys.empty() ? ", without an API key" : ""));
  service.run([&stop] { return stop.requested(); });
  log_info("serve: stopped");
}

void run_serve(const ServeOptions& options) {
  if (options.train) return run_training_service(options);
  if (options.list_settings) {
    print_text(settings_help<ServeSettings>());
    return;
  }
  if (options.model.empty()) throw UserError("--model is missing: a Hugging Face directory");
  const auto settings = serve_settings<ServeSettings>(options);
  const std::string key = load_api_key("BOUGH_API_KEY", "api_key_file", settings.api_key_file);
  check_serving(settings, key);  // before the slow loading of the model
  if (!settings.lora_modules.empty() && settings.rollout.quantization == "int8")
    throw UserError(
        "lora_modules: adapters are not supported with int8 weights yet; leave rollout.quantization out, or "
        "merge an adapter into the model (bough merge) and serve the result");
  const TorchSetup setup = set_up_torch(options.torch);
  ServedModel served = load_served_model(options.model, settings);
  LoadedEngine loaded = load_engine(options.model, served.tokenizer, settings.rollout, setup.dtype,
                                    setup.device, setup.precisions);
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
  print_url(options, server.url());
  log_info(str("serve: ", options.model, " at ", server.url(), key.empty() ? ", without an API key" : ""));
  server.run([&stop] { return stop.requested(); });
  log_info("serve: stopped");
}

}  // namespace

void add_serve_command(CommandLine& line) {
  auto options = std::make_shared<ServeOptions>();
  Command command =
      line.add("serve", "Serves a model through OpenAI's and Anthropic's HTTP APIs, or Tinker's",
               [options] { run_serve(*options); });
  command.add_option("--model", options->model, "Hugging Face directory").type_name("DIR");
  command.add_option("--port", options->port, "Overrides the setting `port`; 0: any free port");
  command.add_option("--config", options->config, "YAML file of settings").type_name("FILE");
  command
      .add_option("overrides", options->overrides,
                  "Settings that override the file: tool_call_parser=hermes rollout.kv_memory=8GiB")
      .type_name("key=value");
  command.add_flag("--train", options->train,
                   "Serve Tinker's API instead: clients train adapters and sample (docs/tinker.md)");
  command.add_flag("--settings", options->list_settings, "List every setting with its default, and exit");
  add_torch_options(command, options->torch);
  add_json_flag(command, options->json);
}

}  // namespace bough
