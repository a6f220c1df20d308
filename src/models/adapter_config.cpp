#include "models/adapter_config.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/file.h"

namespace bough {

namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const fs::path& path, const std::string& key, const Json& got,
                         const char* expected) {
  throw UserError(str(path.string(), ": ", quoted(key), ": got ", dump_line(got), "; expected ", expected));
}

// docs/lora.md says for every field of PEFT's LoraConfig how it is read.
constexpr std::string_view kReadFields[] = {"peft_type",  "r",    "lora_alpha",
                                            "use_rslora", "bias", "init_lora_weights"};
constexpr std::string_view kHarmlessFields[] = {
    // The tensors say which modules have an adapter.
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    // They describe the file, or how it came about.
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "eva_config", "corda_config", "loftq_config", "lora_ga_config", "velora_config",
    // They qualify options that are refused.
    "runtime_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"};

// Every other field would change the computation, or is unknown, so it must be off: null, false or empty.
void check_option(const fs::path& path, const std::string& key, const Json& value) {
  const auto is_in = [&](const auto& names) { return std::ranges::find(names, key) != std::end(names); };
  if (is_in(kReadFields) || is_in(kHarmlessFields)) return;
  const bool is_off =
      value.is_null() || value == false || ((value.is_object() || value.is_array()) && value.empty());
  if (!is_off) refuse(path, key, value, "the option to be off: only plain LoRA with one rank is supported");
}

// PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA start from other base weights than the model's: the file's A and B
// belong to a base from which their first values were subtracted. The file has neither.
void check_initialisation(const fs::path& path, const Json& value) {
  if (value.is_null() || value.is_boolean()) return;
  std::string name = value.is_string() ? value.get<std::string>() : "";
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const char* keeps_base : {"gaussian", "eva", "orthogonal", "mica"})
    if (name == keeps_base) return;
  refuse(path, "init_lora_weights", value,
         "true, false, gaussian, eva, orthogonal or mica: other initialisations change the base model, so "
         "this adapter does not fit the model as published. Convert it with PEFT: "
         "save_pretrained(path_initial_model_for_weight_conversion=...). If DIR already is the changed base, "
         "set init_lora_weights to true");
}

}  // namespace

AdapterConfig read_adapter_config(const fs::path& path) {
  const Json config = read_json(path);
  if (!config.is_object() || !config.contains("peft_type") || config["peft_type"] != "LORA")
    refuse(path, "peft_type", config.is_object() ? config.value("peft_type", Json()) : Json(),
           "\"LORA\", as in an adapter that PEFT or Bough saved");
  const auto number = [&](const char* key) {
    const auto found = config.find(key);
    if (found == config.end() || !found->is_number() || found->get<double>() <= 0)
      refuse(path, key, config.value(key, Json()), "a number above 0");
    return found->get<double>();
  };
  for (const auto& [key, value] : config.items()) check_option(path, key, value);
  if (const Json bias = config.value("bias", Json("none")); bias != "none")
    refuse(path, "bias", bias, "\"none\": trained biases are not supported");
  check_initialisation(path, config.value("init_lora_weights", Json(true)));
  AdapterConfig file;
  const double rank = number("r");
  if (rank != std::floor(rank)) refuse(path, "r", config["r"], "a whole number");
  file.rank = static_cast<int64_t>(rank);
  const Json rslora = config.value("use_rslora", Json());
  if (!rslora.is_null() && !rslora.is_boolean()) refuse(path, "use_rslora", rslora, "true or false");
  file.scale = number("lora_alpha") / (rslora == true ? std::sqrt(rank) : rank);
  return file;
}

Json write_adapter_config(const AdapterConfig& adapter, const std::set<std::string>& targets,
                          const std::string& base) {
  // scale = alpha / rank. If alpha was a whole number, rounding restores it.
  double alpha = adapter.scale * static_cast<double>(adapter.rank);
  if (std::abs(alpha - std::round(alpha)) < 1e-9 * std::abs(alpha)) alpha = std::round(alpha);
  const auto whole = static_cast<int64_t>(std::llround(alpha));
  return {
      {"peft_type", "LORA"},
      {"task_type", "CAUSAL_LM"},
      {"base_model_name_or_path", base},
      {"r", adapter.rank},
      {"lora_alpha", static_cast<double>(whole) == alpha ? Json(whole) : Json(alpha)},
      {"lora_dropout", 0.0},
      {"bias", "none"},
      {"fan_in_fan_out", false},
      {"inference_mode", true},
      {"init_lora_weights", true},
      {"modules_to_save", nullptr},
      {"target_modules", std::vector<std::string>(targets.begin(), targets.end())},
      {"use_dora", false},
      {"use_rslora", false},
  };
}

}  // namespace bough
