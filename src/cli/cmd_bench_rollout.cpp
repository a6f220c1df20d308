// `bough bench rollout`: the embedded engine's generation speed, and a lower bound of its time on this
// machine.
//
// The lower bound of a pass is the larger of two times. The first: the bytes of the weights and of the
// visible keys and values, divided by the bytes per second of reading as much memory repeatedly. The second:
// the FLOPs of the pass's tokens, divided by the best FLOP/s of a matrix product. Both rates are measured in
// the same run. Only tokens that the engine computed count. So a prefix cache that finds less raises both the
// time and the bound.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <span>

#include "base/clock.h"
#include "base/error.h"
#include "base/format.h"
#include "base/median.h"
#include "base/random.h"
#include "cli/command.h"
#include "cli/decode_bench.h"
#include "cli/generation_options.h"
#include "cli/torch_options.h"
#include "cost/calibrate.h"
#include "cost/rates.h"
#include "cost/run_costs.h"
#include "engine/rollouts.h"
#include "plan/plan.h"
#include "rollout/embedded_engine.h"
#include "train/executor.h"

namespace bough {

namespace {

struct BenchRolloutOptions {
  std::string model;
  int64_t prompts = 16, prompt_tokens = 32, repeat = 3, seed = 1;
  SamplingParameters generation;
  EngineOptions engine_options;
  RolloutSettings engine;  // set from engine_options
  TorchOptions torch;
  std::vector<int64_t> contexts;
  bool interrupt = false, json = false;
};

void check_options(BenchRolloutOptions& options) {
  check_at_least("--prompts", options.prompts, 1);
  check_at_least("--prompt-tokens", options.prompt_tokens, 1);
  check_generation(options.generation);
  check_at_least("--repeat", options.repeat, 1);
  check_at_least("--seed", options.seed, 0);
  options.engine = engine_settings(options.engine_options);
  // Every sample gets max_new_tokens tokens.
  options.generation.ignore_eos = true;
}

// Bytes of the weights that a pass reads, and bytes of one token's keys and values.
struct ModelBytes {
  ModelBytes(const ModelShape& shape, const MatrixBytes& matrices)
      : of_experts(matrices.of_experts),
        kv_token(2 * shape.num_layers * shape.key_width() * shape.element_bytes) {
    // If the embedding is not tied to lm_head, a pass reads only the embedding's matrix rows of its tokens.
    const int64_t looked_up = shape.tie_word_embeddings ? 0 : shape.vocab_size * shape.hidden_size;
    weights =
        (shape.num_parameters() - looked_up) * shape.element_bytes - matrices.unquantized + matrices.held;
  }
  // Expects that all experts are used equally often.
  int64_t read_by(int64_t tokens, const ModelShape& shape) const {
    if (of_experts == 0) return weights;
    const double unused = 1 - shape.distinct_experts(tokens) / static_cast<double>(shape.num_experts);
    return weights - static_cast<int64_t>(unused * static_cast<double>(of_experts));
  }
  int64_t weights, of_experts, kv_token;
};

struct Rates {
  double flops = 0, bytes = 0;  // per second
};

struct Run {
  double seconds = 0;
  EngineStatistics statistics;
  std::vector<PassWork> passes;
  MatrixBytes matrices;
  std::vector<GenerationResult> results;
};

std::vector<GenerationRequest> make_requests(const Model& model, const BenchRolloutOptions& options) {
  const CounterRandom random(static_cast<uint64_t>(options.seed), Purpose::sample);
  const auto vocabulary = static_cast<uint64_t>(model.config().vocab_size);
  std::vector<GenerationRequest> requests;
  for (int64_t i = 0; i < options.prompts; ++i) {
    std::vector<int32_t> prompt;
    for (int64_t t = 0; t < options.prompt_tokens; ++t)
      prompt.push_back(
          static_cast<int32_t>(random.below(vocabulary, static_cast<uint64_t>(i), static_cast<uint64_t>(t))));
    requests.push_back({.id = static_cast<uint64_t>(i),
                        .prompt_ids = std::move(prompt),
                        .sampling = options.generation,
                        .seed = static_cast<uint64_t>(options.seed)});
  }
  return requests;
}

Run run_once(const Model& model, const BenchRolloutOptions& options) {
  Run run;
  const auto engine = make_engine(model, options.model, std::nullopt, options.engine,
                                  [&](const PassWork& work) { run.passes.push_back(work); });
  auto requests = make_requests(model, options);
  const auto start = std::chrono::steady_clock::now();
  run.results = engine->generate(std::move(requests));
  run.seconds = seconds_since(start);
  run.statistics = engine->statistics();
  run.matrices = layer_matrix_bytes(engine->generating_model());
  return run;
}

// How much the log-probabilities that generation and training give to the same tokens differ: the metrics
// mismatch/logprob_abs_diff and mismatch/importance_weight_max of a run.
struct Mismatch {
  double logprob_abs_diff = 0, importance_weight_max = 1;
};

Mismatch mismatch_of(Model& model, const Run& run) {
  // Takes one sample of each prompt first, then second samples, and so on. Some thousand tokens are enough.
  constexpr size_t kSequences = 32;
  std::vector<Trajectory> sampled;
  for (size_t sample = 0; sample < run.results.front().samples.size(); ++sample)
    for (const GenerationResult& result : run.results)
      if (sampled.size() < kSequences) sampled.push_back(to_rollout(result, sample, ""));
  const TrainBatch batch = make_batch(sampled, {}, at::kDouble);
  Executor executor(model);
  const auto trainers =
      executor.execute_forward(make_plan("dense", plan_request(batch, 4096)), batch).log_probs_R;
  const auto difference = trainers.to(at::kCPU, at::kDouble) - batch.fields.behaviour_log_probs_R;
  return {difference.abs().mean().item<double>(), difference.max().exp().item<double>()};
}

// The cost of a weight update in the middle of a run.
struct Interruption {
  double swap_seconds = 0;        // of update_weights(), during which no engine step runs
  double decode_seconds = 0;      // of an engine step that only decodes, median before the update
  double seconds = 0;             // of the whole run
  int64_t recomputed_tokens = 0;  // tokens whose keys and values had to be computed again
};

Interruption run_interrupted(const Model& model, const BenchRolloutOptions& options,
                             const Run& uninterrupted) {
  PassWork last;
  const auto engine = make_engine(model, options.model, std::nullopt, options.engine,
                                  [&](const PassWork& work) { last = work; });
  for (GenerationRequest& request : make_requests(model, options)) engine->submit(std::move(request));
  Interruption interruption;
  std::vector<double> decode_seconds;
  const auto start = std::chrono::steady_clock::now();
  while (2 * engine->statistics().new_tokens < uninterrupted.statistics.new_tokens) {
    const auto step_start = std::chrono::steady_clock::now();
    engine->step();
    if (last.decoding == last.tokens) decode_seconds.push_back(seconds_since(step_start));
  }
  const auto swap_start = std::chrono::steady_clock::now();
  engine->update_weights({engine->version() + 1, &model});
  interruption.swap_seconds = seconds_since(swap_start);
  engine->drain();
  interruption.seconds = seconds_since(start);
  if (!decode_seconds.empty()) interruption.decode_seconds = median(decode_seconds);
  interruption.recomputed_tokens =
      engine->statistics().prefill_tokens - uninterrupted.statistics.prefill_tokens;
  return interruption;
}

struct RolloutBound {
  double seconds = 0;
  double decode_seconds = 0;  // the part of passes that only decode
  double memory_seconds = 0;  // the part of passes whose memory time is the larger one
};

RolloutBound bound_of(const std::vector<PassWork>& passes, const ModelShape& shape, const ModelBytes& bytes,
                      const Rates& rates) {
  RolloutBound bound;
  for (const PassWork& pass : passes) {
    const int64_t read = bytes.read_by(pass.tokens, shape) + pass.kv_tokens * bytes.kv_token;
    const double reading = static_cast<double>(read) / rates.bytes;
    const double computing = (static_cast<double>(pass.tokens) * shape.linear_flops_per_token() +
                              static_cast<double>(pass.logits_rows) * shape.flops_per_head_row() +
                              static_cast<double>(pass.attention_pairs) * shape.flops_per_pair()) /
                             rates.flops;
    const double seconds = std::max(reading, computing);
    bound.seconds += seconds;
    if (pass.decoding == pass.tokens) bound.decode_seconds += seconds;
    if (reading > computing) bound.memory_seconds += seconds;
  }
  return bound;
}

void run_bench_rollout(BenchRolloutOptions options) {
  check_options(options);
  const TorchSetup setup = set_up_torch(options.torch);
  const auto model = load_rollout_model(options.model, options.engine, setup.dtype, setup.device);
  model->set_precisions(setup.precisions);
  if (!options.contexts.empty()) {
    const DecodeBench bench{.contexts = options.contexts,
                            .samples = options.generation.n_samples,
                            .repeat = options.repeat,
                            .sparse = options.engine.sparse,
                            .weight_bytes = ModelBytes(model_shape(*model), layer_matrix_bytes(*model))
                                                .read_by(options.generation.n_samples, model_shape(*model))};
    print_decode_bench(run_decode_bench(*model, bench), options.json);
    return;
  }
  const ModelShape shape = model_shape(*model);
  const ModelBytes bytes(shape, run_once(*model, options).matrices);
  Rates rates;
  std::vector<Run> runs;
  for (int64_t i = 0; i < options.repeat; ++i) {  // in turns, so that a busy minute affects all
    rates.flops = std::max(rates.flops, matrix_product_rate(shape, model->dtype(), model->device()));
    rates.bytes = std::max(rates.bytes, read_rate(bytes.weights, model->device()));
    runs.push_back(run_once(*model, options));
  }
  std::vector<double> all_seconds;
  for (const Run& run : runs) all_seconds.push_back(run.seconds);
  const double seconds = median(all_seconds);
  const Run& run = runs.front();  // all runs compute the same
  const RolloutBound bound = bound_of(run.passes, shape, bytes, rates);
  const auto new_tokens = static_cast<double>(run.statistics.new_tokens);
  int64_t decoding = 0, decode_passes = 0;
  for (const PassWork& pass : run.passes) {
    decoding += pass.decoding;
    decode_passes += pass.decoding > 0;
  }
  const double occupancy =
      static_cast<double>(decoding) /
      static_cast<double>(std::max<int64_t>(1, decode_passes * options.engine.max_concurrent_rollouts));
  const double cached =
      static_cast<double>(run.statistics.cached_tokens) /
      static_cast<double>(std::max<int64_t>(1, run.statistics.cached_tokens + run.statistics.prefill_tokens));

  const Mismatch mismatch = mismatch_of(*model, run);
  std::optional<Interruption> interruption;
  if (options.interrupt) interruption = run_interrupted(*model, options, run);
  if (options.json) {
    Json report({{"samples", options.prompts * options.generation.n_samples},
                 {"prompt_tokens", options.prompt_tokens},
                 {"new_tokens", run.statistics.new_tokens},
                 {"seconds", seconds},
                 {"new_tokens_per_second", new_tokens / seconds},
                 {"bound_seconds", bound.seconds},
                 {"bound_fraction", bound.seconds / seconds},
                 {"bound_memory_share", bound.memory_seconds / bound.seconds},
                 {"bound_decode_share", bound.decode_seconds / bound.seconds},
                 {"matrix_product_flops_per_second", rates.flops},
                 {"read_bytes_per_second", rates.bytes},
                 {"passes", run.passes.size()},
                 {"occupancy", occupancy},
                 {"prefill_tokens", run.statistics.prefill_tokens},
                 {"cached_tokens", run.statistics.cached_tokens},
                 {"cache_hit_rate", cached},
                 {"preemptions", run.statistics.preemptions},
                 {"dtype", dtype_name(model->dtype())},
                 {"quantization", options.engine.quantization},
                 {"matrix_bytes", run.matrices.held},
                 {"unquantized_matrix_bytes", run.matrices.unquantized},
                 {"logprob_abs_diff", mismatch.logprob_abs_diff},
                 {"importance_weight_max", mismatch.importance_weight_max},
                 {"batch_invariant", model->batch_invariant()},
                 {"threads", at::get_num_threads()},
                 {"repeat", options.repeat}});
    if (interruption)
      report.update({{"swap_seconds", interruption->swap_seconds},
                     {"decode_step_seconds", interruption->decode_seconds},
                     {"interrupted_seconds", interruption->seconds},
                     {"recomputed_tokens", interruption->recomputed_tokens}});
    print_json(report);
    return;
  }
  const auto percent = [](double share) { return str(format_significant(100 * share, 3), "%"); };
  print_table(
      {{"samples", str(format_thousands(options.prompts * options.generation.n_samples), " of ",
                       format_thousands(options.prompts), " prompts of ",
                       format_thousands(options.prompt_tokens), " tokens")},
       {"new tokens", str(format_thousands(run.statistics.new_tokens), " in ", format_duration(seconds), ": ",
                          format_thousands(std::llround(new_tokens / seconds)), " a second")},
       {"lower bound",
        str(format_duration(bound.seconds), ": ", format_thousands(std::llround(new_tokens / bound.seconds)),
            " a second; reached ", percent(bound.seconds / seconds), "; memory-bound for ",
            percent(bound.memory_seconds / bound.seconds), " of it")},
       {"rates", str(format_significant(rates.flops / 1e9, 3), " GFLOP/s, ",
                     format_significant(rates.bytes / 1e9, 3), " GB/s for reading the weights, measured")},
       {"batches",
        str(format_thousands(static_cast<int64_t>(run.passes.size())), " passes, ", percent(occupancy),
            " of ", options.engine.max_concurrent_rollouts, " slots decoding")},
       {"prompt tokens", str(format_thousands(run.statistics.prefill_tokens), " computed, ",
                             format_thousands(run.statistics.cached_tokens), " from the cache; ",
                             format_thousands(run.statistics.preemptions), " samples preempted")},
       {"weights", describe(run.matrices)},
       {"mismatch", str("mean difference of log-probabilities from training ",
                        format_significant(mismatch.logprob_abs_diff, 2), "; largest importance weight ",
                        format_significant(mismatch.importance_weight_max, 4))},
       {"computed in",
        str(dtype_name(model->dtype()), model->batch_invariant() ? ", batch-invariant, " : ", ",
            at::get_num_threads(), " threads, median of ", options.repeat)}});
  if (interruption)
    print_table({{"weight update",
                  str(format_duration(interruption->swap_seconds), "; a decoding step takes ",
                      format_duration(interruption->decode_seconds), "; the run with the update took ",
                      format_duration(interruption->seconds), ", ",
                      format_thousands(interruption->recomputed_tokens), " tokens recomputed")}});
}

}  // namespace

void add_bench_rollout_command(CommandLine& line, Command& bench) {
  auto options = std::make_shared<BenchRolloutOptions>();
  SamplingParameters& generation = options->generation;
  generation.n_samples = 8;
  generation.max_new_tokens = 64;
  Command command =
      line.add(bench, "rollout", "Times generation by the embedded engine, beside a lower bound",
               [options] { run_bench_rollout(*options); });
  command.add_option("--model", options->model, "Hugging Face directory").required().type_name("DIR");
  command.add_option("--prompts", options->prompts, "Number of prompts, each of random tokens");
  command.add_option("--prompt-tokens", options->prompt_tokens, "Tokens per prompt");
  command.add_option("--n-samples", generation.n_samples, "Samples per prompt");
  command.add_option("--max-new-tokens", generation.max_new_tokens, "Tokens per sample");
  add_engine_options(command, options->engine_options);
  command.add_option("--repeat", options->repeat, "Repetitions, after one that is not counted");
  command.add_option("--seed", options->seed, "Seed of the prompts and of sampling");
  command
      .add_option("--contexts", options->contexts,
                  "Instead, time decoding steps of --n-samples samples at these context lengths: shared and "
                  "distinct contexts, dense and sparse attention (rollout.sparse.budget)")
      .delimiter(',')
      .type_name("TOKENS,...");
  command.add_flag("--interrupt", options->interrupt, "Also time a run with a weight update in the middle");
  add_torch_options(command, options->torch);
  add_json_flag(command, options->json);
}

}  // namespace bough
