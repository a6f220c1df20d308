#include "models/gguf.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <utility>

#include "base/error.h"
#include "models/unicode_text.h"

namespace bough {

static_assert(std::endian::native == std::endian::little, "GGUF's numbers are read as they lie in memory");

namespace {

constexpr std::string_view kMagic = "GGUF";
constexpr const char* kAlignmentKey = "general.alignment";
constexpr uint64_t kDefaultAlignment = 32;
// Most dimensions of a tensor, by ggml's own limit; no weight of a decoder has more than two.
constexpr uint32_t kMaxDimensions = 4;
// Arrays of arrays occur in no known file; deeper ones would overflow the stack.
constexpr int kMaxDepth = 4;

// What ggml calls its types, also those that cannot be read, so that a refusal has a name.
constexpr std::array<std::pair<uint32_t, const char*>, 35> kTypeNames = {{
    {0, "F32"},     {1, "F16"},    {2, "Q4_0"},     {3, "Q4_1"},    {6, "Q5_0"},     {7, "Q5_1"},
    {8, "Q8_0"},    {9, "Q8_1"},   {10, "Q2_K"},    {11, "Q3_K"},   {12, "Q4_K"},    {13, "Q5_K"},
    {14, "Q6_K"},   {15, "Q8_K"},  {16, "IQ2_XXS"}, {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"},
    {20, "IQ4_NL"}, {21, "IQ3_S"}, {22, "IQ2_S"},   {23, "IQ4_XS"}, {24, "I8"},      {25, "I16"},
    {26, "I32"},    {27, "I64"},   {28, "F64"},     {29, "IQ1_M"},  {30, "BF16"},    {34, "TQ1_0"},
    {35, "TQ2_0"},  {39, "MXFP4"}, {40, "NVFP4"},   {41, "Q1_0"},   {42, "Q2_0"},
}};
constexpr const char* kReadable = "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K or Q6_K";

std::optional<GgmlType> readable(uint32_t type) {
  for (const GgmlType known : {GgmlType::kF32, GgmlType::kF16, GgmlType::kQ4_0, GgmlType::kQ4_1,
                               GgmlType::kQ8_0, GgmlType::kQ4_K, GgmlType::kQ6_K, GgmlType::kBF16})
    if (static_cast<uint32_t>(known) == type) return known;
  return {};
}

// The types of metadata values.
enum ValueType : uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64,
};
constexpr const char* kValueTypes = "a type from 0 (uint8) to 12 (float64)";

// The least bytes that a value of the type takes.
uint64_t least_bytes(uint32_t type) {
  switch (type) {
    case kUint8:
    case kInt8:
    case kBool: return 1;
    case kUint16:
    case kInt16: return 2;
    case kUint32:
    case kInt32:
    case kFloat32: return 4;
    case kArray: return 12;
    default: return 8;
  }
}

float half_at(const std::byte* address) {
  uint16_t bits;
  std::memcpy(&bits, address, sizeof bits);
  return static_cast<float>(c10::Half(bits, c10::Half::from_bits()));
}

int nibble(const std::byte* bytes, int64_t i, bool high) {
  return static_cast<int>(high ? bytes[i] >> 4 : bytes[i] & std::byte{15});
}

constexpr int64_t kBlock = 32;        // elements of a block of Q4_0, Q4_1, Q8_0
constexpr int64_t kSuperBlock = 256;  // of Q4_K and Q6_K

// A block has an fp16 scale and 16 bytes whose low halves are elements 0 to 15 and whose high halves are 16
// to 31.
void dequantize_q4_0(const std::byte* block, float* out) {
  const float scale = half_at(block);
  for (int64_t i = 0; i < kBlock; ++i)
    out[i] = scale * static_cast<float>(nibble(block + 2, i % 16, i >= 16) - 8);
}

// A block has an fp16 scale, an fp16 minimum, and 16 bytes whose low halves are elements 0 to 15 and whose
// high halves are 16 to 31.
void dequantize_q4_1(const std::byte* block, float* out) {
  const float scale = half_at(block), minimum = half_at(block + 2);
  for (int64_t i = 0; i < kBlock; ++i)
    out[i] = scale * static_cast<float>(nibble(block + 4, i % 16, i >= 16)) + minimum;
}

void dequantize_q8_0(const std::byte* block, float* out) {
  const float scale = half_at(block);
  for (int64_t i = 0; i < kBlock; ++i) out[i] = scale * static_cast<float>(static_cast<int8_t>(block[2 + i]));
}

// A block has an fp16 scale and minimum; 12 bytes with eight 6-bit scales and eight 6-bit minima; 128 bytes
// of 4-bit quanta: 32 bytes hold the 32 elements of sub-block 2c in their low halves and of 2c + 1 in their
// high ones. Scales 0 to 3 and minima 0 to 3 are the low six bits of bytes 0 to 3 and 4 to 7; of the others,
// bytes 8 to 11 have the low four bits (scales low, minima high) and the top two bits of bytes 0 to 7 the
// rest.
void dequantize_q4_k(const std::byte* block, float* out) {
  const float d = half_at(block), d_min = half_at(block + 2);
  const std::byte* packed = block + 4;
  const std::byte* quanta = block + 16;
  const auto byte = [&](int i) { return static_cast<int>(packed[i]); };
  for (int sub = 0; sub < 8; ++sub) {
    const int j = sub % 4;
    const int scale = sub < 4 ? byte(j) & 63 : (byte(8 + j) & 15) | (byte(j) >> 2 & 48);
    const int minimum = sub < 4 ? byte(4 + j) & 63 : byte(8 + j) >> 4 | (byte(4 + j) >> 2 & 48);
    const float scaled = d * static_cast<float>(scale), shift = d_min * static_cast<float>(minimum);
    for (int64_t i = 0; i < 32; ++i)
      out[32 * sub + i] =
          scaled * static_cast<float>(nibble(quanta + 32 * (sub / 2), i, sub % 2 != 0)) - shift;
  }
}

// A block has 128 bytes of low four bits, 64 bytes of high two bits, 16 signed scales of 16 elements each, an
// fp16 scale of all. Each half of the block (128 elements) is four runs of 32: runs 0 and 1 are the low
// halves of 64 bytes, 2 and 3 their high halves; run r has bits 2r and 2r + 1 of 32 bytes.
void dequantize_q6_k(const std::byte* block, float* out) {
  const std::byte* low = block;
  const std::byte* high = block + 128;
  const std::byte* scales = block + 192;
  const float d = half_at(block + 208);
  for (int64_t i = 0; i < kSuperBlock; ++i) {
    const int64_t half = i / 128, run = i % 128 / 32, lane = i % 32;
    const int bits = nibble(low + 64 * half + 32 * (run % 2), lane, run >= 2) |
                     (static_cast<int>(high[32 * half + lane]) >> (2 * run) & 3) << 4;
    const float scaled = d * static_cast<float>(static_cast<int8_t>(scales[i / 16]));
    out[i] = scaled * static_cast<float>(bits - 32);
  }
}

void dequantize_f16(const std::byte* block, float* out) {
  *out = half_at(block);
}

void dequantize_bf16(const std::byte* block, float* out) {
  uint16_t bits;
  std::memcpy(&bits, block, sizeof bits);
  *out = static_cast<float>(c10::BFloat16(bits, c10::BFloat16::from_bits()));
}

void dequantize_f32(const std::byte* block, float* out) {
  std::memcpy(out, block, sizeof *out);
}

}  // namespace

std::string ggml_type_name(uint32_t type) {
  for (const auto& [number, name] : kTypeNames)
    if (number == type) return name;
  return str("type ", type);
}

GgmlBlock ggml_block(GgmlType type) {
  switch (type) {
    case GgmlType::kF32: return {1, 4};
    case GgmlType::kF16: return {1, 2};
    case GgmlType::kBF16: return {1, 2};
    case GgmlType::kQ4_0: return {kBlock, 2 + 16};
    case GgmlType::kQ4_1: return {kBlock, 4 + 16};
    case GgmlType::kQ8_0: return {kBlock, 2 + 32};
    case GgmlType::kQ4_K: return {kSuperBlock, 4 + 12 + 128};
    case GgmlType::kQ6_K: return {kSuperBlock, 128 + 64 + 16 + 2};
  }
  BOUGH_CHECK(false, "no block for ggml type ", static_cast<uint32_t>(type));
}

void dequantize(GgmlType type, const std::byte* blocks, int64_t num_elements, float* out) {
  const GgmlBlock block = ggml_block(type);
  BOUGH_CHECK(num_elements % block.elements == 0, num_elements, " elements of ",
              ggml_type_name(static_cast<uint32_t>(type)));
  const auto each = [&](auto&& one) {
    constexpr int64_t kGrain = 1 << 16;  // elements of a task: a few times what starting one costs
    at::parallel_for(0, num_elements / block.elements, kGrain / block.elements,
                     [&](int64_t begin, int64_t end) {
                       for (int64_t i = begin; i < end; ++i)
                         one(blocks + i * block.bytes, out + i * block.elements);
                     });
  };
  switch (type) {
    case GgmlType::kF32: return each(dequantize_f32);
    case GgmlType::kF16: return each(dequantize_f16);
    case GgmlType::kBF16: return each(dequantize_bf16);
    case GgmlType::kQ4_0: return each(dequantize_q4_0);
    case GgmlType::kQ4_1: return each(dequantize_q4_1);
    case GgmlType::kQ8_0: return each(dequantize_q8_0);
    case GgmlType::kQ4_K: return each(dequantize_q4_k);
    case GgmlType::kQ6_K: return each(dequantize_q6_k);
  }
}

// Reads forward through the header; every read is checked against the end of the file.
class GgufFile::Cursor {
 public:
  explicit Cursor(const GgufFile& file) : file_(file), bytes_(file.file_->text()) {}

  size_t position() const { return position_; }
  uint64_t left() const { return bytes_.size() - position_; }

  std::string_view take(uint64_t count, const std::string& what) {
    if (count > left())
      file_.damaged(str(what, " at byte ", position_, ": got a length of ", count,
                        " bytes; expected at most ", left(), ", what is left of this file of ",
                        bytes_.size()));
    const std::string_view taken = bytes_.substr(position_, count);
    position_ += count;
    return taken;
  }
  template <class T>
  T number(const std::string& what) {
    T value;
    std::memcpy(&value, take(sizeof value, what).data(), sizeof value);
    return value;
  }
  std::string text(const std::string& what) {
    const uint64_t length = number<uint64_t>(what);
    const std::string_view bytes = take(length, what);
    if (const auto bad = unicode::find_invalid(bytes))
      file_.damaged(
          str(what, ": got bytes that are no UTF-8 (", quoted(bytes.substr(*bad, 16)), "); expected text"));
    return std::string(bytes);
  }
  // Reads a number of things of which each takes at least `bytes_each`.
  uint64_t count(const std::string& what, uint64_t bytes_each) {
    const uint64_t value = number<uint64_t>(what);
    if (value > bytes_.size() / bytes_each)
      file_.damaged(str(what, ": got ", value, "; expected at most ", bytes_.size() / bytes_each,
                        ", as many as fit this file of ", bytes_.size(), " bytes"));
    return value;
  }

 private:
  const GgufFile& file_;
  std::string_view bytes_;
  size_t position_ = 0;
};

GgufFile::GgufFile(const std::filesystem::path& path)
    : path_(path), file_(std::make_shared<const MappedFile>(path)) {
  read_header();
  check_layout();
}

void GgufFile::fail(const std::string& what) const {
  throw UserError(str(path_.string(), ": ", what));
}

void GgufFile::damaged(const std::string& what) const {
  fail(str(what, "; the file is damaged or cut off: copy or download it again"));
}

void GgufFile::read_header() {
  Cursor cursor(*this);
  if (cursor.left() < kMagic.size() || cursor.take(kMagic.size(), "the magic") != kMagic)
    fail(str("got a file that begins with ", quoted(file_->text().substr(0, kMagic.size())),
             "; expected a GGUF file, which begins with 'GGUF'"));
  const auto version = cursor.number<uint32_t>("the version");
  if (version != 0 && (version & 0xFFFF) == 0)
    fail("got a big-endian GGUF file; expected a little-endian one: convert or download it again");
  if (version != 2 && version != 3)
    fail(str("got GGUF version ", version,
             "; expected 2 or 3: convert the model again with a llama.cpp of September 2023 or later"));
  // A tensor's entry takes at least 24 bytes (no name, no dimension), a metadata entry 13.
  const uint64_t num_tensors = cursor.count("the number of tensors", 24);
  const uint64_t num_entries = cursor.count("the number of metadata entries", 13);
  for (uint64_t i = 0; i < num_entries; ++i) {
    const std::string key = cursor.text(str("key of metadata entry ", i));
    const auto type = cursor.number<uint32_t>(str("metadata ", quoted(key)));
    if (metadata_.contains(key))
      damaged(str("metadata ", quoted(key), ": got this key twice; expected it once"));
    metadata_[key] = read_value(cursor, type, key, 0);
  }
  read_tensors(cursor, num_tensors);
}

Json GgufFile::read_value(Cursor& cursor, uint32_t type, const std::string& key, int depth) const {
  const std::string what = str("metadata ", quoted(key));
  switch (type) {
    case kUint8: return cursor.number<uint8_t>(what);
    case kInt8: return cursor.number<int8_t>(what);
    case kUint16: return cursor.number<uint16_t>(what);
    case kInt16: return cursor.number<int16_t>(what);
    case kUint32: return cursor.number<uint32_t>(what);
    case kInt32: return cursor.number<int32_t>(what);
    case kUint64: return cursor.number<uint64_t>(what);
    case kInt64: return cursor.number<int64_t>(what);
    case kFloat32: return cursor.number<float>(what);
    case kFloat64: return cursor.number<double>(what);
    case kString: return cursor.text(what);
    case kBool: {
      const auto value = cursor.number<uint8_t>(what);
      if (value > 1) damaged(str(what, ": got the boolean ", int{value}, "; expected 0 or 1"));
      return value == 1;
    }
    case kArray: {
      if (depth == kMaxDepth)
        damaged(str(what, ": got arrays nested deeper than ", kMaxDepth, "; expected a flat array"));
      const auto element = cursor.number<uint32_t>(what);
      if (element > kFloat64)
        damaged(str(what, ": got an array of type ", element, "; expected ", kValueTypes));
      const uint64_t count = cursor.count(str(what, ", its length"), least_bytes(element));
      if (count > cursor.left() / least_bytes(element))
        damaged(str(what, ": got an array of ", count, " elements; expected at most ",
                    cursor.left() / least_bytes(element), ", as many as the rest of the file holds"));
      Json list = Json::array();
      for (uint64_t i = 0; i < count; ++i) list.push_back(read_value(cursor, element, key, depth + 1));
      return list;
    }
    default: damaged(str(what, ": got a value of type ", type, "; expected ", kValueTypes));
  }
}

void GgufFile::read_tensors(Cursor& cursor, uint64_t count) {
  struct Entry {
    std::string name;
    GgufTensor tensor;
    uint64_t offset;
  };
  std::vector<Entry> entries;
  for (uint64_t i = 0; i < count; ++i) {
    Entry entry{cursor.text(str("name of tensor ", i)), {}, 0};
    const std::string what = str("tensor ", quoted(entry.name));
    const auto dimensions = cursor.number<uint32_t>(what);
    if (dimensions > kMaxDimensions)
      damaged(str(what, ": got ", dimensions, " dimensions; expected at most ", kMaxDimensions));
    uint64_t elements = 1;
    for (uint32_t d = 0; d < dimensions; ++d) {
      const auto size = cursor.number<uint64_t>(what);
      // The limits bound the product by 2^48: more elements than any file holds.
      if (size > (uint64_t{1} << 48) || (size != 0 && elements > (uint64_t{1} << 48) / size))
        damaged(str(what, ": got ", size, " for dimension ", d, "; expected sizes that fit a file of ",
                    file_->size(), " bytes"));
      elements *= size;
      entry.tensor.shape.insert(entry.tensor.shape.begin(), static_cast<int64_t>(size));
    }
    const auto type = cursor.number<uint32_t>(what);
    const auto known = readable(type);
    if (!known)
      fail(str(what, ": got a tensor of type ", ggml_type_name(type), "; expected ", kReadable,
               ": use a file of the same model in one of these (of llama.cpp's names Q8_0, Q4_0, Q4_1, BF16, "
               "F16 or "
               "F32; or Q4_K_M or Q6_K where the widths are multiples of 256)"));
    entry.tensor.type = *known;
    const GgmlBlock block = ggml_block(*known);
    const int64_t row = entry.tensor.shape.empty() ? 1 : entry.tensor.shape.back();
    if (row % block.elements != 0)
      damaged(str(what, ": got rows of ", row, " elements; expected a multiple of ", block.elements,
                  ", the block of ", ggml_type_name(type)));
    entry.offset = cursor.number<uint64_t>(what);
    entry.tensor.end = elements / static_cast<uint64_t>(block.elements) * static_cast<uint64_t>(block.bytes);
    entries.push_back(std::move(entry));
  }

  const int64_t alignment = integer_or(kAlignmentKey, kDefaultAlignment);
  if (alignment < 1 || alignment > (1 << 20) || !std::has_single_bit(static_cast<uint64_t>(alignment)))
    damaged(str("metadata '", kAlignmentKey, "': got ", alignment, "; expected a power of two up to 2^20"));
  const size_t unit = static_cast<size_t>(alignment);
  const size_t data_begin = (cursor.position() + unit - 1) / unit * unit;
  for (auto& [name, tensor, offset] : entries) {
    const std::string what = str("tensor ", quoted(name));
    if (offset % unit != 0)
      damaged(str(what, ": got the offset ", offset, "; expected a multiple of ", unit));
    const size_t available = data_begin < file_->size() ? file_->size() - data_begin : 0;
    if (offset > available || tensor.end > available - offset)
      damaged(str(what, ": got ", tensor.end, " bytes at offset ", offset, "; expected them within the ",
                  available, " bytes of data in this file"));
    tensor.begin = data_begin + offset;
    tensor.end += tensor.begin;
    if (!tensors_.emplace(name, std::move(tensor)).second) damaged(str(what, ": got two of this name"));
  }
}

void GgufFile::check_layout() const {
  std::vector<std::pair<const GgufTensor*, const std::string*>> order;
  for (const auto& [name, tensor] : tensors_)
    if (tensor.begin != tensor.end) order.emplace_back(&tensor, &name);
  std::sort(order.begin(), order.end(),
            [](const auto& a, const auto& b) { return a.first->begin < b.first->begin; });
  for (size_t i = 1; i < order.size(); ++i)
    if (order[i].first->begin < order[i - 1].first->end)
      damaged(str("tensor ", quoted(*order[i].second), ": got bytes that begin at ", order[i].first->begin,
                  "; expected at least ", order[i - 1].first->end, ", where ", quoted(*order[i - 1].second),
                  " ends"));
}

const Json& GgufFile::value(const std::string& key) const {
  const auto found = metadata_.find(key);
  if (found == metadata_.end())
    fail(str("got no metadata ", quoted(key),
             "; expected it: convert the model again with a current llama.cpp (convert_hf_to_gguf.py)"));
  return *found;
}

std::string GgufFile::text(const std::string& key) const {
  const Json& found = value(key);
  if (!found.is_string())
    fail(str("metadata ", quoted(key), ": got ", quoted(dump_line(found)), "; expected a text"));
  return found;
}

std::string GgufFile::text_or(const std::string& key, const std::string& fallback) const {
  return has(key) ? text(key) : fallback;
}

int64_t GgufFile::integer(const std::string& key) const {
  const Json& found = value(key);
  const bool natural = found.is_number_integer() && found >= 0 &&
                       !(found.is_number_unsigned() && found.get<uint64_t>() > uint64_t{INT64_MAX});
  if (!natural)
    fail(str("metadata ", quoted(key), ": got ", quoted(dump_line(found)),
             "; expected one whole number, not negative"));
  return found.get<int64_t>();
}

int64_t GgufFile::integer_or(const std::string& key, int64_t fallback) const {
  return has(key) ? integer(key) : fallback;
}

double GgufFile::number_or(const std::string& key, double fallback) const {
  if (!has(key)) return fallback;
  const Json& found = value(key);
  if (!found.is_number())
    fail(str("metadata ", quoted(key), ": got ", quoted(dump_line(found)), "; expected a number"));
  return found.get<double>();
}

bool GgufFile::flag_or(const std::string& key, bool fallback) const {
  if (!has(key)) return fallback;
  const Json& found = value(key);
  if (!found.is_boolean())
    fail(str("metadata ", quoted(key), ": got ", quoted(dump_line(found)), "; expected true or false"));
  return found.get<bool>();
}

const Json& GgufFile::list(const std::string& key) const {
  const Json& found = value(key);
  if (!found.is_array())
    fail(str("metadata ", quoted(key), ": got ", quoted(dump_line(found)), "; expected an array"));
  return found;
}

at::Tensor GgufFile::dequantized(const std::string& name) const {
  const auto found = tensors_.find(name);
  BOUGH_CHECK(found != tensors_.end(), "no tensor ", quoted(name), " in ", path_.string());
  const GgufTensor& tensor = found->second;
  at::Tensor values = at::empty(tensor.shape, at::TensorOptions().dtype(at::kFloat));
  dequantize(tensor.type, file_->data() + tensor.begin, values.numel(), values.data_ptr<float>());
  return values;
}

}  // namespace bough
