#include "tinker/resident_models.h"

#include <exception>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace bough {

void ResidentModels::add(const std::string& id, int64_t bytes,
                         const std::function<std::unique_ptr<TrainingModel>()>& make) {
  make_room(bytes);
  models_[id] = {make(), bytes, clock_.now()};
}

TrainingModel* ResidentModels::use(const std::string& id) {
  const auto found = models_.find(id);
  if (found == models_.end()) return nullptr;
  Resident& resident = found->second;
  resident.last_use = clock_.now();
  if (resident.model->is_parked()) {
    make_room(resident.bytes);
    resident.model->unpark();
    parked_bytes_ -= resident.bytes;
  }
  return resident.model.get();
}

void ResidentModels::remove(const std::string& id) {
  const auto node = models_.extract(id);
  if (node && node.mapped().model->is_parked()) parked_bytes_ -= node.mapped().bytes;
}

void ResidentModels::park_unused(double seconds) {
  for (auto& [id, resident] : models_)
    if (!resident.model->is_parked() && seconds_between(resident.last_use, clock_.now()) > seconds) try {
        park(resident);
      } catch (const std::exception& error) {
        log_warning(str("serve: ", id, " stays in memory: ", error.what()));
        resident.last_use = clock_.now();
      }
}

// Parks the models that were used longest ago until `bytes` more fit.
void ResidentModels::make_room(int64_t bytes) {
  while (true) {
    int64_t held = 0;
    Resident* oldest = nullptr;
    for (auto& [id, resident] : models_) {
      if (resident.model->is_parked()) continue;
      held += resident.bytes;
      if (!oldest || resident.last_use < oldest->last_use) oldest = &resident;
    }
    if (!oldest || held + bytes <= most_bytes_) return;
    park(*oldest);
  }
}

void ResidentModels::park(Resident& resident) {
  resident.model->park(parking_);
  parked_bytes_ += resident.bytes;
}

}  // namespace bough
