#include "serve/access.h"

#include "serve/api.h"

namespace bough {

std::string given_key(const HttpRequest& request) {
  std::string given = request.header("authorization");
  if (given.size() > 7 && (given.starts_with("Bearer ") || given.starts_with("bearer ")))
    return given.substr(7);
  return request.header("x-api-key");
}

void check_local(const HttpRequest& request) {
  if (!is_for_this_machine(request))
    throw ApiError(403,
                   "without a key this server answers only programs on its own machine (headers Host and "
                   "Origin); start it with a key: BOUGH_API_KEY or api_key_file");
}

}  // namespace bough
