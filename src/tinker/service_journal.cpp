// The service's use of its journal (journal.h): what it writes, and how it goes on after a restart.
#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "tinker/service_state.h"

namespace bough {

namespace fs = std::filesystem;

// ---- While the service runs

void TrainingService::State::keep_request(const Json& answer, const std::string& route,
                                          const HttpRequest& request) {
  if (!answer.contains("request_id") || !answer.contains("model_id")) return;
  const std::string id = answer["request_id"], model = answer["model_id"];
  if (!id.starts_with(model + "/")) return;
  const std::string number = id.substr(model.size() + 1);
  if (number.find_first_not_of("0123456789") != std::string::npos) return;  // it makes a model
  journal.accept(model, std::stoll(number), {route, request.header("content-type"), request.body});
}

FutureResult TrainingService::State::journalled(const std::string& model, const Work& work,
                                                FutureResult result) {
  if (model.empty()) return result;
  const bool failed = result.json.contains("error");
  if (work.changes_weights && !failed) {
    const FutureResult refused = guarded([&] {
      journal_step(model, work.seq_id, result);
      return FutureResult{};
    });
    return refused.json.is_null() ? result : refused;
  }
  const bool waits_for_step = work.request && !work.request->forward_only && !failed;
  // If this fails, the request is computed again after a restart.
  if (!waits_for_step)
    guarded([&] {
      journal.answered(model, work.seq_id, result);
      return FutureResult{};
    });
  return result;
}

void TrainingService::State::journal_step(const std::string& model, int64_t seq_id,
                                          const FutureResult& result) {
  try {
    journal.step(
        model, seq_id,
        [&](const fs::path& folder) {
          training(model).save(folder, base.directory.string(), /*with_optimizer=*/true);
        },
        [&](int64_t each) {
          return each == seq_id ? std::make_shared<const FutureResult>(result)
                                : futures.result(str(model, "/", each));
        });
  } catch (const std::exception& error) {
    throw IoError(str("the weights have changed, but the journal was not written: ", error.what(),
                      "; after a restart the service goes on from the last step that was"));
  }
}

void TrainingService::State::keep_sampler(const std::string& id, const SamplingSession& sampler) {
  const fs::path adapter =
      sampler.adapter.empty() ? fs::path() : sampler.adapter.lexically_relative(settings.folder);
  journal.add_sampler(sampler.session, id,
                      {{"adapter", adapter.string()},
                       {"model_path", sampler.model_path},
                       {"follows", sampler.follows},
                       {"seq_id", sampler.seq_id}});
  const MutexLock guard(mutex);
  if (!sampler.follows.empty())
    for (auto& [other, each] : sampling)
      if (each.follows == sampler.follows) each.adapter = sampler.adapter;
  sampling[id] = sampler;
}

// ---- After a restart

int64_t TrainingService::State::restore() {
  std::set<std::string> runs;
  for (RestoredSession& session : journal.restore()) {
    {
      const MutexLock guard(mutex);
      // Its client has time to come back.
      sessions[session.id] = {clock.now(), session.description.value("tenant", ""), ++num_sessions,
                              session.description.value("description", Json::object())};
    }
    restore_samplers(session);
    for (RestoredModel& model : session.models) {
      runs.insert(model.id);
      restore_model(session.id, model);
    }
  }
  checkpoints.remove_leftovers(runs);
  is_restoring = false;
  return std::ssize(runs);
}

void TrainingService::State::restore_samplers(const RestoredSession& session) {
  const MutexLock guard(mutex);
  std::map<std::string, const SamplingSession*> newest;  // by the model that they follow
  for (const auto& [id, json] : session.samplers) try {
      const std::string adapter = json.at("adapter");
      SamplingSession& sampler = sampling[id];
      sampler = {session.id, adapter.empty() ? fs::path() : fs::path(settings.folder) / adapter,
                 json.at("model_path"), json.at("follows"), json.at("seq_id")};
      const SamplingSession*& last = newest[sampler.follows];
      if (!last || sampler.seq_id > last->seq_id) last = &sampler;
    } catch (const Json::exception& error) {
      sampling.erase(id);
      log_warning(str("serve: the sampling session ", id, " is lost: its file is damaged: ", error.what()));
    }
  for (auto& [id, sampler] : sampling)
    if (sampler.session == session.id && !sampler.follows.empty())
      sampler.adapter = newest.at(sampler.follows)->adapter;
}

void TrainingService::State::restore_model(const std::string& session, RestoredModel& restored) {
  const std::string& id = restored.id;
  const std::string tenant = tenant_of(session).value_or("");
  queue.add_model(id, restored.next);
  if (restored.failure.empty() && restored.start.adapter.rank == 0)
    restored.failure = "all its weights were trained, which a restart ends";
  try {
    if (restored.failure.empty()) add_model(session, id, restored.start);
  } catch (const std::exception& error) {
    restored.failure = error.what();
  }
  if (!restored.failure.empty()) lose_model(session, id, restored.failure);
  for (auto& [seq_id, result] : restored.answers) {
    const std::string future = str(id, "/", seq_id);
    futures.add(session, future);
    futures.complete(future, std::move(result));
    // Its turn in the order of requests, in which nothing is left to do.
    if (seq_id >= restored.next) queue.add(id, seq_id, run_later([] { return FutureResult{}; }));
  }
  for (auto& [seq_id, request] : restored.requests) try {
      answer(request.route,
             {.method = "POST",
              .path = "",
              .headers = {{"content-type", request.content_type}},
              .body = std::move(request.body),
              .hold = nullptr},
             tenant);
    } catch (const std::exception& error) {
      const std::string why = error.what();
      enqueue(id, seq_id, run_later([why] { return failed_result(why, "user"); }));
    }
}

std::string TrainingService::State::lose_model(const std::string& session, const std::string& id,
                                               const std::string& why) {
  const std::string last = checkpoints.newest(id);
  const std::string failure =
      str("model ", id, " is lost: ", why, "; ",
          last.empty() ? "it has no save_state" : "create a model from its last save_state, " + last);
  log_warning("serve: " + failure);
  journal.forget(id);
  const MutexLock guard(mutex);
  ClientModel& model = models[id];
  model.session = session;
  model.failure = failure;
  return failure;
}

}  // namespace bough
