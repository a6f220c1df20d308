// bough trace: the conversations of a run, as its page shows them.
#include <algorithm>
#include <filesystem>
#include <functional>

#include "base/error.h"
#include "cli/command.h"
#include "report/html_text.h"
#include "report/run_follower.h"
#include "run/run_view.h"
#include "run/trace_store.h"

namespace bough {

namespace {

constexpr int64_t kMostListed = 20;

struct TraceOptions {
  std::string run, id;
  int64_t step = -1, worst = 0, best = 0, longest = 0;
  bool failed = false, evaluation = false, json = false;
};

int64_t given_filters(const TraceOptions& options) {
  return (options.worst > 0) + (options.best > 0) + (options.longest > 0) + options.failed +
         !options.id.empty();
}

// The conversations to show, and how many there are.
std::pair<std::vector<TraceRecord>, int64_t> choose_traces(const TraceOptions& options,
                                                           const std::filesystem::path& folder) {
  std::vector<int64_t> steps =
      options.evaluation ? kEvaluationFiles.numbers(folder) : list_traced_steps(folder);
  if (options.step >= 0) {
    steps = {options.step};
  } else if ((options.evaluation || given_filters(options) == 0) && !steps.empty()) {
    steps = {steps.back()};
  }
  std::vector<TraceRecord> records;
  if (!options.evaluation) records = list_traces(folder, steps);
  else if (!steps.empty()) records = read_traces(folder, steps.back(), /*evaluation=*/true);
  if (options.failed)
    std::erase_if(records, [](const TraceRecord& one) { return !one.has_failed && !one.is_dropped; });
  if (options.worst + options.best > 0)
    std::erase_if(records, [](const TraceRecord& one) { return !one.reward; });
  // Equal ones stay in their order.
  const auto keep_first = [&](int64_t most, auto order, auto key) {
    if (most > 0) std::ranges::stable_sort(records, order, key);
    if (most > 0 && std::ssize(records) > most) records.resize(static_cast<size_t>(most));
  };
  keep_first(options.worst, std::less{}, &TraceRecord::reward);
  keep_first(options.best, std::greater{}, &TraceRecord::reward);
  keep_first(options.longest, std::greater{}, &TraceRecord::tokens);
  const int64_t count = std::ssize(records);
  if (count > kMostListed && options.worst + options.best + options.longest == 0)
    records.erase(records.begin(), records.end() - kMostListed);  // the newest are last
  return {std::move(records), count};
}

void show_traces(const TraceOptions& options) {
  const std::filesystem::path folder = view_of_run(options.run).folder;  // checks that it is a run
  if (given_filters(options) > 1)
    throw UserError("give one of --worst, --best, --longest, --failed and --id");
  std::vector<TraceRecord> records;
  int64_t count = 1;
  if (options.id.empty()) std::tie(records, count) = choose_traces(options, folder);
  else records = {parse_trace_id(options.id)};
  Json list = Json::array();
  std::optional<StepGroups> groups;
  for (int64_t step = -1; TraceRecord record : records) {
    if (record.step != step) groups.emplace(folder, step = record.step);
    const std::vector<Trajectory> rows = rows_of(*groups, record);
    if (options.json) list.push_back(trace_json(record, rows));
    else print_text(without_controls(trace_text(record, rows), "\n\t"));
  }
  if (options.json) return print_json({{"conversations", std::move(list)}, {"count", count}});
  if (count > std::ssize(records)) print_text(str(records.size(), " of ", count, " conversations\n"));
  if (count == 0) print_text("no such conversations\n");
}

}  // namespace

void add_trace_command(CommandLine& line) {
  auto options = std::make_shared<TraceOptions>();
  Command command =
      line.add("trace", "Prints conversations of a run: the newest, or the best, worst, longest, failed",
               [options] { show_traces(*options); });
  command.add_option("run", options->run, "The run's folder").required().type_name("RUN");
  command.add_option("--step", options->step, "Only the conversations of this step").range(0, 1'000'000'000);
  command.add_option("--worst", options->worst, "Those of the lowest rewards")
      .type_name("K")
      .range(1, 10'000);
  command.add_option("--best", options->best, "Those of the highest rewards").type_name("K").range(1, 10'000);
  command.add_option("--longest", options->longest, "Those of the most sampled tokens")
      .type_name("K")
      .range(1, 10'000);
  command.add_flag("--failed", options->failed, "Those that failed or were dropped, at most 20");
  command.add_flag("--evaluation", options->evaluation,
                   "Of the validation set instead: the last evaluation, or the one after --step");
  command.add_option("--id", options->id, "One conversation by its id, such as 12.3.2").type_name("ID");
  add_json_flag(command, options->json);
}

}  // namespace bough
