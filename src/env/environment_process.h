// Environments in processes: a Python class, or a command of any kind that answers lines of JSON
// (environment_protocol.h). A process holds one conversation at a time and is used again for the next, so a
// process keeps what one conversation did to it (environment_pool.h).
//
// A Python worker says first that it is ready (worker_protocol.h). A process that dies, closes its end,
// answers what is no reply, or answers more than kMaxReplyBytes is killed with all that it started
// (worker_process.h). Its conversation fails with the reason.
#pragma once

#include <memory>
#include <string>

#include "env/environment.h"
#include "env/environment_pool.h"
#include "net/line_process.h"

namespace bough {

// Why no more lines of the process will come, as a reply kBroken. nullopt: more may come.
std::optional<ChannelReply> broken_reply(LineProcess& process);

// Blocks until a first process is ready. UserError: it cannot be loaded or run.
std::unique_ptr<Environment> make_process_environment(const EnvironmentSettings& settings,
                                                      PoolTime time = {});

}  // namespace bough
