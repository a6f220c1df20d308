// PEFT's adapter_config.json. docs/lora.md says for every field of PEFT's LoraConfig how it is read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>

#include "base/json.h"

namespace bough {

struct AdapterConfig {
  int64_t rank = 0;
  double scale = 1;  // alpha / rank, or with use_rslora alpha / sqrt(rank)
};

// Throws UserError if the file is not PEFT's LoRA, or needs something unsupported (DoRA, different ranks,
// biases, other trained modules).
AdapterConfig read_adapter_config(const std::filesystem::path& path);

// targets: names of modules. base: directory or name of the base model.
Json write_adapter_config(const AdapterConfig& adapter, const std::set<std::string>& targets,
                          const std::string& base);

}  // namespace bough
