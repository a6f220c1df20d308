// report.html of a run: one file, opens without a server, loads nothing from elsewhere (a
// Content-Security-Policy inside the page forbids it), in light and dark. Whatever came from data, models or
// users is escaped.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "report/conversation_page.h"
#include "report/metrics.h"
#include "report/timeline.h"
#include "report/tree_picture.h"

namespace bough {

struct ReportSample {
  int64_t step = 0;
  std::string prompt;
  std::string completion;
  std::optional<double> reward;
  std::string note;  // the expected answer, why a reward failed; may be empty
};

struct ReportInput {
  std::string title;                   // "sums / trial0"
  std::string settings;                // config.yaml as it stands
  std::vector<MetricRecord> metrics;   // ascending steps
  std::vector<TimelineSpan> timeline;  // of the run's threads
  std::vector<TreePicture> trees;      // usually one of the first and one of the last batch
  std::vector<ReportSample> samples;
  std::vector<TalkGroup> conversations;
};

std::string html_report(const ReportInput& input);

// A line of rollouts/step_N.jsonl.zst as a sample. Texts are the line's own fields `prompt` and `completion`
// (also `response`), `answer` becomes the note; without texts the token ids stand in for them.
ReportSample sample_of_rollout(const Json& line, int64_t step);

// Reads config.yaml, metrics.jsonl and timeline.jsonl of a run's folder (each may be missing) and writes
// report.html beside them. The folder's last two names are the title. UserError when `folder` is no folder,
// IoError on a full disk.
std::filesystem::path write_html_report(const std::filesystem::path& folder, std::vector<TreePicture> trees,
                                        std::vector<ReportSample> samples,
                                        std::vector<TalkGroup> conversations = {});

}  // namespace bough
