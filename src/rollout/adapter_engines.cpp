#include "rollout/adapter_engines.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "kernels/common/device.h"
#include "models/lora.h"

namespace bough {

Bytes kv_memory_of_each(const Bytes& kv_memory, at::Device device, int64_t count,
                        const std::function<int64_t()>& free) {
  if (!kv_memory.is_auto()) return {kv_memory.count / count};
  if (device.is_cpu()) return kv_memory;
  return {static_cast<int64_t>(kDeviceShare * static_cast<double>(free()) / static_cast<double>(count))};
}

AdapterEngines::AdapterEngines(const Model& base,
                               const std::map<std::string, std::filesystem::path>& adapters,
                               EmbeddedEngineOptions options) {
  members_.push_back({"", base.share(), nullptr});
  for (const auto& [name, path] : adapters) {
    if (name.empty()) throw UserError(str("the adapter ", quoted(path.string()), " has no name"));
    std::unique_ptr<Model> model = base.share();
    load_adapter(path, *model);
    members_.push_back({name, std::move(model), nullptr});
  }
  // After the adapters, which take memory, and before the engines.
  options.settings.kv_memory =
      kv_memory_of_each(options.settings.kv_memory, base.device(), std::ssize(members_),
                        [&] { return device_memory(base.device()).free; });
  for (Member& member : members_) member.engine = std::make_unique<EmbeddedEngine>(*member.model, options);
}

void AdapterEngines::submit(GenerationRequest request) {
  const uint64_t id = request.id;
  const auto member = std::find_if(members_.begin(), members_.end(),
                                   [&](const Member& each) { return each.name == request.adapter; });
  if (member == members_.end())
    throw UserError(str("request ", id, ": there is no adapter ", quoted(request.adapter)));
  for (const Member& each : members_)
    if (&each != &*member && each.engine->contains(id))
      throw UserError(str("request ", id, ": a request with this id is in flight already"));
  request.adapter.clear();
  member->engine->submit(std::move(request));
}

std::vector<GenerationResult> AdapterEngines::step() {
  std::vector<GenerationResult> finished;
  for (const Member& member : members_) {
    if (member.engine->idle()) continue;
    std::vector<GenerationResult> some = member.engine->step();
    std::move(some.begin(), some.end(), std::back_inserter(finished));
  }
  return finished;
}

bool AdapterEngines::idle() const {
  return std::all_of(members_.begin(), members_.end(),
                     [](const Member& each) { return each.engine->idle(); });
}

bool AdapterEngines::cancel(uint64_t id) {
  return std::any_of(members_.begin(), members_.end(),
                     [id](const Member& each) { return each.engine->cancel(id); });
}

void AdapterEngines::pause() {
  for (const Member& member : members_) member.engine->pause();
}

void AdapterEngines::resume() {
  for (const Member& member : members_) member.engine->resume();
}

void AdapterEngines::park() {
  for (const Member& member : members_) member.engine->park();
}

void AdapterEngines::unpark() {
  for (const Member& member : members_) member.engine->unpark();
}

void AdapterEngines::update_weights(const WeightUpdate& update) {
  BOUGH_CHECK(false, "an engine of several adapters takes no new weights, got version ", update.version);
}

std::vector<RunningRequest> AdapterEngines::running() const {
  std::vector<RunningRequest> all;
  for (const Member& member : members_) {
    std::vector<RunningRequest> some = member.engine->running();
    std::move(some.begin(), some.end(), std::back_inserter(all));
  }
  return all;
}

EngineStatistics AdapterEngines::statistics() const {
  EngineStatistics sum;
  for (const Member& member : members_) sum = sum + member.engine->statistics();
  return sum;
}

}  // namespace bough
