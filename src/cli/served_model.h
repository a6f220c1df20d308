// What `bough serve`, and `bough train` where agents outside hold the conversations, need to serve a model.
#pragma once

#include <filesystem>
#include <string>

#include "serve/api.h"

namespace bough {

ServedModel load_served_model(const std::filesystem::path& directory, const ServeSettings& settings);

// Each connection is a descriptor; the usual soft limit of 1024 is below http.max_connections.
void raise_descriptor_limit(int64_t connections);

}  // namespace bough
