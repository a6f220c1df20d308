// TensorBoard event files, written without TensorFlow.
//
// A file is a list of TFRecords: length (uint64), masked crc32c of these 8 bytes, payload, masked crc32c of
// the payload. Integers are little-endian. The payload is an Event of tensorflow/core/util/event.proto:
// wall_time = 1 (double), step = 2 (int64), file_version = 3, summary = 5 {value = 1 {tag = 1, simple_value =
// 2 (float)}}, session_log = 7 {status = 1}.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "base/file.h"
#include "report/metrics.h"

namespace bough {

class TensorboardMetrics final : public MetricsSink {
 public:
  struct Options {
    // The first training step that this process writes, set only if the run was resumed. TensorBoard then
    // ignores, from this step on, the records of older files in the folder.
    std::optional<int64_t> resumed_at;
    // Returns seconds since 1970. If no function is set, the system's clock is used.
    std::function<double()> wall_time;
  };

  // Creates a new file events.out.tfevents.<time>.<host>.<pid>.<counter> in `folder`, which must exist.
  explicit TensorboardMetrics(const std::filesystem::path& folder);
  TensorboardMetrics(const std::filesystem::path& folder, Options options);

  // Leaves out numbers that are not finite as a float, because TensorBoard would draw them at 0.
  void write(int64_t step, const MetricValues& values) override;

  const std::filesystem::path& path() const { return path_; }

 private:
  Options options_;
  std::filesystem::path path_;
  AppendFile file_;
};

// CRC-32C (Castagnoli polynomial 0x1EDC6F41, reflected) and its masked form, both as TFRecord defines them.
uint32_t crc32c(std::string_view bytes);
uint32_t masked_crc32c(std::string_view bytes);

}  // namespace bough
