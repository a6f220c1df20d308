// What `bough serve`, and `bough train` where agents outside hold the conversations, need to serve a model.
#pragma once

#include <filesystem>
#include <string>

#include "serve/api.h"

namespace bough {

// The key that requests must have: the environment's BOUGH_API_KEY, or the first line of a file. "": none.
std::string load_api_key(const std::string& api_key_file);

ServedModel load_served_model(const std::filesystem::path& directory, const ServeSettings& settings);

// Each connection is a descriptor; the usual soft limit of 1024 is below http.max_connections.
void raise_descriptor_limit(int64_t connections);

}  // namespace bough
