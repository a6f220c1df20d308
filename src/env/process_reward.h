// Rewards in worker processes: the user's Python function, or any command. A RewardPool runs them.
//
//   def score(prompt: str, completion: str, **fields) -> float
//
// `fields` are the fields of the problem's record, always with `answer`. A function without ** gets only the
// arguments that it names. Its printed output goes to stderr.
//
// A command is started once by /bin/sh and keeps running. It reads requests as lines of JSON from its stdin
// and writes one line for each to its stdout (reward_protocol.h). Messages for people belong on its stderr.
//
// When Bough ends, in any way, its workers and all processes that they started are killed (worker_process.h).
// Ctrl-C does not reach workers.
#pragma once

#include <memory>
#include <string>

#include "env/reward_pool.h"

namespace bough {

// Parses FILE.py:NAME. The returned `file` is absolute. Throws UserError if the form is wrong or if the file
// does not exist. The message contains `setting` and `expected`.
struct PythonFunction {
  std::string file;
  std::string name;
};
PythonFunction parse_python_function(
    const std::string& specification, const std::string& setting = "reward",
    const std::string& expected =
        "FILE.py:FUNCTION such as my_reward.py:score, http://HOST:PORT/PATH, or a "
        "verifier's name (bough train --settings lists the keys of reward)");

// Finds the path of the Python interpreter. The first of these counts: `setting` if not empty, $BOUGH_PYTHON,
// .venv/bin/python3 in one of the four folders above the folder of `program`, python3. Names without '/' are
// looked up on $PATH. Throws UserError if there is no interpreter.
std::string find_python(const std::string& setting, const std::string& program);
std::string find_python(const std::string& setting);  // `program` is this process's program

// Both block until every worker is ready. A Python worker is ready when it has loaded the file. A command is
// ready when it has written its ready line if `ready_line` is true, else when it still runs after 200 ms.
// Throw UserError if a worker cannot be loaded or run, has no such function, or takes too long.
std::unique_ptr<RewardPool> make_python_reward(const std::string& specification,
                                               const RewardSettings& settings, PoolTime time = {});
std::unique_ptr<RewardPool> make_command_reward(const std::string& command, bool ready_line,
                                                const RewardSettings& settings, PoolTime time = {});

}  // namespace bough
