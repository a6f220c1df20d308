// Saved models on disk: FOLDER/RUN/weights/NAME with the optimizer's state, FOLDER/RUN/sampler_weights/NAME
// and FOLDER/RUN/external_weights/NAME without it. An adapter is in PEFT's format, a model of which all
// weights are trained a Hugging Face directory. Clients name them tinker://RUN/weights/NAME. checkpoint.json
// holds when one expires, whether it is public and the client's metadata; FOLDER/RUN/run.json describes the
// model and names its tenant. Thread-safe: it has no state but the files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
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
  std::string run, kind, name;  // kind: weights, sampler_weights or external_weights

  std::string path() const { return "tinker://" + run + "/" + kind + "/" + name; }
};

std::string iso_time(int64_t seconds);  // since 1970, as the API shows times
Json text_values(
    const Json& metadata);  // a client's metadata as the API shows it: an object of texts, or null

class Checkpoints {
 public:
  // Creates the folder. Throws IoError if it cannot.
  explicit Checkpoints(std::filesystem::path folder);

  // Throws ApiError 400 if a part is no plain name.
  static CheckpointName checked(const std::string& run, const std::string& kind, const std::string& name);
  // The weights of a sampler that has no name. Clients cannot address them; they go with their session.
  static CheckpointName snapshot(const std::string& run, int64_t seq_id);
  // Writes run.json, unless there is one. `run`: {"tenant", "base_model", "lora_rank", "user_metadata"}.
  void begin_run(const std::string& run, Json description) const;
  // Removes the run's snapshots, and its folder if it has no checkpoint. Sets the time of its last request.
  void end_run(const std::string& run, int64_t last_request) const;
  // The names of the folders of a tenant's runs.
  std::vector<std::string> runs(const std::string& tenant) const;
  // run.json; its "time" is that of the last request. nullopt if there is no such run of the tenant.
  std::optional<Json> run(const std::string& run, const std::string& tenant) const;
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
  // Other tenants may load a public checkpoint. Throws ApiError 400 if it is as asked for: Tinker's service
  // answers 409, which its SDK sends again for five minutes.
  void set_public(const CheckpointName& name, bool is_public) const;
  // For the field `field` of a tenant's request: throws ApiError 400, as existing() does for a path without a
  // checkpoint, if the checkpoint is neither the tenant's nor public.
  void check_readable(const std::string& path, const std::string& tenant, const std::string& field) const;
  void remove(const CheckpointName& name) const;
  // Those of a run, oldest first, as the API lists them.
  Json list(const std::string& run) const;
  // The path of a run's newest checkpoint with the optimizer's state; empty: the run has none.
  std::string newest(const std::string& run) const;
  // The names of the files that clients may download, with their sizes in bytes.
  std::map<std::string, int64_t> files(const CheckpointName& name) const;
  // The settings that its adapter was made with; rank 0 if it has all weights. Throws UserError if the file
  // is not an adapter's.
  LoraSettings adapter(const CheckpointName& name) const;
  void remove_expired() const;

 private:
  const std::filesystem::path folder_;
};

}  // namespace bough
