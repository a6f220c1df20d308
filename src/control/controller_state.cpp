// The controller's part of a checkpoint, as JSON (docs/formats.md).
#include <cmath>
#include <utility>

#include "control/controller.h"
#include "data/rollout_file.h"

namespace bough {

namespace {

Json group_to_json(const ScoredGroup& group) {
  Json samples = Json::array();
  for (size_t i = 0; i < group.group->samples.size(); ++i) samples.push_back(rollout_to_json(group.row(i)));
  return {{"id", group.group->id}, {"samples", std::move(samples)}};
}

std::vector<GroupPointer> groups_from_json(const Json& list) {
  std::vector<GroupPointer> groups;
  std::set<uint64_t> ids;
  for (const Json& saved : list) {
    auto group = std::make_shared<FinishedGroup>();
    group->id = saved.at("id").get<uint64_t>();
    for (const Json& sample : saved.at("samples"))
      group->samples.push_back(parse_rollout(sample, str("the saved buffer, group ", group->id),
                                             {.require_reward_or_advantage = false}));
    if (!ids.insert(group->id).second)
      throw UserError(str("the saved buffer has group ", group->id, " twice"));
    groups.push_back(std::move(group));
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
  Json buffered = Json::array(), awaiting = Json::array();
  for (const auto& [id, group] : state.buffered) buffered.push_back(group_to_json(group));
  for (const auto& [id, group] : state.awaiting) awaiting.push_back(group_to_json({group, {}}));
  Json json = {{"step", state.step},
               {"problems", problems.save()},
               {"buffer", std::move(buffered)},
               {"awaiting_reward", std::move(awaiting)},
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
    for (GroupPointer& group : groups_from_json(json.at("buffer")))
      state.buffered.emplace(group->id, ScoredGroup{group, {}});
    for (GroupPointer& group : groups_from_json(json.value("awaiting_reward", Json::array())))
      state.awaiting.emplace(group->id, group);
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
