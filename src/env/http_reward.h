// A reward behind an HTTP endpoint: each call is a POST of the request as JSON on a connection of its own,
// answered by the reply as JSON (reward_protocol.h). A RewardPool makes them, `workers` at once.
//
// Answers with status 2xx are replies. 5xx, 429 and 408, a connection that is refused and one that breaks are
// failures that another attempt may not have; any other status is a failure without one. Redirects are not
// followed. https is not spoken: what needs it goes through a proxy on this machine, or a command.
#pragma once

#include <memory>
#include <string>

#include "env/reward_pool.h"

namespace bough {

// Blocks until the endpoint accepts a connection, which is closed again. Its address is looked up here and
// kept. UserError: the URL or its host's name is wrong; IoError: no connection within
// startup_timeout_seconds.
std::unique_ptr<RewardPool> make_http_reward(const std::string& url, const RewardSettings& settings);

}  // namespace bough
