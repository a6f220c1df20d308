// retrieve_futures: one request waits for the completions of a whole sampling session. Its answer names the
// requests; their results are fetched with retrieve_future.
#include <algorithm>
#include <limits>

#include "base/error.h"
#include "tinker/service_state.h"

namespace bough {

bool TrainingService::State::answer_poll(Poll& poll, bool is_last) {
  if (!poll.exchange->is_open()) return true;
  const Json done = futures.completed(poll.sampler, poll.clone, poll.cursor);
  if (done.empty() && !is_last) return false;
  poll.exchange->respond({.body = dump_line({{"completions", done}, {"cursor", poll.cursor}})});
  return true;
}

void TrainingService::State::retrieve_several(const HttpRequest& request, const std::string& tenant,
                                              const std::shared_ptr<HttpExchange>& exchange) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const OrderedJson body = parse_body(request);
  Fields fields(body);
  const OrderedJson* const given = fields.object("target");
  if (!given) fields.wrong("target", "a sampling session");
  Fields target(*given, "target");
  Poll poll;
  poll.sampler = target.required_text("sampling_session_id");
  poll.clone = target.integer("cloned_sampler_id", 0, kMost).value_or(0);
  target.only("type", "sampling_session", "others have no list of completions");
  target.done();
  poll.cursor = static_cast<uint64_t>(fields.integer("prev_cursor", 0, kMost).value_or(0));
  const double seconds = fields.number("timeout", 0, 1e9).value_or(1e9);
  std::vector<std::string> fetched;
  if (const OrderedJson* list = fields.array("retrieved_request_ids"))
    for (const OrderedJson& id : *list) fetched.push_back(id.is_string() ? id.get<std::string>() : "");
  fields.done();

  check_owner("sampling_session_id", poll.sampler, tenant);
  const std::string session = session_for("sampling_session_id", poll.sampler);
  if (session.empty())
    throw ApiError(
        404, str("target.sampling_session_id: got ", quoted(poll.sampler, 100), ", which does not exist"),
        "target.sampling_session_id");
  futures.drop(session, fetched);
  const std::chrono::duration<double> wait =
      std::min(std::chrono::duration<double>(seconds), std::chrono::duration<double>(kPoll));
  poll.deadline = clock.now() + std::chrono::duration_cast<Clock::Time::duration>(wait);
  poll.exchange = exchange;
  num_polls = polls.size() + 1;  // before the look, so that no completion is missed
  if (!answer_poll(poll, seconds == 0)) polls.push_back(std::move(poll));
  num_polls = polls.size();
}

void TrainingService::State::tell_polls(const std::string& key) {
  if (num_polls == 0) return;
  http.post([this, sampler = key.substr(0, key.rfind('/'))] {
    std::erase_if(polls, [&](Poll& poll) { return poll.sampler == sampler && answer_poll(poll, false); });
    num_polls = polls.size();
  });
}

}  // namespace bough
