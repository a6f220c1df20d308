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
  int64_t min_new_tokens = 0;           // before it stop tokens are excluded, stop strings do not stop
  std::vector<std::string> stop;        // searched in the response's bytes
  std::vector<int64_t> stop_token_ids;  // in addition to the model's
  bool ignore_eos = false;  // the model's stop tokens do not stop a sample; stop_token_ids still do

  template <class V>
  void visit(V& v) {
    v("n_samples", n_samples, "samples of each prompt (a group)", range(1, 100000));
    v("max_new_tokens", max_new_tokens, "a sample ends after this many tokens", range(1, 100000000));
    v("min_new_tokens", min_new_tokens, "no stop token is drawn before this many tokens",
      range(0, 100000000));
    v("temperature", temperature, "logits are divided by it; 0 takes the most likely token",
      range(0.0, 100.0));
    v("top_p", top_p, "draw from the most likely tokens that together have this probability",
      range(0.0, 1.0));
    v("top_k", top_k, "draw from this many most likely tokens; 0: from all", range(0, 100000000));
    v("min_p", min_p, "draw from tokens with at least this part of the most likely one's probability; 0: off",
      range(0.0, 0.9999));
    v("repetition_penalty", repetition_penalty,
      "logits of tokens of the prompt and the response are divided by it (multiplied, where negative); 1: "
      "off",
      range(0.01, 100.0));
    v("presence_penalty", presence_penalty, "subtracted from the logits of tokens of the response; 0: off",
      range(-100.0, 100.0));
    v("frequency_penalty", frequency_penalty,
      "the same, as often as the token stands in the response; 0: off", range(-100.0, 100.0));
    v("greedy", greedy, "take the most likely token");
    v("top_logprobs", top_logprobs,
      "so many most likely tokens, and how likely they are at this temperature, come with each token "
      "(`top_ids` and `top_logprobs` of a rollout); 0: none",
      range(0, 1000));
    v("stop", stop, "strings that end a sample, across token borders");
    v("stop_token_ids", stop_token_ids, "token ids that end a sample, besides the model's own");
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
    v("from", from, "tokens of a context from which on the budget holds", range(0, int64_t{1} << 40));
    v("budget", budget, "tokens, or pages of 16 tokens (16x32)");
  }
  static SparseBudget from_text(const std::string& text);  // throws UserError: no number before the colon
  std::optional<std::string> to_text() const { return from == 0 ? budget : str(from, ":", budget); }
};

// Block top-k attention of the tokens that the policy samples (kernels/page_choice/page_choice.h).
struct SparseSettings {
  std::vector<SparseBudget> budget = {"none"};
  std::string summary = "mean";
  int64_t dense_layers = 2;
  bool replay = false;

  template <class V>
  void visit(V& v) {
    v("budget", budget,
      "how much of its context a drawn token attends to: tokens (512), or pages of 16 tokens (16x32); none: "
      "all of it; a list grows with the context: [512, 8192:1024] is 1024 from 8192 tokens on");
    v("summary", summary,
      "what a page is scored by: mean (of its keys); minmax (their smallest and largest elements, as Quest "
      "does); exact: no pages, but the keys with the highest scores, a yardstick and slow",
      one_of({"mean", "minmax", "exact"}));
    v("dense_layers", dense_layers, "the first layers, which attend to everything", range(0, 1000000));
    v("replay", replay,
      "keep which pages were chosen with each sample, so that training attends to those instead of choosing "
      "again: 2 bytes a page, layer and key/value head of a drawn token, in kv_memory and with the sample");
  }
  // Returns the pages of 16 tokens that a sampled token attends to in each layer and key/value head. Keys:
  // the context length in tokens from which the number holds; the first is 0. Empty: dense attention. Throws
  // UserError if an entry is no number or below the pages that are always kept. Throws UserError if the list
  // does not begin at 0 and grow.
  std::map<int64_t, int64_t> budget_pages() const;
  std::string budget_text() const;
  bool is_sparse() const { return !budget_pages().empty(); }
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
    v("addresses", addresses, "of the servers, as [http://127.0.0.1:8000]");
    v("api_key_file", api_key_file,
      "file whose first line is the servers' key; the environment's BOUGH_ROLLOUT_API_KEY does the same");
    v("weights_path", weights_path,
      "folder for the weights that servers load, at the same path for them and for the run; empty: the run's "
      "own folder");
    v("timeout_seconds", timeout_seconds,
      "for servers to come up, to load weights, to draw another token of a sample, and to come back",
      above(0.0));
    v("max_logprob_difference", max_logprob_difference,
      "mean difference to the model's log-probabilities of a few tokens, above which a server that has "
      "loaded "
      "weights is refused",
      above(0.0));
  }
};

struct RolloutSettings {
  std::string backend = "embedded";
  int64_t ranks = 0;
  int64_t max_concurrent_rollouts = 128;
  int64_t prefill_chunk_tokens = 512;
  Bytes kv_memory = {};
  std::optional<bool> batch_invariant;
  std::string quantization = "none";
  int64_t max_head_offpolicyness = 0;
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
      "what generates: embedded (in the run's processes; embedded:d2 is rollout.ranks 2), or the servers of "
      "rollout.servers.addresses: vllm, sglang (AReaL's vllm:d4t2 is taken: how they share their work is the "
      "servers' own business)");
    v("servers", servers, "inference servers (docs/rollout_servers.md)");
    v("ranks", ranks,
      "of the processes of --ranks so many only generate, and the others only train (docs/ranks.md); 0: each "
      "does both",
      range(0, 1023));
    v("max_concurrent_rollouts", max_concurrent_rollouts, "samples that are generated at once",
      range(1, 1000000));
    v("prefill_chunk_tokens", prefill_chunk_tokens,
      "tokens of prompts computed in one pass, beside one token of each running sample", range(1, 1000000));
    v("kv_memory", kv_memory,
      "bound on the keys and values kept by the embedded engine; auto: 4GiB, on a GPU a "
      "share of what is free");
    v("batch_invariant", batch_invariant,
      "a token's log-probability is the same bits whatever is computed beside it, and in generation the same "
      "as in training; needs the device cpu, fp32 on AVX-512 or bf16 on AVX512-BF16; null: where it is "
      "cheap, in "
      "fp32");
    v("quantization", quantization,
      "int8: generate with 8-bit weights in the layers, made anew from the trained ones at each update; "
      "mismatch/logprob_abs_diff shows what it costs",
      one_of({"none", "int8"}));
    v("max_head_offpolicyness", max_head_offpolicyness,
      "batches that generation may be ahead of training (eta): 0 generates and trains in turns, more do both "
      "at "
      "once",
      range(0, 1000000));
    v("interruptible", interruptible,
      "running samples go on under new weights, their keys and values computed again; false: they finish on "
      "the old ones, and none begins before that");
    v("weight_sync_steps", weight_sync_steps,
      "weights are published every so many steps; at most max_head_offpolicyness + 1", range(1, 1000000));
    v("min_group", min_group,
      "a group of which fewer samples have a reward, because others failed, is dropped and another one drawn",
      range(1, 100000));
    v("max_buffered_groups", max_buffered_groups,
      "groups begun and not yet trained on, at most; 0: as many as max_head_offpolicyness allows",
      at_least(0));
    v("max_age", max_age,
      "a token is too old for training when its weights are more than so many versions behind; 0: none is",
      range(0, 1000000));
    v("max_age_action", max_age_action,
      "tokens that are too old: keep (the loss corrects for them); mask (no policy gradient; they stay in "
      "the "
      "denominator); drop_group (the whole group, and no other is drawn for it)",
      one_of({"keep", "mask", "drop_group"}));
    v("sparse", sparse, "sparse attention: drawn tokens attend to the pages that matter most to them");
    v("threads", threads,
      "threads that generate, where generation and training run at once; 0: half of the run's",
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
      throw UserError(
          str("rollout.backend is ", backend, " and rollout.ranks ", ranks,
              "; expected embedded:dN, of N ranks that each have the whole model, or embedded and "
              "rollout.ranks"));
    ranks = std::stoll(count);
    backend = "embedded";
  }
  std::string backend_name() const { return backend.substr(0, backend.find(':')); }
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
                          ": the gate would wait for weights that are never published"));
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
                          "; quantize at the server's start, or take the embedded backend"));
    if (has_servers() && batch_invariant.value_or(false))
      throw UserError(str("rollout.batch_invariant is true, but rollout.backend is ", backend,
                          ", whose bits are not the trainer's; expected null or false"));
    if (max_age == 0 && max_age_action != "keep")
      throw UserError(str("rollout.max_age_action is ", max_age_action,
                          ", but rollout.max_age is 0, so that no token is too old; give it a bound"));
  }
};

}  // namespace bough
