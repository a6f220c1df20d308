// The settings that a user gave: in a YAML file or as overrides (settings.h).
#pragma once

#include <string>
#include <vector>

#include "base/settings.h"

namespace bough {

struct GivenSetting {
  std::string key;    // dotted; of a list of groups: the list's key
  std::string place;  // "run.yaml:7" or "command line"
};

namespace internal {
std::vector<GivenSetting> given_settings(SettingField& root, const SettingAliases& aliases,
                                         const std::string& yaml, const std::string& source,
                                         const std::vector<std::string>& overrides);
}  // namespace internal

// Returns the settings that the arguments of load_settings() give, sorted by key. A key that is given twice
// has the place that counts. path: empty if there are only overrides. Throws UserError as load_settings(),
// without its checks.
template <class S>
std::vector<GivenSetting> given_settings(const std::filesystem::path& path,
                                         const std::vector<std::string>& overrides = {}) {
  S settings;
  SettingField root = describe_settings(settings);
  const std::string yaml = path.empty() ? "" : internal::read_settings_file(path);
  return internal::given_settings(root, internal::aliases_of<S>(), yaml, path.string(), overrides);
}

}  // namespace bough
