#include "report/metrics.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <bit>
#include <cmath>
#include <fstream>
#include <limits>

#include "base/base_test_util.h"
#include "base/error.h"
#include "base/json.h"
#include "report/tensorboard.h"

namespace bough {
namespace fs = std::filesystem;
namespace {

class MetricsFiles : public ::testing::Test {
 protected:
  const TemporaryFolder temporary_;
  const fs::path folder_ = temporary_.path(), path_ = folder_ / "metrics.jsonl";
};

TEST_F(MetricsFiles, StepFirstThenSortedKeys) {
  JsonlMetrics sink(path_);
  sink.write(1, {{"reward/mean", 0.5}, {"loss/policy", 1e-5}});
  sink.write(2, {{"x", std::numeric_limits<double>::quiet_NaN()}, {"y", -INFINITY}});
  EXPECT_EQ(read_file(path_),
            "{\"step\":1,\"loss/policy\":1e-05,\"reward/mean\":0.5}\n{\"step\":2,\"x\":null,\"y\":null}\n");
  const auto records = read_metrics(path_);
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[0].step, 1);
  EXPECT_EQ(records[0].values, (MetricValues{{"loss/policy", 1e-5}, {"reward/mean", 0.5}}));
  EXPECT_TRUE(records[1].values.empty());
}

TEST_F(MetricsFiles, EveryDoubleReadsBackExactly) {
  const MetricValues values = {{"a", 1.0 / 3},
                               {"b", 5e-324},
                               {"c", 1.7976931348623157e308},
                               {"d", 0.1 + 0.2},
                               {"e", 12345678901234567}};
  JsonlMetrics(path_).write(3, values);
  EXPECT_EQ(read_metrics(path_)[0].values, values);
}

TEST_F(MetricsFiles, TruncatesAfterACheckpoint) {
  truncate_metrics_after(path_, 3);  // no file, so nothing to do
  EXPECT_FALSE(fs::exists(path_));
  JsonlMetrics sink(path_);
  for (int64_t step = 1; step <= 5; ++step) sink.write(step, {{"a", static_cast<double>(step)}});
  const std::string whole = read_file(path_);
  truncate_metrics_after(path_, 5);
  EXPECT_EQ(read_file(path_), whole);
  truncate_metrics_after(path_, 3);
  EXPECT_EQ(read_file(path_), whole.substr(0, whole.find("{\"step\":4")));
  truncate_metrics_after(path_, 0);
  EXPECT_EQ(read_file(path_), "");
}

TEST_F(MetricsFiles, ATornLastLineIsNoRecordAndIsCut) {
  write_file_atomically(path_, "{\"step\":1}\n{\"step\":2}\n{\"step\":3,\"rew");
  EXPECT_EQ(read_metrics(path_).size(), 2u);
  truncate_metrics_after(path_, 9);
  EXPECT_EQ(read_file(path_), "{\"step\":1}\n{\"step\":2}\n");
  JsonlMetrics(path_).write(3, {});
  EXPECT_EQ(read_metrics(path_).size(), 3u);
}

TEST_F(MetricsFiles, DamageElsewhereIsAnErrorWithItsLine) {
  for (const char* bad :
       {"{\"step\":1}\n{\"st\n{\"step\":3}\n", "{\"step\":1}\n[]\n", "{\"step\":1}\n{\"step\":1.5}\n"}) {
    write_file_atomically(path_, bad);
    try {
      read_metrics(path_);
      FAIL() << bad;
    } catch (const UserError& error) {
      EXPECT_NE(std::string(error.what()).find("metrics.jsonl:2"), std::string::npos) << error.what();
    }
    EXPECT_THROW(truncate_metrics_after(path_, 1), UserError);
    EXPECT_EQ(read_file(path_), bad);
  }
}

struct Recorder : MetricsSink {
  explicit Recorder(std::vector<int64_t>& steps, bool fails) : steps(steps), fails(fails) {}
  void write(int64_t step, const MetricValues&) override {
    if (fails) throw IoError("disk full");
    steps.push_back(step);
  }
  std::vector<int64_t>& steps;
  bool fails;
};

TEST(Metrics, AFailingSinkDoesNotKeepTheOthersFromTheStep) {
  std::vector<int64_t> first, last;
  Metrics metrics;
  metrics.add(std::make_unique<Recorder>(first, false));
  metrics.add(std::make_unique<Recorder>(first, true));
  metrics.add(std::make_unique<Recorder>(last, false));
  EXPECT_THROW(metrics.write(7, {}), IoError);
  EXPECT_EQ(first, (std::vector<int64_t>{7}));
  EXPECT_EQ(last, (std::vector<int64_t>{7}));
}

// ---- TensorBoard, read back by an independent parser ----

uint64_t fixed(std::string_view bytes, size_t at, int num_bytes) {
  uint64_t value = 0;
  for (int i = num_bytes - 1; i >= 0; --i)
    value = value << 8 | static_cast<unsigned char>(bytes.at(at + static_cast<size_t>(i)));
  return value;
}

uint64_t varint(std::string_view bytes, size_t& at) {
  uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = static_cast<unsigned char>(bytes.at(at++));
    value |= static_cast<uint64_t>(byte & 0x7F) << shift;
    if (byte < 0x80) return value;
  }
}

// Splits a protocol buffer message into its fields, in order. A field has a number, and either a varint or
// raw bytes (fixed and length-delimited fields).
struct Field {
  uint64_t number, varint_value;
  std::string_view bytes;
};
std::vector<Field> fields_of(std::string_view message) {
  std::vector<Field> fields;
  for (size_t at = 0; at < message.size();) {
    const uint64_t tag = varint(message, at);
    Field field{tag >> 3, 0, {}};
    const uint64_t type = tag & 7;
    if (type == 0) field.varint_value = varint(message, at);
    else {
      const size_t length = type == 1 ? 8 : type == 5 ? 4 : varint(message, at);
      field.bytes = message.substr(at, length);
      at += length;
    }
    fields.push_back(field);
  }
  return fields;
}

std::vector<std::string> records_of(const std::string& file) {
  std::vector<std::string> records;
  for (size_t at = 0; at < file.size();) {
    const size_t length = fixed(file, at, 8);
    EXPECT_EQ(fixed(file, at + 8, 4), masked_crc32c(std::string_view(file).substr(at, 8)));
    records.push_back(file.substr(at + 12, length));
    EXPECT_EQ(fixed(file, at + 12 + length, 4), masked_crc32c(records.back()));
    at += 16 + length;
  }
  return records;
}

TEST(Tensorboard, Crc32cKnownAnswers) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);            // the check value of CRC-32C
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);  // RFC 3720, B.4
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62A8AB43u);
  EXPECT_EQ(masked_crc32c(""), 0xA282EAD8u);
  EXPECT_EQ(masked_crc32c("123456789"), 0xc78ab0e5u);  // ((c >> 15) | (c << 17)) + 0xa282ead8
}

TEST_F(MetricsFiles, TensorboardFilesReadBack) {
  fs::path file;
  {
    TensorboardMetrics sink(folder_, {.resumed_at = 4, .wall_time = [] { return 1700000000.5; }});
    sink.write(300, {{"loss/policy", -0.25}, {"nan", NAN}, {"reward/mean", 0.5}, {"too_large", 1e300}});
    file = sink.path();
  }
  EXPECT_EQ(file.filename().string().substr(0, 31), "events.out.tfevents.1700000000.");
  const auto records = records_of(read_file(file));
  ASSERT_EQ(records.size(), 3u);

  const auto version = fields_of(records[0]);
  EXPECT_EQ(std::bit_cast<double>(fixed(version.at(0).bytes, 0, 8)), 1700000000.5);
  EXPECT_EQ(version.at(2).number, 3u);
  EXPECT_EQ(version.at(2).bytes, "brain.Event:2");

  const auto restart = fields_of(records[1]);
  EXPECT_EQ(restart.at(1).varint_value, 4u);
  EXPECT_EQ(restart.at(2).number, 7u);
  EXPECT_EQ(fields_of(restart.at(2).bytes).at(0).varint_value, 1u);

  const auto step = fields_of(records[2]);
  EXPECT_EQ(step.at(1).number, 2u);
  EXPECT_EQ(step.at(1).varint_value, 300u);
  EXPECT_EQ(step.at(2).number, 5u);
  const auto values = fields_of(step.at(2).bytes);
  ASSERT_EQ(values.size(), 2u);  // without NaN and numbers that overflow a float
  const auto entry = fields_of(values[0].bytes);
  EXPECT_EQ(entry.at(0).bytes, "loss/policy");
  EXPECT_EQ(std::bit_cast<float>(static_cast<uint32_t>(fixed(entry.at(1).bytes, 0, 4))), -0.25f);
}

// Reads the files with TensorBoard's own reader. Skipped if the python3 on the PATH has no tensorboard.
TEST_F(MetricsFiles, TensorboardItselfReadsThem) {
  if (std::system("python3 -c 'import tensorboard' 2>/dev/null") != 0)
    GTEST_SKIP() << "tensorboard is not installed";
  {
    TensorboardMetrics first(folder_, {.wall_time = [] { return 1700000000.0; }});
    for (int64_t step = 1; step <= 5; ++step) first.write(step, {{"reward/mean", 1.0}});
    TensorboardMetrics second(folder_, {.resumed_at = 4, .wall_time = [] { return 1700000100.0; }});
    for (int64_t step = 4; step <= 6; ++step) second.write(step, {{"reward/mean", 2.0}});
  }
  write_file_atomically(
      folder_ / "read.py",
      "import sys\n"
      "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
      "a = EventAccumulator(sys.argv[1]); a.Reload()\n"
      "print([(s.step, s.value) for s in a.Scalars('reward/mean')])\n");
  const std::string command = "python3 " + (folder_ / "read.py").string() + " " + folder_.string() + " > " +
                              (folder_ / "out.txt").string() + " 2> " + (folder_ / "err.txt").string();
  ASSERT_EQ(std::system(command.c_str()), 0) << read_file(folder_ / "err.txt");
  EXPECT_EQ(read_file(folder_ / "out.txt"), "[(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]\n");
}

}  // namespace
}  // namespace bough
