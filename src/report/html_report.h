// report.html of a run: one file that opens without a server, in a light and a dark style. The page loads
// nothing from other files or servers; a Content-Security-Policy inside the page forbids it. All text from
// data, models or users is escaped.
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
  std::string note;  // the expected answer, or why the reward failed; may be empty
};

struct ReportInput {
  std::string title;                   // "sums / trial0"
  std::string settings;                // the text of config.yaml
  std::vector<MetricRecord> metrics;   // ascending steps
  std::vector<TimelineSpan> timeline;  // spans of the run's threads
  std::vector<TreePicture> trees;      // usually the trees of the first and the last batch
  std::vector<ReportSample> samples;
  std::vector<ConversationGroup> conversations;
};

std::string html_report(const ReportInput& input);

// Converts a line of rollouts/step_N.jsonl.zst to a sample. Its texts are the fields `prompt` and
// `completion` (or `response`). If a text is missing, its token ids are shown. The field `answer` becomes the
// note. Throws UserError if the line is not an object.
ReportSample sample_of_rollout(const Json& line, int64_t step);

// Reads config.yaml, metrics.jsonl and timeline.jsonl of a run's folder (each may be missing) and writes
// report.html to the folder. Returns the path of report.html. The page's title is the last two names of the
// folder's path. Throws UserError if `folder` is not a folder, and IoError if the disk is full.
std::filesystem::path write_html_report(const std::filesystem::path& folder, std::vector<TreePicture> trees,
                                        std::vector<ReportSample> samples,
                                        std::vector<ConversationGroup> conversations = {});

}  // namespace bough
