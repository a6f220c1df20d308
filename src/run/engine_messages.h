// What rank 0 and the engines that generate for it say to each other (ranks_engine.h), as CBOR.
//
//   rank 0:  {"passes": 8, "running": false,
//             "commands": [{"do": "submit", ...}, {"do": "weights", "version": 3}]}
//   engine:  {"ready": true, "statistics": [...], "results": [...], "running": []}
//
// `running` asks for what is in flight, and no pass is made then; else the engine makes up to `passes`.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/json.h"
#include "comm/communicator.h"
#include "engine/engine.h"

namespace bough {

std::string packed(const Json& json);
Json unpacked(const std::string& bytes);

Json to_json(const GenerationRequest& request);  // a command
Json to_json(const GenerationResult& result);
GenerationResult result_from_json(const Json& json);
Json to_json(const EngineStatistics& statistics);  // without seconds
EngineStatistics statistics_from_json(const Json& json);

std::vector<GenerationResult> make_passes(Engine& engine, int64_t passes);

// Does what a message says and returns the engine's. take: the weights that a command `weights` names.
Json answer(const Json& message, Engine& engine,
            const std::function<WeightUpdate(const Json& command)>& take);

// Polls until weights of the version are there; IoError after the group's deadline.
void await_weights(const std::function<bool()>& are_there, int32_t version, const Communicator& ranks);

}  // namespace bough
