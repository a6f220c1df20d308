// Serves the page of one or several runs on loopback, and feeds it by server-sent events from the runs'
// files.
//
//   GET /                     the page
//   GET /api/snapshot         {"runs": [RunFollower::snapshot() and `about`], "serial": N}
//   GET /api/events           events as they come, numbered on; each has `run`, its index. The page opens the
//                             stream first. The snapshot then contains the events up to its `serial`
//   GET /api/step?run=R&step=S&first=G   groups of the step's rollouts, from the G-th on, and their tree
//   GET /metrics              the last metrics as Prometheus text
//   POST /api/control?run=R&command=C    a command to the run (run_control.h), answered when it is done: 200
//                             {"text"}; 409 {"error"} if it was refused
//   POST /api/chat?run=R      {"messages"}: an answer of the run's weights, streamed
//
// Only requests for this machine are answered (Host, Origin). No answer admits other origins. Commands and
// chats need the header X-Bough-Token with the server's token, also from this machine. Nothing else can be
// changed.
// Files are read while an event stream is open, every kPollSeconds, and by requests. A reader that leaves
// more than 1 MiB of a stream unread is disconnected.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"

namespace bough {

struct ViewedRun {
  std::filesystem::path folder;
  // Settings and the like, which do not change while the run works: added to the snapshot.
  Json about = Json::object();
  // The groups of the step's rollouts from the index `first_group` on. Throws UserError if there are none.
  // Called on a thread of the server, one call at a time.
  std::function<Json(int64_t step, int64_t first_group)> step;
};

class ViewServer {
 public:
  static constexpr double kPollSeconds = 0.5;

  // port: 0 to 65535; 0: any free one. Throws UserError if it is taken.
  ViewServer(std::vector<ViewedRun> runs, int64_t port);
  ~ViewServer();
  ViewServer(const ViewServer&) = delete;
  ViewServer& operator=(const ViewServer&) = delete;

  std::string url() const;
  // The URL of the page with the token for its buttons: for the user of the run only.
  std::string url_with_token() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace bough
