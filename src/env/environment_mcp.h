// The tools of an MCP server as an environment: a program that speaks the Model Context Protocol on its stdin
// and stdout (JSON-RPC 2.0, an object a line). Bough is the client.
//
//   start   initialize (the versions of kMcpVersions, the newest is offered), notifications/initialized,
//           tools/list, all its pages: what the model is shown
//   turn    a tools/call for each call of the turn, side by side; the texts of the answers, in order, are the
//           model's tool messages. An answer with isError is shown like any other; a JSON-RPC error is
//           shown as "error: ..." and counts as an invalid call
//   end     a turn without calls ends the conversation. The server gives no reward: the run's `reward` scores
//           the last turn
//
// A server of its own for each conversation (`server: conversation`), one for each worker that is used again
// (`worker`), or one for all (`run`). A call that takes too long is cancelled where the server is shared and
// has been heard from meanwhile; else the server is killed. What a server asks of its client (ping aside) is
// refused; its notifications are ignored. Answers are bounded by kMaxReplyBytes.
#pragma once

#include <memory>
#include <string_view>

#include "env/environment.h"
#include "net/worker_pool.h"

namespace bough {

inline constexpr std::string_view kMcpVersions[] = {"2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"};

// Blocks until a first server has listed its tools. UserError: it cannot be run, or speaks no such version.
std::unique_ptr<Environment> make_mcp_environment(const EnvironmentSettings& settings, PoolTime time = {});

}  // namespace bough
