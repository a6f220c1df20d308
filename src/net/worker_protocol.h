// The part of the line protocol that rewards and environments have in common. Every message is a JSON object
// in UTF-8. A worker process reads and writes one message per line. An HTTP endpoint gets one message as the
// body of a POST and answers with one message.
//
//   Bough:  {"id": 7, ...}
//   worker: {"id": 7, ...}              the answer to call 7      or   {"id": 7, "error": "..."}
//   worker: {"ready": true}             after it has loaded       or   {"ready": false, "error": "..."}
//
// reward_protocol.h and environment_protocol.h define the other keys. All functions are pure: they use no
// processes and no sockets.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/json.h"

namespace bough {

// Shortens untrusted text for a message: at most 1,000 bytes, without cutting a UTF-8 character.
std::string shortened(std::string_view text);

// `AnyJson` below is Json, or nlohmann::ordered_json if the order of keys matters.

// Writes JSON on one line, without a line break. Bytes that are not UTF-8 become U+FFFD.
template <class AnyJson>
std::string dump_message(const AnyJson& message) {
  return message.dump(-1, ' ', false, AnyJson::error_handler_t::replace);
}

template <class AnyJson>
std::string write_request(int64_t id, AnyJson request) {
  request["id"] = id;
  return dump_message(request);
}

template <class AnyJson>
struct WorkerMessage {
  AnyJson object;
  bool has_id = false, has_ready = false;
  std::optional<int64_t> id;         // nullopt if `id` is missing or no integer
  std::optional<bool> ready;         // nullopt if `ready` is missing or no boolean
  std::optional<std::string> error;  // of any length; written as JSON if `error` is not a text
  bool error_is_text = false;
};

// Never throws. nullopt if `text` is no JSON object.
template <class AnyJson>
std::optional<WorkerMessage<AnyJson>> read_message(std::string_view text) {
  WorkerMessage<AnyJson> out;
  out.object = AnyJson::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!out.object.is_object()) return std::nullopt;
  const auto end = out.object.end();
  if (const auto id = out.object.find("id"); id != end) {
    out.has_id = true;
    if (id->is_number_integer()) out.id = id->template get<int64_t>();
  }
  if (const auto ready = out.object.find("ready"); ready != end) {
    out.has_ready = true;
    if (ready->is_boolean()) out.ready = ready->template get<bool>();
  }
  if (const auto error = out.object.find("error"); error != end) {
    out.error_is_text = error->is_string();
    out.error = out.error_is_text ? error->template get<std::string>() : dump_message(*error);
  }
  return out;
}

}  // namespace bough
