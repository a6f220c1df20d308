// Settings that a user gave and that have no effect in this run, because another setting switches off what
// reads them. The start of a run names them (docs/settings_without_effect.md).
//
// The table in idle_settings.cpp has a row for each condition. A setting without a row always has an effect.
// idle_settings_test.cpp lists these settings, so that a new setting is put into one of the two lists.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/given_settings.h"
#include "run/run_settings.h"
#include "run/sft.h"

namespace bough {

struct IdleSetting {
  std::string key;
  std::string place;   // where it was given
  std::string reason;  // what it needs to have an effect
};

// Returns those of the `given` settings that have no effect in a run with `settings`, in the table's order.
std::vector<IdleSetting> idle_settings(const RunSettings& settings, std::span<const GivenSetting> given);

// The same for `bough sft`.
std::vector<IdleSetting> idle_settings(const SftSettings& settings, std::span<const GivenSetting> given);
// The same for the settings `rollout` of commands that generate without a run.
std::vector<IdleSetting> idle_engine_settings(const RolloutSettings& settings,
                                              std::span<const GivenSetting> given);

// The message for the user, one line for each reason: "these settings have no effect: ...". ""
// if there is none.
std::string describe(std::span<const IdleSetting> idle);

// Whether the table has a row for the key.
bool may_be_idle(const std::string& key);

}  // namespace bough
