// `bough serve`: a model behind OpenAI's and Anthropic's HTTP APIs.
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/signals.h"
#include "cli/command.h"
#include "cli/torch_options.h"
#include "rollout/embedded_engine.h"
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

// The token that requests must have: the environment's, or the first line of a file.
std::string load_key(const ServeSettings& settings) {
  const char* given = std::getenv("BOUGH_API_KEY");
  std::string key = given ? given : "";
  if (!settings.api_key_file.empty()) {
    key = read_file(settings.api_key_file);
    key.resize(std::min(key.size(), key.find_first_of("\r\n")));
    if (key.empty())
      throw UserError(str("api_key_file: the first line of ", quoted(settings.api_key_file), " is empty"));
  }
  return key;
}

ServedModel load_served_model(const ServeOptions& options, const ServeSettings& settings) {
  const std::filesystem::path directory = options.model;
  const ModelConfig config = load_model_config(directory);
  ServedModel model{.tokenizer = Tokenizer::load(directory),
                    .max_length = config.max_length(),
                    .vocab_size = config.vocab_size,
                    .created = now_seconds(),
                    .settings = settings};
  for (const std::string& name : settings.served_model_name) {
    if (name == "*") model.any_name = true;
    else model.names.push_back(name);
  }
  if (model.names.empty())
    model.names.push_back(std::filesystem::weakly_canonical(directory).filename().string());
  try {
    model.chat_template = ChatTemplate::from_directory(directory);
  } catch (const UserError& error) {
    model.no_template = error.what();  // matters only to those who have conversations
    log_warning(str("serve: no conversations: ", error.what()));
  }
  return model;
}

// Each connection is a descriptor; the usual soft limit of 1024 is below http.max_connections.
void raise_descriptor_limit(int64_t connections) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const auto wanted = static_cast<rlim_t>(connections) + 256;
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur < wanted)
    log_warning(str("serve: this process may open ", limit.rlim_cur,
                    " files; http.max_connections=", connections, " needs ", wanted));
}

void run_serve(const ServeOptions& options) {
  if (options.list_settings) {
    print_text(settings_help<ServeSettings>());
    return;
  }
  if (options.model.empty()) throw UserError("--model is missing: a Hugging Face directory");
  ServeSettings settings = options.config.empty()
                               ? parse_settings<ServeSettings>("", "defaults", options.overrides)
                               : load_settings<ServeSettings>(options.config, options.overrides);
  if (options.port) settings.port = *options.port;
  if (settings.port < 0 || settings.port > 65535)
    throw UserError(str("--port: got ", settings.port, ", expected 0 (a free one) to 65535"));
  const std::string key = load_key(settings);
  check_serving(settings, key);  // before the model takes its time
  const TorchSetup setup = set_up_torch(options.torch);
  ServedModel served = load_served_model(options, settings);
  const auto [model, matrices, engine] =
      load_engine(options.model, served.tokenizer, settings.rollout, setup.dtype, setup.device);
  raise_descriptor_limit(settings.http.max_connections);
  const StopFlag stop;
  Server server(*engine, std::move(served), key);
  if (options.json) print_json({{"url", server.url()}});
  else print_text(server.url() + "\n");
  log_info(str("serve: ", options.model, " at ", server.url(), key.empty() ? ", without a key" : ""));
  server.run([&stop] { return stop.requested(); });
  log_info("serve: stopped");
}

}  // namespace

void add_serve_command(CommandLine& line) {
  auto options = std::make_shared<ServeOptions>();
  CLI::App& command = line.add("serve", "A model behind OpenAI's and Anthropic's HTTP APIs",
                               [options] { run_serve(*options); });
  command.add_option("--model", options->model, "Hugging Face directory")->type_name("DIR");
  command.add_option("--port", options->port, "As the setting port; 0: a free one");
  command.add_option("--config", options->config, "YAML file of settings")->type_name("FILE");
  command
      .add_option("overrides", options->overrides,
                  "Settings that win over the file's: tool_call_parser=hermes rollout.kv_memory=8GiB")
      ->type_name("key=value");
  command.add_flag("--settings", options->list_settings,
                   "List every setting with its default, and do nothing");
  add_torch_options(command, options->torch);
  add_json_flag(command, options->json);
}

}  // namespace bough
