// Commands on a run's folder. `bough report` writes its report.html again. `bough threads` changes how the
// run divides its cores.
#include <filesystem>

#include "base/error.h"
#include "cli/command.h"
#include "run/run_folder.h"

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
