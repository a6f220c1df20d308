#include "control/replay_buffer.h"

#include <utility>

#include "base/error.h"
#include "data/rollout_file.h"

namespace bough {

StalenessGate::StalenessGate(int64_t batch_groups, int64_t max_staleness, int64_t total_batches)
    : batch_groups_(batch_groups), max_staleness_(max_staleness), total_batches_(total_batches) {
  BOUGH_CHECK(batch_groups >= 1 && max_staleness >= 0, "batches of ", batch_groups, ", staleness ",
              max_staleness);
}

bool StalenessGate::try_start() {
  const std::lock_guard lock(mutex_);
  if (counts_.accepted + counts_.running >= slots()) return false;
  ++counts_.running;
  return true;
}

void StalenessGate::accept() {
  const std::lock_guard lock(mutex_);
  BOUGH_CHECK(counts_.running > 0, "a group finished that nobody began");
  --counts_.running;
  ++counts_.accepted;
}

void StalenessGate::drop_running() {
  const std::lock_guard lock(mutex_);
  BOUGH_CHECK(counts_.running > 0, "a group is dropped that nobody began");
  --counts_.running;
}

void StalenessGate::drop_accepted(int64_t n) {
  const std::lock_guard lock(mutex_);
  BOUGH_CHECK(n >= 0 && n <= counts_.accepted, "drops ", n, " of ", counts_.accepted);
  counts_.accepted -= n;
}

void StalenessGate::set_version(int64_t version) {
  const std::lock_guard lock(mutex_);
  BOUGH_CHECK(version >= counts_.version, "version ", version, " after ", counts_.version);
  counts_.version = version;
}

void StalenessGate::restore(int64_t version, int64_t buffered) {
  const std::lock_guard lock(mutex_);
  BOUGH_CHECK(version >= 0 && buffered >= 0, "version ", version, ", ", buffered, " groups");
  counts_ = {.accepted = batch_groups_ * version + buffered, .running = 0, .version = version};
}

StalenessGate::Counts StalenessGate::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void StalenessGate::check_integrity() const {
  const std::lock_guard lock(mutex_);
  BOUGH_CHECK(counts_.running >= 0 && counts_.accepted >= 0 && counts_.version >= 0, "running ",
              counts_.running, ", accepted ", counts_.accepted, ", version ", counts_.version);
  BOUGH_CHECK(counts_.accepted + counts_.running <= slots(), counts_.accepted, " accepted and ",
              counts_.running, " running of ", slots(), " slots");
}

void ReplayBuffer::put(FinishedGroup group) {
  const std::lock_guard lock(mutex_);
  const uint64_t id = group.id;
  BOUGH_CHECK(groups_.emplace(id, std::move(group)).second, "group ", id, " is in the buffer already");
}

std::optional<std::vector<FinishedGroup>> ReplayBuffer::take(int64_t n) {
  const std::lock_guard lock(mutex_);
  BOUGH_CHECK(n >= 1, "takes ", n);
  if (static_cast<int64_t>(groups_.size()) < n) return std::nullopt;
  std::vector<FinishedGroup> taken;
  while (static_cast<int64_t>(taken.size()) < n)
    taken.push_back(std::move(groups_.extract(groups_.begin()).mapped()));
  return taken;
}

int64_t ReplayBuffer::size() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(groups_.size());
}

int64_t ReplayBuffer::clear() {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(std::exchange(groups_, {}).size());
}

Json ReplayBuffer::save() const {
  const std::lock_guard lock(mutex_);
  Json state = Json::array();
  for (const auto& [id, group] : groups_) {
    Json samples = Json::array();
    for (const Trajectory& sample : group.samples) samples.push_back(rollout_to_json(sample));
    state.push_back({{"id", id}, {"samples", std::move(samples)}});
  }
  return state;
}

void ReplayBuffer::restore(const Json& state) {
  std::map<uint64_t, FinishedGroup> groups;
  try {
    for (const Json& saved : state) {
      FinishedGroup group{.id = saved.at("id").get<uint64_t>(), .problem = nullptr, .samples = {}};
      for (const Json& sample : saved.at("samples"))
        group.samples.push_back(parse_rollout(sample, str("the saved buffer, group ", group.id),
                                              {.require_reward_or_advantage = false}));
      const uint64_t id = group.id;
      if (!groups.emplace(id, std::move(group)).second)
        throw UserError(str("the saved buffer has group ", id, " twice"));
    }
  } catch (const Json::exception& error) {
    throw UserError(str("the saved buffer is damaged: ", error.what()));
  }
  const std::lock_guard lock(mutex_);
  groups_ = std::move(groups);
}

void ReplayBuffer::check_integrity() const {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, group] : groups_) {
    BOUGH_CHECK(group.id == id, "group ", group.id, " stands under ", id);
    for (const Trajectory& sample : group.samples)
      BOUGH_CHECK(!group.problem || sample.reward || !sample.valid, "group ", id,
                  " is in the buffer without a reward");
  }
}

}  // namespace bough
