// The files that a restarted service needs to go on, in the folder `.state` of its checkpoints:
//
//   base.json                    what the base model is, so that another one is refused
//   SESSION/samplers/ID.json     a sampling session
//   SESSION/MODEL/model.json     the settings of the model's adapter
//                 request-N      an accepted request that is not done
//                 step-N/        adapter and optimizer after request N, and answers up to N
//                 answers-N      answers up to N, of an earlier step or of a request that trains nothing
//                 done-N         requests up to N are done, and no gradient of theirs waits for a step
//
// A request is done if its answer is on the disk. After a restart the service runs the requests that are not
// done. The answer of a forward_backward reaches the disk together with the step that uses its gradient, so
// gradients that no step has used are computed again. A step is flushed to the disk (fsync) before it is
// answered. Other files survive a killed process, but a power cut can lose the last ones.
//
// Thread-safe. A journal that is off writes and restores nothing.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/mutex.h"
#include "models/lora_settings.h"
#include "tinker/futures.h"

namespace bough {

// The HTTP request of a model, to be run again.
struct JournalRequest {
  std::string route, content_type, body;
};

// How a model begins: an adapter from a seed, or from a checkpoint. Rank 0: full fine-tuning. The journal has
// nothing else of such a model, which a restart ends.
struct ModelStart {
  LoraSettings adapter;
  uint64_t seed = 0;
  std::string path;  // tinker://RUN/weights/NAME; empty: a new adapter
  bool with_optimizer = false;
};

struct RestoredModel {
  std::string id;
  std::string failure;  // why it is lost; empty: it can go on
  ModelStart start;
  int64_t next = 1;  // all requests before it are done
  std::map<int64_t, FutureResult> answers;
  std::map<int64_t, JournalRequest> requests;  // not done
};
struct RestoredSession {
  std::string id;
  Json description;  // of add_session()
  std::map<std::string, Json> samplers;
  std::vector<RestoredModel> models;
};

class Journal {
 public:
  // Throws UserError if the folder has sessions of another base model, IoError if it cannot be written.
  // `base`: base_identity(). If the journal is off, removes what an earlier one has left.
  Journal(std::filesystem::path folder, bool is_on, const Json& base);
  // All sessions, before the first call of another function. Damaged files are logged.
  std::vector<RestoredSession> restore();

  void add_session(const std::string& session, const Json& description);
  void add_model(const std::string& model, const ModelStart& start);
  void add_sampler(const std::string& session, const std::string& id, const Json& sampler);
  void remove_session(const std::string& session);
  void forget(const std::string& model);  // its files stay as they are, until the session is removed

  // Writes a request, unless it is done. Call it before the request is acknowledged.
  void accept(const std::string& model, int64_t seq_id, const JournalRequest& request);
  // The request is done. Do not call it for a forward_backward whose gradient waits for a step.
  void answered(const std::string& model, int64_t seq_id, const FutureResult& result);
  // Request `seq_id` has changed the weights (0: the model's start has): all requests up to it are done.
  // save: writes adapter and optimizer to a folder. answer: of a request; nullptr if it is no longer kept.
  // If the function throws, the last snapshot is as before.
  using Save = std::function<void(const std::filesystem::path& folder)>;
  using Answer = std::function<std::shared_ptr<const FutureResult>(int64_t seq_id)>;
  void step(const std::string& model, int64_t seq_id, const Save& save, const Answer& answer);
  // The folder of the model's last snapshot.
  std::optional<std::filesystem::path> snapshot(const std::string& model) const;
  // Removes files of answers that are no longer kept. Call it from time to time.
  using IsKept = std::function<bool(const std::string& model, int64_t seq_id)>;
  void drop_answers(const IsKept& is_kept);

 private:
  struct Model {
    int64_t next = 1;                                 // all requests before it are done
    std::optional<int64_t> snapshot, mark;            // N of step-N and of done-N
    std::vector<int64_t> in_snapshot;                 // requests whose answers are in the snapshot
    std::map<int64_t, std::vector<int64_t>> answers;  // files answers-N, with their requests
    std::set<int64_t> requests;                       // files request-N
    std::set<int64_t> done;                           // from `next` on
  };
  std::filesystem::path folder_of(const std::string& model) const;
  void restore_model(const std::filesystem::path& folder, RestoredModel& restored);
  void restore_files(const std::filesystem::path& folder, RestoredModel& restored, Model& model);
  void advance(const std::filesystem::path& folder, Model& model, int64_t next) REQUIRES(mutex_);

  const std::filesystem::path folder_;
  const bool is_on_;
  mutable Mutex mutex_;
  std::map<std::string, Model> models_ GUARDED_BY(mutex_);
};

// Identifies a base model without reading all of it: its dtype, the sizes of its files, and hashes of pieces.
Json base_identity(const std::filesystem::path& directory, const std::string& dtype);

}  // namespace bough
