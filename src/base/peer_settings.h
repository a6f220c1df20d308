// Settings of other RL trainers and Bough's keys for them. An error about an unknown key suggests Bough's key
// from this table. The table never makes a key valid: accepted spellings are the aliases() of a settings
// struct.
#pragma once

#include <span>
#include <string_view>

namespace bough {

struct PeerSetting {
  std::string_view name;  // the end of the dotted key, with '_' for '-': "lr" also stands for "optim.lr"
  std::string_view key;   // Bough's key or group; "" if Bough needs no such setting
  std::string_view note;  // how the meaning differs, or the value to set; may be empty
};

// Rows may have the same name. The first one whose key exists in the settings at hand counts.
std::span<const PeerSetting> peer_settings();

// True if `key` is a group in which another trainer has settings: "data", "actor_rollout_ref.rollout".
bool is_peer_group(std::string_view key);

}  // namespace bough
