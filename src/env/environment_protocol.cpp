#include "env/environment_protocol.h"

#include <cmath>

#include "base/error.h"
#include "base/json.h"
#include "net/worker_protocol.h"

namespace bough {

namespace {

// `value` is null, a text, or a list. Elements of the list are messages, or texts that answer the turn's
// calls.
OrderedJson read_messages(const OrderedJson& value, size_t num_calls) {
  OrderedJson out = OrderedJson::array();
  if (value.is_null()) return out;
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    if (num_calls == 0) out.push_back(message_of("user", text));
    for (size_t i = 0; i < num_calls; ++i) out.push_back(message_of("tool", text));
    return out;
  }
  if (!value.is_array()) throw Malformed("messages: expected a list of messages, or a text");
  for (const OrderedJson& message : value) {
    if (message.is_string() && num_calls > 0) {  // texts are the answers to the calls, in order
      out.push_back(message_of("tool", message.get<std::string>()));
      continue;
    }
    out.push_back(message);
  }
  try {
    return template_messages(out);
  } catch (const MessageError& error) {
    throw Malformed(error.what());
  }
}

double read_number(const OrderedJson& value, const char* key) {
  if (value.is_boolean()) return value.get<bool>() ? 1 : 0;
  if (!value.is_number() || !std::isfinite(value.get<double>()))
    throw Malformed(str(key, ": got ", quoted(dump_ordered(value)), ", expected a finite number"));
  return value.get<double>();
}

}  // namespace

OrderedJson request_of(const EpisodeCall& call) {
  if (call.is_reset())
    return {{"method", "reset"}, {"problem", problem_json(call.problem)}, {"seed", call.seed}};
  OrderedJson calls = OrderedJson::array();
  for (const EnvironmentCall& each : call.action->calls)
    calls.push_back({{"id", each.id}, {"name", each.name}, {"arguments", each.arguments}});
  return {{"method", "step"},
          {"action",
           {{"text", call.action->text},
            {"content", call.action->content},
            {"reasoning", call.action->reasoning},
            {"calls", std::move(calls)}}}};
}

Observation read_observation(const OrderedJson& reply, size_t num_calls) {
  Observation out;
  const auto field = [&](const char* key) {
    const auto found = reply.find(key);
    return found == reply.end() ? OrderedJson() : *found;
  };
  out.messages = read_messages(field("messages"), num_calls);
  try {
    out.tools = template_tools(field("tools"));
  } catch (const UserError& error) {
    throw Malformed(error.what());
  }
  if (const OrderedJson reward = field("reward"); !reward.is_null())
    out.reward = read_number(reward, "reward");
  if (const OrderedJson rewards = field("rewards"); !rewards.is_null()) {
    if (!rewards.is_object()) throw Malformed("rewards: expected an object of numbers");
    for (const auto& [name, value] : rewards.items()) out.rewards[name] = read_number(value, "rewards");
  }
  if (const OrderedJson count = field("invalid_calls"); !count.is_null())
    out.invalid_calls = static_cast<int64_t>(read_number(count, "invalid_calls"));
  if (const OrderedJson done = field("done"); !done.is_null()) {
    if (!done.is_boolean())
      throw Malformed(str("done: got ", quoted(dump_ordered(done)), ", expected true or false"));
    out.done = done.get<bool>();
  }
  return out;
}

}  // namespace bough
