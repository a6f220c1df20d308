// The row of `bough doctor` about the self-test of the CUDA kernels.
#include <algorithm>

#include "base/child_process.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "base/format.h"
#include "cli/doctor.h"

namespace bough {

SelfTestFacts read_self_test_facts(double seconds) {
  SelfTestFacts facts;
  const ChildResult found = run_in_child(
      [] {
        const auto key = self_test_key();
        return key ? dump_line(*key) : "";
      },
      seconds);
  if (!found.is_done || found.output.empty()) return facts;
  facts.key = parse_json(found.output, "the GPU's name").get<SelfTestKey>();
  if (cache_folder().empty()) return facts;
  facts.file = self_test_file(cache_folder(), *facts.key);
  facts.result = read_self_test(facts.file, *facts.key);
  if (facts.result) facts.age = std::max<int64_t>(0, now_seconds() - facts.result->time);
  return facts;
}

std::vector<Finding> check_self_test(const SelfTestFacts& facts) {
  if (!facts.key) return {};
  if (!facts.result)
    return {{"kernels", "not tested yet", FindingState::kOk, "the first run on this GPU tests them"}};
  const SelfTestResult& result = *facts.result;
  const std::string when =
      str(result.num_tests, " tests, ", format_duration(static_cast<double>(facts.age)), " ago");
  if (!result.unable.empty())
    return {{"kernels", str("the self-test could not be finished: ", result.unable), FindingState::kWarning,
             "the next run on this GPU repeats it"}};
  if (result.faulty.empty())
    return {{"kernels", str("correct by the self-test: ", when), FindingState::kOk, ""}};
  std::string list;
  bool is_slow = false;
  for (const FaultyKernel& each : result.faulty) {
    list += str(list.empty() ? "" : "; ", each.kernel, ": ", each.why);
    is_slow |= each.is_much_faster;
  }
  return {{"kernels", str("left out by the self-test (", when, "): ", list),
           is_slow ? FindingState::kMissing : FindingState::kWarning,
           is_slow
               ? "attention or products would take more than three times as long, so runs on this GPU are "
                 "refused unless BOUGH_SELF_TEST=allow-slow; send this report; BOUGH_SELF_TEST=run tests "
                 "again"
               : "slower replacements run; send this report; BOUGH_SELF_TEST=run tests again"}};
}

}  // namespace bough
