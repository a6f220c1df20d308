// Environments in processes: a Python class, or any command that answers lines of JSON
// (environment_protocol.h). A process has one conversation at a time and is reused for the next one, so what
// a conversation changes in its process is still there in the next one (environment_pool.h).
//
// A Python worker first sends that it is ready (worker_protocol.h). A process is not used any more if it
// ends, closes its stdout, sends a malformed reply, or sends more than kMaxReplyBytes without a line break.
// Its conversation then fails with the reason. The process and all that it started are killed
// (worker_process.h).
#pragma once

#include <memory>
#include <string>

#include "env/environment.h"
#include "env/environment_pool.h"
#include "net/line_process.h"

namespace bough {

// Returns a reply kBroken that says why the process will send no more lines. nullopt if it may send more.
std::optional<ChannelReply> broken_reply(LineProcess& process);

// Blocks until a first process is ready. Throws UserError if it cannot be loaded or run.
std::unique_ptr<Environment> make_process_environment(const EnvironmentSettings& settings,
                                                      PoolTime time = {});

}  // namespace bough
