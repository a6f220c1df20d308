// `bough simulate`: how long a run would take if a cluster's devices were divided otherwise between
// generation and training. Uses the run's own controller with simulated devices.
#include <algorithm>
#include <cmath>
#include <sstream>

#include "base/error.h"
#include "base/format.h"
#include "base/log.h"
#include "cli/command.h"
#include "cli/generation_options.h"
#include "cli/torch_options.h"
#include "control/run_simulator.h"
#include "cost/rollout_cost.h"
#include "cost/run_costs.h"
#include "data/rollout_file.h"
#include "models/decoder_cost.h"
#include "run/cluster.h"
#include "run/run_folder.h"

namespace bough {

namespace {

struct SimulateOptions {
  std::string run, cluster, shape = "qwen3-0.6b", device = "h100", dtype = "bf16";
  std::vector<int64_t> max_staleness = {0, 1, 4};
  std::vector<int64_t> devices = {8};
  int64_t steps = 20;
  int64_t batch_groups = 64, group_size = 8, prompt_tokens = 256, max_running = 256;
  double length_mean = 2000, length_sigma = 1.0;
  int64_t longest = 16384;
  double memory_bandwidth = 0, efficiency = 0.5;
  std::vector<double> reward_seconds = {0, 0};
  SparseSettings sparse;
  bool no_interrupt = false, no_sharing = false, json = false;
};

struct Assumed {
  SimulationOptions simulation;
  std::string lengths, rates;  // where the values come from
  std::string iteration;       // priced on one device, if known
};

// Memory bandwidth in bytes per second. Known GPUs: from their data sheets. This machine: as measured.
double memory_bandwidth(const DeviceProfile& profile) {
  if (profile.name == "h100") return 3.35e12;
  if (profile.name == "h200") return 4.8e12;
  if (profile.name == "a100") return 2.04e12;
  return profile.memory_bytes_per_s;
}

// A decoding pass reads the weights once, and the keys and values that each sample attends to. Those of a
// prompt are read once for its whole group of samples (rollout_cost.h). The pass computes one token per
// sample. A training step computes the FLOPs of three forward passes for every token of the tree.
void plan_rates(const SimulateOptions& options, Assumed& assumed) {
  const DeviceProfile profile = device_profile(options.device, parse_dtype(options.dtype));
  const ModelShape shape = named_model_shape(options.shape, options.dtype);
  const double bandwidth =
      options.memory_bandwidth > 0 ? options.memory_bandwidth * 1e9 : memory_bandwidth(profile);
  const double flops = shape.linear_flops_per_token() + shape.flops_per_head_row();
  const double rate = profile.matrix_product_rate() * options.efficiency;
  const double weights = flops / 2 * static_cast<double>(shape.element_bytes);
  const SparseAttention sparse = priced_attention(options.sparse);
  const SampledGroup group{options.prompt_tokens,
                           std::vector<int64_t>(static_cast<size_t>(options.group_size),
                                                std::max<int64_t>(1, std::llround(options.length_mean)))};
  // One group represents all, because groups have no common prefix.
  const RolloutCost sampled = rollout_cost(CostModel(profile, shape), {group}, sparse, options.group_size);
  const auto tokens = static_cast<double>(sampled.tokens);
  const double kv = sampled.bytes() / tokens;
  const double attention_flops =
      sampled.keys / tokens * shape.flops_per_pair() / static_cast<double>(shape.num_layers);
  SimulatedRates& rates = assumed.simulation.rates;
  rates.pass_seconds = weights / (bandwidth * options.efficiency);
  rates.sample_seconds = kv / (bandwidth * options.efficiency) + (flops + attention_flops) / rate;
  rates.prefill_tokens_per_s = rate / flops;
  rates.train_tokens_per_s = rate / (3 * flops);
  rates.swap_seconds = rates.publish_seconds = weights / bandwidth;
  const double samples = static_cast<double>(options.batch_groups * options.group_size);
  const double running = std::min(samples, static_cast<double>(options.max_running));
  const double batch_tokens =
      samples * options.length_mean + static_cast<double>(options.batch_groups * options.prompt_tokens);
  const double rollout =
      samples * options.length_mean / running * (rates.pass_seconds + running * rates.sample_seconds) +
      static_cast<double>(options.batch_groups * options.prompt_tokens) / rates.prefill_tokens_per_s;
  const double recompute = batch_tokens * flops / rate, update = batch_tokens / rates.train_tokens_per_s;
  const auto seconds = [](double value) { return format_significant(value, 3); };
  assumed.iteration = str("rollout ", seconds(rollout), " s (",
                          format_significant(100 * rollout / (rollout + recompute + update), 3),
                          "%), recompute ", seconds(recompute), " s, update ", seconds(update), " s",
                          sparse.is_sparse() ? str("; budget ", options.sparse.budget_text()) : "");
  assumed.rates = str(options.shape, " in ", options.dtype, " on ", options.device, ", ",
                      format_significant(100 * options.efficiency, 3), "% of its peaks");
}

// Reads the rates of a run (medians of the metrics of its training steps), its lengths and its settings.
void read_run(const SimulateOptions& options, Assumed& assumed) {
  const std::filesystem::path folder = options.run;
  const RunSettings settings = load_settings<RunSettings>(folder / "config.yaml", {});
  std::map<std::string, std::vector<double>> values;
  for (const MetricRecord& record : read_metrics(folder / "metrics.jsonl"))
    for (const auto& [name, value] : record.values) values[name].push_back(value);
  const auto median_of = [&](const std::string& name) {
    std::vector<double>& list = values[name];
    if (list.empty())
      throw UserError(str("--run ", quoted(options.run, 300), ": its metrics.jsonl has no ", name,
                          "; give the folder of a run that has trained some steps"));
    std::nth_element(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(list.size() / 2), list.end());
    return list[list.size() / 2];
  };
  SimulationOptions& simulation = assumed.simulation;
  simulation.controller.batch_groups = settings.train_dataset.batch_size;
  simulation.controller.group_size = settings.gconfig.n_samples;
  simulation.rates.max_running = settings.rollout.max_concurrent_rollouts;
  std::vector<int64_t> lengths;
  double prompts = 0;
  int64_t rows = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "rollouts")) {
    for (const Trajectory& sample : read_rollouts(entry.path())) {
      lengths.push_back(sample.num_generated());
      prompts += static_cast<double>(static_cast<int64_t>(sample.input_ids.size()) - lengths.back());
      ++rows;
    }
    if (rows > 20000) break;
  }
  if (lengths.empty())
    throw UserError(
        str("--run ", quoted(options.run, 300), ": it has no rollouts; give a run with saver.rollouts=true"));
  simulation.prompt_tokens = std::llround(prompts / static_cast<double>(rows));
  simulation.lengths.seen = std::move(lengths);
  assumed.lengths = str(format_thousands(rows), " responses of ", options.run);
  const double samples =
      static_cast<double>(std::min(settings.rollout.max_concurrent_rollouts,
                                   settings.train_dataset.batch_size * settings.gconfig.n_samples));
  const double generated = median_of("perf/generated_tokens_per_s");
  simulation.rates.pass_seconds = 0;
  simulation.rates.sample_seconds = 1 / generated;
  simulation.rates.prefill_tokens_per_s = 4 * generated;
  simulation.rates.train_tokens_per_s = median_of("perf/unique_tokens_per_s");
  simulation.rates.publish_seconds = median_of("time/publish");
  assumed.rates = str("measured in ", options.run, ": ", format_count(generated), " tokens/s generated by ",
                      samples, " samples at once, ", format_count(simulation.rates.train_tokens_per_s),
                      " tree tokens/s trained, on one device");
}

Assumed assume(const SimulateOptions& options) {
  for (const int64_t devices : options.devices)
    check_at_least("--devices", devices, 2, "a split needs a device on each side");
  if (options.cluster.empty() && options.devices.size() > 1)
    throw UserError("--devices: several numbers need --cluster FILE; give one number");
  if (!options.cluster.empty() && !options.run.empty())
    throw UserError(
        "--cluster: cannot be used with --run, whose rates are those of one device; leave out one of them");
  check_at_least("--steps", options.steps, 1);
  for (const int64_t eta : options.max_staleness) check_at_least("--eta", eta, 0);
  check_at_least("--batch-groups", options.batch_groups, 1);
  check_at_least("--group-size", options.group_size, 1);
  if (options.reward_seconds.size() != 2 || options.reward_seconds[0] < 0 ||
      options.reward_seconds[1] < options.reward_seconds[0])
    throw UserError(
        "--reward-seconds: expected two numbers, the least and the most, as in --reward-seconds 0.1 2");
  Assumed assumed;
  SimulationOptions& simulation = assumed.simulation;
  simulation.controller.batch_groups = options.batch_groups;
  simulation.controller.group_size = options.group_size;
  simulation.prompt_tokens = options.prompt_tokens;
  simulation.lengths = {
      .mean = options.length_mean, .sigma = options.length_sigma, .longest = options.longest, .seen = {}};
  simulation.rates.max_running = options.max_running;
  assumed.lengths =
      str("log-normal, mean ", format_significant(options.length_mean, 4), ", deviation of the logarithm ",
          format_significant(options.length_sigma, 3), ", at most ", format_thousands(options.longest));
  if (!options.run.empty() && options.sparse.is_sparse())
    throw UserError(
        "--sparse-budget: cannot be used with --run, whose rates already include that run's attention; leave "
        "out one of them");
  if (options.run.empty()) plan_rates(options, assumed);
  else read_run(options, assumed);
  simulation.controller.total_steps = options.steps;
  simulation.controller.interruptible = !options.no_interrupt;
  simulation.shares_prompts = !options.no_sharing;
  simulation.rates.reward_min_seconds = options.reward_seconds[0];
  simulation.rates.reward_max_seconds = options.reward_seconds[1];
  return assumed;
}

std::string rounded_percent(double share) {
  return format_significant(100 * share, 2) + "%";
}

// Options of `bough train` for a split with one rank per device. options_of_engines() gives the ranks that
// generate. rank_options() adds the number of all ranks, for data-parallel training.
std::string options_of_engines(const SplitResult& split) {
  return str(split.max_staleness == 0 ? "" : str("rollout.ranks=", split.rollout_devices, " "),
             "rollout.max_head_offpolicyness=", split.max_staleness);
}
std::string rank_options(const SplitResult& split) {
  const bool in_turns = split.max_staleness == 0;
  return str("--ranks ", in_turns ? split.train_devices : split.rollout_devices + split.train_devices, " ",
             options_of_engines(split));
}

std::string table_of(const std::vector<SplitResult>& splits, double synchronous) {
  std::ostringstream out;
  char line[160];
  std::snprintf(line, sizeof line, "%-9s %-9s %4s %10s %9s %8s %8s %10s %8s\n", "generate", "train", "eta",
                "tokens/s", "over sync", "trainer", "engine", "staleness", "largest");
  out << line;
  for (const SplitResult& split : splits) {
    const SimulationResult& result = split.result;
    const std::string over =
        synchronous > 0 ? format_significant(result.tokens_per_second() / synchronous, 3) + "x" : "";
    std::snprintf(line, sizeof line, "%-9lld %-9lld %4lld %10s %9s %8s %8s %10s %8lld\n",
                  static_cast<long long>(split.rollout_devices), static_cast<long long>(split.train_devices),
                  static_cast<long long>(split.max_staleness),
                  format_count(result.tokens_per_second()).c_str(), over.c_str(),
                  rounded_percent(result.trainer_idle).c_str(), rounded_percent(result.engine_idle).c_str(),
                  format_significant(result.staleness_mean, 3).c_str(),
                  static_cast<long long>(result.staleness_max));
    out << line;
  }
  return out.str();
}

// ---- A cluster: several numbers of devices, with the best split of each.

struct ClusterRow {
  int64_t devices;
  std::optional<SplitResult> in_turns, best;  // nullopt: nothing fits
};

Json split_json(const SplitResult& split) {
  return {{"rank_options", rank_options(split)},
          {"rollout_devices", split.rollout_devices},
          {"train_devices", split.train_devices},
          {"max_head_offpolicyness", split.max_staleness},
          {"tokens_per_s", split.result.tokens_per_second()},
          {"seconds", split.result.seconds},
          {"trainer_idle", split.result.trainer_idle},
          {"engine_idle", split.result.engine_idle},
          {"staleness_mean", split.result.staleness_mean},
          {"staleness_max", split.result.staleness_max}};
}

void print_cluster(const SimulateOptions& options, const Assumed& assumed) {
  const auto settings = load_settings<ClusterSettings>(options.cluster, {});
  const DeviceProfile profile = device_profile(options.device, parse_dtype(options.dtype));
  const ClusterRates rates(settings, profile, named_model_shape(options.shape, options.dtype),
                           assumed.simulation);
  std::vector<ClusterRow> rows;
  Json list = Json::array();
  for (const int64_t devices : options.devices) {
    log_info(str("simulating ", devices, " devices"));
    ClusterRow row{devices, {}, {}};
    const auto rates_of = [&](int64_t rollout, int64_t train) {
      return rates.rates(rollout, train, rollout == devices && train == devices);
    };
    const int64_t stride = std::max<int64_t>(1, devices / 16);
    Json splits = Json::array();
    for (SplitResult& split :
         simulate_splits(assumed.simulation, devices, options.max_staleness, rates_of, stride)) {
      const bool in_turns = split.max_staleness == 0;
      Json entry = split_json(split);
      const auto layout = rates.layout(split.rollout_devices, split.train_devices, in_turns);
      entry["layout"] = layout->text();
      // `bough train` cannot run such a split: its engine ranks have one device each, and ranks that hold
      // only a shard of the model do not generate.
      if (layout->devices_per_engine > 1 || (in_turns && layout->replica.devices() > 1))
        entry.erase("rank_options");
      else if (layout->replica.devices() > 1)
        entry["rank_options"] = str("actor.backend=", layout->backend(), " ", options_of_engines(split));
      splits.push_back(std::move(entry));
      std::optional<SplitResult>& place = in_turns ? row.in_turns : row.best;
      if (!place || split.result.tokens_per_second() > place->result.tokens_per_second())
        place = std::move(split);
    }
    list.push_back({{"devices", devices}, {"splits", std::move(splits)}});
    rows.push_back(std::move(row));
  }
  if (options.json) {
    print_json({{"clusters", std::move(list)}, {"lengths", assumed.lengths}, {"rates", assumed.rates}});
    return;
  }
  print_table({{"lengths", assumed.lengths},
               {"rates", assumed.rates},
               {"links", str(settings.nvlink_gb_per_s, " GB/s within a node of ", settings.n_gpus_per_node,
                             ", ", settings.network_gb_per_s, " GB/s per device between nodes")},
               {"batch", str(assumed.simulation.controller.batch_groups, " groups of ",
                             assumed.simulation.controller.group_size)}});
  std::ostringstream out;
  char line[200];
  std::snprintf(line, sizeof line, "\n%7s %-10s %10s   %-16s %4s %10s %9s %8s %8s %8s\n", "devices",
                "in turns", "tokens/s", "best split", "eta", "tokens/s", "speedup", "scaling", "trainer",
                "engine");
  out << line;
  const ClusterRow* first = nullptr;
  for (const ClusterRow& row : rows) {
    const auto layout = [&](const std::optional<SplitResult>& split, bool in_turns) {
      return split ? rates.layout(split->rollout_devices, split->train_devices, in_turns)->text()
                   : "too large";
    };
    const auto rate = [](const std::optional<SplitResult>& split) {
      return split ? format_count(split->result.tokens_per_second()) : std::string("-");
    };
    if (row.best && !first) first = &row;
    const auto per_device = [](const ClusterRow& r) {
      return r.best->result.tokens_per_second() / static_cast<double>(r.devices);
    };
    std::string turns = layout(row.in_turns, true);
    turns = turns.substr(0, turns.find('+'));
    std::snprintf(
        line, sizeof line, "%7lld %-10s %10s   %-16s %4s %10s %9s %8s %8s %8s\n",
        static_cast<long long>(row.devices), turns.c_str(), rate(row.in_turns).c_str(),
        layout(row.best, false).c_str(), row.best ? str(row.best->max_staleness).c_str() : "",
        rate(row.best).c_str(),
        row.best && row.in_turns
            ? (format_significant(
                   row.best->result.tokens_per_second() / row.in_turns->result.tokens_per_second(), 3) +
               "x")
                  .c_str()
            : "",
        row.best ? str(std::llround(100 * per_device(row) / per_device(*first)), "%").c_str() : "",
        row.best ? rounded_percent(row.best->result.trainer_idle).c_str() : "",
        row.best ? rounded_percent(row.best->result.engine_idle).c_str() : "");
    out << line;
  }
  print_text(out.str());
  print_text(
      "\ntokens/s: generated tokens that were trained on\n"
      "in turns (eta 0): all devices generate, then all train\n"
      "split: ENGINES+REPLICAS; dN: N of them, tN: N devices share each layer, pN: N pipeline stages\n"
      "speedup: of the best split over in turns; scaling: tokens/s per device, relative to the first row\n"
      "trainer, engine: share of the time that it waited\n"
      "as a run, if engines have no tN: bough train CONFIG actor.backend=fsdp:REPLICAS rollout.ranks=ENGINES "
      "rollout.max_head_offpolicyness=ETA;\nin turns, without tN: --ranks alone\n");
}

void run_simulate(const SimulateOptions& options) {
  const Assumed assumed = assume(options);
  if (!options.cluster.empty()) return print_cluster(options, assumed);
  const std::vector<SplitResult> splits =
      simulate_splits(assumed.simulation, options.devices.front(), options.max_staleness);
  double synchronous = 0;
  const SplitResult* best = nullptr;
  std::vector<SplitResult> shown;
  for (const int64_t eta : options.max_staleness) {
    const SplitResult* best_of_eta = nullptr;
    for (const SplitResult& split : splits)
      if (split.max_staleness == eta &&
          (!best_of_eta || split.result.tokens_per_second() > best_of_eta->result.tokens_per_second()))
        best_of_eta = &split;
    if (eta == 0) synchronous = best_of_eta->result.tokens_per_second();
    if (!best || best_of_eta->result.tokens_per_second() > best->result.tokens_per_second())
      best = best_of_eta;
  }
  if (options.json) {
    Json list = Json::array();
    for (const SplitResult& split : splits) list.push_back(split_json(split));
    print_json({{"splits", std::move(list)},
                {"lengths", assumed.lengths},
                {"rates", assumed.rates},
                {"iteration", assumed.iteration}});
    return;
  }
  std::vector<std::pair<std::string, std::string>> rows = {
      {"lengths", assumed.lengths},
      {"rates", assumed.rates},
      {"batch", str(assumed.simulation.controller.batch_groups, " groups of ",
                    assumed.simulation.controller.group_size)}};
  if (!assumed.iteration.empty()) rows.emplace_back("on one device", assumed.iteration);
  print_table(rows);
  print_text("\n" + table_of(splits, synchronous));
  print_text(str(
      "\ntokens/s: generated tokens that were trained on; trainer, engine: share of the time that it waited; "
      "staleness: in versions, of a group\nbest: ",
      best->max_staleness == 0 ? str("all ", options.devices.front(), " devices generate, then train")
                               : str(best->rollout_devices, " devices generate, ", best->train_devices,
                                     " train, rollout.max_head_offpolicyness ", best->max_staleness),
      synchronous > 0 ? str(", ", format_significant(best->result.tokens_per_second() / synchronous, 3),
                            " times as fast as the synchronous run")
                      : "",
      "\nas a run: bough train CONFIG ", rank_options(*best), "\n"));
}

}  // namespace

void add_simulate_command(CommandLine& line) {
  auto options = std::make_shared<SimulateOptions>();
  Command command = line.add("simulate", "Simulates how fast a run would be on every split of a cluster",
                             [options] { run_simulate(*options); });
  command
      .add_option("--devices", options->devices,
                  "Devices of the cluster, all of one kind; with --cluster one number or several")
      .type_name("N");
  command
      .add_option("--cluster", options->cluster,
                  "YAML file of the cluster's nodes and links; adds link times and memory limits")
      .type_name("FILE");
  command.add_option("--eta", options->max_staleness,
                     "rollout.max_head_offpolicyness, one or several; 0: synchronous");
  command
      .add_option("--run", options->run,
                  "Folder of a run, which gives the batch, the lengths, and the rates of one device")
      .type_name("RUN");
  command.add_option("--shape", options->shape, "Model: qwen3-0.6b ... qwen3-14b, small");
  command.add_option("--device", options->device, "h100 | h200 | a100 | cpu (measured)");
  command.add_option("--dtype", options->dtype, "fp32 | bf16");
  command.add_option("--efficiency", options->efficiency, "Share of the device's peak rates that is reached");
  command.add_option("--memory-bandwidth", options->memory_bandwidth,
                     "Memory bandwidth in GB/s; 0: that of the data sheet");
  command.add_option("--batch-groups", options->batch_groups, "Groups per batch");
  command.add_option("--group-size", options->group_size, "Samples per group");
  command.add_option("--prompt-tokens", options->prompt_tokens, "Tokens per prompt");
  command.add_option("--length", options->length_mean, "Mean tokens per response");
  command.add_option("--sigma", options->length_sigma,
                     "Standard deviation of the logarithm of lengths; 1.4 is heavy-tailed");
  command.add_option("--longest", options->longest, "Most tokens per response");
  add_sparse_options(command, options->sparse);
  command.add_option("--max-running", options->max_running, "Samples that a device generates at once");
  command.add_option("--reward-seconds", options->reward_seconds, "Least and most seconds of a reward")
      .expected(2);
  command.add_flag("--no-sharing", options->no_sharing,
                   "Training computes the prompt again for each sample of a group");
  command.add_flag("--no-interrupt", options->no_interrupt, "Running samples finish with the old weights");
  command.add_option("--steps", options->steps, "Steps to simulate");
  add_json_flag(command, options->json);
}

}  // namespace bough
