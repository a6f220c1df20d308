#include "report/timeline.h"

#include <cmath>
#include <fstream>

#include "base/json.h"

namespace bough {

std::string to_line(const TimelineSpan& span) {
  const auto milliseconds = [](double seconds) { return std::round(seconds * 1e3) / 1e3; };
  return Json::array({span.lane, span.what, milliseconds(span.begin), milliseconds(span.end)}).dump();
}

std::optional<TimelineSpan> parse_timeline_line(std::string_view line) {
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_array() || json.size() != 4 || !json[0].is_string() || !json[1].is_string() ||
      !json[2].is_number() || !json[3].is_number())
    return std::nullopt;
  return TimelineSpan{json[0], json[1], json[2], json[3]};
}

std::vector<TimelineSpan> read_timeline(const std::filesystem::path& path) {
  std::vector<TimelineSpan> spans;
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line))
    if (auto span = parse_timeline_line(line)) spans.push_back(std::move(*span));
  return spans;
}

}  // namespace bough
