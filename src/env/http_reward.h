// A reward behind an HTTP endpoint. Each call is a POST of the request as JSON on a connection of its own.
// The answer is the reply as JSON (reward_protocol.h). A RewardPool makes up to `workers` calls at the same
// time.
//
// - Status 2xx: the body is the reply.
// - 5xx, 429, 408, or a connection that is refused or breaks: the call is retried.
// - Any other status: the call fails without a retry. Redirects are not followed.
// https is not supported. Use a proxy on this machine, or a command, for endpoints that need https.
#pragma once

#include <memory>
#include <string>

#include "env/reward_pool.h"

namespace bough {

// Blocks until the endpoint accepts a connection, which is closed again. The host name is resolved only here.
// Throws UserError if the URL or its host name is wrong, and IoError if there is no connection within
// startup_timeout_seconds.
std::unique_ptr<RewardPool> make_http_reward(const std::string& url, const RewardSettings& settings);

}  // namespace bough
