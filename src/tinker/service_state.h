// The state of a TrainingService, and its routes by subject: sessions and training (training_routes.cpp),
// sampling (sampling_routes.cpp). service.cpp has HTTP and the computation thread, service_journal.cpp the
// journal.
#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/file.h"
#include "base/mutex.h"
#include "models/lora_settings.h"
#include "net/http_server.h"
#include "serve/api.h"
#include "tinker/checkpoints.h"
#include "tinker/futures.h"
#include "tinker/journal.h"
#include "tinker/samplers.h"
#include "tinker/service.h"
#include "tinker/training_model.h"
#include "tinker/work_queue.h"

namespace bough {

// Largest number of a seq_id and of other numbers that clients count.
inline constexpr int64_t kMostSeqId = int64_t{1} << 40;

struct TrainingService::State {
  State(TrainingBase base_, TrainingServiceSettings settings_, std::string key);
  ~State() { http.close(); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  struct Session {
    Clock::Time heartbeat;
  };
  struct ClientModel {
    std::string session;
    LoraSettings adapter;
    std::unique_ptr<TrainingModel> model = nullptr;  // computation thread only
    std::string failure = {};                        // why there is none; empty: it is not made yet
  };
  struct SamplingSession {
    std::string session;
    std::filesystem::path adapter;  // empty: the base model
    std::string model_path;         // as clients see it; empty: the base model
    std::string follows;            // the model whose later saves it takes; empty: a snapshot
    int64_t seq_id = 0;             // of the save that made it
  };
  struct Wait {
    std::string future;
    Clock::Time deadline;
    std::shared_ptr<HttpExchange> exchange;
  };

  // I/O thread.
  void handle(HttpRequest request, const std::shared_ptr<HttpExchange>& exchange);
  void check_access(const HttpRequest& request, const std::string& route) const;
  void retrieve(const HttpRequest& request, const std::shared_ptr<HttpExchange>& exchange);
  void expire_waits();
  void end_late_sessions();
  void clean_up();  // preparation thread

  // Preparation threads. Each returns the answer of a route.
  Json answer(const std::string& route, const HttpRequest& request);
  Json client_config() const;
  Json capabilities() const;
  Json create_session(Fields& fields);
  Json heartbeat(Fields& fields);
  Json create_model(Fields& fields);
  Json get_info(Fields& fields);
  Json forward_backward(ForwardBackwardRequest request);
  Json optim_step(Fields& fields);
  Json save_weights(Fields& fields);
  Json load_weights(Fields& fields);
  Json weights_info(Fields& fields);
  Json training_run(const std::string& id, const std::string& rest, const HttpRequest& request);
  Json save_for_sampler(Fields& fields);
  Json create_sampling_session(Fields& fields);
  Json sampler(const std::string& id);
  Json sample(Fields& fields);
  Json cancel(Fields& fields);

  // Any thread. `model` and `session` must exist, otherwise ApiError 404.
  Json enqueue(const std::string& model, int64_t seq_id, Work work);  // in the order of seq_id
  Json enqueue_now(const std::string& session, const std::string& key, std::function<FutureResult()> run);
  void check_queue() const;  // throws ApiError 429 if it is full
  Json add_model(const std::string& session, const std::string& id, const ModelStart& start);
  std::string session_of(const std::string& model) const;
  void check_session(const std::string& session) const;
  void check_base(const std::string& name) const;
  void end_session(const std::string& session);

  // Computation thread.
  void compute(ModelQueue::Group group);
  FutureResult make_training(const std::string& id, const ModelStart& start);
  FutureResult load(const std::string& id, const std::string& path, bool with_optimizer);
  void free_ended_models();
  TrainingModel& training(const std::string& model);
  FutureResult guarded(const std::function<FutureResult()>& run) const;

  // service_journal.cpp. keep_request() is called before a request is acknowledged, journalled() before its
  // result is complete.
  void keep_request(const Json& answer, const std::string& route, const HttpRequest& request);
  FutureResult journalled(const std::string& model, const Work& work, FutureResult result);
  void journal_step(const std::string& model, int64_t seq_id, const FutureResult& result);
  void keep_sampler(const std::string& id, const SamplingSession& sampler);
  int64_t restore();  // returns the number of models
  void restore_samplers(const RestoredSession& session);
  void restore_model(const std::string& session, RestoredModel& restored);
  // All requests of the model fail from now on. Returns their message.
  std::string lose_model(const std::string& session, const std::string& id, const std::string& why);

  const TrainingBase base;
  const TrainingServiceSettings settings;
  const std::string api_key;
  const std::string shown_name;       // of the base model
  const std::set<std::string> names;  // that clients may use for it
  const bool any_name;
  const Checkpoints checkpoints;
  const FolderLock folder_lock;
  Journal journal;
  const SteadyClock clock;
  Futures futures{clock};
  ModelQueue queue;
  Samplers samplers;  // computation thread only
  std::atomic<uint64_t> next_seed, num_waiters = 0;

  mutable Mutex mutex;
  std::map<std::string, Session> sessions GUARDED_BY(mutex);
  std::map<std::string, ClientModel> models GUARDED_BY(mutex);
  std::map<std::string, SamplingSession> sampling GUARDED_BY(mutex);
  // Models and sessions that the computation thread must free.
  std::set<std::string> ended GUARDED_BY(mutex), ended_sessions GUARDED_BY(mutex);

  std::map<uint64_t, Wait> waits;  // I/O thread only
  bool is_restoring = true;        // until the constructor ends
  const int64_t num_restored;
  HttpServer http;  // last, because its threads use the members above
};

}  // namespace bough
