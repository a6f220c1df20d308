#include "report/tensorboard.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"

namespace bough {
namespace {

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table = {};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit)
      crc = crc & 1 ? crc >> 1 ^ 0x82F63B78 : crc >> 1;  // the polynomial, reflected
    table[i] = crc;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kCrcTable = make_crc_table();

void append_fixed(std::string& out, uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xFF);
}

// Protocol buffers: a field is the integer (number << 3 | wire type), followed by the field's content.
enum WireType { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void append_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>((value & 0x7F) | 0x80);
  out += static_cast<char>(value);
}
void append_tag(std::string& out, int field, WireType type) {
  append_varint(out, static_cast<uint64_t>(field << 3 | type));
}
void append_bytes(std::string& out, int field, std::string_view bytes) {
  append_tag(out, field, kBytes);
  append_varint(out, bytes.size());
  out += bytes;
}

std::string begin_event(double wall_time, int64_t step) {
  std::string event;
  append_tag(event, 1, kFixed64);
  append_fixed(event, std::bit_cast<uint64_t>(wall_time), 8);
  append_tag(event, 2, kVarint);
  append_varint(event, static_cast<uint64_t>(step));
  return event;
}

std::string framed(const std::string& payload) {
  std::string length, out;
  append_fixed(length, payload.size(), 8);
  out = length;
  append_fixed(out, masked_crc32c(length), 4);
  out += payload;
  append_fixed(out, masked_crc32c(payload), 4);
  return out;
}

std::string new_file_name(double wall_time) {
  static std::atomic<int> counter{0};  // distinguishes writers that one process creates in one second
  return str("events.out.tfevents.", static_cast<int64_t>(wall_time), ".", host_name(), ".", ::getpid(), ".",
             counter++);
}

TensorboardMetrics::Options with_clock(TensorboardMetrics::Options options) {
  if (!options.wall_time) options.wall_time = seconds_since_1970;
  return options;
}
}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = 0xFFFFFFFF;
  for (const char c : bytes) crc = crc >> 8 ^ kCrcTable[(crc ^ static_cast<unsigned char>(c)) & 0xFF];
  return ~crc;
}

// TFRecord stores masked CRCs: the CRC of data that contains its own CRC would detect fewer errors.
uint32_t masked_crc32c(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xA282EAD8u;
}

TensorboardMetrics::TensorboardMetrics(const std::filesystem::path& folder)
    : TensorboardMetrics(folder, Options()) {}

TensorboardMetrics::TensorboardMetrics(const std::filesystem::path& folder, Options options)
    : options_(with_clock(std::move(options))),
      path_(folder / new_file_name(options_.wall_time())),
      file_(path_) {
  std::string version = begin_event(options_.wall_time(), 0);
  append_bytes(version, 3, "brain.Event:2");
  std::string records = framed(version);
  if (options_.resumed_at) {
    std::string start;
    append_tag(start, 1, kVarint);
    append_varint(start, 1);  // SessionLog.START
    std::string event = begin_event(options_.wall_time(), *options_.resumed_at);
    append_bytes(event, 7, start);
    records += framed(event);
  }
  file_.append(records);
}

void TensorboardMetrics::write(int64_t step, const MetricValues& values) {
  std::string summary;
  for (const auto& [name, value] : values) {
    const float rounded = static_cast<float>(value);
    if (!std::isfinite(rounded)) continue;
    std::string entry;
    append_bytes(entry, 1, name);
    append_tag(entry, 2, kFixed32);
    append_fixed(entry, std::bit_cast<uint32_t>(rounded), 4);
    append_bytes(summary, 1, entry);
  }
  std::string event = begin_event(options_.wall_time(), step);
  append_bytes(event, 5, summary);
  file_.append(framed(event));
}

}  // namespace bough
