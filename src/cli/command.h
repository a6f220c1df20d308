// Code that all commands share: registration, output, exit codes.
//
// A command is one cmd_x.cpp with one function `add_x_command(CommandLine&)`, declared below and called in
// main.cpp. This function registers the command's options, which live as long as the command line, and the
// function that runs the command:
//
//   void add_plan_command(CommandLine& line) {
//     auto options = std::make_shared<PlanOptions>();
//     Command command = line.add("plan", "Shows the plan of a rollout file", [options] { run(*options); });
//     command.add_option("--rollouts", options->rollouts, "...").required().type_name("FILE");
//     add_json_flag(command, options->json);
//   }
//
// A command returns normally (exit code 0) or throws an error of base/error.h. A command never exits and
// never prints errors. Results go to stdout through print_*(), everything else to stderr through base/log.h.
// With --json, the line of print_json() is the last line of stdout.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace bough {

enum ExitCode : int {
  kExitDone = 0,
  kExitFindings = 1,  // `bough doctor`: something that a run needs is missing
  kExitBadInput = 2,  // bad use or bad input: UserError, and errors of CLI11
  kExitFailure = 3,   // at run time: IoError, InternalError, out of memory, libtorch's errors
  kExitInterrupted = 130,
};

// An option of a command. Each function returns the option itself.
class CommandOption {
 public:
  explicit CommandOption(CLI::Option* option) : option_(option) {}

  CommandOption& required();
  CommandOption& type_name(const std::string& name);  // for --help: FILE, N
  CommandOption& expected(int count);                 // words after the name
  CommandOption& one_value_each_time();               // lists: the name is repeated for each value
  CommandOption& delimiter(char separator);           // lists: one word may hold several values
  CommandOption& range(int64_t low, int64_t high);

 private:
  CLI::Option* option_;
};

// A command's place on the command line. It hides CLI11, so that only command.cpp compiles CLI11's templates.
class Command {
 public:
  explicit Command(CLI::App* app) : app_(app) {}

  void hide();  // leaves the command out of --help

  // T is a type for which command.cpp instantiates the function. Parsing writes `value`. The value before
  // parsing is the default that --help shows.
  template <typename T>
  CommandOption add_option(const std::string& names, T& value, const std::string& help);
  CommandOption add_option_function(const std::string& names,
                                    std::function<void(const std::vector<std::string>&)> take,
                                    const std::string& help);
  CommandOption add_flag(const std::string& names, bool& value, const std::string& help);
  // `take` gets the number of times that the flag was given, negative for a name with `!` before it.
  CommandOption add_flag_function(const std::string& names, std::function<void(int64_t)> take,
                                  const std::string& help);
  // The options that the parsed command line gives, by their first names.
  std::vector<std::string> given_options() const;

 private:
  friend class CommandLine;
  CLI::App* app_;
};

class CommandLine {
 public:
  CommandLine();
  ~CommandLine();

  // `run` is called after the whole line was parsed. A parent's own `run` is not called if a subcommand was
  // given.
  Command add(const std::string& name, const std::string& description, std::function<void()> run);
  Command add(Command& parent, const std::string& name, const std::string& description,
              std::function<void()> run);

  // Parses the command line and runs the command. Never throws: maps an exception to an ExitCode and prints a
  // message of a few lines to stderr.
  int run(int argc, const char* const* argv);

  // The exit code of a command that returns normally, instead of kExitDone. Called by the command.
  void set_exit_code(ExitCode code) { exit_code_ = code; }

 private:
  void parse(int argc, const char* const* argv);

  std::unique_ptr<CLI::App> app_;
  std::string chosen_ = "bough";  // for messages: "bough step"
  std::function<void()> action_;
  ExitCode exit_code_ = kExitDone;
};

std::string program_version();  // "0.1.0"

void add_doctor_command(CommandLine& line);
void add_init_command(CommandLine& line);
void add_import_command(CommandLine& line);
void add_merge_command(CommandLine& line);
void add_upcycle_command(CommandLine& line);
void add_step_command(CommandLine& line);
void add_plan_command(CommandLine& line);
void add_rollout_command(CommandLine& line);
void add_train_command(CommandLine& line);
void add_sft_command(CommandLine& line);
void add_eval_command(CommandLine& line);
void add_serve_command(CommandLine& line);
void add_data_command(CommandLine& line);
void add_bench_command(CommandLine& line);
void add_bench_rollout_command(CommandLine& line, Command& bench);
void add_bench_serve_command(CommandLine& line, Command& bench);
void add_report_command(CommandLine& line);
void add_view_command(CommandLine& line);
void add_watch_command(CommandLine& line);
void add_simulate_command(CommandLine& line);
void add_threads_command(CommandLine& line);
void add_ctl_command(CommandLine& line);
void add_trace_command(CommandLine& line);
void add_self_test_command(CommandLine& line);

void add_json_flag(Command& command, bool& json);

// Prints to stdout and flushes. Throws IoError if stdout is full or closed. If the reader of a pipe has gone,
// the process ends by SIGPIPE.
void print_text(std::string_view text);
void print_json(const Json& object);  // one line
// Lines "name   value", with names padded to the same width.
std::string table_text(const std::vector<std::pair<std::string, std::string>>& rows);
void print_table(const std::vector<std::pair<std::string, std::string>>& rows);

// Throws UserError that names the option unless value >= low.
void check_at_least(const std::string& option, int64_t value, int64_t low, const std::string& remedy = "");
void check_at_least(const std::string& option, double value, double low, const std::string& remedy = "");

// Throws UserError unless the folder of `path` exists and `path` itself is no folder. Call it before long
// work, so that its result can be written.
void check_output_file(const std::string& option, const std::string& path);

}  // namespace bough
