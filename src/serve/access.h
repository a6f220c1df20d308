// Checks of who sends a request.
#pragma once

#include <string>

#include "net/http_server.h"

namespace bough {

// Compares in a time that tells nothing about the key, which must not be empty.
bool same_key(const std::string& given, const std::string& key);

// For a server without a key. Throws ApiError 403 if the request's Host or Origin header names another
// machine. A page in a browser may send requests to loopback, but cannot choose these headers. They
// distinguish such a page from this machine's programs.
void check_local(const HttpRequest& request);

}  // namespace bough
