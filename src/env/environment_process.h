// Environments in processes: a Python class, or a command of any kind. A process holds one conversation at a
// time and is used again for the next, so that what one of them does to itself is its own matter. There are
// as many as conversations are open: whoever opens them keeps to `workers` (max_open). A run and its
// evaluation, which holds its own while the run's wait, do so each.
//
// Lines of JSON, UTF-8. A process has one request at a time; only `close` has no answer:
//
//   Bough:  {"id": 1, "method": "reset", "problem": {...}, "seed": 7}
//   worker: {"id": 1, "messages": [{"role": "user", "content": "..."}], "tools": [...]}
//   Bough:  {"id": 2, "method": "step", "action": {"text": "...", "content": "...", "reasoning": "...",
//            "calls": [{"id": "...", "name": "...", "arguments": {...}}]}}
//   worker: {"id": 2, "messages": [...], "reward": 0.5, "done": false, "rewards": {"style": 1}}
//   Bough:  {"method": "close"}
//   worker: {"id": 2, "error": "..."}              fails the conversation; the process goes on with others
//
// `messages` may be a text: then it is one message, of the role tool for each call of the turn, else user.
// Without messages of its own, reset leaves those of the problem.
//
// One thread polls all processes until the nearest deadline. A process that is silent too long, dies, closes
// its end, answers what is no reply or more than kMaxReplyBytes is killed with all that it started
// (worker_process.h), and its conversation fails with the reason. A `reset` whose process died is tried
// again, `retries` times; a `step` never is, since tools may have acted.
#pragma once

#include <memory>
#include <string>

#include "env/environment.h"

namespace bough {

// Blocks until a first process is ready. UserError: it cannot be loaded or run.
std::unique_ptr<Environment> make_process_environment(const EnvironmentSettings& settings);

}  // namespace bough
