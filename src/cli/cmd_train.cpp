// `bough train`: reinforcement learning, the whole loop.
#include <csignal>
#include <cstdio>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "base/format.h"
#include "base/log.h"
#include "base/signals.h"
#include "cli/command.h"
#include "cli/launch_ranks.h"
#include "cli/served_model.h"
#include "cli/torch_options.h"
#include "net/http_client.h"
#include "report/display.h"
#include "report/run_control.h"
#include "run/engine_process.h"
#include "run/idle_settings.h"
#include "run/run.h"
#include "run/run_components.h"
#include "run/run_folder.h"
#include "serve/agent_server.h"

namespace bough {

namespace {

struct TrainOptions {
  std::string config;
  std::vector<std::string> overrides;
  bool list_settings = false;
  RanksOptions ranks;
  bool json = false;
};

std::string accuracy_percent(double fraction) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.1f%%", 100 * fraction);
  return buffer;
}

std::string describe(const Accuracy& accuracy) {
  return str(accuracy_percent(accuracy.avg_at_k), "  (95%: ", accuracy_percent(accuracy.low), " to ",
             accuracy_percent(accuracy.high), ", step ", accuracy.step, ")");
}

void print_summary(const RunSummary& summary) {
  std::vector<std::pair<std::string, std::string>> rows;
  if (summary.before) rows.emplace_back("accuracy before", describe(*summary.before));
  if (summary.after && summary.after->step > 0) rows.emplace_back("accuracy after", describe(*summary.after));
  if (summary.after_sparse)
    rows.emplace_back("accuracy with sparse attention", describe(*summary.after_sparse));
  rows.emplace_back("steps", format_thousands(summary.steps));
  if (summary.compression > 0) {
    rows.emplace_back("compression", str(format_significant(summary.compression, 3),
                                         "x: tokens of a batch / tokens computed"));
  }
  if (const auto& comparison = summary.comparison; comparison && comparison->seconds > 0) {
    rows.emplace_back("gradient of a batch",
                      str(format_duration(comparison->seconds), " with the tree, ",
                          format_duration(comparison->dense_seconds),
                          " dense: ", format_significant(comparison->dense_seconds / comparison->seconds, 3),
                          "x (median of ", comparison->num_batches,
                          comparison->num_batches == 1 ? " batch)" : " batches)"));
  }
  rows.emplace_back("model", summary.model);
  rows.emplace_back("report", summary.report);
  print_table(rows);
}

// External agents are answered by the trained model. Their sessions are the run's samples.
std::unique_ptr<ExternalRollouts> serve_agents(const RunSettings& run, Engine& engine, bool json) {
  ServeSettings settings;
  settings.host = run.serve.host;
  settings.port = *run.serve.port;
  settings.served_model_name = {std::filesystem::weakly_canonical(run.model.path).filename().string(), "*"};
  settings.tool_call_parser = run.serve.tool_call_parser;
  settings.reasoning_parser = run.serve.reasoning_parser;
  settings.seed = run.seed;
  settings.log_requests = false;
  // Inference servers return no log-probabilities other than processed ones.
  if (run.rollout.has_servers()) settings.logprobs_mode = "processed_logprobs";
  settings.gconfig = run.gconfig;
  settings.gconfig.n_samples = 1;
  settings.gconfig.top_logprobs = 0;
  const std::string key = load_api_key("BOUGH_API_KEY", "api_key_file", run.serve.api_key_file);
  const AgentSessionsOptions options{.group_size = run.gconfig.n_samples,
                                     .min_group = run.rollout.min_group,
                                     .lease_seconds = run.serve.lease_seconds,
                                     .scored_elsewhere = !run.reward.empty()};
  raise_descriptor_limit(settings.http.max_connections);
  auto server =
      std::make_unique<AgentServer>(engine, load_served_model(run.model.path, settings), key, options);
  // The folder is the user's alone, so the key may stand there.
  write_file_atomically(control_file(run_folder_of(run), kModelServer),
                        dump_line({{"url", server->url()}, {"api_key", key}}) + "\n");
  if (json) print_json({{"url", server->url()}, {"folder", run_folder_of(run).string()}});
  else print_text("agents: " + server->url() + "\n");
  log_info(str("agents start sessions at ", server->url(), key.empty() ? ", without an API key" : ""));
  return server;
}

// Returns the warning of the self-test of the GPU's kernels; "" if there is none.
std::string set_up(const RunSettings& settings, const std::string& device) {
  TorchOptions torch{.dtype = settings.dtype, .threads = {}, .device = device};
  if (settings.threads > 0) torch.threads = settings.threads;
  std::string warning;
  set_up_torch(torch, [&](const std::string& text) { warning = text; });
  return warning;
}

// The command of the process that holds the engine of a rank that only generates. The rank starts it.
constexpr const char* kEngineCommand = "engine-process";

void run_engine() {
  set_log_level(LogLevel::kSilent);  // the process that started this one reports errors
  run_engine_process([](const Json& job, const ServeEngine& serve) {
    const RunSettings settings = settings_of_job(job);
    set_up(settings, settings.device);
    EngineParts parts(settings);
    serve(*parts.engine, *parts.model, takes_weights_in_place(settings, *parts.model),
          what_changes(settings));
  });
}

void run_train(const TrainOptions& options) {
  if (options.list_settings) {
    print_text(settings_help<RunSettings>());
    return;
  }
  if (options.config.empty())
    throw UserError("CONFIG is missing: a YAML file of settings; --settings lists them");
  const RunSettings settings = load_settings<RunSettings>(options.config, options.overrides);
  std::optional<int64_t> wanted = settings.actor.num_ranks();
  if (wanted) *wanted += settings.rollout.ranks;
  RanksOptions of_ranks = options.ranks;
  if (!of_ranks.ranks) of_ranks.ranks = wanted;
  if (wanted && *wanted != *of_ranks.ranks)
    throw UserError(str("--ranks: got ", *of_ranks.ranks, ", but actor.backend=", settings.actor.backend,
                        " and rollout.ranks=", settings.rollout.ranks, " need ", *wanted,
                        " ranks; leave one of them out"));
  std::unique_ptr<Communicator> ranks = enter_ranks(of_ranks, settings.device);
  // For a rank that only generates, the device is used by its engine process.
  RunOptions run;
  run.warnings.push_back(set_up(settings, only_generates(settings, *ranks) ? "cpu" : settings.device));
  run.ranks = ranks.get();
  run.engine_command = {std::filesystem::read_symlink("/proc/self/exe").string(), kEngineCommand};
  if (ranks->rank() > 0) {  // ranks other than 0 would log the same, and end when rank 0 does
    set_log_level(LogLevel::kSilent);
    // The launcher sends these signals to all ranks. Rank 0 handles them and makes the other ranks end.
    for (const int signal : {SIGINT, SIGUSR1}) std::signal(signal, SIG_IGN);
    if (!is_mpi_rank()) std::signal(SIGTERM, SIG_IGN);  // torchrun ends ranks by SIGTERM
    run_training(settings, run);
    return;
  }
  const StopFlag stop;
  print_changed_settings(settings_rows(settings), (run_folder_of(settings) / "config.yaml").string());
  run.warnings.push_back(
      describe(idle_settings(settings, given_settings<RunSettings>(options.config, options.overrides))));
  run.stop = [&stop] { return stop.requested(); };
  if (options.json && !settings.serve.port) print_json({{"folder", run_folder_of(settings).string()}});
  if (settings.serve.port)
    run.external = [&options](const RunSettings& served, Engine& engine) {
      return serve_agents(served, engine, options.json);
    };
  bool have_ended = false;
  run.on_ranks_ended = [&have_ended] { have_ended = true; };
  RunSummary summary;
  try {
    summary = run_training(settings, run);
  } catch (const Interrupted&) {
    if (have_ended) ranks.reset();  // all ranks end in order; otherwise the launcher must end them
    throw;
  }
  if (options.json) print_json(to_json(summary));
  else print_summary(summary);
}

}  // namespace

void add_train_command(CommandLine& line) {
  auto options = std::make_shared<TrainOptions>();
  Command command =
      line.add("train", "Reinforcement learning: samples, rewards, updates; resumes where it stopped",
               [options] { run_train(*options); });
  command.add_option("config", options->config, "YAML file of settings").type_name("CONFIG");
  command
      .add_option("overrides", options->overrides, "Settings that override the file: actor.optimizer.lr=1e-4")
      .type_name("key=value");
  command.add_flag("--settings", options->list_settings, "List every setting with its default, and exit");
  line.add(kEngineCommand, "The engine of a rank that only generates: `train` starts it", run_engine).hide();
  add_ranks_options(command, options->ranks);
  add_max_restarts_option(command, options->ranks);
  add_json_flag(command, options->json);
}

}  // namespace bough
