#include "env/code_verifier.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include "base/ascii.h"
#include "base/error.h"
#include "env/code_test_scripts.h"
#include "env/reward.h"

namespace bough {

namespace {

using WallClock = std::chrono::steady_clock;

constexpr size_t kMaxProgram = 1 << 20;

// Returns the lines without the empty ones at the end.
std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    lines.push_back(trimmed(text.substr(0, end), kSpaces));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  while (!lines.empty() && lines.back().empty()) lines.pop_back();
  return lines;
}

std::vector<std::string_view> words_of(std::string_view line) {
  std::vector<std::string_view> words;
  for (size_t i = 0; i < line.size();) {
    while (i < line.size() && is_space(line[i])) ++i;
    const size_t begin = i;
    while (i < line.size() && !is_space(line[i])) ++i;
    if (i > begin) words.push_back(line.substr(begin, i - begin));
  }
  return words;
}

std::optional<double> number(std::string_view word) {
  double value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

bool same_line(std::string_view a, std::string_view b, std::optional<double> tolerance) {
  if (a == b) return true;
  if (!tolerance) return false;
  const auto left = words_of(a), right = words_of(b);
  return std::equal(left.begin(), left.end(), right.begin(), right.end(), [&](auto x, auto y) {
    if (x == y) return true;
    const auto p = number(x), q = number(y);
    return p && q && std::abs(*p - *q) <= *tolerance * std::max({1.0, std::abs(*p), std::abs(*q)});
  });
}

// Accepts JSON, or a text that contains JSON.
Json parsed(const Json& field, const char* name) {
  if (!field.is_string()) return field;
  const std::string& text = field.get_ref<const std::string&>();
  if (text.empty()) return nullptr;
  try {
    return parse_json(text, name);
  } catch (const UserError& error) {
    throw UserError(str(error.what(),
                        " (tests as text must be JSON; compressed or pickled ones, as in "
                        "LiveCodeBench's private_test_cases, must be converted first)"));
  }
}

std::string text_of(const Json& value, const char* name) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_array()) {  // TACO has lists of lines
    std::string text;
    for (const Json& line : value) text += text_of(line, name) + "\n";
    return text;
  }
  if (value.is_number()) return value.dump();
  throw UserError(str(name, ": expected a text or a list of lines, got ", quoted(dump_line(value))));
}

const Json& at(const Json& object, const char* key, const char* name) {
  if (!object.is_object() || !object.contains(key))
    throw UserError(str(name, ": expected an object with ", quoted(std::string(key)), ", got ",
                        quoted(dump_line(object))));
  return object.at(key);
}

std::string text_field(const Json& object, std::initializer_list<const char*> keys) {
  for (const char* key : keys)
    if (object.is_object() && object.contains(key) && object.at(key).is_string()) return object.at(key);
  return "";
}

// LiveCodeBench's arguments: one JSON value per line.
Json arguments_of(const Json& input, const char* name) {
  if (input.is_array()) return input;
  Json arguments = Json::array();
  for_each_json_line(text_of(input, name), name,
                     [&](Json value, int64_t) { arguments.push_back(std::move(value)); });
  return arguments;
}

// {"inputs": [...], "outputs": [...], "fn_name": optional}, the form of APPS and TACO. CodeContests has
// "input" and "output".
void add_inputs_outputs(const Json& field, const char* name, CodeTests& tests) {
  const bool singular = field.contains("input");
  const Json& inputs = at(field, singular ? "input" : "inputs", name);
  const Json& outputs = at(field, singular ? "output" : "outputs", name);
  if (!inputs.is_array() || !outputs.is_array() || inputs.size() != outputs.size())
    throw UserError(str(name, ": expected two lists of the same length, the inputs and the outputs"));
  const std::string function = text_field(field, {"fn_name"});
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (function.empty()) {
      tests.runs.push_back({text_of(inputs[i], name), text_of(outputs[i], name)});
    } else {
      tests.calls.push_back({{"name", function},
                             {"args", inputs[i].is_array() ? inputs[i] : arguments_of(inputs[i], name)},
                             {"expected", parsed(outputs[i], name)},
                             {"wrapped", true}});
    }
  }
}

// [{"input", "output", "testtype": stdin | functional}], the form of LiveCodeBench, or a list of asserts.
void add_cases(const Json& field, const char* name, const std::string& function, CodeTests& tests) {
  if (!field.is_array()) throw UserError(str(name, ": expected a list, got ", quoted(dump_line(field))));
  for (const Json& test : field) {
    if (test.is_string()) {
      tests.asserts.push_back(test);
      continue;
    }
    const std::string called = text_field(test, {"fn_name"});
    const std::string kind = text_field(test, {"testtype", "type"});
    if (kind == "functional" || !called.empty()) {
      const std::string callee = called.empty() ? function : called;
      if (callee.empty())
        throw UserError(str(
            name, ": a functional test names no function; expected fn_name in it, or func_name in metadata"));
      const Json& output = at(test, "output", name);
      tests.calls.push_back({{"name", callee},
                             {"args", arguments_of(at(test, "input", name), name)},
                             {"expected", parsed(output, name)},
                             {"wrapped", false}});
    } else {
      tests.runs.push_back({text_of(at(test, "input", name), name), text_of(at(test, "output", name), name)});
    }
  }
}

class CodeReward : public RewardFunction {
 public:
  explicit CodeReward(const CodeVerifierOptions& options) : options_(options), sandbox_(options.sandbox) {
    if (options_.python.empty()) {
      for (const char* candidate : {"/usr/bin/python3", "/usr/local/bin/python3"})
        if (options_.python.empty() && access(candidate, X_OK) == 0) options_.python = candidate;
    }
    python_ = {options_.python, "-I", "-B"};
    if (options_.interpreter.empty() && options_.language != "python")
      throw UserError(str("code verifier: language is ", quoted(options_.language),
                          " but interpreter is not set; set it to the command that runs such a program"));
    const auto probe = [&](const std::vector<std::string>& command, const char* setting) {
      const SandboxResult result = sandbox_.run(
          {.command = {"/bin/sh", "-c", "command -v -- \"$1\" >/dev/null", "sh", command[0]}, .seconds = 30});
      if (!result.ok() || command[0].empty())
        throw UserError(
            str("code verifier: ", setting, ": no program ", quoted(command[0]),
                " in the sandbox, which contains /usr and the folders of sandbox.read_only_paths"));
    };
    if (options_.language == "python") probe(python_, "python");
    if (!options_.interpreter.empty()) probe(options_.interpreter, "interpreter");
  }

  std::vector<RewardResult> score_all(std::span<const RewardRequest> requests) override {
    std::vector<RewardResult> results(requests.size());
    std::atomic<size_t> next{0};
    const auto work = [&] {
      for (size_t i; (i = next++) < requests.size();) {
        try {
          results[i] = test(requests[i]);
        } catch (const std::exception& error) {  // not the program's fault: no descriptor, no tests
          results[i] = failed_reward(options_.failure_reward, error.what());
        }
      }
    };
    const size_t threads = std::min<size_t>(requests.size(), static_cast<size_t>(options_.workers));
    std::vector<std::jthread> others;
    for (size_t i = 1; i < threads; ++i) others.emplace_back(work);
    work();
    others.clear();
    return results;
  }

  void check(const Dataset& dataset) const override {
    for (const Problem& problem : dataset.problems()) {
      const std::string where = str(dataset.source(), ": problem ", quoted(problem.id), ": ");
      try {
        const CodeTests tests = read_code_tests(problem);
        if (tests.size() > tests.runs.size() && options_.language != "python")
          throw UserError(
              str("tests that call functions must be Python, but language is ", quoted(options_.language)));
      } catch (const UserError& error) {
        throw UserError(where + error.what());
      }
    }
  }

 private:
  struct Tally {
    size_t passed = 0;
    size_t total = 0;
    std::string message;  // of the first test that did not pass
  };

  RewardResult test(const RewardRequest& request) const {
    BOUGH_CHECK(request.problem != nullptr, "the request has no problem");
    CodeTests tests = read_code_tests(*request.problem);
    std::string program = extract_program(request.completion, options_.language);
    if (program.size() > kMaxProgram) return {0, false, "the program is longer than 1 MiB"};
    if (!tests.prefix.empty()) {
      const bool whole =
          program.find(str("def ", tests.check.at("entry").get<std::string>())) != std::string::npos;
      program = whole ? str(tests.prefix, "\n", program) : tests.prefix + program;
    }
    // The completion may have been cut inside a multi-byte character.
    while (!program.empty() && (static_cast<unsigned char>(program.back()) & 0x80) != 0) program.pop_back();
    const auto most = static_cast<size_t>(options_.max_tests);
    if (tests.runs.size() > most) tests.runs.resize(most);
    while (tests.calls.size() > most) tests.calls.erase(tests.calls.size() - 1);
    if (tests.asserts.size() > most) tests.asserts.resize(most);

    Tally tally;
    tally.total = tests.size();
    const auto deadline = WallClock::now() + std::chrono::duration<double>(options_.total_timeout_seconds);
    const bool all = options_.score == "all";
    for (size_t i = 0; i < tests.runs.size() && !(all && !tally.message.empty()); ++i)
      run_once(program, tests.runs[i], i, deadline, tally);
    if (tests.size() > tests.runs.size() && !(all && !tally.message.empty()))
      run_functions(program, tests, deadline, tally);
    const double fraction = static_cast<double>(tally.passed) / static_cast<double>(tally.total);
    const double reward = all ? (tally.passed == tally.total ? 1 : 0) : fraction;
    const std::string counted = all ? "" : str(", ", tally.passed, " of ", tally.total, " tests passed");
    return {reward, false, tally.message.empty() ? "passed" : tally.message + counted};
  }

  // Throws if the sandbox did not start, because then the program is not at fault.
  static void refuse_not_started(const SandboxResult& result) {
    if (result.end == SandboxResult::End::kNotStarted) throw IoError(str("the sandbox ", result.describe()));
  }

  double seconds_until(auto deadline) const {
    const double left = std::chrono::duration<double>(deadline - WallClock::now()).count();
    return std::min(options_.timeout_seconds, left);
  }

  void run_once(const std::string& program, const CodeTests::Run& run, size_t number, auto deadline,
                Tally& tally) const {
    const auto failed = [&](const std::string& why) {
      if (tally.message.empty()) tally.message = str("test ", number + 1, ": ", why);
    };
    const double seconds = seconds_until(deadline);
    if (seconds <= 0) return failed("total_timeout_seconds was over before this test");
    std::vector<std::string> command = options_.interpreter.empty() ? python_ : options_.interpreter;
    command.push_back("program.py");
    const SandboxResult result = sandbox_.run(
        {.command = command, .files = {{"program.py", program}}, .input = run.input, .seconds = seconds});
    refuse_not_started(result);
    if (!result.ok()) return failed(str("the program ", result.describe()));
    if (!same_output(result.output, run.output, options_.tolerance))
      return failed(str("printed ", quoted(result.output, 40), ", expected ", quoted(run.output, 40)));
    ++tally.passed;
  }

  void run_functions(const std::string& program, const CodeTests& tests, auto deadline, Tally& tally) const {
    const double left = std::chrono::duration<double>(deadline - WallClock::now()).count();
    if (left <= 0) {
      if (tally.message.empty())
        tally.message = "total_timeout_seconds was over before the tests that call functions";
      return;
    }
    std::array<int, 2> ends;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0)
      throw IoError(str("code verifier: cannot make a socket: ", std::strerror(errno)));
    const Json input{{"setup", tests.setup},
                     {"asserts", tests.asserts},
                     {"calls", tests.calls},
                     {"check", tests.check},
                     {"seconds", std::min(options_.timeout_seconds, left)},
                     {"total", left},
                     {"tolerance", options_.tolerance ? Json(*options_.tolerance) : Json()},
                     {"all", options_.score == "all"}};
    std::stop_source stop;
    SandboxResult servant, tester;
    std::string servant_error;
    {
      std::jthread beside([&] {
        try {
          servant = run_script(kCodeServant, {"program.py", program}, ends[0], left, stop.get_token());
        } catch (const std::exception& error) {
          servant_error = error.what();
        }
        // Closes the connection even if the program gave the socket to another process, so that the tester
        // stops waiting for answers.
        shutdown(ends[0], SHUT_RDWR);
      });
      try {
        // The tester itself limits the time of calls. Its sandbox gets 5 s more, to print the verdict.
        tester = run_script(kCodeTester, {"tests.json", dump_line(input)}, ends[1], left + 5, {});
      } catch (const std::exception& error) {
        servant_error = error.what();
      }
      stop.request_stop();
    }
    for (const int end : ends) close(end);
    if (!servant_error.empty()) throw IoError(servant_error);
    refuse_not_started(servant);
    refuse_not_started(tester);
    Json verdict{{"passed", Json::array()},
                 {"message", str("the process that runs the tests ", tester.describe())}};
    // If the tester does not exit normally, a value of the program caused it (such as a range of 10^12
    // numbers). Its tests then count as not passed.
    if (tester.ok()) verdict = parse_json(tester.output, "the tester");
    if (verdict.contains("broken"))
      throw UserError(str("the tests are not valid Python: ", verdict.at("broken").get<std::string>()));
    for (const Json& passed : verdict.at("passed"))
      if (passed.get<bool>()) ++tally.passed;
    std::string message = verdict.at("message");
    using End = SandboxResult::End;
    if (!message.empty() &&
        (servant.end == End::kMemory || servant.end == End::kProcesses || servant.end == End::kOutput))
      message += str(" (the program ", servant.describe(), ")");
    if (tally.message.empty()) tally.message = message;
  }

  SandboxResult run_script(const char* script, std::pair<std::string, std::string> file, int channel,
                           double seconds, std::stop_token stop) const {
    std::vector<std::string> command = python_;
    command.push_back("main.py");
    return sandbox_.run({.command = command,
                         .files = {{"main.py", str(kCodeValues, script)}, std::move(file)},
                         .channel = channel,
                         .seconds = seconds},
                        stop);
  }

  CodeVerifierOptions options_;
  Sandbox sandbox_;
  std::vector<std::string> python_;
};

}  // namespace

CodeTests read_code_tests(const Problem& problem) {
  CodeTests tests;
  const Json& fields = problem.fields;
  const auto has = [&](const char* name) {
    return fields.is_object() && fields.contains(name) && !fields.at(name).is_null();
  };
  // LiveCodeBench names the function in a text that contains JSON.
  std::string function = text_field(fields, {"fn_name"});
  if (has("metadata") && function.empty())
    function = text_field(parsed(fields.at("metadata"), "metadata"), {"func_name", "fn_name"});
  const auto add = [&](const Json& field, const char* name) {
    if (field.is_null()) return;
    if (field.is_object()) add_inputs_outputs(field, name, tests);
    else add_cases(field, name, function, tests);
  };
  for (const char* name : {"input_output", "tests", "public_test_cases", "private_test_cases", "public_tests",
                           "private_tests", "generated_tests", "test_list"})
    if (has(name)) add(parsed(fields.at(name), name), name);
  if (has("test") && has("entry_point")) {  // HumanEval's form
    tests.check = {{"code", text_of(fields.at("test"), "test")},
                   {"entry", text_of(fields.at("entry_point"), "entry_point")}};
    tests.prefix = text_field(fields, {"prompt"});
  }
  if (has("test_imports"))
    for (const Json& line : fields.at("test_imports")) tests.setup += text_of(line, "test_imports") + "\n";
  if (has("test_setup_code")) tests.setup += text_of(fields.at("test_setup_code"), "test_setup_code");
  if (tests.size() == 0 && !problem.answer.empty() && (problem.answer[0] == '{' || problem.answer[0] == '['))
    add(parsed(problem.answer, "answer"), "answer");
  if (tests.size() == 0)
    throw UserError(
        "no tests: expected input_output, tests, public_test_cases, test_list, or test with entry_point");
  return tests;
}

std::string extract_program(std::string_view text, const std::string& language) {
  std::optional<std::string_view> found;
  bool found_named = false;
  size_t line_begin = 0;
  constexpr size_t kNone = std::string_view::npos;
  size_t open = kNone;  // where the content of the open fence begins
  bool named = false, ours = false;
  const auto take = [&](size_t end) {
    if (open != kNone && ours && (named || !found_named)) {
      found = text.substr(open, end - open);
      found_named = named;
    }
    open = kNone;
  };
  while (line_begin < text.size()) {
    const size_t line_end = std::min(text.find('\n', line_begin), text.size());
    const std::string_view line = trimmed(text.substr(line_begin, line_end - line_begin), kSpaces);
    if (line.starts_with("```")) {
      if (open != kNone) {
        take(line_begin);
      } else {
        std::string name(trimmed(line.substr(3), kSpaces));
        std::transform(name.begin(), name.end(), name.begin(),
                       [](unsigned char c) { return std::tolower(c); });
        named = !name.empty();
        ours =
            name.empty() || name == language || (language == "python" && (name == "py" || name == "python3"));
        open = std::min(line_end + 1, text.size());
      }
    }
    line_begin = line_end + 1;
  }
  if (open != kNone) take(text.size());  // the completion ends inside its fence
  return std::string(found.value_or(text));
}

bool same_output(std::string_view printed, std::string_view expected, std::optional<double> tolerance) {
  const auto got = lines_of(printed), wanted = lines_of(expected);
  return std::equal(got.begin(), got.end(), wanted.begin(), wanted.end(),
                    [&](auto a, auto b) { return same_line(a, b, tolerance); });
}

std::unique_ptr<RewardFunction> make_code_reward(const CodeVerifierOptions& options) {
  return std::make_unique<CodeReward>(options);
}

}  // namespace bough
