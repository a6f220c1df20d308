// Sinks for the metrics of each training step. docs/formats.md lists the names, such as "reward/mean". Every
// sink uses the same name for a metric.
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

// Writes metrics.jsonl: one object per training step. The key "step" is first and the other keys are sorted,
// so that equal runs give equal bytes. NaN and infinities become null. A line is written whole or not at all.
// Throws IoError if the disk is full.
class JsonlMetrics final : public MetricsSink {
 public:
  explicit JsonlMetrics(const std::filesystem::path& path);
  void write(int64_t step, const MetricValues& values) override;

 private:
  AppendFile file_;
};

struct MetricRecord {
  int64_t step = 0;
  MetricValues values;  // without null values
};

// Reads all records of a metrics.jsonl. A last line without a line break is ignored (the process was killed
// while it wrote). Throws UserError, with the line number, for any other malformed line. Returns no records
// if the file is missing.
std::vector<MetricRecord> read_metrics(const std::filesystem::path& path);

// Removes what was written after the checkpoint of `step`: the first line of a later training step, all lines
// after it, and an incomplete last line. The remaining bytes do not change. A missing file stays missing.
void truncate_metrics_after(const std::filesystem::path& path, int64_t step);

// Passes each record to all sinks, in the order in which the sinks were added. If a sink throws IoError, the
// remaining sinks still get the record. Then the first error is rethrown.
class Metrics final : public MetricsSink {
 public:
  void add(std::unique_ptr<MetricsSink> sink);
  void write(int64_t step, const MetricValues& values) override;

 private:
  std::vector<std::unique_ptr<MetricsSink>> sinks_;
};

}  // namespace bough
