#include "serve/jobs.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "base/clock.h"
#include "base/format.h"
#include "base/log.h"

namespace bough {

// A request being answered.
struct Jobs::Job {
  std::shared_ptr<HttpExchange> exchange;
  const Api* api = nullptr;
  ReadRequest read;
  std::string id;
  std::chrono::steady_clock::time_point start;
  std::vector<uint64_t> engine_ids;              // by prompt
  std::vector<SampleText> texts;                 // by choice
  std::vector<ChoiceDelta> choices;              // all output so far, by choice
  std::vector<std::optional<AnswerToken>> last;  // by choice: the sample's last token
  std::vector<size_t> seen;                      // tokens taken, by choice
  RequestIdentity identity;  // set if `session` is: tells whether a later request is a retry
  SessionPointer session;
  size_t num_accepted = 0, num_finished = 0;
  std::string unsent;  // of a stream
  std::optional<double> first_token_seconds;
  bool is_streaming = false, is_over = false;

  const ServedRequest& request() const { return read.request; }
};
namespace {

constexpr const char* kOver = "the session of this request has ended, or its lease has expired";
constexpr const char* kFailed = "the server failed to answer this request; its log says why";

// A token as answers show it. Its `top` has log-probabilities at temperature 1. p_T is the probability at the
// request's temperature T. The engine gives log p_T of the sampled token s and of each top token a, and log
// p_1 of s only. So log p_1(a) = log p_1(s) + T (log p_T(a) - log p_T(s)).
AnswerToken answer_token(const ServedModel& model, const SamplingParameters& sampling,
                         const StreamedToken& sampled) {
  AnswerToken token{sampled.token, model.logprob_of(sampled.raw_logprob, sampled.sampling_logprob), {}};
  const double temperature = sampling.temperature > 0 ? sampling.temperature : 1.0;
  for (size_t i = 0; i < sampled.top_ids.size(); ++i)
    token.top.emplace_back(sampled.top_ids[i],
                           sampled.raw_logprob + temperature * (sampled.top_logprobs[i] - sampled.logprob));
  return token;
}

// The token at position `at` of a whole sample.
StreamedToken token_at(const GeneratedSample& sample, size_t at) {
  StreamedToken token{.token = sample.token_ids[at],
                      .logprob = sample.logprobs[at],
                      .raw_logprob = sample.raw_logprobs[at],
                      .sampling_logprob = sample.sampling_logprobs[at],
                      .is_last = at + 1 == sample.token_ids.size()};
  if (!sample.top_ids.empty()) token.top_ids = sample.top_ids[at];
  if (!sample.top_ids.empty()) token.top_logprobs = sample.top_logprobs[at];
  return token;
}

}  // namespace

HttpHeaders headers_for(const std::string& request_id) {
  return {{"X-Request-Id", request_id}, {"Request-Id", request_id}};
}

Jobs::Jobs(const ServedModel& model, const AgentSessions* agent_sessions, EngineLoop& loop, HttpServer& http)
    : model_(model), agent_sessions_(agent_sessions), loop_(loop), http_(http) {}

Jobs::~Jobs() = default;

void Jobs::clear() {
  jobs_.clear();
  agent_jobs_.clear();
}

void Jobs::fail_ended_sessions() {
  const std::vector<JobPointer> all(agent_jobs_.begin(), agent_jobs_.end());
  for (const JobPointer& job : all)
    if (!job->is_over && !agent_sessions_->is_open(*job->session))
      fail(*job, ApiError(410, kOver, "", "session_ended"));
}

// A client that sends a request again has abandoned its first attempt.
void Jobs::take_identity(Job& job, const HttpRequest& request) {
  const std::string retries = request.header("x-stainless-retry-count");
  job.identity = {.fingerprint = std::hash<std::string>()(str(request.path, "\n", request.body)),
                  .idempotency_key = request.header("idempotency-key"),
                  .is_retry = !retries.empty() && retries != "0"};
  const std::vector<JobPointer> all(agent_jobs_.begin(), agent_jobs_.end());
  for (const JobPointer& other : all)
    if (other->session == job.session && !other->is_over && other->identity.is_repeated_by(job.identity))
      fail(*other, ApiError(409, "the same request was sent again, and the later one gets the answer"));
}

// Parses JSON, applies the template and tokenizes on a preparation thread, then goes on on the I/O thread.
void Jobs::start(const Api& api, HttpRequest request, const std::shared_ptr<HttpExchange>& exchange,
                 const SessionPointer& session) {
  const auto job = std::make_shared<Job>();
  job->session = session;
  if (session) take_identity(*job, request);
  ++in_flight_;
  if (session) agent_jobs_.insert(job);
  job->exchange = exchange;
  job->api = &api;
  job->start = std::chrono::steady_clock::now();
  job->id = new_id("req_");
  exchange->on_gone([this, weak = std::weak_ptr<Job>(job)] {
    if (const JobPointer gone = weak.lock()) abandon(*gone);
  });
  const size_t size = request.body.size();
  http_.prepare(size, [this, job, request = std::move(request)]() mutable {
    auto read = std::make_shared<ReadRequest>();  // the job belongs to the I/O thread
    std::optional<ApiError> error;
    try {
      *read = job->api->read(parse_ordered_json(request.body, "the body"), model_, job->session);
    } catch (const ApiError& refused) {
      error = refused;
    } catch (const UserError& refused) {
      error = ApiError(400, refused.what());
    } catch (const std::exception& failure) {
      log_error(str("serve: ", job->api->path, ": ", failure.what()));
      error = ApiError(500, kFailed);
    }
    request = {};
    http_.post([this, job, read, error] {
      if (job->is_over) return;
      job->read = std::move(*read);
      if (error) return fail(*job, *error);
      if (is_stopping_) return fail(*job, ApiError(503, kStopping));
      if (job->session && !agent_sessions_->is_open(*job->session))
        return fail(*job, ApiError(410, kOver, "", "session_ended"));
      submit(job);
    });
  });
}

void Jobs::submit(const JobPointer& job) {
  if (job->read.ready) {
    job->exchange->respond({.body = dump_line(*job->read.ready), .headers = headers_for(job->id)});
    return close(*job, 200, "counted");
  }
  const ServedRequest& request = job->request();
  const auto num_choices = static_cast<size_t>(request.num_choices());
  OutputParser parser(request.reasoning_parser, request.tool_call_parser, request.tools, request.begun);
  if (request.ends_after_call) parser.end_after_call();
  const bool skips_special =
      !has_special_markers(model_.tokenizer, request.reasoning_parser, request.tool_call_parser);
  for (size_t i = 0; i < num_choices; ++i)
    job->texts.emplace_back(model_.tokenizer, parser, &job->read.request.sampling, skips_special);
  job->choices.resize(num_choices);
  job->last.resize(num_choices);
  job->seen.resize(num_choices);
  if (job->session)
    if (const auto result = job->session->answered(job->identity)) return answer_again(job, *result);
  std::vector<GenerationRequest> requests;
  for (size_t prompt = 0; prompt < request.prompts.size(); ++prompt) {
    const uint64_t id = next_id_++;
    jobs_[id] = {job, prompt};
    job->engine_ids.push_back(id);
    GenerationRequest& asked = requests.emplace_back();
    asked.id = id;
    asked.prompt_ids = request.prompts[prompt];
    if (request.asked) asked.sampled = request.asked->row.sampled;
    asked.sampling = request.sampling;
    asked.adapter = request.adapter;
    asked.seed = request.seed.value_or(static_cast<uint64_t>(model_.settings.seed));
    if (request.seed) asked.sequence = prompt;
  }
  loop_.submit(std::move(requests));
}

// Sends the answer that the same request got before.
void Jobs::answer_again(const JobPointer& job, const GenerationResult& result) {
  if (job->request().stream) begin(*job);
  finish_prompt(*job, 0, result);
  job->session->take_again(job->identity, job->read.answer->id());
  complete(job);
}

void Jobs::begin(Job& job) {
  job.is_streaming = true;
  job.exchange->begin_stream(headers_for(job.id));
  job.unsent += job.read.answer->begin();
}

void Jobs::take(std::vector<EngineEvent> events) {
  std::vector<JobPointer> touched;
  for (EngineEvent& event : events) {
    const auto found = jobs_.find(event.id);
    if (found == jobs_.end()) continue;
    const auto [job, prompt] = found->second;
    try {
      take(job, prompt, std::move(event));
    } catch (const std::exception& failure) {
      log_error(str("serve: ", job->api->path, " ", job->id, ": ", failure.what()));
      fail(*job, ApiError(500, kFailed));
    }
    if (touched.empty() || touched.back() != job) touched.push_back(job);
  }
  for (const JobPointer& job : touched)
    if (!job->is_over) send(*job);
}

void Jobs::take(const JobPointer& job, size_t prompt, EngineEvent event) {
  const ServedRequest& request = job->request();
  switch (event.kind) {
    case EngineEvent::Kind::kAccepted:
      if (++job->num_accepted == request.prompts.size() && request.stream) begin(*job);
      return;
    case EngineEvent::Kind::kRefused: {
      const std::string prefix = str("request ", event.id, ": ");
      if (event.message.starts_with(prefix)) event.message.erase(0, prefix.size());
      return fail(*job, ApiError(400, event.message));
    }
    case EngineEvent::Kind::kToken: {
      if (!job->first_token_seconds) job->first_token_seconds = seconds_since(job->start);
      const size_t choice =
          prompt * static_cast<size_t>(request.sampling.n_samples) + static_cast<size_t>(event.token.sample);
      ++job->seen[choice];
      take_token(*job, choice, event.token);
      if (job->texts[choice].is_over()) end_early(job);
      return;
    }
    case EngineEvent::Kind::kFinished:
      finish_prompt(*job, prompt, event.result);
      if (job->session)
        job->session->take(*request.asked, event.result, request.sampling, job->identity,
                           job->read.answer->id());
      if (++job->num_finished == request.prompts.size()) complete(job);
      return;
  }
}

// Ends the generation if all choices are over. An agent's session keeps whole samples, as they are trained.
void Jobs::end_early(const JobPointer& job) {
  if (job->session || job->num_finished > 0) return;
  for (size_t i = 0; i < job->texts.size(); ++i)
    if (!job->texts[i].is_over() || job->last[i]) return;
  for (const uint64_t id : job->engine_ids) loop_.cancel(id);
  for (size_t i = 0; i < job->texts.size(); ++i) {
    ChoiceDelta delta;
    delta.parts = job->texts[i].finish(std::nullopt, FinishReason::kStop);
    delta.end = job->texts[i].end();
    counters_.malformed_calls += job->texts[i].malformed_calls();
    add(*job, i, std::move(delta));
  }
  complete(job);
  for (const uint64_t id : job->engine_ids) jobs_.erase(id);
}

// Whether a sample's last token is a stop token is known only in finish_prompt(), so the token is kept.
void Jobs::take_token(Job& job, size_t choice, const StreamedToken& sampled) {
  AnswerToken token = answer_token(model_, job.request().sampling, sampled);
  if (sampled.is_last) {
    job.last[choice] = std::move(token);
    return;
  }
  ChoiceDelta delta;
  delta.parts = job.texts[choice].push(token.id);
  delta.tokens.push_back(std::move(token));
  add(job, choice, std::move(delta));
}

// The finish reason of a sample is known only when all samples of its prompt have ended.
void Jobs::finish_prompt(Job& job, size_t prompt, const GenerationResult& result) {
  const auto n_samples = static_cast<size_t>(job.request().sampling.n_samples);
  for (size_t sample = 0; sample < result.samples.size() && sample < n_samples; ++sample) {
    const GeneratedSample& sampled = result.samples[sample];
    const size_t choice = prompt * n_samples + sample;
    // Takes all tokens that the engine did not stream; some engines stream none.
    for (size_t& seen = job.seen[choice]; seen < sampled.token_ids.size(); ++seen)
      take_token(job, choice, token_at(sampled, seen));
    ChoiceDelta delta;
    std::optional<int32_t> last;
    if (job.last[choice]) {
      last = job.last[choice]->id;
      delta.tokens.push_back(*job.last[choice]);
    }
    delta.parts = job.texts[choice].finish(last, sampled.finish_reason);
    delta.end = job.texts[choice].end();
    counters_.malformed_calls += job.texts[choice].malformed_calls();
    add(job, choice, std::move(delta));
  }
}

void Jobs::add(Job& job, size_t choice, ChoiceDelta delta) {
  if (job.is_streaming || job.read.answer->wants_deltas()) {
    const std::string text = job.read.answer->add(choice, delta);
    if (job.is_streaming) job.unsent += text;
  }
  ChoiceDelta& sum = job.choices[choice];
  sum.parts.append(std::move(delta.parts));
  sum.tokens.insert(sum.tokens.end(), delta.tokens.begin(), delta.tokens.end());
  sum.end = std::move(delta.end);
}

void Jobs::send(Job& job) {
  if (job.is_streaming && !job.unsent.empty()) job.exchange->write(job.unsent);
  job.unsent.clear();
}

void Jobs::complete(const JobPointer& job) {
  if (job->is_streaming) {
    job->unsent += job->read.answer->end(job->choices);
    send(*job);
    job->exchange->finish();
    return close(*job, 200, "streamed");
  }
  for (const uint64_t id : job->engine_ids) jobs_.erase(id);
  constexpr size_t kBytesPerToken = 16;  // estimates an answer's size, to choose its preparation thread
  http_.prepare(kBytesPerToken * static_cast<size_t>(count_tokens(job->choices)), [this, job] {
    auto body = std::make_shared<std::string>();
    try {
      *body = dump_line(job->read.answer->whole(job->choices));
    } catch (const std::exception& failure) {
      log_error(str("serve: ", job->api->path, " ", job->id, ": ", failure.what()));
    }
    http_.post([this, job, body] {
      if (job->is_over) return;
      if (body->empty()) return fail(*job, ApiError(500, kFailed));
      job->exchange->respond({.body = std::move(*body), .headers = headers_for(job->id)});
      close(*job, 200, "answered");
    });
  });
}

void Jobs::fail(Job& job, const ApiError& error) {
  for (const uint64_t id : job.engine_ids)
    if (jobs_.contains(id)) loop_.cancel(id);
  if (job.is_streaming) {
    job.unsent += job.read.answer->fail(error);
    send(job);
    job.exchange->finish();
  } else {
    HttpHeaders headers = headers_for(job.id);
    if (error.status == 503) headers.emplace_back("Retry-After", "1");
    job.exchange->respond(
        {.status = error.status, .body = dump_line(job.api->error(error)), .headers = std::move(headers)});
  }
  close(job, error.status, quoted(std::string(error.what()), 200));
}

void Jobs::fail_all(const ApiError& error) {
  std::vector<JobPointer> all;
  for (const auto& [id, place] : jobs_) all.push_back(place.job);
  all.insert(all.end(), agent_jobs_.begin(), agent_jobs_.end());
  for (const JobPointer& job : all)
    if (!job->is_over) fail(*job, error);
}

// The client has closed the connection.
void Jobs::abandon(Job& job) {
  if (job.is_over) return;
  for (const uint64_t id : job.engine_ids)
    if (jobs_.contains(id)) loop_.cancel(id);
  ++counters_.cancelled;
  close(job, 499, "the client went away");
}

void Jobs::close(Job& job, int status, const std::string& how) {
  job.is_over = true;
  for (const uint64_t id : job.engine_ids) jobs_.erase(id);
  if (job.session) std::erase_if(agent_jobs_, [&](const JobPointer& each) { return each.get() == &job; });
  --in_flight_;
  const int64_t prompt_tokens = job.request().prompt_tokens(), new_tokens = count_tokens(job.choices);
  counters_.prompt_tokens += prompt_tokens;
  counters_.completion_tokens += new_tokens;
  ++counters_.requests[{job.api->path, status}];
  if (!model_.settings.log_requests) return;
  log_info(
      str("serve: ", job.api->path, " ", status, " ", job.id, ": ", how, "; ", prompt_tokens, " + ",
          new_tokens, " tokens in ", format_duration(seconds_since(job.start)),
          job.first_token_seconds ? ", the first after " + format_duration(*job.first_token_seconds) : ""));
}

}  // namespace bough
