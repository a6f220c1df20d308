#include "cli/command.h"

#include <c10/util/Exception.h>
#include <unistd.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <new>
#include <optional>

#include "base/error.h"
#include "base/format.h"
#include "base/log.h"
#include "cli/device_errors.h"
#include "cli/launch_ranks.h"

namespace bough {

namespace {

// A message may contain input of any length (a path, a number). Only a few lines are shown.
constexpr size_t kMaxMessage = 1500;

std::string bounded(std::string message) {
  if (message.size() <= kMaxMessage) return message;
  size_t end = kMaxMessage;
  while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xC0) == 0x80) --end;
  return message.substr(0, end) + "…";
}

std::string nearest_of(const std::string& name, const std::vector<std::string>& candidates) {
  std::vector<const char*> pointers;
  for (const auto& candidate : candidates) pointers.push_back(candidate.c_str());
  return nearest(name, pointers.data(), pointers.data() + pointers.size());
}

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(command->get_name());
  return names;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

std::vector<std::string> option_names(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options())
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

// The error text for arguments that CLI11 could not place: an unknown flag, or a word too many.
std::string describe_extras(const CLI::App& command, const std::vector<std::string>& extras) {
  const std::string& first = extras.front();
  const std::string name = first.substr(0, first.find('='));
  if (name.size() < 2 || name[0] != '-') return str("unexpected argument ", quoted(first));
  const std::string near = nearest_of(name, option_names(command));
  return str("unknown option ", quoted(name), near.empty() ? "" : str("; did you mean ", near, "?"));
}

// The innermost command that was parsed, for example `bench step`.
const CLI::App& deepest(const CLI::App& app) {
  const auto parsed = app.get_subcommands();
  return parsed.empty() ? app : deepest(*parsed.back());
}

std::string full_name(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  return parent ? full_name(*parent) + " " + command.get_name() : command.get_name();
}

}  // namespace

CommandOption& CommandOption::required() {
  option_->required();
  return *this;
}

CommandOption& CommandOption::type_name(const std::string& name) {
  option_->type_name(name);
  return *this;
}

CommandOption& CommandOption::expected(int count) {
  option_->expected(count);
  return *this;
}

CommandOption& CommandOption::one_value_each_time() {
  option_->type_size(1)->allow_extra_args(false);
  return *this;
}

CommandOption& CommandOption::delimiter(char separator) {
  option_->delimiter(separator)->allow_extra_args(false);
  return *this;
}

CommandOption& CommandOption::range(int64_t low, int64_t high) {
  option_->check(CLI::Range(low, high));
  return *this;
}

void Command::hide() {
  app_->group("");
}

template <typename T>
CommandOption Command::add_option(const std::string& names, T& value, const std::string& help) {
  return CommandOption(app_->add_option(names, value, help));
}

template CommandOption Command::add_option(const std::string&, std::string&, const std::string&);
template CommandOption Command::add_option(const std::string&, int&, const std::string&);
template CommandOption Command::add_option(const std::string&, int64_t&, const std::string&);
template CommandOption Command::add_option(const std::string&, uint64_t&, const std::string&);
template CommandOption Command::add_option(const std::string&, double&, const std::string&);
template CommandOption Command::add_option(const std::string&, std::optional<std::string>&,
                                           const std::string&);
template CommandOption Command::add_option(const std::string&, std::optional<int64_t>&, const std::string&);
template CommandOption Command::add_option(const std::string&, std::optional<uint64_t>&, const std::string&);
template CommandOption Command::add_option(const std::string&, std::optional<double>&, const std::string&);
template CommandOption Command::add_option(const std::string&, std::vector<std::string>&, const std::string&);
template CommandOption Command::add_option(const std::string&, std::vector<int64_t>&, const std::string&);
template CommandOption Command::add_option(const std::string&, std::vector<double>&, const std::string&);

CommandOption Command::add_option_function(const std::string& names,
                                           std::function<void(const std::vector<std::string>&)> take,
                                           const std::string& help) {
  return CommandOption(app_->add_option_function<std::vector<std::string>>(names, std::move(take), help));
}

CommandOption Command::add_flag(const std::string& names, bool& value, const std::string& help) {
  return CommandOption(app_->add_flag(names, value, help));
}

std::vector<std::string> Command::given_options() const {
  std::vector<std::string> names;
  for (const CLI::Option* option : app_->get_options())
    if (option->count() > 0) names.push_back(option->get_name());
  return names;
}

CommandOption Command::add_flag_function(const std::string& names, std::function<void(int64_t)> take,
                                         const std::string& help) {
  return CommandOption(app_->add_flag_function(names, std::move(take), help));
}

std::string program_version() {
  return BOUGH_VERSION;
}

CommandLine::CommandLine()
    : app_(std::make_unique<CLI::App>(
          "RL post-training of language models over prefix trees: shared tokens are computed once.",
          "bough")) {
  app_->set_version_flag("--version", "bough " BOUGH_VERSION, "Print the version");
  app_->set_help_flag("-h,--help", "Print this help");
  app_->option_defaults()->always_capture_default();  // so that the help shows defaults
  app_->get_formatter()->column_width(36);
  app_->get_formatter()->label("SUBCOMMAND", "COMMAND");
  app_->get_formatter()->label("Subcommands", "Commands");
  app_->footer(
      "`bough COMMAND --help` lists the options of a command.\n"
      "Exit codes: 0 done, 1 `bough doctor` found that something is missing, 2 bad use or bad input,\n"
      "3 a failure at run time, 130 interrupted.");
}

CommandLine::~CommandLine() = default;

Command CommandLine::add(const std::string& name, const std::string& description, std::function<void()> run) {
  Command top(app_.get());
  return add(top, name, description, std::move(run));
}

Command CommandLine::add(Command& parent, const std::string& name, const std::string& description,
                         std::function<void()> run) {
  CLI::App* command = parent.app_->add_subcommand(name, description);
  command->callback([this, command, run = std::move(run)] {
    if (command->get_subcommands().empty()) action_ = run;
  });
  return Command(command);
}

void CommandLine::parse(int argc, const char* const* argv) {
  if (argc < 2) throw UserError(str("a command is missing; one of: ", joined(command_names(*app_))));
  const std::string first = argv[1];
  if (first.empty() || first[0] != '-') {
    const auto names = command_names(*app_);
    if (std::find(names.begin(), names.end(), first) == names.end()) {
      const std::string near = nearest_of(first, names);
      throw UserError(
          str("unknown command ", quoted(first),
              near.empty() ? str("; one of: ", joined(names)) : str("; did you mean ", near, "?")));
    }
  }
  try {
    app_->parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    action_ = [this] { print_text(app_->help()); };
  } catch (const CLI::CallForVersion&) {
    action_ = [] { print_text("bough " BOUGH_VERSION "\n"); };
  } catch (const CLI::ExtrasError&) {
    throw UserError(describe_extras(deepest(*app_), deepest(*app_).remaining(true)));
  } catch (const CLI::ParseError& error) {
    // A mistyped --modle leaves --model missing. A message about the unknown flag helps more.
    const auto extras = deepest(*app_).remaining(true);
    throw UserError(extras.empty() ? error.what() : describe_extras(deepest(*app_), extras));
  }
  if (!action_) throw UserError("there is no command to run");
}

int CommandLine::run(int argc, const char* const* argv) {
  bool parsed = false;
  const auto fail = [&](ExitCode code, const std::string& message) {
    show_status("");
    print_line(str(rank_prefix(), chosen_, ": ", bounded(message)));
    if (!parsed) print_line(str("`", chosen_, " --help` shows the usage."));
    return code;
  };
  try {
    try {
      parse(argc, argv);
      parsed = true;
    } catch (...) {
      chosen_ = full_name(deepest(*app_));
      throw;
    }
    chosen_ = full_name(deepest(*app_));
    action_();
    return exit_code_;
  } catch (const UserError& error) {
    return fail(kExitBadInput, error.what());
  } catch (const Interrupted& error) {
    return fail(kExitInterrupted, error.what());
  } catch (const c10::Error& error) {
    // libtorch reports "not enough memory" with the same type as all other errors. The stack trace does not
    // help users.
    const std::string text = error.what_without_backtrace(), remedy = remedy_for_device_error(text);
    return fail(kExitFailure, remedy.empty() ? text : str(text, "\n", remedy));
  } catch (const std::bad_alloc&) {
    return fail(kExitFailure, "out of memory");
  } catch (const std::exception& error) {  // IoError, InternalError, and unforeseen exceptions
    return fail(kExitFailure, error.what());
  } catch (...) {
    return fail(kExitFailure, "an exception of unknown type");
  }
}

void add_json_flag(Command& command, bool& json) {
  command.add_flag("--json", json, "Print one JSON object, as the last line of stdout");
}

void print_text(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDOUT_FILENO, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (errno == EPIPE) {
      std::signal(SIGPIPE, SIG_DFL);
      std::raise(SIGPIPE);
    } else if (errno != EINTR) {
      throw IoError(str("cannot write to stdout: ", std::strerror(errno)));
    }
  }
}

void print_json(const Json& object) {
  print_text(dump_line(object) + "\n");
}

std::string table_text(const std::vector<std::pair<std::string, std::string>>& rows) {
  int width = 0;
  for (const auto& [name, value] : rows) width = std::max(width, display_width(name));
  std::string text;
  for (const auto& [name, value] : rows)
    text += name + std::string(static_cast<size_t>(width - display_width(name) + 2), ' ') + value + "\n";
  return text;
}

void print_table(const std::vector<std::pair<std::string, std::string>>& rows) {
  print_text(table_text(rows));
}

void check_at_least(const std::string& option, int64_t value, int64_t low, const std::string& remedy) {
  if (value >= low) return;
  throw UserError(
      str(option, ": got ", value, ", expected at least ", low, remedy.empty() ? "" : "; ", remedy));
}

void check_at_least(const std::string& option, double value, double low, const std::string& remedy) {
  if (value >= low) return;  // also false for NaN
  throw UserError(
      str(option, ": got ", value, ", expected at least ", low, remedy.empty() ? "" : "; ", remedy));
}

void check_output_file(const std::string& option, const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (path.empty()) throw UserError(str(option, ": the file's name is empty"));
  if (fs::is_directory(path, ignored))
    throw UserError(str(option, ": ", quoted(path), " is a folder; name a file"));
  const fs::path folder = fs::path(path).has_parent_path() ? fs::path(path).parent_path() : fs::path(".");
  if (!fs::is_directory(folder, ignored))
    throw UserError(str(option, ": ", quoted(path), " cannot be written: there is no folder ",
                        quoted(folder.string()), "; create it first"));
}

}  // namespace bough
