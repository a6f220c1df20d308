#include "report/metrics.h"

#include <exception>
#include <utility>

#include "base/error.h"
#include "base/json.h"

namespace bough {
namespace {

struct Line {
  int64_t number;
  size_t begin, end;  // byte offsets; `end` is after the line break
  Json value;
};

// The complete lines of a metrics file, each an object with an integer "step".
std::vector<Line> parse_lines(const std::string& text, const std::string& source) {
  std::vector<Line> lines;
  int64_t number = 0;
  for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    Json value = parse_json(std::string_view(text).substr(begin, end - begin), source, ++number);
    if (!value.is_object() || !value.contains("step") || !value["step"].is_number_integer())
      throw UserError(str(source, ":", number,
                          ": expected an object with an integer \"step\"; the file is damaged or is "
                          "not a metrics file: move it away to continue without it"));
    lines.push_back({number, begin, end + 1, std::move(value)});
  }
  return lines;
}
}  // namespace

JsonlMetrics::JsonlMetrics(const std::filesystem::path& path) : file_(path) {}

void JsonlMetrics::write(int64_t step, const MetricValues& values) {
  std::string line = str("{\"step\":", step);
  for (const auto& [name, value] : values) line += "," + dump_line(name) + ":" + dump_line(value);
  file_.append(line + "}\n");
}

std::vector<MetricRecord> read_metrics(const std::filesystem::path& path) {
  std::vector<MetricRecord> records;
  if (!std::filesystem::exists(path)) return records;
  for (const Line& line : parse_lines(read_file(path), path.string())) {
    MetricRecord& record = records.emplace_back();
    record.step = line.value["step"].get<int64_t>();
    for (const auto& [name, value] : line.value.items())
      if (name != "step" && value.is_number()) record.values[name] = value.get<double>();
  }
  return records;
}

void truncate_metrics_after(const std::filesystem::path& path, int64_t step) {
  if (!std::filesystem::exists(path)) return;
  const std::string text = read_file(path);
  size_t keep = 0;
  for (const Line& line : parse_lines(text, path.string())) {
    if (line.value["step"].get<int64_t>() > step) break;
    keep = line.end;
  }
  if (keep < text.size()) write_file_atomically(path, std::string_view(text).substr(0, keep));
}

void Metrics::add(std::unique_ptr<MetricsSink> sink) {
  sinks_.push_back(std::move(sink));
}

void Metrics::write(int64_t step, const MetricValues& values) {
  std::exception_ptr first;
  for (const auto& sink : sinks_) {
    try {
      sink->write(step, values);
    } catch (const IoError&) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace bough
