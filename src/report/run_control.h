// Commands to a run that works, and its answers: `bough ctl`, the buttons of the page (view_server.h).
//
//   RUN/control/ID.request   {"command": "pause"}, written by the client, removed by the run that takes it
//   RUN/control/ID.answer    {"done": true, "text": "paused after step 12"}, written by the run when it is
//                            done or refused, removed by the client
//   RUN/control/page_url     the URL of the run's own page with its token, only with report.port
//   RUN/control/server.json  {"url", "api_key"} of the run's own server, only with serve.port
//
// Only the run's user can read and write the folder control/. A run is alive while a process holds the lock
// of its folder (base/file.h).
#pragma once

#include <array>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"

namespace bough {

inline constexpr std::array<std::string_view, 5> kControlCommands = {"pause", "resume", "checkpoint",
                                                                     "evaluate", "stop"};

struct ControlAnswer {
  bool done = false;  // false: refused
  std::string text;   // what happened, or why it was refused
};

// One command of a client. The destructor withdraws a request that the run has not taken.
class ControlRequest {
 public:
  // Throws UserError if there is no such command, or the run is not alive.
  ControlRequest(std::filesystem::path run, const std::string& command);
  ~ControlRequest();
  ControlRequest(const ControlRequest&) = delete;
  ControlRequest& operator=(const ControlRequest&) = delete;

  // The answer, once it is there. If the run has ended without one, the answer says so.
  std::optional<ControlAnswer> poll();

 private:
  const std::filesystem::path run_;
  const std::filesystem::path request_, answer_;
};

bool is_run_alive(const std::filesystem::path& run);

// Makes the folder control/ for the run's user alone, without requests of earlier processes.
void clear_control_folder(const std::filesystem::path& run);
// A file of that folder. The run writes kPageUrl and kModelServer.
std::filesystem::path control_file(const std::filesystem::path& run, const std::string& name);
inline constexpr const char *kPageUrl = "page_url", *kModelServer = "server.json";

// The run's side.
class ControlQueue {
 public:
  static constexpr double kPollSeconds = 0.2;
  struct Request {
    std::string id, command;
  };

  // `clock` must outlive this object.
  ControlQueue(const std::filesystem::path& run, const Clock& clock);
  // The requests that came since the last call, in their order. Looks every kPollSeconds at most.
  std::vector<Request> take();
  void answer(const std::string& id, const ControlAnswer& answer);

 private:
  const std::filesystem::path run_;
  const Clock& clock_;
  std::optional<Clock::Time> last_look_;
};

}  // namespace bough
