// Commands on a run's folder. `bough view` serves its page, `bough watch` shows it in a terminal. `bough
// report` writes its report.html again. `bough threads` changes how the run divides its cores. `bough ctl`
// pauses it and the like.
#include <chrono>
#include <filesystem>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "base/signals.h"
#include "cli/command.h"
#include "report/run_control.h"
#include "report/run_watch.h"
#include "report/view_server.h"
#include "run/run_folder.h"
#include "run/run_view.h"

namespace bough {

void add_report_command(CommandLine& line) {
  struct ReportOptions {
    std::string run;
    bool json = false;
  };
  auto options = std::make_shared<ReportOptions>();
  Command command = line.add("report", "Rebuilds report.html of a run's folder", [options] {
    std::error_code ignored;
    if (std::filesystem::is_directory(options->run, ignored) &&
        !std::filesystem::exists(std::filesystem::path(options->run) / "config.yaml", ignored))
      throw UserError(str("cannot report on ", quoted(options->run, 300),
                          ": no config.yaml in it; give a run's folder, FILEROOT/EXPERIMENT/TRIAL"));
    const std::string report = RunFolder::write_report(options->run).string();
    if (options->json) print_json({{"report", report}});
    else print_table({{"report", report}});
  });
  command.add_option("run", options->run, "The run's folder").required().type_name("RUN");
  add_json_flag(command, options->json);
}

void add_view_command(CommandLine& line) {
  struct ViewOptions {
    std::vector<std::string> runs;
    int64_t port = 0;
    bool json = false;
  };
  auto options = std::make_shared<ViewOptions>();
  Command command =
      line.add("view", "Serves a page that shows runs, while they work and afterwards", [options] {
        std::vector<ViewedRun> runs;
        for (const std::string& folder : options->runs) runs.push_back(view_of_run(folder));
        const StopFlag stop;
        const ViewServer server(std::move(runs), options->port);
        if (options->json) print_json({{"url", server.url()}, {"url_with_token", server.url_with_token()}});
        else print_text(server.url_with_token() + "\n");
        constexpr std::chrono::milliseconds kPause{100};
        while (!stop.requested()) std::this_thread::sleep_for(kPause);
      });
  command.add_option("runs", options->runs, "Folders of runs, FILEROOT/EXPERIMENT/TRIAL")
      .required()
      .type_name("RUN");
  command.add_option("--port", options->port, "Port on 127.0.0.1; 0: any free one").range(0, 65535);
  add_json_flag(command, options->json);
}

void add_watch_command(CommandLine& line) {
  auto run = std::make_shared<std::string>();
  Command command =
      line.add("watch", "Shows a run in the terminal until it ends, or once if stderr is no terminal", [run] {
        const std::filesystem::path folder = view_of_run(*run).folder;  // checks that it is a run
        RunFollower follower(folder);
        const StopFlag stop;
        constexpr std::chrono::milliseconds kPause{500};
        while (stderr_is_terminal() && !stop.requested() && !has_ended(follower)) {
          show_status(watch_text(follower, terminal_columns() - 1));
          std::this_thread::sleep_for(kPause);
          follower.poll();
        }
        show_status("");
        print_text(watch_text(follower, terminal_columns() - 1) + "\n");
      });
  command.add_option("run", *run, "The run's folder").required().type_name("RUN");
}

void add_ctl_command(CommandLine& line) {
  struct CtlOptions {
    std::string run, command;
    bool json = false;
  };
  auto options = std::make_shared<CtlOptions>();
  Command command =
      line.add("ctl", "Tells a run that works: pause, resume, checkpoint, evaluate or stop", [options] {
        ControlRequest request(view_of_run(options->run).folder, options->command);
        const StopFlag stop;
        constexpr std::chrono::milliseconds kPause{50};
        std::optional<ControlAnswer> answer;
        while (!(answer = request.poll())) {
          if (stop.requested()) throw Interrupted("no longer waits for the run's answer");
          if (stderr_is_terminal()) show_status("waiting for the run");
          std::this_thread::sleep_for(kPause);
        }
        show_status("");
        if (!answer->done) throw UserError(answer->text);
        if (options->json) print_json({{"text", answer->text}});
        else print_text(answer->text + "\n");
      });
  command.add_option("run", options->run, "The run's folder").required().type_name("RUN");
  command.add_option("command", options->command, "pause, resume, checkpoint, evaluate or stop")
      .required()
      .type_name("COMMAND");
  add_json_flag(command, options->json);
}

void add_threads_command(CommandLine& line) {
  struct ThreadsOptions {
    std::string run;
    ThreadChange change;
  };
  auto options = std::make_shared<ThreadsOptions>();
  Command command =
      line.add("threads", "Changes how a running run divides its cores, from its next step on", [options] {
        if (!std::filesystem::exists(std::filesystem::path(options->run) / "config.yaml"))
          throw UserError(str("cannot change ", quoted(options->run, 300),
                              ": no config.yaml in it; give a run's folder, FILEROOT/EXPERIMENT/TRIAL"));
        write_thread_change(options->run, options->change);
        print_table({{"threads", (std::filesystem::path(options->run) / "threads.json").string()}});
      });
  command.add_option("run", options->run, "The run's folder").required().type_name("RUN");
  command.add_option("--rollout", options->change.generating, "Threads for generation; 0: no change")
      .range(0, 4096);
  command.add_option("--actor", options->change.training, "Threads for training; 0: no change")
      .range(0, 4096);
}

}  // namespace bough
