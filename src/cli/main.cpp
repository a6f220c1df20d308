// The program `bough`. Each command has a file cmd_*.cpp.
#include <csignal>

#include "base/cpu.h"
#include "cli/command.h"

int main(int argc, char** argv) {
  bough::apply_cpu_workarounds();
  // If a worker or a server closes its connection, one write fails and the run goes on. print_text() restores
  // the default for readers of stdout that went away.
  std::signal(SIGPIPE, SIG_IGN);
  bough::CommandLine line;
  bough::add_doctor_command(line);
  bough::add_init_command(line);
  bough::add_import_command(line);
  bough::add_merge_command(line);
  bough::add_upcycle_command(line);
  bough::add_step_command(line);
  bough::add_plan_command(line);
  bough::add_rollout_command(line);
  bough::add_train_command(line);
  bough::add_sft_command(line);
  bough::add_eval_command(line);
  bough::add_serve_command(line);
  bough::add_data_command(line);
  bough::add_bench_command(line);
  bough::add_report_command(line);
  bough::add_view_command(line);
  bough::add_watch_command(line);
  bough::add_simulate_command(line);
  bough::add_threads_command(line);
  bough::add_ctl_command(line);
  bough::add_trace_command(line);
  bough::add_self_test_command(line);
  return line.run(argc, argv);
}
