// `bough data sums`: problems of the built-in task as a JSON Lines file.
#include "base/error.h"
#include "base/format.h"
#include "cli/command.h"
#include "env/sums.h"

namespace bough {

namespace {

struct DataOptions {
  std::string task;
  std::string out;
  int64_t n = 1000;
  std::string split = "train";
  int64_t seed = 1;
  SumsSettings sums;
  bool json = false;
};

constexpr int64_t kMostProblems = 10'000'000;  // a gigabyte; more is a slip of the keyboard

Split split_of(const std::string& name) {
  if (name == "train") return Split::train;
  if (name == "test") return Split::test;
  if (name == "example") return Split::example;
  throw UserError(str("--split: got ", quoted(name), ", expected train, test or example"));
}

void run_data(DataOptions options) {
  if (options.task != "sums") throw UserError(str("TASK: got ", quoted(options.task), ", expected sums"));
  check_at_least("-n", options.n, 1);
  if (options.n > kMostProblems)
    throw UserError(str("-n: got ", options.n, ", expected at most ", kMostProblems));
  check_at_least("--seed", options.seed, 0);
  check_output_file("--out", options.out);
  // The settings' own bounds, with their messages.
  internal::check_settings(describe_settings(options.sums), "command line");
  write_sums_dataset(options.out, options.n, split_of(options.split), static_cast<uint64_t>(options.seed),
                     options.sums);
  if (options.json) print_json({{"file", options.out}, {"problems", options.n}});
  else print_table({{"file", options.out}, {"problems", format_thousands(options.n)}});
}

}  // namespace

void add_data_command(CommandLine& line) {
  auto options = std::make_shared<DataOptions>();
  CLI::App& command =
      line.add("data", "Problems of a built-in task (sums) as JSON Lines; splits are disjoint",
               [options] { run_data(*options); });
  command.add_option("task", options->task, "sums")->required()->type_name("TASK");
  command.add_option("--out", options->out, "File to write")->required()->type_name("FILE");
  command.add_option("-n,--count", options->n, "Problems");
  command.add_option("--split", options->split, "train | test | example");
  command.add_option("--seed", options->seed, "Problems are a function of it");
  command.add_option("--min-operand", options->sums.min_operand, "Smallest number in a question");
  command.add_option("--max-operand", options->sums.max_operand, "Largest number in a question");
  command.add_option("--slips", options->sums.slips,
                     "Share of worked answers whose result is a little off: imperfect demonstrations");
  command.add_option("--min-steps", options->sums.min_steps, "Fewest operations of a problem");
  command.add_option("--max-steps", options->sums.max_steps, "Most operations of a problem");
  command
      .add_option("--operations", options->sums.operations, "add | subtract | multiply; may be given often")
      ->type_size(1)
      ->allow_extra_args(false);
  add_json_flag(command, options->json);
}

}  // namespace bough
