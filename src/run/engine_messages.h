// Messages between rank 0 and the engines that generate for it (ranks_engine.h), as CBOR.
//
//   rank 0:  {"passes": 8, "running": false,
//             "commands": [{"do": "submit", ...}, {"do": "weights", "version": 3}]}
//   engine:  {"ready": true, "statistics": [...], "results": [...], "running": []}
//
// If rank 0's `running` is true, the engine makes no pass, and the `running` of the reply lists the requests
// in flight. Else the engine makes `passes` generation passes, or fewer if it becomes idle.
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

Json to_json(const GenerationRequest& request);  // the command "submit"
Json to_json(const GenerationResult& result);
GenerationResult result_from_json(const Json& json);
Json to_json(const EngineStatistics& statistics);  // without seconds
EngineStatistics statistics_from_json(const Json& json);

std::vector<GenerationResult> make_passes(Engine& engine, int64_t passes);

// Executes the commands of a message and returns the engine's reply. take: returns the weights that a command
// `weights` names.
Json answer(const Json& message, Engine& engine,
            const std::function<WeightUpdate(const Json& command)>& take);

// Polls until are_there() returns true. Throws IoError after the time limit of the communicator `ranks`.
void await_weights(const std::function<bool()>& are_there, int32_t version, const Communicator& ranks);

}  // namespace bough
