// Samplers and samples.
#include <cmath>
#include <limits>

#include "base/error.h"
#include "tinker/service_state.h"

namespace bough {

namespace {

void refuse_unserved(Fields& fields) {
  if (fields.integer("prompt_alt_tokens_k", 0, 1 << 20).value_or(0) > 0)
    throw ApiError(400, "prompt_alt_tokens_k: not served; topk_prompt_logprobs is", "prompt_alt_tokens_k");
  if (fields.boolean("record_stability_info").value_or(false))
    throw ApiError(
        400,
        "record_stability_info: not served, as stable_reinforce is not; importance_sampling and cispo "
        "are",
        "record_stability_info");
}

// Token ids at each prompt token from the second on, [length - 1, K]; -1: none.
std::optional<WireTensor> read_targets(Fields& fields, int64_t length, int64_t vocab_size) {
  const char* const kField = "target_prompt_logprobs";
  int64_t elements_left = int64_t{1} << 22;
  const OrderedJson* const given = fields.object(kField);
  if (!given) return {};
  WireTensor targets = read_tensor(*given, elements_left, kField);
  const OrderedJson shape = given->value("shape", OrderedJson());
  if (!shape.is_array() || shape.size() != 2 || targets.rows() != length - 1)
    fields.wrong(kField,
                 str("the shape [", length - 1, ", K]: a row for each prompt token from the second on"));
  for (size_t i = 0; i < targets.values.size(); ++i) {
    double& id = targets.values[i];
    if (!targets.is_set.empty() && targets.is_set[i] == 0) id = -1;
    if (id != std::floor(id) || id < -1 || id >= static_cast<double>(vocab_size))
      throw ApiError(400, str(kField, ": got ", id, ", expected token ids below ", vocab_size, ", or -1"),
                     kField);
  }
  return targets;
}

void read_stop(Fields& fields, int64_t vocab_size, SamplingParameters& sampling) {
  const OrderedJson* const stop = fields.find("stop");
  if (!stop) return;
  const auto read = [&](const OrderedJson& each) {
    if (each.is_string() && each != "") {
      sampling.stop.push_back(each.get<std::string>());
    } else if (stop->is_array() && each.is_number_integer() && each >= 0 && each < vocab_size) {
      sampling.stop_token_ids.push_back(each.get<int64_t>());
    } else {
      fields.wrong("stop", str("a text, a list of texts, or a list of token ids below ", vocab_size));
    }
  };
  if (!stop->is_array()) return read(*stop);
  sampling.ignore_eos = true;  // a list replaces the model's own stop tokens
  for (const OrderedJson& each : *stop) read(each);
}

// Returns the seed, if there is one.
std::optional<int64_t> read_sampling_params(const OrderedJson* given, int64_t vocab_size, int64_t most_tokens,
                                            SamplingParameters& sampling) {
  static const OrderedJson kNone = OrderedJson::object();
  Fields fields(given ? *given : kNone, "sampling_params");
  sampling.max_new_tokens =
      std::min(fields.integer("max_tokens", 1, kMostSeqId).value_or(most_tokens), most_tokens);
  sampling.temperature = fields.number("temperature", 0, 100).value_or(1);
  sampling.top_p = fields.number("top_p", 0, 1).value_or(1);
  sampling.top_k = std::max<int64_t>(0, fields.integer("top_k", -1, 1 << 30).value_or(0));
  read_stop(fields, vocab_size, sampling);
  const auto seed =
      fields.integer("seed", std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
  fields.done();
  return seed;
}

}  // namespace

Json TrainingService::State::save_for_sampler(Fields& fields) {
  const std::string id = fields.required_text("model_id");
  const int64_t seq_id = fields.required_integer("seq_id", 1, kMostSeqId);
  const std::optional<std::string> path = fields.text("path");
  const auto number = fields.integer("sampling_session_seq_id", 0, kMostSeqId);
  if (!path && !number)
    fields.wrong("path", "a name, or sampling_session_seq_id for a sampler of this session");
  const std::string kind = fields.text("kind").value_or("snapshot");
  if (kind != "snapshot" && kind != "inflight") fields.wrong("kind", "snapshot or inflight");
  Checkpoints::Terms terms{fields.integer("ttl_seconds", 1, kMostSeqId), nullptr};
  if (const OrderedJson* metadata = fields.object("user_metadata")) terms.user_metadata = Json(*metadata);
  fields.ignore({"type"});
  fields.done();
  const CheckpointName name =
      path ? Checkpoints::checked(id, "sampler_weights", *path) : Checkpoints::snapshot(id, seq_id);
  if (!exists(id)) return {{"request_id", future_of_gone(id)}, {"model_id", id}};
  const std::string session = session_of(id);
  const bool is_named = path.has_value();
  return enqueue(
      id, seq_id, run_later([this, id, seq_id, name, kind, session, is_named, terms] {
        const std::filesystem::path folder = checkpoints.folder(name);
        checkpoints.publish(name, terms, [&](const std::filesystem::path& temporary) {
          training(id).save(temporary, base.directory.string(), /*with_optimizer=*/false);
        });
        samplers.forget(folder);
        if (is_named) return FutureResult{{{"path", name.path()}, {"type", "save_weights_for_sampler"}}};
        const std::string follows = kind == "inflight" ? id : "";
        const std::string sampler = str(session, ":sample:", id.substr(id.rfind(':') + 1), "-", seq_id);
        keep_sampler(sampler, {session, folder, "", follows, seq_id});
        return FutureResult{{{"sampling_session_id", sampler}, {"type", "save_weights_for_sampler"}}};
      }));
}

Json TrainingService::State::create_sampling_session(Fields& fields) {
  const std::string session = fields.required_text("session_id");
  const int64_t number = fields.required_integer("sampling_session_seq_id", 0, kMostSeqId);
  const std::optional<std::string> path = fields.text("model_path"), base_model = fields.text("base_model");
  if (!path && !base_model) fields.wrong("base_model", "a model's name, or model_path");
  fields.ignore({"type"});
  fields.done();
  SamplingSession created{session, {}, path.value_or(""), ""};
  if (path) created.adapter = checkpoints.folder(checkpoints.existing(*path, "", "model_path"));
  if (base_model) check_base(*base_model);
  check_session(session);
  const std::string id = str(session, ":sample:", number);
  keep_sampler(id, created);
  return {{"type", "create_sampling_session"}, {"sampling_session_id", id}};
}

Json TrainingService::State::sample(Fields& fields) {
  const ModelConfig& config = base.model->config();
  refuse_unserved(fields);
  const std::string sampler = fields.required_text("sampling_session_id");
  const int64_t seq_id = fields.required_integer("seq_id", 0, std::numeric_limits<int64_t>::max());
  const OrderedJson* const prompt = fields.object("prompt");
  if (!prompt) fields.wrong("prompt", "a model input");
  SampleRequest request;
  request.prompt = read_model_input(*prompt, "prompt");
  const auto length = std::ssize(request.prompt);
  if (length == 0 || length >= config.max_length())
    throw ApiError(400, str("prompt: got ", length, " tokens, expected 1 to ", config.max_length() - 1),
                   "prompt");
  for (const int32_t id : request.prompt)
    if (id >= config.vocab_size)
      throw ApiError(400, str("prompt: got token id ", id, ", expected 0 to ", config.vocab_size - 1),
                     "prompt");
  const auto seed = read_sampling_params(fields.object("sampling_params"), config.vocab_size,
                                         config.max_length() - length, request.sampling);
  request.sampling.n_samples = fields.integer("num_samples", 1, 100'000).value_or(1);
  request.sampling.top_logprobs = fields.integer("topk_sample_logprobs", 0, 1000).value_or(0);
  request.wants_prompt_log_probs = fields.boolean("prompt_logprobs").value_or(false);
  request.prompt_top_k = fields.integer("topk_prompt_logprobs", 0, 1000).value_or(0);
  request.prompt_targets = read_targets(fields, length, config.vocab_size);
  request.prompt_last_n =
      fields.integer("prompt_logprobs_last_n", 1, std::max<int64_t>(1, length - 1)).value_or(0);
  if (request.prompt_last_n > 0 && !request.wants_prompt_log_probs)
    fields.wrong("prompt_logprobs_last_n", "it together with prompt_logprobs");
  fields.ignore({"type"});
  fields.only("base_model", nullptr, "a sampling session has its model");
  fields.only("model_path", nullptr, "a sampling session has its model");
  fields.done();
  request.seed = seed ? static_cast<uint64_t>(*seed) : next_seed++ << 20U;

  std::string session;
  {
    const MutexLock lock(mutex);
    const auto found = sampling.find(sampler);
    if (found == sampling.end())
      throw ApiError(404, str("sampling_session_id: got ", quoted(sampler, 100), ", which does not exist"),
                     "sampling_session_id");
    request.adapter = found->second.adapter;
    session = found->second.session;
  }
  check_queue(session);
  const int64_t count = request.sampling.n_samples;
  const std::string id = str(sampler, "/", seq_id);
  if (futures.add(session, id))
    queue.add_now(session, run_later([this, id, request = std::move(request)] {
                    const FutureResult refused = guarded([&] {
                      samplers.submit(id, request, [this, id](SampleResult result) {
                        futures.complete(id, future_result(std::move(result)));
                      });
                      return FutureResult{};
                    });
                    if (!refused.json.is_null()) futures.complete(id, refused);
                    return FutureResult{};
                  }));
  Json sequences = Json::array();
  for (int64_t i = 0; i < count; ++i) sequences.push_back(str(id, "-", i));
  return {{"request_id", id}, {"sample_sequence_ids", sequences}};
}

Json TrainingService::State::cancel(Fields& fields) {
  const std::string id = fields.required_text("request_id");
  fields.done();
  queue.add_now(futures.session_of(id), run_later([this, id] {
                  if (samplers.cancel(id))
                    futures.complete(id, failed_result("cancelled by the client", "user"));
                  futures.abandon(id);
                  return FutureResult{};
                }));
  return nullptr;
}

}  // namespace bough
