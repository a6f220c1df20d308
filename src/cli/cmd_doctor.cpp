// `bough doctor`: checks what a run on this machine needs, and says what to do about each finding.
#include <algorithm>

#include "base/error.h"
#include "base/format.h"
#include "cli/command.h"
#include "cli/doctor.h"
#include "run/run_settings.h"

namespace bough {

namespace {

constexpr double kDriverSeconds = 20;
// Reading libtorch_cuda (2 GB) from a slow disk for the first time takes longer than the driver's answers.
constexpr double kLibrarySeconds = 120;

struct Report {
  DriverFacts driver;
  HostFacts host;
  BuildFacts build;
  SelfTestFacts self_test;
  std::vector<Finding> findings;

  int64_t count(FindingState state) const {
    return std::count_if(findings.begin(), findings.end(),
                         [state](const Finding& finding) { return finding.state == state; });
  }
  bool is_ok() const { return count(FindingState::kMissing) == 0; }
};

Report examine() {
  Report report;
  report.driver = query_driver(kDriverSeconds);
  const bool answers = report.driver.cuda_code != kDriverQueryFailed;
  report.build = read_build(answers, kLibrarySeconds);
  if (report.driver.cuda_gpus > 0 && report.build.cuda_library_opens)
    report.self_test = read_self_test_facts(kDriverSeconds);
  report.host = read_host(RunSettings().fileroot);
  const bool has = has_gpu(report.driver, report.host);
  const int gpus = std::max(report.driver.cuda_gpus, has ? 1 : 0);
  for (auto& rows :
       {check_build(report.build, has), check_driver(report.driver, report.build, report.host),
        check_gpus(report.driver, report.build), check_cuda_libraries(report.build, report.driver, has),
        check_self_test(report.self_test), check_host(report.host, gpus)})
    report.findings.insert(report.findings.end(), rows.begin(), rows.end());
  return report;
}

// null if there is no GPU, or if its kernels have not been tested yet.
Json self_test_json(const SelfTestFacts& facts) {
  if (!facts.result) return {};
  Json json = *facts.result;
  json["gpu"] = facts.key->gpu;
  json["driver"] = facts.key->driver;
  json["torch"] = facts.key->torch;
  json["age_seconds"] = facts.age;
  json["file"] = facts.file.string();
  return json;
}

Json to_json(const Report& report) {
  Json checks = Json::array(), ids = Json::object();
  for (const Finding& finding : report.findings)
    checks.push_back({{"what", finding.what},
                      {"found", finding.found},
                      {"state", name_of(finding.state)},
                      {"remedy", finding.remedy}});
  for (const auto& [file, id] : report.build.build_ids) ids[file] = id;
  const BuildFacts& build = report.build;
  return {{"ok", report.is_ok()},
          {"checks", checks},
          {"driver", report.driver},
          {"self_test", self_test_json(report.self_test)},
          {"build",
           {{"version", build.version},
            {"build_ids", ids},
            {"torch", build.torch.torch},
            {"torch_cuda", build.torch.cuda},
            {"cuda_architectures", build.cuda_architectures},
            {"cuda_library", build.cuda_library.string()},
            {"nccl_version", build.nccl_version}}},
          {"host_memory",
           {{"available", report.host.memory.available},
            {"limit", report.host.memory.limit},
            {"limited_by", report.host.memory.limited_by}}}};
}

std::string to_text(const Report& report) {
  int width = 0;
  for (const Finding& finding : report.findings) width = std::max(width, display_width(finding.what));
  std::string text;
  for (const Finding& finding : report.findings) {
    const std::string state = name_of(finding.state);
    text += state + std::string(12 - state.size(), ' ') + finding.what +
            std::string(static_cast<size_t>(width - display_width(finding.what) + 2), ' ') + finding.found +
            "\n";
    if (!finding.remedy.empty()) text += str(std::string(12, ' '), "-> ", finding.remedy, "\n");
  }
  const int64_t missing = report.count(FindingState::kMissing),
                warnings = report.count(FindingState::kWarning);
  return str(text, "\n", missing ? str(missing, " missing") : "nothing is missing", ", ", warnings,
             warnings == 1 ? " warning\n" : " warnings\n");
}

}  // namespace

void add_doctor_command(CommandLine& line) {
  auto json = std::make_shared<bool>(false);
  Command command = line.add(
      "doctor", "Checks this machine and this build, and says what to do about each finding", [&line, json] {
        const Report report = examine();
        if (*json) print_json(to_json(report));
        else print_text(to_text(report));
        if (!report.is_ok()) line.set_exit_code(kExitFindings);
      });
  add_json_flag(command, *json);
}

}  // namespace bough
