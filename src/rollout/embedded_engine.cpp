#include "rollout/embedded_engine.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "base/error.h"
#include "base/log.h"
#include "base/random.h"
#include "kernels/common/cuda_library.h"
#include "kernels/common/device.h"
#include "kernels/common/host_to_device.h"
#include "models/checkpoint.h"
#include "models/lora.h"
#include "text/stop_tokens.h"

namespace bough {

namespace {

constexpr int64_t kAutoKvBytes = int64_t{4} << 30;   // meaning of `kv_memory: auto` on a CPU
constexpr int64_t kLogitsBytes = int64_t{64} << 20;  // kLogitsBytesOfGpu for a CPU
// A sample's key of random numbers: the request's id (or GenerationRequest::sequence, if set), then the
// sample's index in 20 bits.
constexpr int kSampleBits = 20;

int64_t auto_kv_bytes(at::Device device) {
  if (device.is_cpu()) return kAutoKvBytes;
  return static_cast<int64_t>(kDeviceShare * static_cast<double>(device_memory(device).free));
}

int64_t page_budget(const Model& model, const EmbeddedEngineOptions& options, const SparsePolicy& sparse) {
  const RolloutSettings& settings = options.settings;
  const int64_t bytes =
      settings.kv_memory.is_auto() ? auto_kv_bytes(model.device()) : settings.kv_memory.count;
  const int64_t page_bytes = KvStorage::bytes_per_page(model.config(), model.dtype(), sparse, model.device());
  if (bytes < page_bytes) {
    throw UserError(str("rollout.kv_memory: got ", settings.kv_memory.to_string(),
                        ", but keys and values of ", kPageTokens, " tokens of this model take ", page_bytes,
                        " bytes; raise it"));
  }
  return std::min<int64_t>(bytes / page_bytes, INT32_MAX / kPageTokens);
}

}  // namespace

std::unique_ptr<Model> load_rollout_model(const std::filesystem::path& directory,
                                          const RolloutSettings& settings, at::ScalarType dtype,
                                          at::Device device, const ModelRanks& ranks) {
  auto model = load_model(directory, dtype, device, ranks);
  const bool is_cheap = model->dtype() == at::kFloat && !model->why_not_batch_invariant();
  model->set_batch_invariant(settings.batch_invariant.value_or(is_cheap));
  return model;
}

ModelLimits model_limits(const ModelConfig& config) {
  return {config.vocab_size, config.max_length(), config.max_length_reason()};
}

MatrixBytes apply_quantization(const RolloutSettings& settings, Model& model) {
  if (settings.quantization == "int8") quantize(model);
  return layer_matrix_bytes(model);
}

EmbeddedEngine::EmbeddedEngine(const Model& model, EmbeddedEngineOptions options)
    : model_(model),
      options_(std::move(options)),
      limits_(model_limits(model.config())),
      version_(options_.version),
      quantized_(options_.settings.quantization == "int8" && !is_quantized(model)
                     ? std::optional<QuantizedModel>(std::in_place, model)
                     : std::nullopt),
      sparse_(sparse_policy(options_.settings.sparse, model.device())),
      scheduler_(options_.settings.max_concurrent_rollouts,
                 options_.settings.prefill_chunk(model_.device().is_cuda()),
                 page_budget(model, options_, sparse_), sparse_.is_sparse(),
                 options_.settings.admission == "longest_prefix"),
      storage_(model.config(), model.dtype(), model.device(), scheduler_.pool().max_pages(), sparse_),
      experts_(options_.settings.return_routed_experts
                   ? std::optional<ExpertRecords>(std::in_place, model.config(),
                                                  scheduler_.pool().max_pages(), version_)
                   : std::nullopt),
      forward_pass_(generating_model(), storage_, options_.attention,
                    options_.settings.max_concurrent_rollouts) {
  BOUGH_CHECK(!options_.settings.batch_invariant.value_or(false) || model.batch_invariant(),
              "rollout.batch_invariant is true, but the model is not batch-invariant");
  const PagedShape shape{model.config().num_heads, model.config().num_kv_heads, model.config().head_dim,
                         model.dtype(), model.device()};
  if (experts_ && !model.config().is_mixture())
    throw UserError("rollout.return_routed_experts is true, but the model has no experts; expected false");
  const bool needs_kernel = sparse_.is_sparse() && !model.device().is_cpu();
  if (needs_kernel && !has_cuda_kernel("bough::paged_attention_"))
    throw UserError(str("rollout.sparse.budget is ", options_.settings.sparse.budget_text(),
                        ", which on a GPU needs the kernel paged_attention_, but it is left out (`bough "
                        "doctor`); expected none, or device cpu"));
  if (needs_kernel && !PagedPlan::on_cuda(shape))
    throw UserError(str(
        "rollout.sparse.budget is ", options_.settings.sparse.budget_text(), ", but on ",
        model.device().str(), " pages are chosen only in fp32 or bf16 and with head_dim up to 256; got ",
        c10::toString(model.dtype()), " and ", model.config().head_dim, "; expected none, or device cpu"));
  constexpr int64_t kMostBlocks = int64_t{1} << 16;  // block numbers that fit two bytes
  if (sparse_.keeps_choices && sparse_.blocks_for(model.config().max_length()) > kMostBlocks)
    throw UserError(str("rollout.sparse.replay: the model takes ", model.config().max_length(),
                        " positions, but chosen blocks of ", sparse_.block_tokens,
                        " tokens are kept for at most ", kMostBlocks * sparse_.block_tokens,
                        "; expected false, larger blocks, or a model with fewer positions"));
  if (sparse_.keeps_choices)
    log_info(str("rollout.sparse.replay keeps the blocks that each sampled token chose: ",
                 KvStorage::choice_bytes_per_token(model.config(), sparse_), " bytes per token"));
  for (const int32_t token : options_.stop_tokens) {
    if (token < 0 || token >= model.config().vocab_size) {
      throw UserError(str("stop token ", token, " of the model is outside its vocabulary of ",
                          model.config().vocab_size, "; check eos_token_id in generation_config.json"));
    }
  }
}

// An engine thread with a stream of its own may have queued work on memory that was allocated on another
// stream, whose next work would get the memory at once.
EmbeddedEngine::~EmbeddedEngine() {
  try {
    synchronize(model_.device());
  } catch (const std::exception&) {  // the device is lost, and so is the work
  }
}

void EmbeddedEngine::submit(GenerationRequest request) {
  check_request(request, limits_);
  if (!request.sampling.stop.empty() && !options_.token_bytes) {
    throw UserError(str("request ", request.id,
                        ": stop strings need a tokenizer, and the model directory has no "
                        "tokenizer.json; use stop_token_ids"));
  }
  const auto prompt_length = static_cast<int64_t>(request.prompt_ids.size());
  const int64_t longest =
      std::min(prompt_length + request.sampling.max_new_tokens, model_.config().max_length());
  const int64_t needed = pages_for(longest) + 1;  // one more: each sample copies the prompt's last page
  if (needed > scheduler_.pool().max_pages()) {
    throw UserError(
        str("request ", request.id, ": a sample of up to ", longest, " tokens needs ",
            needed * KvStorage::bytes_per_page(model_.config(), model_.dtype(), sparse_, model_.device()),
            " bytes of keys and values; raise rollout.kv_memory (now ",
            options_.settings.kv_memory.to_string(), ") or lower max_new_tokens"));
  }
  // check_request has checked that these ids are inside the vocabulary.
  std::vector<int32_t> stop_tokens(request.sampling.stop_token_ids.begin(),
                                   request.sampling.stop_token_ids.end());
  if (!request.sampling.ignore_eos) {
    stop_tokens.insert(stop_tokens.end(), options_.stop_tokens.begin(), options_.stop_tokens.end());
  }
  std::sort(stop_tokens.begin(), stop_tokens.end());
  stop_tokens.erase(std::unique(stop_tokens.begin(), stop_tokens.end()), stop_tokens.end());
  const uint64_t id = request.id;
  scheduler_.add(std::move(request), std::move(stop_tokens));
  for (ActiveSample& sample : scheduler_.find(id)->samples) {
    if (experts_) sample.experts = experts_->restored(sample.result.routed_experts);
    if (sample.stop_matcher)
      for (const int32_t token : sample.result.token_ids)
        sample.stop_matcher->push(options_.token_bytes(token));
  }
}

std::vector<GenerationResult> EmbeddedEngine::step() {
  const auto start = std::chrono::steady_clock::now();
  if (!paused_ && !scheduler_.idle()) {
    const at::NoGradGuard no_grad;
    Pass pass = scheduler_.plan();
    storage_.copy_pages(pass.page_copies);
    const at::Tensor hidden_TD = pass.entries.empty() ? at::Tensor() : run_pass(pass);
    if (options_.on_pass && !pass.entries.empty()) options_.on_pass(work_of(pass));
    scheduler_.commit(pass);
    if (experts_) experts_->keep_pages(pass);
    std::vector<std::pair<int32_t, int32_t>> page_copies;
    const std::vector<ActiveSample*> started = scheduler_.start_samples(page_copies);
    storage_.copy_pages(page_copies);
    BOUGH_CHECK(!pass.entries.empty() || !started.empty(),
                "requests are in flight and nothing can be computed");
    const std::vector<ActiveSample*> waiting = sample_from_prompts(started);
    if (hidden_TD.defined()) sample_from_pass(pass, hidden_TD, waiting);
    ++statistics_.steps;
  }
  statistics_.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return std::exchange(finished_, {});
}

// Returns the final hidden states [T, D] of the pass's tokens.
at::Tensor EmbeddedEngine::run_pass(const Pass& pass) {
  std::vector<int64_t> tokens, positions;
  std::vector<PagedSegment> segments;
  std::vector<uint8_t> is_sampled;
  for (const PassEntry& entry : pass.entries) {
    const auto& all = entry.tokens();
    for (int64_t i = entry.begin; i < entry.begin + entry.count; ++i) {
      tokens.push_back(all[static_cast<size_t>(i)]);
      positions.push_back(i);
      is_sampled.push_back(policy_ == SampledPolicy::kGenerating && entry.is_sampled(i));
    }
    segments.push_back({entry.table().pages, entry.begin, entry.count});
    const bool is_decode = entry.sample && entry.count == 1;
    if (!is_decode) statistics_.prefill_tokens += entry.count;
    if (!is_decode && entry.sample) statistics_.recomputed_tokens += entry.count;
  }
  ForwardPass& forward_pass = without_adapter_ ? without_adapter_->pass : forward_pass_;
  if (!experts_) return forward_pass.run(tokens, positions, segments, is_sampled);
  at::Tensor recorded_TLK = experts_->recorded(pass);
  if (recorded_TLK.defined()) recorded_TLK = recorded_TLK.to(model_.device());
  ExpertRoutes routes(std::move(recorded_TLK));
  const at::Tensor hidden_TD = forward_pass.run(tokens, positions, segments, is_sampled, &routes);
  experts_->add(pass, routes.used_TLK());
  return hidden_TD;
}

PassWork EmbeddedEngine::work_of(const Pass& pass) const {
  PassWork work;
  std::vector<uint8_t> read(static_cast<size_t>(scheduler_.pool().num_pages()));
  for (const PassEntry& entry : pass.entries) {
    const int64_t end = entry.begin + entry.count;
    work.tokens += entry.count;
    work.decoding += entry.sample && entry.count == 1;
    work.logits_rows += entry.reaches_end();
    work.attention_pairs += entry.count * (entry.begin + end + 1) / 2;
    const auto& pages = entry.table().pages;
    for (int64_t i = 0; i < pages_for(end); ++i) {
      const auto page = static_cast<size_t>(pages[static_cast<size_t>(i)]);
      if (std::exchange(read[page], uint8_t{1}) == 0)
        work.kv_tokens += std::min(kPageTokens, end - i * kPageTokens);
    }
  }
  return work;
}

// `started`: samples without a token. If their prompt was computed in an earlier engine step, their first
// token is sampled here, from the stored prompt logits. If this token ends the last sample of a request, the
// request is destroyed with its samples. Returns the other samples: their prompt ended in this pass, and
// sample_from_pass() samples their first token.
std::vector<ActiveSample*> EmbeddedEngine::sample_from_prompts(const std::vector<ActiveSample*>& started) {
  std::vector<ActiveSample*> waiting;
  for (size_t i = 0; i < started.size();) {
    ActiveRequest& request = *started[i]->request;
    std::vector<std::pair<ActiveSample*, int64_t>> samples_and_rows;
    for (; i < started.size() && started[i]->request == &request; ++i)
      samples_and_rows.emplace_back(started[i], 0);
    if (!request.logits_1V.defined()) {
      for (const auto& [sample, row] : samples_and_rows) waiting.push_back(sample);
      continue;
    }
    const at::Tensor logits_1V = request.logits_1V;
    if (request.num_not_started == 0) request.logits_1V = at::Tensor();
    sample_rows(logits_1V, samples_and_rows);
  }
  return waiting;
}

void EmbeddedEngine::sample_from_pass(const Pass& pass, const at::Tensor& hidden_TD,
                                      const std::vector<ActiveSample*>& waiting) {
  struct Row {
    int64_t token;  // token index in the pass
    const PassEntry* entry;
  };
  std::unordered_map<const ActiveRequest*, std::vector<ActiveSample*>> waiting_of;
  for (ActiveSample* sample : waiting) waiting_of[sample->request].push_back(sample);
  std::vector<Row> rows;
  int64_t token = 0;
  for (const PassEntry& entry : pass.entries) {
    token += entry.count;
    const bool is_needed =
        entry.sample || entry.request->num_not_started > 0 || waiting_of.count(entry.request) > 0;
    if (entry.reaches_end() && is_needed) rows.push_back({token - 1, &entry});
  }

  const Model& model = without_adapter_ ? *without_adapter_->model : model_;
  const int64_t V = model_.config().vocab_size;
  const int64_t bytes = model_.device().is_cuda() ? kLogitsBytesOfGpu : kLogitsBytes;
  const auto chunk = static_cast<size_t>(
      std::max<int64_t>(1, bytes / (V * static_cast<int64_t>(c10::elementSize(model_.logits_dtype())))));
  for (size_t begin = 0; begin < rows.size(); begin += chunk) {
    const size_t end = std::min(rows.size(), begin + chunk);
    std::vector<int64_t> hidden_rows;
    for (size_t i = begin; i < end; ++i) hidden_rows.push_back(rows[i].token);
    const at::Tensor logits_RV =
        model.logits(hidden_TD.index_select(0, upload(hidden_rows, model_.device())));
    std::vector<std::pair<ActiveSample*, int64_t>> samples_and_rows;
    for (size_t i = begin; i < end; ++i) {
      const PassEntry& entry = *rows[i].entry;
      const auto row = static_cast<int64_t>(i - begin);
      if (entry.sample) {
        samples_and_rows.emplace_back(entry.sample, row);
        continue;
      }
      for (ActiveSample* sample : waiting_of[entry.request]) samples_and_rows.emplace_back(sample, row);
      if (entry.request->num_not_started > 0) entry.request->logits_1V = logits_RV.narrow(0, row, 1).clone();
    }
    sample_rows(logits_RV, samples_and_rows);
  }
}

void EmbeddedEngine::sample_rows(const at::Tensor& logits_RV,
                                 const std::vector<std::pair<ActiveSample*, int64_t>>& samples_and_rows) {
  std::vector<SamplingTask> requests;
  for (const auto& [sample, row] : samples_and_rows) {
    const GenerationRequest& request = sample->request->request;
    SamplingTask& task = requests.emplace_back();
    task.row = row;
    static_cast<SamplingOptions&>(task) = request.sampling;
    task.prompt = request.prompt_ids;
    task.response = sample->result.token_ids;
    if (static_cast<int64_t>(sample->result.token_ids.size()) < request.sampling.min_new_tokens) {
      task.excluded = sample->request->stop_tokens;
    }
    const uint64_t sequence =
        (request.sequence.value_or(request.id) << kSampleBits) | static_cast<uint64_t>(sample->index);
    task.uniform = CounterRandom(request.seed, Purpose::sample).uniform(sequence, sample->tokens.size());
  }
  std::vector<SampledToken> sampled(requests.size());
  sample_tokens(logits_RV, requests, sampled);
  for (size_t i = 0; i < sampled.size(); ++i) {
    append(*samples_and_rows[i].first, sampled[i]);
  }
}

void EmbeddedEngine::append(ActiveSample& sample, const SampledToken& sampled) {
  const int32_t token = sampled.token;
  ActiveRequest& active = *sample.request;
  const GenerationRequest& request = active.request;
  GeneratedSample& result = sample.result;
  sample.must_make_progress = false;
  sample.tokens.push_back(token);
  result.token_ids.push_back(token);
  result.logprobs.push_back(sampled.log_prob);
  result.raw_logprobs.push_back(sampled.raw_log_prob);
  result.sampling_logprobs.push_back(sampled.sampling_log_prob);
  result.versions.push_back(version_);
  if (request.sampling.top_logprobs > 0) {
    result.top_ids.push_back(sampled.top_ids);
    result.top_logprobs.emplace_back(sampled.top_log_probs.begin(), sampled.top_log_probs.end());
  }
  ++statistics_.new_tokens;

  const auto num_new = static_cast<int64_t>(result.token_ids.size());
  const bool is_stop = std::binary_search(active.stop_tokens.begin(), active.stop_tokens.end(), token);
  // The bytes are pushed before min_new_tokens is reached, because a stop string may begin there.
  const bool ends_stop_string = sample.stop_matcher &&
                                sample.stop_matcher->push(options_.token_bytes(token)) &&
                                num_new >= request.sampling.min_new_tokens;
  const bool is_full = static_cast<int64_t>(sample.tokens.size()) >= model_.config().max_length();
  const bool ends = is_stop || ends_stop_string || num_new >= request.sampling.max_new_tokens || is_full;
  if (request.on_token) {
    StreamedToken streamed{request.id,
                           sample.index,
                           num_new - 1,
                           token,
                           sampled.log_prob,
                           sampled.raw_log_prob,
                           sampled.sampling_log_prob,
                           version_,
                           ends};
    if (request.sampling.top_logprobs > 0) {
      streamed.top_ids = result.top_ids.back();
      streamed.top_logprobs = result.top_logprobs.back();
    }
    request.on_token(streamed);
  }
  if (!ends) return;
  if (sparse_.keeps_choices && policy_ == SampledPolicy::kGenerating) {
    const PassEntry entry{.sample = &sample, .request = &active};
    result.page_choices = storage_.kept_choices(sample.table.pages, sample.num_computed,
                                                [&](int64_t i) { return entry.is_sampled(i); });
  }
  result.routed_experts = routed_experts_of(sample);
  scheduler_.finish(sample, is_stop            ? FinishReason::kStop
                            : ends_stop_string ? FinishReason::kStopString
                                               : FinishReason::kLength);
  if (active.num_done == request.sampling.n_samples) finished_.push_back(scheduler_.take(active));
}

RoutedExperts EmbeddedEngine::routed_experts_of(const ActiveSample& sample) const {
  return experts_ ? experts_->of(sample.experts, std::ssize(sample.tokens) - 1) : RoutedExperts();
}

bool EmbeddedEngine::cancel(uint64_t id) {
  if (ActiveRequest* request = experts_ ? scheduler_.find(id) : nullptr)
    for (ActiveSample& sample : request->samples)
      if (sample.state != ActiveSample::State::kDone && !sample.result.token_ids.empty())
        sample.result.routed_experts = routed_experts_of(sample);
  if (!scheduler_.cancel(id)) return false;
  finished_.push_back(scheduler_.take(*scheduler_.find(id)));
  return true;
}

std::vector<RunningRequest> EmbeddedEngine::running() const {
  std::vector<RunningRequest> running = scheduler_.running_requests();
  if (!experts_) return running;
  for (RunningRequest& request : running)
    for (size_t i = 0; i < request.samples.size(); ++i)
      if (!request.samples[i].has_ended)
        request.samples[i].sample.routed_experts = routed_experts_of(scheduler_.find(request.id)->samples[i]);
  return running;
}

void EmbeddedEngine::update_weights(const WeightUpdate& update) {
  BOUGH_CHECK(update.model == &model_, "the engine shares one model's weights, but version ", update.version,
              " belongs to another model");
  version_ = update.version;
  if (quantized_) quantized_->update();
  if (experts_) experts_->new_weights(version_);
  scheduler_.preempt_all();
}

void EmbeddedEngine::sample_from(SampledPolicy policy) {
  BOUGH_CHECK(idle(), "sample_from() needs an idle engine");
  policy_ = policy;
  without_adapter_.reset();
  if (policy == SampledPolicy::kDenseWithoutAdapter) {
    BOUGH_CHECK(has_adapter(model_) && !quantized_, "the model has no adapter, or a quantized copy");
    std::unique_ptr<Model> model = without_last_adapter(model_);
    ForwardPass pass(*model, storage_, options_.attention, options_.settings.max_concurrent_rollouts);
    without_adapter_.emplace(std::move(model), std::move(pass));
  }
  scheduler_.preempt_all();
}

void EmbeddedEngine::park() {
  scheduler_.park();
  parked_finished_ = std::exchange(finished_, {});
}

void EmbeddedEngine::unpark() {
  BOUGH_CHECK(idle(), "unpark() needs an idle engine");
  scheduler_.unpark();
  finished_ = std::exchange(parked_finished_, {});
}

EngineStatistics EmbeddedEngine::statistics() const {
  EngineStatistics statistics = statistics_;
  statistics.cached_tokens = scheduler_.cached_tokens();
  statistics.preemptions = scheduler_.preemptions();
  statistics.blocks_read = forward_pass_.blocks_read().blocks;
  statistics.blocks_in_context = forward_pass_.blocks_read().of;
  if (experts_) statistics.replayed_experts = experts_->replayed_tokens();
  if (experts_) statistics.rerouted_experts = experts_->rerouted_tokens();
  return statistics;
}

EmbeddedEngineOptions load_engine_options(const std::filesystem::path& directory,
                                          const std::optional<Tokenizer>& tokenizer,
                                          const RolloutSettings& settings) {
  if (settings.has_servers())
    throw UserError(str("rollout.backend: got ", settings.backend,
                        "; expected embedded: only `bough train` generates with servers"));
  EmbeddedEngineOptions options{.settings = settings, .stop_tokens = load_stop_tokens(directory, tokenizer)};
  if (tokenizer) options.token_bytes = [tokenizer](int32_t id) { return tokenizer->id_to_bytes(id); };
  return options;
}

std::unique_ptr<EmbeddedEngine> make_engine(const Model& model, const std::filesystem::path& directory,
                                            const std::optional<Tokenizer>& tokenizer,
                                            const RolloutSettings& settings,
                                            std::function<void(const PassWork&)> on_pass) {
  EmbeddedEngineOptions options = load_engine_options(directory, tokenizer, settings);
  options.on_pass = std::move(on_pass);
  return std::make_unique<EmbeddedEngine>(model, std::move(options));
}

LoadedEngine load_engine(const std::filesystem::path& directory, const std::optional<Tokenizer>& tokenizer,
                         const RolloutSettings& settings, at::ScalarType dtype, at::Device device,
                         const Precisions& precisions) {
  LoadedEngine loaded;
  loaded.model = load_rollout_model(directory, settings, dtype, device);
  loaded.model->set_precisions(precisions);
  loaded.matrices = apply_quantization(settings, *loaded.model);
  loaded.engine = make_engine(*loaded.model, directory, tokenizer, settings);
  return loaded;
}

}  // namespace bough
