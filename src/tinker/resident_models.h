// The models in training. Those that were used last are in memory, as many as fit; others are parked until
// their next use. Computation thread only, except parked_bytes().
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "base/clock.h"
#include "tinker/training_model.h"

namespace bough {

class ResidentModels {
 public:
  // most_bytes: of models that are not parked. parking: the folder of parked models (TrainingModel::park).
  // `clock` must outlive the object.
  ResidentModels(int64_t most_bytes, std::filesystem::path parking, const Clock& clock)
      : most_bytes_(most_bytes), parking_(std::move(parking)), clock_(clock) {}

  // Calls `make` when there is memory for a model of `bytes`.
  void add(const std::string& id, int64_t bytes, const std::function<std::unique_ptr<TrainingModel>()>& make);
  // Returns the model, which is then not parked until the next call. nullptr: there is none. Throws IoError
  // if others cannot be parked.
  TrainingModel* use(const std::string& id);
  void remove(const std::string& id);
  // Parks models that were not used for so long. One that cannot be parked stays, with a warning.
  void park_unused(double seconds);

  int64_t parked_bytes() const { return parked_bytes_; }  // any thread

 private:
  struct Resident {
    std::unique_ptr<TrainingModel> model;
    int64_t bytes = 0;
    Clock::Time last_use;
  };
  void make_room(int64_t bytes);
  void park(Resident& resident);

  const int64_t most_bytes_;
  const std::filesystem::path parking_;
  const Clock& clock_;
  std::map<std::string, Resident> models_;
  std::atomic<int64_t> parked_bytes_ = 0;
};

}  // namespace bough
