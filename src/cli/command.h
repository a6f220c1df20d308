// What every command shares: how it is registered, how it prints, how it ends.
//
// A command is one cmd_x.cpp with one function `add_x_command(CommandLine&)`, declared below and called in
// main.cpp. It registers options that live as long as the command line, and what runs:
//
//   void add_plan_command(CommandLine& line) {
//     auto options = std::make_shared<PlanOptions>();
//     Command command = line.add("plan", "what a rollout file shares", [options] { run(*options); });
//     command.add_option("--rollouts", options->rollouts, "...").required().type_name("FILE");
//     add_json_flag(command, options->json);
//   }
//
// A command returns normally (exit code 0) or throws what base/error.h lists; it never exits or prints
// errors. Results go to stdout through print_*(), everything else to stderr through base's log. With --json
// the one line of print_json() is the last of stdout.
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
  kExitBadInput = 2,  // bad use or bad input: UserError, and whatever CLI11 refuses
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
  CommandOption& one_value_each_time();               // of a list: the name is repeated for each value
  CommandOption& delimiter(char separator);           // of a list: one word may hold several values
  CommandOption& range(int64_t low, int64_t high);

 private:
  CLI::Option* option_;
};

// A command's place on the command line. It hides CLI11, so that only command.cpp compiles CLI11's templates.
class Command {
 public:
  explicit Command(CLI::App* app) : app_(app) {}

  void hide();  // leaves the command out of --help

  // T is a type for which command.cpp instantiates the function. Parsing writes `value`. What it holds before
  // is the default that --help shows.
  template <typename T>
  CommandOption add_option(const std::string& names, T& value, const std::string& help);
  CommandOption add_option_function(const std::string& names,
                                    std::function<void(const std::vector<std::string>&)> take,
                                    const std::string& help);
  CommandOption add_flag(const std::string& names, bool& value, const std::string& help);
  // `take` gets how often the flag was given, negative for a name behind `!`.
  CommandOption add_flag_function(const std::string& names, std::function<void(int64_t)> take,
                                  const std::string& help);

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

  // Parses, runs, maps what was thrown to an ExitCode with a message of a few lines on stderr. Never throws.
  int run(int argc, const char* const* argv);

 private:
  void parse(int argc, const char* const* argv);

  std::unique_ptr<CLI::App> app_;
  std::string chosen_ = "bough";  // for messages: "bough step"
  std::function<void()> action_;
};

void add_init_command(CommandLine& line);
void add_import_command(CommandLine& line);
void add_merge_command(CommandLine& line);
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
void add_simulate_command(CommandLine& line);
void add_threads_command(CommandLine& line);

void add_json_flag(Command& command, bool& json);

// Prints to stdout at once. IoError where stdout is full or closed; a reader that went away (SIGPIPE) ends
// the process as that signal does.
void print_text(std::string_view text);
void print_json(const Json& object);  // one line
// "name   value" lines, names padded to one width.
void print_table(const std::vector<std::pair<std::string, std::string>>& rows);

// UserError naming the option unless value >= low.
void check_at_least(const std::string& option, int64_t value, int64_t low, const std::string& remedy = "");
void check_at_least(const std::string& option, double value, double low, const std::string& remedy = "");

// UserError unless the folder that `path` is to be written into exists and `path` is no folder: found before
// the work whose result would be lost.
void check_output_file(const std::string& option, const std::string& path);

}  // namespace bough
