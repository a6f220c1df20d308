// Loads a model's files for serving: for `bough serve`, and for `bough train` with external agents.
#pragma once

#include <filesystem>
#include <string>

#include "serve/api.h"

namespace bough {

ServedModel load_served_model(const std::filesystem::path& directory, const ServeSettings& settings);

// Raises the soft limit of open files to `connections` plus some spare descriptors, if the hard limit allows.
// The usual soft limit of 1024 is too low for http.max_connections. Logs a warning if the limit stays too
// low.
void raise_descriptor_limit(int64_t connections);

}  // namespace bough
