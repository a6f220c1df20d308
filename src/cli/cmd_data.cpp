// `bough data TASK`: writes problems of a built-in task, or demonstrations of them, as a JSON Lines file.
#include <algorithm>
#include <map>

#include "base/error.h"
#include "base/file.h"
#include "base/format.h"
#include "base/settings.h"
#include "cli/command.h"
#include "env/calculator.h"
#include "env/guess.h"
#include "env/sums.h"
#include "env/trace.h"

namespace bough {

namespace {

struct DataOptions {
  std::string task;
  std::string out;
  int64_t n = 1000;
  std::string split = "train";
  int64_t seed = 1;
  bool traces = false;
  // The given settings of the task, by key.
  std::map<std::string, std::optional<int64_t>> integers;
  std::map<std::string, std::optional<double>> numbers;
  std::vector<std::string> operations;
  bool json = false;
};

constexpr int64_t kMostProblems = 10'000'000;  // about a gigabyte; a larger number is a typing error

Split split_of(const std::string& name) {
  if (name == "train") return Split::train;
  if (name == "test") return Split::test;
  if (name == "example") return Split::example;
  throw UserError(str("--split: got ", quoted(name), ", expected train, test or example"));
}

// The task's settings with the given values. The settings check their own bounds, with their own messages.
template <class Settings>
Settings settings_of(const DataOptions& options) {
  Settings settings;
  std::map<std::string, Json> given;
  for (const auto& [key, value] : options.integers)
    if (value) given[key] = *value;
  for (const auto& [key, value] : options.numbers)
    if (value) given[key] = *value;
  if (!options.operations.empty()) given["operations"] = options.operations;
  SettingField root = describe_settings(settings);
  for (const SettingField& field : root.fields) {
    const auto found = given.find(field.key);
    if (found == given.end()) continue;
    field.set(found->second);
    given.erase(found);
  }
  if (!given.empty()) {
    std::string option = given.begin()->first;
    std::replace(option.begin(), option.end(), '_', '-');
    throw UserError(str("--", option, " is not an option of the task ", options.task));
  }
  internal::check_settings(root, "command line");
  return settings;
}

template <class Settings>
std::vector<Json> records_of(const DataOptions& options,
                             std::vector<Json> (*problems)(int64_t, Split, uint64_t, const Settings&),
                             std::vector<Json> (*traces)(int64_t, Split, uint64_t, const Settings&)) {
  return (options.traces ? traces : problems)(options.n, split_of(options.split),
                                              static_cast<uint64_t>(options.seed),
                                              settings_of<Settings>(options));
}

void run_data(const DataOptions& options) {
  check_at_least("-n", options.n, 1);
  if (options.n > kMostProblems)
    throw UserError(str("-n: got ", options.n, ", expected at most ", kMostProblems));
  check_at_least("--seed", options.seed, 0);
  check_output_file("--out", options.out);
  auto count = options.n;
  const bool are_worked_out = options.task == "sums" || options.task == "trace";
  if (are_worked_out && options.traces)
    throw UserError(str("--traces: the problems of ", options.task,
                        " already have worked answers; leave it out, and give the file to `bough sft`"));
  if (options.task == "sums") {
    write_sums_dataset(options.out, options.n, split_of(options.split), static_cast<uint64_t>(options.seed),
                       settings_of<SumsSettings>(options));
  } else {
    std::vector<Json> records;
    if (options.task == "calculator")
      records = records_of(options, make_calculator_problems, make_calculator_traces);
    else if (options.task == "guess") records = records_of(options, make_guess_problems, make_guess_traces);
    else if (options.task == "trace")
      records = make_trace_problems(options.n, split_of(options.split), static_cast<uint64_t>(options.seed),
                                    settings_of<TraceSettings>(options));
    else
      throw UserError(str("TASK: got ", quoted(options.task), ", expected sums, trace, calculator or guess"));
    std::string lines;
    for (const Json& record : records) lines += dump_line(record) + "\n";
    write_file_atomically(options.out, lines);
    count = std::ssize(records);
  }
  const char* what = options.traces ? "turns" : "problems";
  if (options.json) print_json({{"file", options.out}, {what, count}});
  else print_table({{"file", options.out}, {what, format_thousands(count)}});
}

}  // namespace

void add_data_command(CommandLine& line) {
  auto options = std::make_shared<DataOptions>();
  Command command = line.add("data",
                             "Writes problems of a built-in task (sums, trace, calculator, guess) as JSON "
                             "Lines; splits are disjoint",
                             [options] { run_data(*options); });
  command.add_option("task", options->task, "sums | trace | calculator | guess").required().type_name("TASK");
  command.add_option("--out", options->out, "File to write").required().type_name("FILE");
  command.add_option("-n,--count", options->n, "Number of problems");
  command.add_option("--split", options->split, "train | test | example");
  command.add_option("--seed", options->seed, "Seed of the problems");
  command.add_flag("--traces", options->traces,
                   "Write demonstrations for `bough sft` instead, one turn per line (calculator, guess)");
  const auto integer = [&](const char* name, const char* key, const char* help) {
    command.add_option(name, options->integers[key], help);
  };
  integer("--min-operand", "min_operand", "Smallest number in a question (sums, calculator)");
  integer("--max-operand", "max_operand", "Largest number in a question (sums, calculator)");
  integer("--min-steps", "min_steps", "Fewest operations of a problem (sums, trace, calculator)");
  integer("--max-steps", "max_steps", "Most operations of a problem (sums, trace, calculator)");
  integer("--registers", "registers", "Registers per program (trace)");
  integer("--max-first", "max_first", "The first step has one of the first N labels (trace)");
  command.add_option("--mixing", options->numbers["mixing"],
                     "Share of the steps that add another register (trace)");
  integer("--max-low", "max_low", "Largest beginning of a range; the smallest is 1 (guess)");
  integer("--width", "width", "Numbers in a range (guess)");
  integer("--guesses", "guesses", "Guesses per game (guess)");
  command.add_option("--slips", options->numbers["slips"],
                     "Share of imperfect demonstrations: answers with a slightly wrong result (sums), steps "
                     "with a wrong digit (trace), turns with a wrong number (calculator), guesses that "
                     "ignore earlier answers (guess)");
  command.add_option("--operations", options->operations, "add | subtract | multiply; may be repeated (sums)")
      .one_value_each_time();
  add_json_flag(command, options->json);
}

}  // namespace bough
