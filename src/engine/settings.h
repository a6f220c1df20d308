// Settings of generation: `gconfig` (sampling) and `rollout` (the engine). Names follow AReaL.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/settings.h"

namespace bough {

// How a token is sampled from its logits (sampler.h has the order of the steps).
struct SamplingOptions {
  double temperature = 1.0;         // 0: the most likely token
  double top_p = 1.0;               // applied to what top_k leaves; 1: off
  int64_t top_k = 0;                // 0: off
  double min_p = 0;                 // below 1; 0: off
  double repetition_penalty = 1.0;  // for tokens of prompt and response; 1: off
  double presence_penalty = 0;      // for tokens of the response; 0: off
  double frequency_penalty = 0;     // times the token's count in the response; 0: off
  bool greedy = false;              // take the most likely token; log-probability at `temperature`
  int64_t top_logprobs = 0;         // number of most likely tokens reported with the sampled one
};

// Sampling of one prompt, as in settings (`gconfig`) and requests (engine.h).
struct SamplingParameters : SamplingOptions {
  int64_t n_samples = 1;
  int64_t max_new_tokens = 256;
  int64_t min_new_tokens = 0;           // for fewer tokens, no stop token is sampled, no stop string stops
  std::vector<std::string> stop;        // searched in the response's bytes
  std::vector<int64_t> stop_token_ids;  // in addition to the model's
  bool ignore_eos = false;  // the model's stop tokens do not stop a sample; stop_token_ids still do

  template <class V>
  void visit(V& v) {
    v("n_samples", n_samples, "number of samples per prompt (the group size)", range(1, 100000));
    v("max_new_tokens", max_new_tokens, "maximum number of tokens of a sample", range(1, 100000000));
    v("min_new_tokens", min_new_tokens, "no stop token is sampled before this many tokens",
      range(0, 100000000));
    v("temperature", temperature, "logits are divided by it; 0: take the most likely token",
      range(0.0, 100.0));
    v("top_p", top_p, "sample from the most likely tokens that together have this probability; 1: off",
      range(0.0, 1.0));
    v("top_k", top_k, "sample from this many most likely tokens; 0: from all", range(0, 100000000));
    v("min_p", min_p,
      "sample from tokens with at least this fraction of the highest token probability; 0: off",
      range(0.0, 0.9999));
    v("repetition_penalty", repetition_penalty,
      "logits of tokens in the prompt and the response are divided by it, negative ones multiplied; 1: off",
      range(0.01, 100.0));
    v("presence_penalty", presence_penalty,
      "subtracted from the logits of tokens that occur in the response; 0: off", range(-100.0, 100.0));
    v("frequency_penalty", frequency_penalty,
      "subtracted from a token's logit once per occurrence in the response; 0: off", range(-100.0, 100.0));
    v("greedy", greedy, "take the most likely token");
    v("top_logprobs", top_logprobs,
      "number of most likely tokens reported with each sampled token, with their log-probabilities at this "
      "temperature (`top_ids` and `top_logprobs` of a rollout); 0: none",
      range(0, 1000));
    v("stop", stop, "strings that end a sample; they may span tokens");
    v("stop_token_ids", stop_token_ids, "token ids that end a sample, in addition to the model's");
    v("ignore_eos", ignore_eos, "do not stop at the model's own stop tokens");
  }
  void check() const {
    if (min_new_tokens > max_new_tokens) {
      throw UserError(
          str("min_new_tokens is ", min_new_tokens, ", more than max_new_tokens, ", max_new_tokens));
    }
  }
};

// The attention budget of contexts of at least `from` tokens. As text: 512, 16x32 or 8192:1024.
struct SparseBudget {
  int64_t from = 0;
  std::string budget = "none";

  SparseBudget() = default;
  SparseBudget(const char* text) : SparseBudget(from_text(text)) {}

  template <class V>
  void visit(V& v) {
    v("from", from, "context length in tokens from which the budget holds", range(0, int64_t{1} << 40));
    v("budget", budget, "number of tokens (512) or of pages of 16 tokens (16x32)");
  }
  static SparseBudget from_text(const std::string& text);  // throws UserError: no number before the colon
  std::optional<std::string> to_text() const { return from == 0 ? budget : str(from, ":", budget); }
};

// Sparse attention of the sampled tokens to their top-k pages (kernels/page_choice/page_choice.h).
struct SparseSettings {
  std::vector<SparseBudget> budget = {"none"};
  std::string summary = "mean";
  int64_t block = 16;
  std::optional<int64_t> sink_tokens, recent_tokens;
  int64_t dense_layers = 2;
  bool replay = false;

  template <class V>
  void visit(V& v) {
    v("budget", budget,
      "amount of context that a sampled token attends to: tokens (512) or blocks (16x32: 32 blocks of 16 "
      "tokens); none: all; a list grows with the context: [512, 8192:1024] means 1024 in contexts of 8192 "
      "tokens or more");
    v("block", block,
      "tokens of a block, which is kept or left out as a whole: 4, 8, 16, 32 or 64; a GPU takes 16 only",
      range(4, 64));
    v("summary", summary,
      "how blocks are scored: mean (of a block's keys); minmax (their smallest and largest elements, as in "
      "Quest); exact: selects single keys instead of blocks, a slow baseline",
      one_of({"mean", "minmax", "exact"}));
    v("sink_tokens", sink_tokens,
      "first tokens of the context, always kept, in whole blocks [default: 16, at least one block]",
      range(0, int64_t{1} << 20));
    v("recent_tokens", recent_tokens,
      "last tokens of the context, always kept, in whole blocks; the query's own block counts as whole and "
      "is "
      "always kept [default: 32, at least two blocks]",
      range(0, int64_t{1} << 20));
    v("dense_layers", dense_layers, "number of first layers with dense attention", range(0, 1000000));
    v("replay", replay,
      "store the chosen blocks with each sample, so that training attends to the same blocks; takes 2 bytes "
      "per block, layer, key/value head and sampled token, in kv_memory and in the sample");
  }
  // Returns the number of blocks that a sampled token attends to in each layer and key/value head.
  // Keys: the context length in tokens from which the number holds; the first is 0. Empty: dense attention.
  // Throws UserError if `block` is invalid, or an entry is no number or below SparsePolicy::least_budget()
  // (kernels/page_choice). Throws UserError if the list's context lengths or budgets do not grow, or its
  // first context length is not 0.
  std::map<int64_t, int64_t> budget_blocks() const;
  int64_t first_blocks() const, last_blocks() const;  // always kept
  std::string budget_text() const;
  bool is_sparse() const { return !budget_blocks().empty(); }
  void check() const;
};

// Inference servers that generate instead of the embedded engine (server_engine.h).
struct ServerSettings {
  std::vector<std::string> addresses;
  std::string api_key_file;
  std::string weights_path;
  double timeout_seconds = 300;
  double max_logprob_difference = 0.1;

  template <class V>
  void visit(V& v) {
    v("addresses", addresses, "addresses of the servers, for example [http://127.0.0.1:8000]");
    v("api_key_file", api_key_file,
      "file whose first line is the servers' API key; alternative: environment variable "
      "BOUGH_ROLLOUT_API_KEY");
    v("weights_path", weights_path,
      "folder from which servers load weights; servers and run must see it at the same path; empty: the "
      "run's own folder");
    v("timeout_seconds", timeout_seconds,
      "time limit in seconds for a server to start, load weights, sample a token, or come back", above(0.0));
    v("max_logprob_difference", max_logprob_difference,
      "maximum mean difference between a server's log-probabilities and the model's; a server with more is "
      "refused; checked on a few tokens after it loads weights",
      above(0.0));
  }
};

// Default of prefill_chunk_tokens on the CPU and on a GPU. A chunk delays the running samples by its time. A
// GPU needs a few thousand tokens until its products take as long as its launches.
inline constexpr int64_t kPrefillChunkTokens = 512, kPrefillChunkTokensOfGpu = 4096;

struct RolloutSettings {
  std::string backend = "embedded";
  int64_t ranks = 0;
  int64_t max_concurrent_rollouts = 128;
  std::optional<int64_t> prefill_chunk_tokens;
  std::string admission = "longest_prefix";
  Bytes kv_memory = {};
  std::optional<bool> batch_invariant;
  std::string quantization = "none";
  bool return_routed_experts = false;
  int64_t max_head_offpolicyness = 0;
  bool fixed_staleness = false;
  bool interruptible = true;
  int64_t weight_sync_steps = 1;
  int64_t threads = 0;
  int64_t min_group = 2;
  int64_t max_buffered_groups = 0;
  int64_t max_age = 0;
  std::string max_age_action = "keep";
  SparseSettings sparse;
  ServerSettings servers;

  template <class V>
  void visit(V& v) {
    v("backend", backend,
      "generation engine: embedded (in the run's processes; embedded:d2 means rollout.ranks 2), or the "
      "servers of rollout.servers.addresses: vllm, sglang (AReaL's vllm:d4t2 is accepted; :d4t2 has no "
      "effect)");
    v("servers", servers, "inference servers (docs/rollout_servers.md)");
    v("ranks", ranks,
      "number of the --ranks processes that only generate; the others only train (docs/ranks.md); 0: each "
      "does both",
      range(0, 1023));
    v("max_concurrent_rollouts", max_concurrent_rollouts, "maximum number of samples generated at once",
      range(1, 1000000));
    v("prefill_chunk_tokens", prefill_chunk_tokens,
      "prompt tokens computed in one pass, in addition to one token of each running sample; null: 512, on a "
      "GPU 4096",
      range(1, 1000000));
    v("admission", admission,
      "which waiting prompt the engine computes next: longest_prefix (the one with the most tokens in the "
      "prefix cache, so conversations that go on before new ones); first_come",
      one_of({"first_come", "longest_prefix"}));
    v("kv_memory", kv_memory,
      "memory limit for the keys and values of the embedded engine; auto: 4GiB, on a GPU a share of the free "
      "memory, in a run by its memory plan");
    v("batch_invariant", batch_invariant,
      "log-probabilities are bit-identical for every batch composition and in generation and training; needs "
      "device cpu with fp32 on AVX2 or bf16 on AVX512-BF16; null: on for fp32 if supported");
    v("quantization", quantization,
      "int8: generate with 8-bit layer weights, converted from the trained weights at each update; the "
      "metric mismatch/logprob_abs_diff shows the error",
      one_of({"none", "int8"}));
    v("return_routed_experts", return_routed_experts,
      "record the experts that a mixture of experts chose for each token, in the rollouts' routed_experts; "
      "actor.routing_replay R3 turns it on");
    v("max_head_offpolicyness", max_head_offpolicyness,
      "number of batches that generation may be ahead of training (eta); 0: generation and training take "
      "turns; above 0: both run at once",
      range(0, 1000000));
    v("fixed_staleness", fixed_staleness,
      "true: generation and training take turns, and each batch is exactly max_head_offpolicyness versions "
      "old when it is trained on (the first batches less), so the run is reproducible; to study staleness");
    v("interruptible", interruptible,
      "running samples continue under new weights, with keys and values recomputed; false: they finish on "
      "the old weights, and no sample starts before that");
    v("weight_sync_steps", weight_sync_steps,
      "number of training steps between weight updates of the engine; at most max_head_offpolicyness + 1",
      range(1, 1000000));
    v("min_group", min_group,
      "minimum number of samples with a reward in a group; a group with fewer is dropped and replaced",
      range(1, 100000));
    v("max_buffered_groups", max_buffered_groups,
      "maximum number of groups started but not yet trained on; 0: as max_head_offpolicyness allows",
      at_least(0));
    v("max_age", max_age, "maximum age, in weight versions, of a token that is trained on; 0: no limit",
      range(0, 1000000));
    v("max_age_action", max_age_action,
      "treatment of tokens older than max_age: keep (the loss corrects for them); mask (no policy gradient, "
      "but they count in the denominator); drop_group (drop the whole group without a replacement)",
      one_of({"keep", "mask", "drop_group"}));
    v("sparse", sparse, "sparse attention: sampled tokens attend to the pages with the highest scores");
    v("threads", threads,
      "generation threads if generation and training run at once; 0: half of the run's threads",
      range(0, 4096));
  }
  // AReaL's embedded:dN means N ranks. Throws UserError if N is no number from 1 to 9999 or contradicts
  // `ranks`.
  void complete() {
    constexpr std::string_view kEmbedded = "embedded:d";
    if (!backend.starts_with(kEmbedded)) return;
    const std::string count = backend.substr(kEmbedded.size());
    const bool is_count = !count.empty() && count.size() <= 4 && count[0] != '0' &&
                          count.find_first_not_of("0123456789") == std::string::npos;
    if (!is_count || (ranks > 0 && std::stoll(count) != ranks))
      throw UserError(str(
          "rollout.backend is ", backend, " and rollout.ranks ", ranks,
          "; expected embedded:dN with rollout.ranks 0 or N (N from 1 to 9999 ranks, each with the unsharded "
          "model), or embedded with rollout.ranks"));
    ranks = std::stoll(count);
    backend = "embedded";
  }
  int64_t prefill_chunk(bool on_gpu) const {
    return prefill_chunk_tokens.value_or(on_gpu ? kPrefillChunkTokensOfGpu : kPrefillChunkTokens);
  }
  std::string backend_name() const { return backend.substr(0, backend.find(':')); }
  // Whether generation and training run at once.
  bool is_asynchronous() const { return max_head_offpolicyness > 0 && !fixed_staleness; }
  bool has_servers() const { return backend_name() != "embedded"; }
  // Whether the ranks that train have no embedded engine.
  bool generates_elsewhere() const { return has_servers() || ranks > 0; }
  void check() const {
    const std::string name = backend_name();
    if (name != "embedded" && name != "vllm" && name != "sglang")
      throw UserError(str("rollout.backend is ", backend, "; expected embedded, vllm or sglang"));
    if (weight_sync_steps > max_head_offpolicyness + 1)
      throw UserError(str("rollout.weight_sync_steps is ", weight_sync_steps,
                          "; expected at most rollout.max_head_offpolicyness + 1, ",
                          max_head_offpolicyness + 1,
                          ": otherwise the staleness limiter waits for weights that are never published"));
    if (fixed_staleness && max_head_offpolicyness > 0 && (weight_sync_steps > 1 || max_buffered_groups > 0))
      throw UserError(str("rollout.fixed_staleness is true, but rollout.weight_sync_steps is ",
                          weight_sync_steps, " and rollout.max_buffered_groups is ", max_buffered_groups,
                          "; expected 1 and 0: otherwise the age of a batch is not fixed"));
    if (!has_servers() && !servers.addresses.empty())
      throw UserError(
          "rollout.servers.addresses: given, but rollout.backend is embedded; expected vllm or sglang");
    if (has_servers() && ranks > 0)
      throw UserError(str("rollout.ranks is ", ranks, ", but rollout.backend is ", backend,
                          ", whose servers generate; expected 0, or the embedded backend"));
    if (has_servers() && sparse.is_sparse())
      throw UserError(str("rollout.sparse.budget is ", sparse.budget_text(), ", but rollout.backend is ",
                          backend, ", whose attention is dense; expected none, or the embedded backend"));
    if (has_servers() && quantization != "none")
      throw UserError(str("rollout.quantization is ", quantization, ", but rollout.backend is ", backend,
                          "; quantize when you start the server, or use the embedded backend"));
    if (has_servers() && batch_invariant.value_or(false))
      throw UserError(
          str("rollout.batch_invariant is true, but rollout.backend is ", backend,
              ", whose log-probabilities are not bit-identical to the trainer's; expected null or false"));
    if (max_age == 0 && max_age_action != "keep")
      throw UserError(
          str("rollout.max_age_action is ", max_age_action,
              ", but rollout.max_age is 0 (no limit); expected rollout.max_age of 1 or more, or keep"));
  }
};

}  // namespace bough
