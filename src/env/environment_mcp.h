// The tools of an MCP server as an environment. The server is a program that speaks the Model Context
// Protocol on its stdin and stdout (JSON-RPC 2.0, one object per line). Bough is the client.
//
//   start   initialize (offers the newest of kMcpVersions, accepts any), notifications/initialized, and all
//           pages of tools/list. The model is shown these tools
//   turn    one tools/call for each call of the turn, in parallel. The texts of the answers, in order, become
//           tool messages. An answer with isError is shown like any other. A JSON-RPC error is shown as
//           "error: ..." and counts as an invalid call
//   end     a turn without calls ends the conversation. The server gives no reward: the run's `reward` scores
//           the last turn
//
// The setting `server` starts one server per conversation (`conversation`), one per worker, reused for its
// next conversation (`worker`), or one for all (`run`). If a call takes too long, the server is killed, with
// one exception: a server for all conversations that has sent something since the call began only gets a
// cancellation. Requests that the server sends are refused, except ping. Its notifications are ignored. A
// server that sends a line of more than kMaxReplyBytes is not used any more.
#pragma once

#include <memory>
#include <string_view>

#include "env/environment.h"
#include "net/worker_pool.h"

namespace bough {

inline constexpr std::string_view kMcpVersions[] = {"2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"};

// Blocks until a first server has listed its tools. Throws UserError if it cannot be run, lists no tools or
// speaks none of kMcpVersions.
std::unique_ptr<Environment> make_mcp_environment(const EnvironmentSettings& settings, PoolTime time = {});

}  // namespace bough
