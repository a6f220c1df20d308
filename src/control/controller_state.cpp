// The controller's part of a checkpoint, as JSON (docs/formats.md).
#include <cmath>
#include <utility>

#include "control/controller.h"
#include "data/rollout_file.h"

namespace bough {

namespace {

Json groups_to_json(const std::map<uint64_t, GroupPointer>& groups) {
  Json list = Json::array();
  for (const auto& [id, group] : groups) {
    Json samples = Json::array();
    for (const Trajectory& sample : group->samples) samples.push_back(rollout_to_json(sample));
    list.push_back({{"id", id}, {"samples", std::move(samples)}});
  }
  return list;
}

std::map<uint64_t, GroupPointer> groups_from_json(const Json& list) {
  std::map<uint64_t, GroupPointer> groups;
  for (const Json& saved : list) {
    auto group = std::make_shared<FinishedGroup>();
    group->id = saved.at("id").get<uint64_t>();
    for (const Json& sample : saved.at("samples"))
      group->samples.push_back(parse_rollout(sample, str("the saved buffer, group ", group->id),
                                             {.require_reward_or_advantage = false}));
    const uint64_t id = group->id;
    if (!groups.emplace(id, std::move(group)).second)
      throw UserError(str("the saved buffer has group ", id, " twice"));
  }
  return groups;
}

}  // namespace

Json to_json(const ControllerState& state, const ProblemOrder& problems) {
  Json running = Json::array();
  for (const auto& [id, samples] : state.running) {
    Json list = Json::array();
    for (const PartialRollout& sample : samples) list.push_back(partial_rollout_to_json(sample));
    running.push_back({{"id", id}, {"samples", std::move(list)}});
  }
  Json json = {{"step", state.step},
               {"problems", problems.save()},
               {"buffer", groups_to_json(state.buffered)},
               {"awaiting_reward", groups_to_json(state.awaiting)},
               {"running", std::move(running)},
               {"next_position", state.next_position},
               {"unfinished", state.unfinished}};
  if (state.unwritten_metrics) json["unwritten_metrics"] = *state.unwritten_metrics;
  return json;
}

ControllerState controller_state_from_json(const Json& json, ProblemOrder& problems) {
  ControllerState state;
  try {
    problems.restore(json.at("problems"));
    state.step = json.at("step").get<int64_t>();
    state.next_position = json.at("next_position").get<int64_t>();
    state.buffered = groups_from_json(json.at("buffer"));
    state.awaiting = groups_from_json(json.value("awaiting_reward", Json::array()));
    for (const Json& request : json.value("running", Json::array())) {
      std::vector<PartialRollout>& samples = state.running[request.at("id").get<uint64_t>()];
      for (const Json& sample : request.at("samples")) samples.push_back(partial_rollout_from_json(sample));
    }
    json.at("unfinished").get_to(state.unfinished);
    if (json.contains("unwritten_metrics")) {
      state.unwritten_metrics.emplace();
      for (const auto& [name, value] : json.at("unwritten_metrics").items())
        (*state.unwritten_metrics)[name] = value.is_number() ? value.get<double>() : NAN;
    }
  } catch (const Json::exception& error) {
    throw UserError(
        str("the saved state of the run is damaged: ", error.what(), "; go back to an earlier checkpoint"));
  }
  return state;
}

}  // namespace bough
