#include "engine/server_experts.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>

#include "base/base64.h"
#include "base/error.h"

namespace bough {

namespace {

[[noreturn]] void refuse_experts(const std::string& got, const std::string& expected) {
  throw UserError(str("routed_experts: got ", got, ", expected ", expected));
}

std::string bytes_of(const Json& text, const char* expected) {
  const auto bytes = text.is_string() ? base64_decode(text.get_ref<const std::string&>()) : std::nullopt;
  if (!bytes) refuse_experts(quoted(dump_line(text), 60), expected);
  return *bytes;
}

std::string shape_of(const ExpertLayout& layout, int64_t num_rows) {
  return str(num_rows, " rows of ", layout.num_layers, " layers with ", layout.num_chosen, " experts");
}

// The K experts of one token in one layer.
template <class T>
void add_experts(const T* chosen, int64_t token, int64_t layer, const ExpertLayout& layout,
                 RoutedExperts& out) {
  const T* const end = chosen + layout.num_chosen;
  const auto refuse = [&](int64_t expert, const char* what, const std::string& expected) {
    refuse_experts(str("expert ", expert, what, " of token ", token, " in layer ", layer),
                   str(expected, "; check that the server serves the trained model"));
  };
  if (!layout.dense_layers.empty() && layout.dense_layers[static_cast<size_t>(layer)]) {
    const T* const other = std::find_if(chosen, end, [](T expert) { return expert != 0; });
    if (other != end) refuse(*other, "", "0, because the layer has no experts");
    return;
  }
  for (const T* each = chosen; each != end; ++each) {
    const int64_t expert = *each;
    if (expert < 0 || expert >= layout.num_experts)
      refuse(expert, "", str("numbers from 0 to ", layout.num_experts - 1));
    if (std::find(chosen, each, *each) != each) refuse(expert, " twice", "different experts");
    out.experts.push_back(static_cast<uint16_t>(expert));
  }
}

// `bytes`: the elements of an array [num_rows, layers, K], little-endian.
template <class T>
RoutedExperts experts_of_elements(std::string_view bytes, const ExpertLayout& layout, int64_t num_rows) {
  std::vector<T> elements(bytes.size() / sizeof(T));
  std::memcpy(elements.data(), bytes.data(), bytes.size());
  const auto num_dense = std::count(layout.dense_layers.begin(), layout.dense_layers.end(), 1);
  RoutedExperts out{.num_layers = layout.num_layers - num_dense, .num_chosen = layout.num_chosen};
  out.experts.reserve(static_cast<size_t>(num_rows * out.row_size()));
  const T* chosen = elements.data();
  for (int64_t token = 0; token < num_rows; ++token)
    for (int64_t layer = 0; layer < layout.num_layers; ++layer, chosen += layout.num_chosen)
      add_experts(chosen, token, layer, layout, out);
  return out;
}

// The text after `key` in the header of a .npy file, a Python dictionary that numpy writes.
std::string_view value_in(std::string_view header, std::string_view key) {
  const size_t found = header.find(key);
  return found == std::string_view::npos ? std::string_view() : header.substr(found + key.size());
}

// Reads the numbers of (5, 3, 2). nullopt if the text does not begin with such a list.
std::optional<std::vector<int64_t>> shape_in(std::string_view text) {
  const size_t close = text.find(')');
  if (!text.starts_with('(') || close == std::string_view::npos) return std::nullopt;
  std::vector<int64_t> shape;
  const char* at = text.data() + 1;
  const char* const end = text.data() + close;
  while (at < end) {
    const auto [after, error] = std::from_chars(at, end, shape.emplace_back());
    if (error != std::errc()) return std::nullopt;
    at = std::find_if(after, end, [](char c) { return c != ',' && c != ' '; });
  }
  return shape;
}

}  // namespace

RoutedExperts experts_of_int32(const Json& text, const ExpertLayout& layout, int64_t num_rows) {
  const std::string bytes =
      bytes_of(text, "base64 text of int32 numbers, as SGLang 0.5.23 sends them from /generate");
  const auto row_bytes = layout.num_layers * layout.num_chosen * int64_t{sizeof(int32_t)};
  if (std::ssize(bytes) != num_rows * row_bytes)
    refuse_experts(str(bytes.size(), " bytes"),
                   str(num_rows * row_bytes, " bytes: ", shape_of(layout, num_rows),
                       ", each in 4 bytes; check that the server serves the trained model"));
  return experts_of_elements<int32_t>(bytes, layout, num_rows);
}

RoutedExperts experts_of_npy(const Json& text, const ExpertLayout& layout, int64_t num_rows) {
  constexpr std::string_view kMagic = "\x93NUMPY\x01";  // version 1 of the format
  constexpr size_t kLengthAt = 8, kHeaderAt = 10;
  constexpr const char* kExpected =
      "base64 text of a .npy file with uint8, uint16 or int32 numbers, as vLLM 0.32 sends it from "
      "/inference/v1/generate";
  const std::string bytes = bytes_of(text, kExpected);
  if (!bytes.starts_with(kMagic) || bytes.size() < kHeaderAt)
    refuse_experts(str("bytes that begin with ", quoted(bytes, 16)), kExpected);
  const size_t header_size = static_cast<unsigned char>(bytes[kLengthAt]) +
                             256 * static_cast<size_t>(static_cast<unsigned char>(bytes[kLengthAt + 1]));
  if (bytes.size() < kHeaderAt + header_size) refuse_experts("a .npy file without its end", kExpected);
  const std::string_view header = std::string_view(bytes).substr(kHeaderAt, header_size);
  const std::string_view elements = std::string_view(bytes).substr(kHeaderAt + header_size);
  const std::string_view type = value_in(header, "'descr': ").substr(0, 5);
  const auto shape = shape_in(value_in(header, "'shape': "));
  const size_t width = type == "'|u1'" ? 1 : type == "'<u2'" ? 2 : type == "'<i4'" ? 4 : 0;
  if (width == 0 || !shape || !value_in(header, "'fortran_order': ").starts_with("False"))
    refuse_experts(str("a .npy file with the header ", quoted(header, 100)), kExpected);
  if (*shape != std::vector<int64_t>{num_rows, layout.num_layers, layout.num_chosen}) {
    std::string got = "the shape";
    for (const int64_t size : *shape) got += str(' ', size);
    refuse_experts(got, str(shape_of(layout, num_rows), "; check that the server serves the trained model"));
  }
  if (elements.size() != static_cast<size_t>(num_rows * layout.num_layers * layout.num_chosen) * width)
    refuse_experts("a .npy file without its end", kExpected);
  if (width == 1) return experts_of_elements<uint8_t>(elements, layout, num_rows);
  if (width == 2) return experts_of_elements<uint16_t>(elements, layout, num_rows);
  return experts_of_elements<int32_t>(elements, layout, num_rows);
}

}  // namespace bough
