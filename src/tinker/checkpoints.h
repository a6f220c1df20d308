// Saved adapters on disk: FOLDER/RUN/weights/NAME with the optimizer's state, FOLDER/RUN/sampler_weights/NAME
// without it, in PEFT's format. Clients name them tinker://RUN/weights/NAME. checkpoint.json holds when one
// expires and the client's metadata. Thread-safe: it has no state but the files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/json.h"
#include "models/lora_settings.h"

namespace bough {

// The place of a checkpoint. Each part is the name of one folder: letters, digits, '-', '_', '.' and ':',
// without a leading dot.
struct CheckpointName {
  std::string run, kind, name;  // kind: weights or sampler_weights

  std::string path() const { return "tinker://" + run + "/" + kind + "/" + name; }
};

class Checkpoints {
 public:
  // Creates the folder. Throws IoError if it cannot.
  explicit Checkpoints(std::filesystem::path folder);

  // Throws ApiError 400 if a part is no plain name.
  static CheckpointName checked(const std::string& run, const std::string& kind, const std::string& name);
  // The weights of a sampler that has no name. Clients cannot address them; they go with their session.
  static CheckpointName snapshot(const std::string& run, int64_t seq_id);
  void remove_snapshots(const std::string& run) const;
  // Removes what a killed service has left: snapshots of runs that are not in `runs`, and half-written
  // folders.
  void remove_leftovers(const std::set<std::string>& runs) const;
  // A folder that no client can name, for the service's own files.
  std::filesystem::path hidden_folder(const std::string& name) const { return folder_ / ("." + name); }
  // Parses tinker://RUN/KIND/NAME of an existing checkpoint, for the field `field`. kind: the only kind that
  // is allowed; empty: both. Throws ApiError 400.
  CheckpointName existing(const std::string& path, const std::string& kind, const std::string& field) const;
  std::filesystem::path folder(const CheckpointName& name) const;

  struct Terms {
    std::optional<int64_t> ttl_seconds;  // absent: it never expires
    Json user_metadata;                  // null or an object
    std::string request = {};            // the id of the request that makes it
  };
  // Calls `write` with a temporary folder, which then becomes the checkpoint, in place of an older one.
  void publish(const CheckpointName& name, const Terms& terms,
               const std::function<void(const std::filesystem::path&)>& write) const;
  // The id of the request that made a checkpoint; empty: there is none of this name.
  std::string made_by(const CheckpointName& name) const;
  void set_ttl(const CheckpointName& name, std::optional<int64_t> ttl_seconds) const;
  void remove(const CheckpointName& name) const;
  // Those of a run, oldest first, as the API lists them.
  Json list(const std::string& run) const;
  // The settings that its adapter was made with. Throws UserError if the file is not an adapter's.
  LoraSettings adapter(const CheckpointName& name) const;
  void remove_expired() const;

 private:
  const std::filesystem::path folder_;
};

}  // namespace bough
