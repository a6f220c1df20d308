// Where the numbers of each step go. Names are those of docs/formats.md ("reward/mean"), one name each
// everywhere.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/file.h"

namespace bough {

using MetricValues = std::map<std::string, double>;

class MetricsSink {
 public:
  virtual ~MetricsSink() = default;
  virtual void write(int64_t step, const MetricValues& values) = 0;
};

// metrics.jsonl: one object a step, "step" first, the other keys sorted, so that equal runs give equal bytes.
// NaN and infinities become null. A line is written whole or not at all; IoError on a full disk.
class JsonlMetrics final : public MetricsSink {
 public:
  explicit JsonlMetrics(const std::filesystem::path& path);
  void write(int64_t step, const MetricValues& values) override;

 private:
  AppendFile file_;
};

struct MetricRecord {
  int64_t step = 0;
  MetricValues values;  // without those that are null
};

// Reads all records of a metrics.jsonl. A last line without its line break (torn by a kill) is left out; any
// other malformed line is a UserError with its number. A missing file has no records.
std::vector<MetricRecord> read_metrics(const std::filesystem::path& path);

// Cuts what was written after the checkpoint of `step`: the file ends before the first line of a later step,
// and before a torn last line. Everything that remains keeps its bytes. A missing file stays missing.
void truncate_metrics_after(const std::filesystem::path& path, int64_t step);

// Sends each step to every sink, in the order they were added. A sink that fails with an IoError does not
// keep the others from the step: the first error is thrown after all were tried.
class Metrics final : public MetricsSink {
 public:
  void add(std::unique_ptr<MetricsSink> sink);
  void write(int64_t step, const MetricValues& values) override;

 private:
  std::vector<std::unique_ptr<MetricsSink>> sinks_;
};

}  // namespace bough
