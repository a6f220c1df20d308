#include "cli/served_model.h"

#include <sys/resource.h>

#include <algorithm>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "models/config.h"

namespace bough {

ServedModel load_served_model(const std::filesystem::path& directory, const ServeSettings& settings) {
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
  for (const LoraModule& adapter : settings.lora_modules) {
    if (model.is_adapter(adapter.name) ||
        std::find(model.names.begin(), model.names.end(), adapter.name) != model.names.end())
      throw UserError(
          str("lora_modules: the name ", quoted(adapter.name),
              " is used twice; expected a unique name, because requests choose a model by its name"));
    model.adapters.push_back(adapter.name);
  }
  try {
    model.chat_template = ChatTemplate::from_directory(directory);
  } catch (const UserError& error) {
    model.no_template = error.what();  // matters only for conversations
    log_warning(str("serve: chat requests are refused: ", error.what()));
  }
  if (std::string& parser = model.settings.tool_call_parser; parser == kAutoParser) {
    parser = model.chat_template ? model.chat_template->tool_call_parser() : "";
    if (model.chat_template)
      log_info(str("serve: tool_call_parser=auto: ",
                   parser.empty()
                       ? "none, since the chat template has the markers of no known format; requests "
                         "with tools are refused"
                       : parser));
  }
  return model;
}

void raise_descriptor_limit(int64_t connections) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const auto wanted = static_cast<rlim_t>(connections) + 256;
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur < wanted)
    log_warning(str("serve: this process may open ", limit.rlim_cur, " files; http.max_connections=",
                    connections, " needs ", wanted, "; raise the limit (ulimit -n)"));
}

}  // namespace bough
