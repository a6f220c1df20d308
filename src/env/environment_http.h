// An environment behind an HTTP endpoint, which holds all conversations: each call is a POST of the request
// as JSON on a connection of its own, answered by the reply as JSON (environment_protocol.h). A request has
// `episode`, a text that no other conversation has, of any run; `close` is a request as well, whose answer
// says nothing. `workers` conversations are open at once.
//
// Opening a conversation is tried again, `retries` times, after 5xx, 429 and 408, a connection that is
// refused and one that breaks, each time as the same `episode`: an endpoint that knows it opens it anew. A
// step is tried again only where it came to nothing: no connection, 429 and 503. A call that takes too long
// is hung up on and the conversation closed; an endpoint should also forget those that nobody has asked for
// long, since a run that is killed says no goodbye.
#pragma once

#include <memory>

#include "env/environment.h"

namespace bough {

// Blocks until the endpoint accepts a connection, which is closed again. UserError: the URL or its host's
// name is wrong; IoError: no connection within startup_timeout_seconds.
std::unique_ptr<Environment> make_http_environment(const EnvironmentSettings& settings);

}  // namespace bough
