// Checks of who sends a request.
#pragma once

#include <string>

#include "net/http_server.h"

namespace bough {

// The key that a request sends: of "Authorization: Bearer KEY", otherwise of X-API-Key. Empty: none.
std::string given_key(const HttpRequest& request);

// For a server without a key. Throws ApiError 403 if the request's Host or Origin header names another
// machine. A page in a browser may send requests to loopback, but cannot choose these headers. They
// distinguish such a page from this machine's programs.
void check_local(const HttpRequest& request);

}  // namespace bough
