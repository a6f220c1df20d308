#include "tinker/wire.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <protozero/pbf_reader.hpp>
#include <protozero/pbf_writer.hpp>

#include "base/error.h"

namespace bough {

namespace {

// DType of tinker_public.
constexpr int32_t kFloat32 = 1, kInt64 = 2, kInt32 = 3, kBFloat16 = 4;
// Elements of all sparse tensors of a request. They are stored dense, so a small body could fill the memory.
constexpr int64_t kMostElements = int64_t{1} << 26;

[[noreturn]] void wrong(const std::string& where, const std::string& got, const std::string& expected) {
  throw ApiError(400, str(where, ": got ", got, ", expected ", expected), where);
}

template <class T>
std::vector<T> numbers(std::string_view bytes, const std::string& where) {
  if (bytes.size() % sizeof(T) != 0)
    wrong(where, str(bytes.size(), " bytes"), str("a multiple of ", sizeof(T)));
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

std::vector<double> to_doubles(std::string_view bytes, int32_t dtype, const std::string& where) {
  const auto widened = [](const auto& values) { return std::vector<double>(values.begin(), values.end()); };
  switch (dtype) {
    case kFloat32: return widened(numbers<float>(bytes, where));
    case kInt64: return widened(numbers<int64_t>(bytes, where));
    case kInt32: return widened(numbers<int32_t>(bytes, where));
    case kBFloat16: {
      std::vector<double> values;
      for (const uint16_t bits : numbers<uint16_t>(bytes, where)) {
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value = 0;
        std::memcpy(&value, &wide, sizeof value);
        values.push_back(value);
      }
      return values;
    }
    default: wrong(where + ".dtype", str(dtype), "1 (float32), 2 (int64), 3 (int32) or 4 (bfloat16)");
  }
}

// Compressed sparse rows to a dense tensor with `is_set`.
WireTensor from_rows(const std::vector<double>& values, const std::vector<int64_t>& row_begin,
                     const std::vector<int64_t>& column, const std::vector<int64_t>& shape,
                     int64_t& elements_left, const std::string& where) {
  if (shape.size() != 2 || shape[0] < 0 || shape[1] < 1)
    wrong(where + ".shape", str(shape.size(), " sizes"), "[rows, columns] of a sparse tensor");
  if (shape[0] > elements_left / shape[1])
    wrong(where + ".shape", str(shape[0], " rows of ", shape[1]),
          str("at most ", kMostElements, " elements in all sparse tensors of a request"));
  elements_left -= shape[0] * shape[1];
  const auto count = static_cast<int64_t>(values.size());
  if (std::ssize(row_begin) != shape[0] + 1 || std::ssize(column) != count || row_begin.front() != 0 ||
      row_begin.back() != count)
    wrong(where, "indices that do not fit the values",
          "crow_indices of rows + 1 entries, from 0 to the count");
  WireTensor dense;
  dense.columns = shape[1];
  dense.values.assign(static_cast<size_t>(shape[0] * shape[1]), 0.0);
  dense.is_set.assign(dense.values.size(), 0);
  for (size_t row = 0; row + 1 < row_begin.size(); ++row) {
    if (row_begin[row + 1] < row_begin[row] || row_begin[row + 1] > count)
      wrong(where + ".crow_indices", "a row with a negative length", "ascending indices");
    for (int64_t i = row_begin[row]; i < row_begin[row + 1]; ++i) {
      const int64_t at = column[static_cast<size_t>(i)];
      if (at < 0 || at >= shape[1]) wrong(where + ".col_indices", str(at), str("0 to ", shape[1] - 1));
      const auto place = row * static_cast<size_t>(shape[1]) + static_cast<size_t>(at);
      dense.values[place] = values[static_cast<size_t>(i)];
      dense.is_set[place] = 1;
    }
  }
  return dense;
}

WireTensor from_dense(std::vector<double> values, const std::vector<int64_t>& shape,
                      const std::string& where) {
  WireTensor tensor;
  tensor.values = std::move(values);
  if (shape.size() > 2) wrong(where + ".shape", str(shape.size(), " sizes"), "one or two");
  if (shape.size() == 2) tensor.columns = shape[1];
  int64_t elements = 1;
  for (const int64_t size : shape) {
    if (size < 0 || size > kMostElements) wrong(where + ".shape", str(size), "sizes from 0");
    elements *= size;
    if (elements > kMostElements) wrong(where + ".shape", str(elements), "fewer elements");
  }
  if (tensor.columns < 1) wrong(where + ".shape", str(tensor.columns, " columns"), "1 or more");
  if (!shape.empty() && elements != std::ssize(tensor.values))
    wrong(where, str(tensor.values.size(), " values"), str(elements, ", by its shape"));
  return tensor;
}

std::string_view view_of(const protozero::data_view& view) {
  return {view.data(), view.size()};
}

WireTensor read_tensor(protozero::pbf_reader message, int64_t& elements_left, const std::string& where) {
  std::string_view dense, values, rows, columns;
  bool is_sparse = false;
  int32_t dtype = 0;
  std::vector<int64_t> shape;
  while (message.next()) switch (message.tag()) {
      case 1: dense = view_of(message.get_view()); break;
      case 2: {
        is_sparse = true;
        protozero::pbf_reader sparse = message.get_message();
        while (sparse.next()) switch (sparse.tag()) {
            case 1: values = view_of(sparse.get_view()); break;
            case 2: rows = view_of(sparse.get_view()); break;
            case 3: columns = view_of(sparse.get_view()); break;
            default: sparse.skip();
          }
        break;
      }
      case 3: dtype = message.get_enum(); break;
      case 4:
        if (message.wire_type() == protozero::pbf_wire_type::length_delimited)
          for (const int64_t size : message.get_packed_int64()) shape.push_back(size);
        else shape.push_back(message.get_int64());
        break;
      default: message.skip();
    }
  if (is_sparse)
    return from_rows(to_doubles(values, dtype, where), numbers<int64_t>(rows, where),
                     numbers<int64_t>(columns, where), shape, elements_left, where);
  return from_dense(to_doubles(dense, dtype, where), shape, where);
}

constexpr const char* kOnlyText = "text: Bough serves language models, which read no images or audio";

WireDatum read_datum(protozero::pbf_reader message, int64_t& elements_left, const std::string& where) {
  WireDatum datum;
  while (message.next()) switch (message.tag()) {
      case 1: {
        protozero::pbf_reader chunk = message.get_message();
        while (chunk.next()) {
          if (chunk.tag() != 1) wrong(where + ".model_input", "an image or audio chunk", kOnlyText);
          protozero::pbf_reader text = chunk.get_message();
          while (text.next()) {
            if (text.tag() == 1) {
              const auto tokens = numbers<int32_t>(view_of(text.get_view()), where + ".model_input");
              datum.tokens.insert(datum.tokens.end(), tokens.begin(), tokens.end());
            } else {
              text.skip();
            }
          }
        }
        break;
      }
      case 2: {
        protozero::pbf_reader entry = message.get_message();
        std::string name;
        std::optional<protozero::pbf_reader> tensor;
        while (entry.next()) switch (entry.tag()) {
            case 1: name = entry.get_string(); break;
            case 2: tensor = entry.get_message(); break;
            default: entry.skip();
          }
        const std::string place = str(where, ".loss_fn_inputs.", name.substr(0, 80));
        datum.inputs[name] = read_tensor(tensor.value_or(protozero::pbf_reader()), elements_left, place);
        break;
      }
      default: message.skip();  // spans, which say where tokens come from: only stable_reinforce reads them
    }
  return datum;
}

template <class T>
std::vector<T> json_numbers(const OrderedJson& list, const std::string& where) {
  if (!list.is_array()) wrong(where, dump_ordered(list).substr(0, 80), "a list of numbers");
  std::vector<T> values;
  values.reserve(list.size());
  for (const OrderedJson& each : list) {
    const bool fits = std::is_integral_v<T> ? each.is_number_integer() : each.is_number();
    if (!fits) wrong(where, dump_ordered(each).substr(0, 80), "a number");
    values.push_back(each.get<T>());
  }
  return values;
}
std::vector<int64_t> optional_numbers(const OrderedJson& body, const std::string& name,
                                      const std::string& where) {
  const auto found = body.find(name);
  if (found == body.end() || found->is_null()) return {};
  return json_numbers<int64_t>(*found, str(where, ".", name));
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

Json json_floats(const std::vector<float>& values) {
  Json list = Json::array();
  for (const float value : values) list.push_back(std::isfinite(value) ? Json(value) : Json(nullptr));
  return list;
}

void write(protozero::pbf_writer& parent, uint32_t tag, const WireTopK& top) {
  if (top.k == 0) return;
  protozero::pbf_writer message(parent, tag);
  message.add_bytes(1, bytes_of(top.ids));
  message.add_bytes(2, bytes_of(top.log_probs));
  message.add_uint32(3, static_cast<uint32_t>(top.k));
  message.add_uint32(4, static_cast<uint32_t>(top.length()));
}

void write(protozero::pbf_writer& parent, uint32_t tag, const WireTensor& tensor) {
  protozero::pbf_writer message(parent, tag);
  std::vector<float> values;
  std::vector<int64_t> row_begin = {0}, columns;
  for (size_t i = 0; i < tensor.values.size(); ++i) {
    const auto column = static_cast<int64_t>(i) % tensor.columns;
    if (tensor.is_set.empty() || tensor.is_set[i] != 0) {
      values.push_back(static_cast<float>(tensor.values[i]));
      columns.push_back(column);
    }
    if (column + 1 == tensor.columns) row_begin.push_back(std::ssize(values));
  }
  if (tensor.is_set.empty()) {
    message.add_bytes(1, bytes_of(values));
  } else {
    protozero::pbf_writer sparse(message, 2);
    sparse.add_bytes(1, bytes_of(values));
    sparse.add_bytes(2, bytes_of(row_begin));
    sparse.add_bytes(3, bytes_of(columns));
  }
  const std::array<int64_t, 2> shape = {tensor.rows(), tensor.columns};
  message.add_enum(3, kFloat32);
  message.add_packed_int64(4, shape.begin(), shape.end());
}

}  // namespace

WireTensor read_tensor(const OrderedJson& body, int64_t& elements_left, const std::string& where) {
  if (!body.is_object() || !body.contains("data")) wrong(where, dump_ordered(body).substr(0, 80), "a tensor");
  Fields fields(body, where);
  fields.ignore({"data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices"});
  fields.done();
  std::vector<double> values = json_numbers<double>(body["data"], where + ".data");
  const auto shape = optional_numbers(body, "shape", where);
  const auto rows = optional_numbers(body, "sparse_crow_indices", where);
  if (rows.empty()) return from_dense(std::move(values), shape, where);
  return from_rows(values, rows, optional_numbers(body, "sparse_col_indices", where), shape, elements_left,
                   where);
}

std::vector<int32_t> read_model_input(const OrderedJson& input, const std::string& where) {
  const auto chunks = input.is_object() ? input.find("chunks") : input.end();
  if (chunks == input.end() || !chunks->is_array())
    wrong(where, dump_ordered(input).substr(0, 80), "an object with the list `chunks`");
  Fields fields(input, where);
  fields.ignore({"chunks"});
  fields.done();
  std::vector<int32_t> tokens;
  for (const OrderedJson& chunk : *chunks) {
    if (!chunk.is_object() || !chunk.contains("tokens"))
      wrong(where, dump_ordered(chunk).substr(0, 80), kOnlyText);
    Fields of_chunk(chunk, where + ".chunks");
    of_chunk.ignore({"tokens", "type"});
    of_chunk.done();
    for (const int64_t id : json_numbers<int64_t>(chunk["tokens"], where + ".tokens")) {
      if (id < 0 || id > std::numeric_limits<int32_t>::max()) wrong(where + ".tokens", str(id), "a token id");
      tokens.push_back(static_cast<int32_t>(id));
    }
  }
  return tokens;
}

ForwardBackwardRequest read_forward_backward(std::string_view protobuf) {
  ForwardBackwardRequest request;
  std::map<std::string, std::variant<double, std::string>> newer;
  int64_t elements_left = kMostElements;
  try {
    protozero::pbf_reader message(protobuf.data(), protobuf.size());
    while (message.next()) switch (message.tag()) {
        case 1: request.model_id = message.get_string(); break;
        case 2: request.seq_id = message.get_int32(); break;
        case 3:
          request.data.push_back(
              read_datum(message.get_message(), elements_left, str("data[", request.data.size(), "]")));
          break;
        case 4: request.loss_fn = message.get_string(); break;
        case 5:
        case 7: {
          const bool is_newer = message.tag() == 7;
          protozero::pbf_reader entry = message.get_message();
          std::string name;
          std::variant<double, std::string> value = 0.0;
          while (entry.next()) {
            if (entry.tag() == 1) {
              name = entry.get_string();
            } else if (entry.tag() == 2 && is_newer) {
              protozero::pbf_reader either = entry.get_message();
              while (either.next()) {
                if (either.tag() == 1) value = either.get_double();
                else if (either.tag() == 2) value = either.get_string();
                else either.skip();
              }
            } else if (entry.tag() == 2) {
              value = entry.get_double();
            } else {
              entry.skip();
            }
          }
          (is_newer ? newer : request.config)[name] = value;
          break;
        }
        case 6: request.forward_only = message.get_bool(); break;
        default: message.skip();
      }
  } catch (const protozero::exception& error) {
    throw ApiError(400, str("the body is no ForwardBackwardRequest of tinker_public: ", error.what()));
  }
  if (!newer.empty()) request.config = std::move(newer);
  return request;
}

ForwardBackwardRequest read_forward_backward(const OrderedJson& body, bool forward_only) {
  using Limits = std::numeric_limits<int64_t>;
  Fields fields(body);
  ForwardBackwardRequest request;
  request.forward_only = fields.boolean("forward_only").value_or(false) || forward_only;
  request.model_id = fields.required_text("model_id");
  request.seq_id = fields.required_integer("seq_id", Limits::min(), Limits::max());
  const std::string key = body.contains("forward_input") ? "forward_input" : "forward_backward_input";
  const OrderedJson* const input = fields.object(key);
  if (!input) fields.wrong(key, "an object with the list `data`");
  fields.ignore({"forward_input", "forward_backward_input", "type"});
  fields.done();
  Fields of_input(*input, key);
  request.loss_fn = of_input.required_text("loss_fn");
  const OrderedJson* const data = of_input.array("data");
  if (!data) of_input.wrong("data", "a list");
  const OrderedJson* const config = of_input.object("loss_fn_config");
  of_input.done();
  int64_t elements_left = kMostElements;
  for (const OrderedJson& each : *data) {
    const std::string where = str("data[", request.data.size(), "]");
    if (!each.is_object() || !each.contains("model_input") || !each.contains("loss_fn_inputs") ||
        !each["loss_fn_inputs"].is_object())
      wrong(where, dump_ordered(each).substr(0, 80), "an object with model_input and loss_fn_inputs");
    Fields of_datum(each, where);
    of_datum.ignore({"model_input", "loss_fn_inputs"});
    of_datum.done();
    WireDatum datum{read_model_input(each["model_input"], where + ".model_input"), {}};
    for (const auto& [name, tensor] : each["loss_fn_inputs"].items())
      datum.inputs[name] =
          read_tensor(tensor, elements_left, str(where, ".loss_fn_inputs.", name.substr(0, 80)));
    request.data.push_back(std::move(datum));
  }
  if (config)
    for (const auto& [name, value] : config->items()) {
      if (value.is_number()) request.config[name] = value.get<double>();
      else if (value.is_string()) request.config[name] = value.get<std::string>();
      else wrong("loss_fn_config." + name, dump_ordered(value).substr(0, 80), "a number or a text");
    }
  return request;
}

std::string ForwardBackwardResult::protobuf() const {
  std::string bytes;
  protozero::pbf_writer message(bytes);
  message.add_string(1, "ArrayRecord");
  // A record has one trailing shape, so it ends where the number of columns changes.
  for (size_t begin = 0; begin < outputs.size();) {
    size_t end = begin;
    std::vector<int64_t> offsets = {0};
    std::string data;
    while (end < outputs.size() && outputs[end].columns == outputs[begin].columns) {
      data += bytes_of(outputs[end++].log_probs);
      offsets.push_back(static_cast<int64_t>(data.size()));
    }
    protozero::pbf_writer record(message, 2);
    {
      protozero::pbf_writer entry(record, 2);
      entry.add_string(1, "logprobs");
      protozero::pbf_writer tensor(entry, 2);
      tensor.add_bytes(1, data);
      tensor.add_bytes(2, bytes_of(offsets));
      tensor.add_enum(3, kFloat32);
      if (outputs[begin].columns > 1) {
        const std::vector<int64_t> trailing = {outputs[begin].columns};
        tensor.add_packed_int64(4, trailing.begin(), trailing.end());
      }
    }
    record.add_int64(3, static_cast<int64_t>(end - begin));
    begin = end;
  }
  for (const auto& [name, value] : metrics) {
    protozero::pbf_writer entry(message, 3);
    entry.add_string(1, name);
    entry.add_double(2, value);
  }
  return bytes;
}

Json ForwardBackwardResult::json() const {
  Json list = Json::array();
  for (const WireOutput& output : outputs) {
    Json shape = {static_cast<int64_t>(output.log_probs.size()) / output.columns};
    if (output.columns > 1) shape.push_back(output.columns);
    list.push_back(
        {{"logprobs", {{"data", json_floats(output.log_probs)}, {"dtype", "float32"}, {"shape", shape}}}});
  }
  return {{"loss_fn_output_type", "ArrayRecord"}, {"loss_fn_outputs", list}, {"metrics", metrics}};
}

std::string SampleResult::protobuf() const {
  std::string bytes;
  protozero::pbf_writer message(bytes);
  for (const Sequence& sequence : sequences) {
    protozero::pbf_writer each(message, 1);
    each.add_enum(1, sequence.stopped ? 0 : 1);
    each.add_bytes(2, bytes_of(sequence.tokens));
    each.add_bytes(3, bytes_of(sequence.log_probs));
    write(each, 4, sequence.top);
  }
  if (prompt_log_probs) message.add_bytes(2, bytes_of(*prompt_log_probs));
  write(message, 3, prompt_top);
  if (prompt_targets) write(message, 5, *prompt_targets);
  return bytes;
}

Json SampleResult::json() const {
  Json list = Json::array();
  for (const Sequence& sequence : sequences)
    list.push_back({{"stop_reason", sequence.stopped ? "stop" : "length"},
                    {"tokens", sequence.tokens},
                    {"logprobs", json_floats(sequence.log_probs)}});
  Json result = {{"type", "sample"}, {"sequences", list}};
  if (prompt_log_probs) result["prompt_logprobs"] = json_floats(*prompt_log_probs);
  return result;
}

}  // namespace bough
