// Rewards of worker processes: the user's Python function, or a command of any kind. A RewardPool runs them.
//
//   def score(prompt: str, completion: str, **fields) -> float
//
// `fields` are the fields of the problem's record, `answer` always among them. A function without ** gets
// only the arguments that it names. What it prints goes to stderr.
//
// A command is run by /bin/sh and stays: it reads requests as lines of JSON from its stdin and writes a line
// for each to its stdout (reward_protocol.h); what it has to tell people belongs on its stderr.
//
// Workers die with Bough, whatever way that dies, and with them what they started (worker_process.h); they
// leave no zombies, and are not reached by Ctrl-C.
#pragma once

#include <memory>
#include <string>

#include "env/reward_pool.h"

namespace bough {

// FILE.py:NAME. UserError: not of that form, or no such file; it names the setting and what was expected.
// `file` is absolute.
struct PythonFunction {
  std::string file;
  std::string name;
};
PythonFunction parse_python_function(
    const std::string& specification, const std::string& setting = "reward",
    const std::string& expected =
        "FILE.py:FUNCTION such as my_reward.py:score, http://HOST:PORT/PATH, or a "
        "verifier's name (bough train --settings lists the keys of reward)");

// The interpreter's path: `setting` if not empty, else $BOUGH_PYTHON, else .venv/bin/python3 in one of the
// four folders above `program`'s, else python3; names without '/' are looked up on $PATH. UserError: there is
// none.
std::string find_python(const std::string& setting, const std::string& program);
std::string find_python(const std::string& setting);  // of this program

// Block until every worker is ready: has loaded the file, has said so (`ready_line`), or has not ended within
// a moment. UserError: it cannot be loaded or run, has no such function, or takes too long.
std::unique_ptr<RewardPool> make_python_reward(const std::string& specification,
                                               const RewardSettings& settings, PoolTime time = {});
std::unique_ptr<RewardPool> make_command_reward(const std::string& command, bool ready_line,
                                                const RewardSettings& settings, PoolTime time = {});

}  // namespace bough
