// Which tenant may address what. A session belongs to the tenant whose key created it; models, samplers and
// futures belong to their session, a checkpoint to the tenant of its run.
#include <algorithm>

#include "base/error.h"
#include "tinker/service_state.h"

namespace bough {

std::string TrainingService::State::session_for(const std::string& field, const std::string& id) const {
  if (field == "request_id") return futures.session_of(id);
  const MutexLock lock(mutex);
  if (field == "session_id") return sessions.contains(id) ? id : "";
  if (field == "model_id") {
    const auto found = models.find(id);
    return found == models.end() ? "" : found->second.session;
  }
  const auto found = sampling.find(id);
  return found == sampling.end() ? "" : found->second.session;
}

std::optional<std::string> TrainingService::State::tenant_of(const std::string& session) const {
  const MutexLock lock(mutex);
  const auto found = sessions.find(session);
  return found == sessions.end() ? std::nullopt : std::optional(found->second.tenant);
}

std::set<std::string> TrainingService::State::sessions_of(const std::string& tenant) const {
  const MutexLock lock(mutex);
  std::set<std::string> ids;
  for (const auto& [id, session] : sessions)
    if (session.tenant == tenant) ids.insert(id);
  return ids;
}

void TrainingService::State::check_owner(const std::string& field, const std::string& id,
                                         const std::string& tenant) const {
  const std::string session = session_for(field, id);
  // A model that is gone has its run's checkpoints.
  const bool is_other_run = session.empty() && field == "model_id" && !checkpoints.run(id, tenant);
  if (is_other_run || (!session.empty() && tenant_of(session) != tenant))
    throw ApiError(404, str(field, ": got ", quoted(id, 100), ", which does not exist"), field);
}

void TrainingService::State::check_names(const OrderedJson& body, const std::string& tenant) const {
  const auto text = [&](const char* field) {
    const auto found = body.find(field);
    return found != body.end() && found->is_string() ? found->get<std::string>() : std::string();
  };
  std::string first, first_field;
  for (const char* field : {"session_id", "model_id", "sampling_session_id", "request_id"}) {
    const std::string id = text(field);
    if (id.empty()) continue;
    check_owner(field, id, tenant);
    const std::string session = session_for(field, id);
    if (session.empty()) continue;
    if (!first.empty() && session != first)
      throw ApiError(400,
                     str(field, ": got ", quoted(id, 100), ", expected one of the session of ", first_field),
                     field);
    first = session;
    first_field = field;
  }
  for (const char* field : {"path", "model_path", "tinker_path"})
    if (const std::string path = text(field); path.starts_with("tinker://"))
      checkpoints.check_readable(path, tenant, field);
}

void TrainingService::State::check_queue(const std::string& session) const {
  const std::optional<std::string> tenant = tenant_of(session);
  if (!is_restoring && tenant && futures.num_unfetched(sessions_of(*tenant)) >= settings.max_requests)
    throw ApiError(429, str("more than ", settings.max_requests,
                            " requests wait, run or have a result that was not fetched (max_requests)"));
}

}  // namespace bough
