#include "models/safetensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "base/error.h"

namespace bough {

static_assert(std::endian::native == std::endian::little, "tensors are stored little-endian, as in memory");

namespace {

constexpr size_t kLengthBytes = 8;
// The format's own limit. The header of a model with 10,000 tensors has 1 MB.
constexpr uint64_t kMaxHeader = 100'000'000;
// torch's own limit on dimensions. No weight has more than a few.
constexpr size_t kMaxDimensions = 64;
constexpr const char* kMetadataKey = "__metadata__";

struct KnownDtype {
  const char* name;
  at::ScalarType type;
};
constexpr std::array<KnownDtype, 14> kDtypes = {{{"F64", at::kDouble},
                                                 {"F32", at::kFloat},
                                                 {"F16", at::kHalf},
                                                 {"BF16", at::kBFloat16},
                                                 {"I64", at::kLong},
                                                 {"I32", at::kInt},
                                                 {"I16", at::kShort},
                                                 {"I8", at::kChar},
                                                 {"U8", at::kByte},
                                                 {"U16", at::kUInt16},
                                                 {"U32", at::kUInt32},
                                                 {"U64", at::kUInt64},
                                                 {"BOOL", at::kBool},
                                                 {"F8_E4M3", at::kFloat8_e4m3fn}}};

const char* dtype_name(at::ScalarType type) {
  for (const KnownDtype& known : kDtypes)
    if (known.type == type) return known.name;
  BOUGH_CHECK(false, "safetensors has no name for dtype ", c10::toString(type));
}

// Returns a JSON number that is an integer from 0 to 2^63 - 1, or nullopt.
std::optional<int64_t> natural(const Json& value) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > uint64_t(INT64_MAX)) return {};
  return value.get<int64_t>();
}

std::string shown(const Json& value) {
  return quoted(dump_line(value));
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : path_(path), file_(std::make_shared<const MappedFile>(path)) {
  read_header();
  check_layout();
}

void SafetensorsFile::fail(const std::string& what) const {
  throw UserError(
      str(path_.string(), ": ", what, "; the file is damaged or cut off: copy or download it again"));
}

void SafetensorsFile::read_header() {
  const size_t size = file_->size();
  if (size < kLengthBytes)
    fail(str("got ", size, " bytes; expected a safetensors file, which has at least 8"));
  uint64_t length = 0;
  std::memcpy(&length, file_->data(), kLengthBytes);
  if (length > kMaxHeader)
    fail(str("got a header length of ", length, " bytes; expected at most ", kMaxHeader));
  if (length > size - kLengthBytes)
    fail(str("got a header length of ", length, " bytes; expected at most ", size - kLengthBytes,
             ", the rest of this file of ", size, " bytes"));
  data_begin_ = kLengthBytes + length;
  const Json header = parse_json(file_->text().substr(kLengthBytes, length), path_.string() + " (header)");
  if (!header.is_object()) fail(str("got the header ", shown(header), "; expected a JSON object"));
  for (const auto& [name, value] : header.items()) {
    if (name != kMetadataKey) {
      entries_.emplace(name, parse_entry(name, value));
      continue;
    }
    if (!value.is_object())
      fail(str("got ", kMetadataKey, " ", shown(value), "; expected an object of strings"));
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string())
        fail(str("got ", kMetadataKey, "[", quoted(key), "] ", shown(text), "; expected a string"));
      metadata_[key] = text.get<std::string>();
    }
  }
}

SafetensorsEntry SafetensorsFile::parse_entry(const std::string& name, const Json& value) const {
  const std::string where = str("tensor ", quoted(name), ": got ");
  if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") ||
      !value.contains("data_offsets"))
    fail(str(where, shown(value), "; expected an object with dtype, shape and data_offsets"));
  SafetensorsEntry entry{};
  const auto known = std::find_if(kDtypes.begin(), kDtypes.end(),
                                  [&](const KnownDtype& dtype) { return value["dtype"] == dtype.name; });
  if (known == kDtypes.end())
    fail(str(where, "dtype ", shown(value["dtype"]), "; expected F32, BF16, F16, F64 or an integer type"));
  entry.dtype = known->type;

  const Json& shape = value["shape"];
  if (!shape.is_array() || shape.size() > kMaxDimensions)
    fail(str(where, "shape ", shown(shape), "; expected a list of at most ", kMaxDimensions, " sizes"));
  int64_t bytes = static_cast<int64_t>(c10::elementSize(entry.dtype));
  for (const Json& size : shape) {
    const auto number = natural(size);
    if (!number) fail(str(where, "size ", shown(size), " in its shape; expected an integer from 0"));
    entry.shape.push_back(*number);
  }
  // If a size is 0, the product is 0 and must not be refused because the other sizes overflow.
  const bool is_empty = std::count(entry.shape.begin(), entry.shape.end(), 0) > 0;
  for (const int64_t size : entry.shape)
    if (!is_empty && __builtin_mul_overflow(bytes, size, &bytes))
      fail(str(where, "shape ", shown(shape), "; expected at most 2^63 bytes"));
  if (is_empty) bytes = 0;

  const Json& offsets = value["data_offsets"];
  const bool is_pair = offsets.is_array() && offsets.size() == 2;
  const int64_t begin = is_pair ? natural(offsets[0]).value_or(-1) : -1;
  const int64_t end = is_pair ? natural(offsets[1]).value_or(-1) : -1;
  const int64_t data_size = static_cast<int64_t>(file_->size() - data_begin_);
  if (begin < 0 || begin > end || end > data_size)
    fail(str(where, "data_offsets ", shown(offsets), "; expected [begin, end] within the ", data_size,
             " bytes that follow the header"));
  if (end - begin != bytes)
    fail(str(where, end - begin, " bytes; expected ", bytes, " for shape ", shown(shape), " of ",
             known->name));
  entry.begin = static_cast<size_t>(begin);
  entry.end = static_cast<size_t>(end);
  return entry;
}

// Checks that the tensors, in byte order, are contiguous from the end of the header to the end of the file.
void SafetensorsFile::check_layout() const {
  std::vector<std::pair<const SafetensorsEntry*, const std::string*>> order;
  for (const auto& [name, entry] : entries_) order.emplace_back(&entry, &name);
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first->begin, a.first->end) < std::pair(b.first->begin, b.first->end);
  });
  size_t reached = 0;
  for (const auto& [entry, name] : order) {
    if (entry->begin != reached)
      fail(str("tensor ", quoted(*name), ": got bytes that begin at ", entry->begin, "; expected ", reached,
               ", the end of the tensor before it (tensors neither overlap nor leave holes)"));
    reached = entry->end;
  }
  const size_t data_size = file_->size() - data_begin_;
  if (reached != data_size)
    fail(str("got ", data_size, " bytes after the header; expected ", reached,
             ", the end of the last tensor"));
}

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end())
    throw UserError(str(path_.string(), ": got no tensor ", quoted(name), "; expected one of its ",
                        entries_.size(), " tensors"));
  const SafetensorsEntry& entry = found->second;
  const auto options = at::TensorOptions().dtype(entry.dtype);
  const std::byte* bytes = file_->data() + data_begin_ + entry.begin;
  if (entry.begin == entry.end || reinterpret_cast<uintptr_t>(bytes) % c10::elementSize(entry.dtype) != 0) {
    at::Tensor copy = at::empty(entry.shape, options);
    if (entry.begin != entry.end) std::memcpy(copy.data_ptr(), bytes, entry.end - entry.begin);
    return copy;
  }
  // from_blob takes a mutable pointer. The mapping is read-only, so a write would fault instead of corrupting
  // the file.
  return at::from_blob(
      const_cast<std::byte*>(bytes), entry.shape, [file = file_](void*) {}, options);
}

int64_t stored_bytes(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  return tensor.numel() * static_cast<int64_t>(c10::elementSize(dtype.value_or(tensor.scalar_type())));
}

void write_safetensors(AtomicFile& file, const std::vector<SafetensorsSource>& sources,
                       const SafetensorsMetadata& metadata) {
  std::vector<const SafetensorsSource*> order;
  for (const SafetensorsSource& source : sources) order.push_back(&source);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return c10::elementSize(a->dtype) > c10::elementSize(b->dtype);
  });

  Json header = Json::object();
  if (!metadata.empty()) header[kMetadataKey] = metadata;
  int64_t offset = 0;
  for (const SafetensorsSource* source : order) {
    BOUGH_CHECK(source->name != kMetadataKey && !header.contains(source->name), "tensor name ",
                quoted(source->name), " is used twice or reserved");
    int64_t end = static_cast<int64_t>(c10::elementSize(source->dtype));
    for (const int64_t size : source->shape) end *= size;
    end += offset;
    header[source->name] = {
        {"dtype", dtype_name(source->dtype)}, {"shape", source->shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = dump_line(header);
  text.append((8 - text.size() % 8) % 8, ' ');  // tensors begin at a multiple of 8, as the format advises
  const uint64_t length = text.size();
  file.write(&length, sizeof length);
  file.write(text);
  for (const SafetensorsSource* source : order) {
    const at::Tensor made = source->make();
    BOUGH_CHECK(made.sizes() == at::IntArrayRef(source->shape), quoted(source->name), " has the shape ",
                made.sizes());
    const at::Tensor stored = made.detach().to(at::kCPU, source->dtype).contiguous();
    file.write(stored.data_ptr(), static_cast<size_t>(stored_bytes(stored, {})));
  }
}

void write_safetensors(AtomicFile& file, const NamedTensors& tensors, std::optional<at::ScalarType> dtype,
                       const SafetensorsMetadata& metadata) {
  std::vector<SafetensorsSource> sources;
  for (const auto& [name, tensor] : tensors)
    sources.push_back({name, dtype.value_or(tensor.scalar_type()), tensor.sizes().vec(),
                       [tensor = tensor] { return tensor; }});
  write_safetensors(file, sources, metadata);
}

void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       std::optional<at::ScalarType> dtype, const SafetensorsMetadata& metadata) {
  AtomicFile file(path);
  write_safetensors(file, tensors, dtype, metadata);
  file.commit();
}

}  // namespace bough
