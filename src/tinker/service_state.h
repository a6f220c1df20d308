// The state of a TrainingService, and its routes by subject: sessions and training (training_routes.cpp),
// sampling (sampling_routes.cpp), lists and downloads (rest_routes.cpp). service.cpp has HTTP and the
// computation thread, tenants.cpp the checks of which tenant may address what, service_journal.cpp the
// journal.
#pragma once

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
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
#include "tinker/model_memory.h"
#include "tinker/resident_models.h"
#include "tinker/samplers.h"
#include "tinker/service.h"
#include "tinker/training_model.h"
#include "tinker/work_queue.h"

namespace bough {

// Largest number of a seq_id and of other numbers that clients count.
inline constexpr int64_t kMostSeqId = int64_t{1} << 40;

// A fetch of a result that is not ready ends after this time: before the client's limit of 45 s.
inline constexpr std::chrono::seconds kPoll{25};

// Bounds of ttl_seconds.
inline constexpr int64_t kLeastTtl = 3600, kMostTtl = int64_t{3600} * 24 * 366 * 10;
// Reads ttl_seconds and user_metadata.
Checkpoints::Terms read_terms(Fields& fields);

// Throws ApiError 400 if the body is no JSON object.
OrderedJson parse_body(const HttpRequest& request);

struct TrainingService::State {
  State(TrainingBase base_, TrainingServiceSettings settings_, ApiKeys keys_);
  ~State() { http.close(); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  struct Session {
    Clock::Time heartbeat;
    std::string tenant;
    uint64_t number = 0;    // of its creation
    Json description = {};  // of the client: user_metadata, display_name
  };
  struct ClientModel {
    std::string session;
    LoraSettings adapter;      // rank 0: all weights are trained
    int64_t bytes = 0;         // that it holds when it is not parked
    int64_t last_request = 0;  // seconds since 1970
    std::string failure = {};  // why it is lost; empty: it is not
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
  // A retrieve_futures that waits for a request of its sampling session to complete.
  struct Poll {
    std::string sampler;
    int64_t clone = 0;
    uint64_t cursor = 0;
    Clock::Time deadline;
    std::shared_ptr<HttpExchange> exchange;
  };
  // A link to the files of a checkpoint, which needs no key.
  struct Download {
    CheckpointName checkpoint;
    int64_t expires = 0;  // seconds since 1970
  };

  // I/O thread.
  void handle(HttpRequest request, const std::shared_ptr<HttpExchange>& exchange);
  // Returns the tenant. Throws ApiError 401 or 403.
  std::string check_access(const HttpRequest& request, const std::string& route) const;
  void retrieve(const HttpRequest& request, const std::string& tenant,
                const std::shared_ptr<HttpExchange>& exchange);
  void retrieve_several(const HttpRequest& request, const std::string& tenant,
                        const std::shared_ptr<HttpExchange>& exchange);
  bool answer_poll(Poll& poll, bool is_last);  // true: answered
  void expire_waits();
  void tell_polls(const std::string& key);  // any thread: the request with this key is complete
  void end_late_sessions();
  void clean_up();  // preparation thread

  // Preparation threads. Each returns the answer of a route.
  HttpResponse respond(const std::string& route, const HttpRequest& request, const std::string& tenant);
  Json answer(const std::string& route, const HttpRequest& request, const std::string& tenant);
  Json client_config() const;
  Json capabilities() const;
  Json create_session(Fields& fields, const std::string& tenant);
  Json heartbeat(Fields& fields);
  Json create_model(Fields& fields);
  Json get_info(Fields& fields);
  Json forward_backward(ForwardBackwardRequest request);
  Json optim_step(Fields& fields);
  Json save_weights(Fields& fields);
  Json load_weights(Fields& fields);
  Json weights_info(Fields& fields);
  Json save_external(Fields& fields);
  Json save_for_sampler(Fields& fields);
  Json create_sampling_session(Fields& fields);
  Json sample(Fields& fields);
  Json cancel(Fields& fields);

  // Lists, sessions, runs and checkpoints. nullopt: the route is none of these.
  std::optional<Json> rest(const std::string& route, const HttpRequest& request, const std::string& tenant);
  Json checkpoint_list(const std::string& tenant, const HttpRequest& request);
  Json run_list(const std::string& tenant, const HttpRequest& request);
  Json session_list(const std::string& tenant, const HttpRequest& request);
  Json session(const std::string& id);
  Json sampler(const std::string& id);
  Json run(const std::string& id, const std::string& tenant);
  // `rest`: what comes after training_runs/ID/checkpoints/
  Json checkpoint(const std::string& id, const std::string& rest, const HttpRequest& request);
  Json download_urls(const CheckpointName& name, const HttpRequest& request);
  HttpResponse download(const std::string& route, const std::string& method);

  // Any thread. Throws ApiError 404 if the id in the request's field `field` belongs to another tenant, and
  // 400 if two fields belong to different sessions or a checkpoint is not the tenant's. Unknown ids pass:
  // their route answers.
  void check_names(const OrderedJson& body, const std::string& tenant) const;
  void check_owner(const std::string& field, const std::string& id, const std::string& tenant) const;
  // The session of an id: session_id, model_id, sampling_session_id or request_id. Empty: unknown.
  std::string session_for(const std::string& field, const std::string& id) const;
  std::optional<std::string> tenant_of(const std::string& session) const;  // nullopt: unknown
  std::set<std::string> sessions_of(const std::string& tenant) const;

  // Any thread. `model` and `session` must exist, otherwise ApiError 404, or a future that fails.
  Json enqueue(const std::string& model, int64_t seq_id, Work work);  // in the order of seq_id
  Json enqueue_now(const std::string& session, const std::string& key, std::function<FutureResult()> run);
  void check_queue(const std::string& session) const;  // throws ApiError 429 if its tenant's is full
  Json add_model(const std::string& session, const std::string& id, const ModelStart& start,
                 const Json& metadata = nullptr);
  void check_new_model(const ModelNeed& need, const LoraSettings& adapter,
                       const std::set<std::string>& of_tenant) const REQUIRES(mutex);
  std::string session_of(const std::string& model) const;
  bool exists(const std::string& model) const;
  std::string future_of_gone(const std::string& model);
  void check_session(const std::string& session) const;
  void check_base(const std::string& name) const;
  void end_session(const std::string& session);

  // Computation thread.
  void compute(ModelQueue::Group group);
  void compute_now(const Work& work);
  bool serve_others(double seconds, const std::function<bool()>& stop);
  FutureResult make_training(const std::string& id, const ModelStart& start, int64_t bytes);
  FutureResult load(const std::string& id, const std::string& path, bool with_optimizer);
  void free_ended_models();
  TrainingModel& training(const std::string& model);  // not parked
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

  const ServiceMemory memory;
  const TrainingBase base;
  const TrainingServiceSettings settings;
  const ApiKeys keys;
  const std::string shown_name;       // of the base model
  const std::set<std::string> names;  // that clients may use for it
  const bool any_name;
  const Checkpoints checkpoints;
  const FolderLock folder_lock;
  Journal journal;
  const SteadyClock clock;
  Futures futures{clock, [this](const std::string& key) { tell_polls(key); }};
  ModelQueue queue;
  ResidentModels residents;  // computation thread only, as samplers
  Samplers samplers;
  std::atomic<uint64_t> next_seed, num_waiters = 0, num_sessions = 0;
  std::atomic<size_t> num_polls = 0;  // polls.size(), or more

  mutable Mutex mutex;
  std::map<std::string, Session> sessions GUARDED_BY(mutex);
  std::map<std::string, ClientModel> models GUARDED_BY(mutex);
  std::map<std::string, SamplingSession> sampling GUARDED_BY(mutex);
  // Models and sessions that the computation thread must free.
  std::set<std::string> ended GUARDED_BY(mutex), ended_sessions GUARDED_BY(mutex);

  std::map<std::string, Download> downloads GUARDED_BY(mutex);  // by the secret in the link

  std::map<uint64_t, Wait> waits;  // I/O thread only
  std::list<Poll> polls;           // I/O thread only
  bool is_restoring = true;        // until the constructor ends
  const int64_t num_restored;
  HttpServer http;  // last, because its threads use the members above
};

}  // namespace bough
