#include "run/memory_plan.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/format.h"
#include "cost/calibrate.h"
#include "cost/cost_model.h"
#include "models/lora_settings.h"
#include "models/safetensors.h"
#include "plan/plan.h"
#include "rollout/embedded_engine.h"
#include "rollout/forward_pass.h"
#include "rollout/kv_storage.h"
#include "run/run_components.h"
#include "train/collective_buckets.h"

namespace bough {

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
// Assumed (docs/performance.md, "What remains"): the context with libtorch's and libbough_cuda's modules; a
// workspace of cuBLAS and of cuBLASLt for each of two streams, 32 MiB each on Hopper; NCCL's buffers.
constexpr int64_t kContextBytes = 768 * kMiB;
constexpr int64_t kWorkspaceBytes = 4 * 32 * kMiB;
constexpr int64_t kNcclBytes = 512 * kMiB;
// The kernels of recorded decoding passes. Assumed as well.
constexpr int64_t kGraphBytes = 192 * kMiB;
// Share of the device's total memory for gaps between the allocator's blocks.
constexpr double kReserveShare = 0.03;
// Tokens of a prompt, where the settings do not bound them.
constexpr int64_t kAssumedPromptTokens = 1024;

std::string gib(int64_t bytes) {
  return format_bytes(static_cast<double>(bytes));
}

// Sets adapter_elements and head_adapter_elements.
void set_adapters(ModelShape& shape, const LoraSettings& lora) {
  if (!lora.path.empty()) {
    const SafetensorsFile file(std::filesystem::path(lora.path) / "adapter_model.safetensors");
    for (const auto& [name, entry] : file.entries()) {
      if (name.find(".lora_") == std::string::npos) continue;
      int64_t elements = 1;
      for (const int64_t size : entry.shape) elements *= size;
      shape.adapter_elements += elements;
      if (name.find(".lm_head.") != std::string::npos) shape.head_adapter_elements += elements;
    }
    return;
  }
  const int64_t D = shape.hidden_size, F = shape.intermediate_size;
  // Experts have no adapters.
  const int64_t all = shape.num_layers, dense = shape.num_dense_layers();
  const std::pair<const char*, int64_t> rows_and_columns[] = {{"q_proj", all * (D + shape.query_width())},
                                                              {"k_proj", all * (D + shape.key_width())},
                                                              {"v_proj", all * (D + shape.key_width())},
                                                              {"o_proj", all * (D + shape.query_width())},
                                                              {"gate_proj", dense * (D + F)},
                                                              {"up_proj", dense * (D + F)},
                                                              {"down_proj", dense * (D + F)}};
  int64_t sum = 0;
  for (const auto& [name, elements] : rows_and_columns)
    for (const LoraTarget& target : lora.targets)
      if (target.name == "all-linear" || target.name.ends_with(name)) sum += elements;
  const bool has_head = std::ranges::any_of(lora.targets, [](const auto& t) { return t.name == "lm_head"; });
  shape.head_adapter_elements = has_head ? lora.rank * (D + shape.vocab_size) : 0;
  shape.adapter_elements = lora.rank * sum + shape.head_adapter_elements;
}

// Elements of a model that one rank holds. The layers are cut by tensor and pipeline parallelism; the
// embedding and lm_head are cut by tensor parallelism, and a stage is counted with one of them.
int64_t elements_on_rank(const ModelShape& shape, const ParallelSizes& sizes) {
  const int64_t of_embedding = shape.vocab_size * shape.hidden_size;
  const int64_t num_embeddings = shape.tie_word_embeddings ? 1 : 2;
  const int64_t of_layers = shape.num_parameters() - num_embeddings * of_embedding;
  const int64_t held = sizes.pipeline > 1 ? 1 : num_embeddings;
  return ceil_div(of_layers, sizes.tensor * sizes.pipeline) + held * ceil_div(of_embedding, sizes.tensor);
}

// Bytes of one token in a forward pass that keeps nothing: input, residual, queries, keys and values before
// and after the rotary embedding, attention's output, the feed-forward part, and rows of a mixture's pairs.
int64_t forward_bytes_per_token(const ModelShape& shape) {
  const int64_t qkv = shape.query_width() + 2 * shape.key_width();
  const int64_t rows = 4 + (shape.is_mixture() ? 2 * shape.experts_per_token : 0);
  return (rows * shape.hidden_size + 2 * qkv + shape.query_width() + 3 * shape.widest_feed_forward()) *
         shape.element_bytes;
}

class Planning {
 public:
  Planning(const RunSettings& settings, const DeviceProfile& profile, const RunMemory& memory,
           int64_t num_ranks)
      : settings_(settings),
        profile_(profile),
        num_ranks_(num_ranks),
        sizes_(settings.actor.sizes_of(num_ranks_)),
        memory_(memory),
        policy_(shape_of(settings.model.path)) {
    if (settings.actor.lora.enabled()) set_adapters(policy_, settings.actor.lora);
    policy_.has_router_losses = settings.actor.router_losses.is_used();
    longest_ = longest_group();
    passes_ = passes_of_longest();
  }

  // With a critic that shares the policy's backbone, or with one of its own.
  MemoryPlan plan(bool offloads, bool shares) {
    plan_ = {};
    plan_.memory = memory_;
    plan_.offloads = offloads;
    plan_.shares_backbone = shares;
    add_fixed();
    add_generation();
    divide_the_rest();
    return plan_;
  }

 private:
  ModelShape shape_of(const std::string& path) const {
    return model_shape(load_model_config(path), profile_.dtype);
  }
  void add(const std::string& what, int64_t device, int64_t host, const std::string& note = "") {
    if (device > 0 || host > 0) plan_.rows.push_back({what, device, host, note});
  }
  int64_t accumulator(int64_t elements) const { return elements * policy_.accumulator_bytes; }
  int64_t weights(int64_t elements) const { return elements * policy_.element_bytes; }
  // Both moments and, unless a weight is its own, the master weight.
  int64_t state(int64_t elements) const {
    return accumulator(ceil_div(elements, sizes_.data)) *
           (policy_.element_bytes < policy_.accumulator_bytes ? 3 : 2);
  }
  // Bytes of all ranks together: rank 0 gathers the state of the others.
  int64_t checkpoint_bytes(int64_t trained) const { return weights(trained) + sizes_.data * state(trained); }
  bool engine_is_here() const { return !settings_.rollout.generates_elsewhere() && !is_sharded(); }
  bool is_sharded() const { return sizes_.tensor * sizes_.pipeline > 1; }
  bool runs_in_parallel() const { return settings_.rollout.is_asynchronous(); }

  void add_optimizer(const std::string& what, int64_t trained, bool offloads) {
    add(what + "gradients", accumulator(trained), 0);
    const std::string note = offloads ? "offloaded to host memory" : "";
    add(what + "optimizer", offloads ? 0 : state(trained), offloads ? state(trained) : 0, note);
  }

  void add_fixed() {
    add("CUDA context and other programs", plan_.memory.device_total - plan_.memory.device_free, 0);
    add("reserve", static_cast<int64_t>(kReserveShare * static_cast<double>(plan_.memory.device_total)), 0,
        "gaps between allocations");
    const int64_t all = elements_on_rank(policy_, sizes_);
    const int64_t adapters = policy_.adapter_elements;
    const int64_t trained = adapters > 0 ? adapters : all;
    add("weights", weights(all + adapters), 0, settings_.model.path);
    add_optimizer("", trained, plan_.offloads || settings_.actor.optimizer.offload.value_or(false));
    if (settings_.actor.deterministic)
      add("partial gradients", 3 * accumulator(trained), 0, "actor.deterministic");
    if (settings_.actor.loss.uses_reference() && (adapters == 0 || !settings_.ref.path.empty())) {
      const std::string path = settings_.ref.path.empty() ? settings_.model.path : settings_.ref.path;
      add("reference", weights(elements_on_rank(shape_of(path), sizes_)), 0, path);
    }
    if (const std::string& path = settings_.actor.loss.teacher.path; !path.empty())
      add("teacher", weights(elements_on_rank(shape_of(path), sizes_)), 0, path);
    add_critic();
    if (settings_.sparse_training.is_draft()) {
      const int64_t draft = elements_on_rank(shape_of(settings_.sparse_training.draft_path), sizes_);
      add("draft policy", weights(draft), 0, settings_.sparse_training.draft_path);
      add_optimizer("draft policy: ", draft, false);
    }
    if (is_sharded()) add("whole model for publishing", 0, weights(policy_.num_parameters()), "on rank 0");
    if (runs_in_parallel() && engine_is_here())
      add("weights of generation", weights(trained), weights(trained),
          "the engine's copy, and in pinned memory the published one");
    if (runs_in_parallel() && (settings_.saver.freq_steps > 0 || settings_.saver.freq_minutes > 0))
      add("copies for checkpoints", 0, checkpoint_bytes(trained) / plan_.memory.ranks_per_host,
          "written while training goes on");
    add("cuBLAS workspaces", kWorkspaceBytes, 0, "assumed");
    if (num_ranks_ > 1) {
      add("NCCL", kNcclBytes, 0, "assumed");
      // No bucket is larger than the gradients.
      add("buckets of gradients and weights", std::min(kCollectiveBufferBytes, 2 * accumulator(trained)), 0);
    }
  }

  void add_critic() {
    if (!settings_.actor.advantages.needs_values()) return;
    if (plan_.shares_backbone) return;  // a value head of hidden_size elements
    const std::string path = settings_.critic.path.empty() ? settings_.model.path : settings_.critic.path;
    ModelShape critic = shape_of(path);
    critic.tie_word_embeddings = true;  // it has no lm_head
    const int64_t elements = elements_on_rank(critic, sizes_);
    const bool offloads = plan_.offloads || settings_.critic.optimizer.offload.value_or(false);
    add("critic: weights", weights(elements), 0, path);
    add_optimizer("critic: ", elements, offloads);
    plan_.critic_bytes = weights(elements) + accumulator(elements) + (offloads ? 0 : state(elements));
  }

  void add_generation() {
    if (!engine_is_here()) return;
    const RolloutSettings& rollout = settings_.rollout;
    const int64_t running = rollout.max_concurrent_rollouts;
    const int64_t tokens = rollout.prefill_chunk(true) + running;
    const int64_t logits = std::min(kLogitsBytesOfGpu, running * policy_.vocab_size * policy_.element_bytes);
    // Logits, and their fp32 copy for sampling.
    generation_bytes_ = tokens * forward_bytes_per_token(policy_) +
                        logits * (1 + policy_.accumulator_bytes / policy_.element_bytes);
    add("recorded kernels", kGraphBytes, 0, "assumed");
    add("graphs of decoding",
        decode_graph_bytes(policy_, running) + running * forward_bytes_per_token(policy_), 0);
  }

  // A group of the longest samples, as the settings bound them.
  struct Longest {
    int64_t prompt = 0, response = 0, samples = 1;
    int64_t length() const { return prompt + response; }
  };
  Longest longest_group() const {
    const int64_t most = policy_.max_length();
    Longest longest{.samples = settings_.gconfig.n_samples};
    longest.response = std::min(most - 1, settings_.gconfig.max_new_tokens);
    const int64_t given = settings_.train_dataset.max_length;
    longest.prompt = std::min(most - longest.response, given > 0 ? given : kAssumedPromptTokens);
    return longest;
  }

  void divide_the_rest() {
    const Longest& longest = longest_;
    PassNeed passes = passes_;
    // Generation and training take turns, and then use the same memory.
    const int64_t shared = runs_in_parallel() ? 0 : generation_bytes_;
    if (runs_in_parallel() && generation_bytes_ > 0) add("passes of generation", generation_bytes_, 0);
    passes.least = std::max(passes.least, shared);
    passes.most = std::max(passes.most, passes.least);
    if (const Bytes given = settings_.actor.mb_spec.memory; !given.is_auto())
      passes.least = passes.most = std::max(passes.least, given.count - plan_.critic_bytes);

    int64_t kv_least = 0, kv_most = 0;
    if (engine_is_here()) {
      const SparsePolicy sparse = sparse_policy(settings_.rollout.sparse, at::kCUDA);
      const auto page = static_cast<double>(
          KvStorage::bytes_per_page(policy_, scalar_type_of(profile_.dtype), sparse, at::kCUDA));
      const auto bytes_of = [&](int64_t tokens) {
        return static_cast<int64_t>(page * static_cast<double>(ceil_div(tokens, kPageTokens)));
      };
      const int64_t running = settings_.rollout.max_concurrent_rollouts;
      kv_least = bytes_of(longest.length()) + bytes_of(1);
      kv_most = std::max(kv_least, ceil_div(running, longest.samples) * bytes_of(longest.prompt) +
                                       running * bytes_of(longest.response));
      if (const Bytes given = settings_.rollout.kv_memory; !given.is_auto()) kv_least = kv_most = given.count;
    }

    const int64_t fixed = plan_.device_bytes();
    const int64_t rest = plan_.memory.device_total - fixed;
    plan_.least_bytes = fixed + kv_least + passes.least;
    // Half for each, and what one of them cannot use for the other.
    plan_.pass_bytes = std::clamp(rest - std::clamp(rest / 2, kv_least, kv_most), passes.least, passes.most);
    plan_.kv_bytes = std::clamp(rest - plan_.pass_bytes, kv_least, kv_most);
    if (kv_most > 0) {
      const int64_t running = settings_.rollout.max_concurrent_rollouts;
      const int64_t at_once = std::min(running, plan_.kv_bytes * running / kv_most);
      plan_.rows.push_back({"keys and values", plan_.kv_bytes, 0,
                            str("for ", std::max<int64_t>(1, at_once), " of ", running,
                                " samples of full length (rollout.max_concurrent_rollouts)")});
    }
    plan_.rows.push_back({"training passes", plan_.pass_bytes, 0,
                          str(gib(passes.least), " to ", gib(passes.most), " of use: ", longest.samples,
                              " samples of ", longest.response, " tokens, prompt of ", longest.prompt,
                              settings_.train_dataset.max_length > 0 ? "" : " (assumed)")});
  }

  struct PassNeed {
    int64_t least = 0, most = 0;
  };
  // For one group of the longest samples: the peak of the fastest plan without a bound, and the least peak.
  PassNeed passes_of_longest() const {
    const Longest& longest = longest_;
    const CostModel costs(profile_, policy_);
    std::vector<std::vector<int32_t>> samples;
    int32_t next = 0;
    for (int64_t s = 0; s < longest.samples; ++s) {
      std::vector<int32_t>& sample = samples.emplace_back(static_cast<size_t>(longest.length()));
      std::iota(sample.begin(), sample.begin() + longest.prompt, 0);
      next = std::max(next, static_cast<int32_t>(longest.prompt));
      std::iota(sample.begin() + longest.prompt, sample.end(), next);
      next += static_cast<int32_t>(longest.response);
    }
    PlanRequest request{
        .sequences = {samples.begin(), samples.end()},
        .trained = {},
        .max_tokens_per_pass = settings_.actor.mb_spec.max_tokens_per_mb.value_or(kMaxTokensPerPassOfGpu),
        .costs = &costs,
        .packer = settings_.actor.tree.packer,
        .layers = settings_.actor.tree.layers(),
        .offload = settings_.actor.tree.offload()};
    for (const auto& sample : samples)
      for (size_t i = 0; i < sample.size(); ++i)
        request.trained.push_back(static_cast<int64_t>(i) >= longest.prompt);
    const std::string strategy = settings_.actor.tree.strategy();
    PassNeed need;
    need.most = simulate(make_plan(strategy, request), &costs).peak_bytes;
    request.memory_bytes = 1;
    try {
      make_plan(strategy, request);
    } catch (const MemoryTooSmall& error) {
      need.least = error.smallest;
    }
    // The rows of the loss stay in memory for all groups of a mini-batch.
    const int64_t groups =
        ceil_div(settings_.train_dataset.batch_size, settings_.actor.ppo_n_minibatches * sizes_.data);
    const int64_t rows = (groups - 1) * longest.samples * longest.response * costs.row_bytes();
    return {need.least + rows, need.most + rows};
  }

  const RunSettings& settings_;
  const DeviceProfile& profile_;
  const int64_t num_ranks_;
  const ParallelSizes sizes_;
  const RunMemory memory_;
  ModelShape policy_;
  Longest longest_;
  PassNeed passes_;
  int64_t generation_bytes_ = 0;
  MemoryPlan plan_;
};

bool fits(const MemoryPlan& plan) {
  return plan.least_bytes <= plan.memory.device_total && plan.host_bytes() <= plan.memory.host_free;
}

// Tries what the settings leave open, the fastest first: a critic of its own, then one that shares the
// backbone; each without offloading first.
MemoryPlan best_plan(const RunSettings& settings, const DeviceProfile& profile, const RunMemory& memory,
                     int64_t num_ranks, std::optional<bool> critic_shares) {
  const bool has_critic = settings.actor.advantages.needs_values();
  if (settings.critic.share_backbone) critic_shares = settings.critic.share_backbone;
  else if (!settings.critic.path.empty() || settings.actor.lora.enabled()) critic_shares = false;
  if (!has_critic) critic_shares = false;
  const bool may_offload = !settings.actor.optimizer.offload.has_value();
  Planning planning(settings, profile, memory, num_ranks);
  MemoryPlan first;
  for (const bool offloads : {false, true}) {
    if (offloads && !may_offload) continue;
    for (const bool shares : {false, true}) {
      if (critic_shares && *critic_shares != shares) continue;
      MemoryPlan plan = planning.plan(offloads, shares);
      if (fits(plan)) return plan;
      // The message speaks of the plan without offloading, unless only the host's memory is short.
      if (first.rows.empty() || plan.least_bytes <= memory.device_total) first = std::move(plan);
    }
  }
  return first;
}

struct Remedy {
  std::string text;
  std::function<void(RunSettings&, int64_t& num_ranks)> apply;
};

// Changes that need less memory, those that change least about the training first.
std::vector<Remedy> remedies(const RunSettings& settings, int64_t num_ranks) {
  std::vector<Remedy> list;
  const auto add = [&](bool applies, std::string text, auto apply) {
    if (applies) list.push_back({std::move(text), std::move(apply)});
  };
  add(!settings.rollout.kv_memory.is_auto(), "rollout.kv_memory=auto",
      [](RunSettings& s, int64_t&) { s.rollout.kv_memory = {}; });
  add(!settings.actor.mb_spec.memory.is_auto(), "actor.mb_spec.memory=auto",
      [](RunSettings& s, int64_t&) { s.actor.mb_spec.memory = {}; });
  add(!settings.actor.optimizer.offload.value_or(true), "actor.optimizer.offload=null",
      [](RunSettings& s, int64_t&) { s.actor.optimizer.offload.reset(); });
  add(settings.dtype != "bf16", "dtype=bf16", [](RunSettings& s, int64_t&) { s.dtype = "bf16"; });
  add(settings.rollout.is_asynchronous(), "rollout.max_head_offpolicyness=0", [](RunSettings& s, int64_t&) {
    s.rollout.max_head_offpolicyness = 0;
    s.rollout.weight_sync_steps = 1;
  });
  add(settings.actor.advantages.needs_values() && !settings.critic.share_backbone.value_or(false) &&
          settings.critic.path.empty(),
      "critic.share_backbone=true", [](RunSettings& s, int64_t&) { s.critic.share_backbone = true; });
  if (!sizes_of_backend(settings.actor.backend) && settings.rollout.ranks == 0)
    for (const int64_t ranks : {2, 4, 8})
      add(ranks > num_ranks, str("--ranks ", ranks, " on as many GPUs"),
          [ranks](RunSettings&, int64_t& num_ranks) { num_ranks = ranks; });
  add(!settings.actor.lora.enabled(), "lora.rank=32, which trains adapters in place of all weights",
      [](RunSettings& s, int64_t&) { s.actor.lora.rank = 32; });
  return list;
}

std::string shortage_of(const RunSettings& settings, const DeviceProfile& profile, const MemoryPlan& plan,
                        int64_t num_ranks) {
  const RunMemory& memory = plan.memory;
  const bool lacks_device = plan.least_bytes > memory.device_total;
  std::string text = lacks_device
                         ? str("device memory: the run takes at least ", gib(plan.least_bytes),
                               ", the device has ", gib(memory.device_total))
                         : str("host memory: the run takes ", gib(plan.host_bytes()), ", the host has ",
                               gib(memory.host_free), " for each of its ", memory.ranks_per_host, " ranks");
  const auto changed_fits = [&](std::span<const Remedy> changes) {
    RunSettings changed = settings;
    int64_t ranks = num_ranks;
    for (const Remedy& change : changes) change.apply(changed, ranks);
    DeviceProfile of_dtype = profile;
    of_dtype.dtype = changed.dtype;
    return fits(best_plan(changed, of_dtype, memory, ranks, std::nullopt));
  };
  const std::vector<Remedy> list = remedies(settings, num_ranks);
  for (const Remedy& remedy : list)
    if (changed_fits({&remedy, 1})) return text + "; it fits with " + remedy.text;
  for (size_t count = 2; count <= list.size(); ++count) {
    if (!changed_fits({list.data(), count})) continue;
    text += "; it fits with all of:";
    for (size_t i = 0; i < count; ++i) text += (i > 0 ? ", " : " ") + list[i].text;
    return text;
  }
  return text + "; no change of settings makes it fit: a smaller model, or a larger device";
}

}  // namespace

RunMemory memory_of_profile(const DeviceProfile& device) {
  return {.device_total = device.memory_bytes,
          .device_free = device.memory_bytes - kContextBytes,
          .host_free = std::numeric_limits<int64_t>::max()};
}

int64_t MemoryPlan::device_bytes() const {
  int64_t sum = 0;
  for (const MemoryRow& row : rows) sum += row.device_bytes;
  return sum;
}

int64_t MemoryPlan::host_bytes() const {
  int64_t sum = 0;
  for (const MemoryRow& row : rows) sum += row.host_bytes;
  return sum;
}

MemoryPlan plan_memory(const RunSettings& settings, const DeviceProfile& profile, const RunMemory& memory,
                       int64_t num_ranks, std::optional<bool> resumed_critic_shares) {
  MemoryPlan plan = best_plan(settings, profile, memory, num_ranks, resumed_critic_shares);
  if (!fits(plan)) plan.shortage = shortage_of(settings, profile, plan, num_ranks);
  return plan;
}

RunSettings with_memory_plan(const RunSettings& settings, const MemoryPlan& plan) {
  if (!plan.shortage.empty()) throw UserError(str(plan.shortage, "\n", memory_table(plan)));
  RunSettings planned = settings;
  if (plan.kv_bytes > 0) planned.rollout.kv_memory.count = plan.kv_bytes;
  planned.actor.mb_spec.memory.count = plan.pass_bytes + plan.critic_bytes;
  if (!planned.actor.optimizer.offload) planned.actor.optimizer.offload = plan.offloads;
  if (!planned.critic.optimizer.offload) planned.critic.optimizer.offload = plan.offloads;
  if (planned.actor.advantages.needs_values()) planned.critic.share_backbone = plan.shares_backbone;
  return planned;
}

std::string memory_table(const MemoryPlan& plan) {
  const bool has_host = plan.host_bytes() > 0;
  size_t width = 0;
  for (const MemoryRow& row : plan.rows) width = std::max(width, row.what.size());
  std::string text;
  const auto line = [&](const std::string& what, const std::string& device, const std::string& host,
                        const std::string& note) {
    std::string row = what + std::string(width + 2 - what.size(), ' ');
    row += std::string(10 - std::min<size_t>(10, device.size()), ' ') + device;
    if (has_host) row += std::string(12 - std::min<size_t>(12, host.size()), ' ') + host;
    if (!note.empty()) row += "  " + note;
    text += row.substr(0, row.find_last_not_of(' ') + 1) + "\n";
  };
  line("", "device", "host", "");
  for (const MemoryRow& row : plan.rows)
    line(row.what, row.device_bytes > 0 ? gib(row.device_bytes) : "",
         row.host_bytes > 0 ? gib(row.host_bytes) : "", row.note);
  line("sum", gib(plan.device_bytes()), gib(plan.host_bytes()),
       str("of ", gib(plan.memory.device_total), "; at least ", gib(plan.least_bytes)));
  return text;
}

Json to_json(const MemoryPlan& plan) {
  Json rows = Json::array();
  for (const MemoryRow& row : plan.rows)
    rows.push_back({{"what", row.what},
                    {"device_bytes", row.device_bytes},
                    {"host_bytes", row.host_bytes},
                    {"note", row.note}});
  return {{"rows", rows},
          {"device_total", plan.memory.device_total},
          {"device_bytes", plan.device_bytes()},
          {"least_device_bytes", plan.least_bytes},
          {"host_bytes", plan.host_bytes()},
          {"kv_bytes", plan.kv_bytes},
          {"pass_bytes", plan.pass_bytes},
          {"offloads", plan.offloads},
          {"shares_backbone", plan.shares_backbone},
          {"fits", plan.shortage.empty()},
          {"shortage", plan.shortage}};
}

}  // namespace bough
