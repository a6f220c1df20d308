// An environment behind an HTTP endpoint, which has the state of all conversations. Each call is a POST of
// the request as JSON on a connection of its own. The answer is the reply as JSON (environment_protocol.h). A
// request has `episode`, a text that is unique to the conversation among all runs. `close` is also a request;
// its answer is ignored. A run has at most `workers` conversations open at the same time, and so has its
// evaluation, in addition.
//
// Retries, `retries` times each:
// - Opening a conversation: after 5xx, 429, 408, and a connection that is refused or breaks. Every attempt
//   has the same `episode`. An endpoint that already has this episode must begin it again.
// - A step: only after a refused connection, 429 or 503, because then the endpoint has not executed it.
// If a call takes too long, Bough closes its connection and the conversation. A run that is killed sends no
// `close`, so an endpoint should also drop conversations that were idle for long.
#pragma once

#include <memory>

#include "env/environment.h"

namespace bough {

// Blocks until the endpoint accepts a connection, which is closed again. Throws UserError if the URL or its
// host name is wrong, and IoError if there is no connection within startup_timeout_seconds.
std::unique_ptr<Environment> make_http_environment(const EnvironmentSettings& settings);

}  // namespace bough
