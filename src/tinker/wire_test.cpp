#include "tinker/wire.h"

#include <gtest/gtest.h>

#include <protozero/pbf_reader.hpp>
#include <protozero/pbf_writer.hpp>
#include <random>

namespace bough {
namespace {

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

void add_tensor(protozero::pbf_writer& datum, const std::string& name, const std::string& dense,
                int32_t dtype, const std::vector<int64_t>& shape) {
  protozero::pbf_writer entry(datum, 2);
  entry.add_string(1, name);
  protozero::pbf_writer tensor(entry, 2);
  tensor.add_bytes(1, dense);
  tensor.add_enum(3, dtype);
  tensor.add_packed_int64(4, shape.begin(), shape.end());
}

// A request as the SDK writes it: two datums, the second with sparse targets.
std::string example() {
  std::string bytes;
  protozero::pbf_writer message(bytes);
  message.add_string(1, "session-1:train:0");
  message.add_int32(2, 7);
  {
    protozero::pbf_writer datum(message, 3);
    {
      protozero::pbf_writer chunk(datum, 1);
      protozero::pbf_writer text(chunk, 1);
      text.add_bytes(1, bytes_of(std::vector<int32_t>{5, 6, 7}));
    }
    add_tensor(datum, "target_tokens", bytes_of(std::vector<int64_t>{6, 7, 8}), 2, {3});
    add_tensor(datum, "weights", bytes_of(std::vector<float>{0, 0.5F, 1}), 1, {3});
  }
  {
    protozero::pbf_writer datum(message, 3);
    {
      protozero::pbf_writer chunk(datum, 1);
      protozero::pbf_writer text(chunk, 1);
      text.add_bytes(1, bytes_of(std::vector<int32_t>{5, 6}));
    }
    protozero::pbf_writer entry(datum, 2);
    entry.add_string(1, "target_tokens");
    protozero::pbf_writer tensor(entry, 2);
    {
      protozero::pbf_writer sparse(tensor, 2);
      sparse.add_bytes(1, bytes_of(std::vector<int64_t>{6, 9, 8}));
      sparse.add_bytes(2, bytes_of(std::vector<int64_t>{0, 2, 3}));
      sparse.add_bytes(3, bytes_of(std::vector<int64_t>{0, 2, 1}));
    }
    tensor.add_enum(3, 2);
    const std::vector<int64_t> shape = {2, 3};
    tensor.add_packed_int64(4, shape.begin(), shape.end());
  }
  message.add_string(4, "ppo");
  for (const uint32_t field : {5U, 7U}) {  // the newer map wins
    protozero::pbf_writer entry(message, field);
    entry.add_string(1, "clip_low_threshold");
    if (field == 5) {
      entry.add_double(2, 0.1);
    } else {
      protozero::pbf_writer value(entry, 2);
      value.add_double(1, 0.7);
    }
  }
  message.add_bool(6, true);
  return bytes;
}

TEST(TinkerWire, ReadsARequestAsTheSdkWritesIt) {
  const ForwardBackwardRequest request = read_forward_backward(std::string_view(example()));
  EXPECT_EQ(request.model_id, "session-1:train:0");
  EXPECT_EQ(request.seq_id, 7);
  EXPECT_EQ(request.loss_fn, "ppo");
  EXPECT_TRUE(request.forward_only);
  ASSERT_EQ(request.config.size(), 1U);
  EXPECT_EQ(std::get<double>(request.config.at("clip_low_threshold")), 0.7);
  ASSERT_EQ(request.data.size(), 2U);
  EXPECT_EQ(request.data[0].tokens, (std::vector<int32_t>{5, 6, 7}));
  EXPECT_EQ(request.data[0].inputs.at("weights").values, (std::vector<double>{0, 0.5, 1}));
  const WireTensor& sparse = request.data[1].inputs.at("target_tokens");
  EXPECT_EQ(sparse.columns, 3);
  EXPECT_EQ(sparse.values, (std::vector<double>{6, 0, 9, 0, 8, 0}));
  EXPECT_EQ(sparse.is_set, (std::vector<uint8_t>{1, 0, 1, 0, 1, 0}));
}

TEST(TinkerWire, ReadsTheSameRequestAsJson) {
  const OrderedJson body = OrderedJson::parse(R"({"model_id": "session-1:train:0", "seq_id": 7,
    "forward_backward_input": {"loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 0.7}, "data": [
      {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}, {"tokens": [7]}]},
       "loss_fn_inputs": {"target_tokens": {"data": [6, 7, 8], "dtype": "int64", "shape": [3]},
                          "weights": {"data": [0, 0.5, 1], "dtype": "float32"}}}]}})");
  const ForwardBackwardRequest request = read_forward_backward(body, false);
  EXPECT_FALSE(request.forward_only);
  EXPECT_EQ(request.data[0].tokens, (std::vector<int32_t>{5, 6, 7}));
  EXPECT_EQ(request.data[0].inputs.at("target_tokens").values, (std::vector<double>{6, 7, 8}));
  EXPECT_TRUE(read_forward_backward(body, true).forward_only);
}

TEST(TinkerWire, ATruncatedOrChangedBodyIsRefusedOrReadButNeverCrashes) {
  const std::string good = example();
  int refused = 0;
  for (size_t length = 0; length < good.size(); ++length) try {
      read_forward_backward(std::string_view(good).substr(0, length));
    } catch (const ApiError& error) {
      EXPECT_EQ(error.status, 400);
      ++refused;
    }
  EXPECT_GT(refused, static_cast<int>(good.size()) / 2);
  std::mt19937 random(1);
  for (int i = 0; i < 20'000; ++i) {
    std::string changed = good;
    for (int k = 0; k < 3; ++k) changed[random() % changed.size()] = static_cast<char>(random());
    try {
      read_forward_backward(std::string_view(changed));
    } catch (const ApiError& error) {
      EXPECT_EQ(error.status, 400);
    }
  }
}

TEST(TinkerWire, ShapesThatDoNotFitAreRefusedByName) {
  const auto refusal = [](const std::string& dense, int32_t dtype, const std::vector<int64_t>& shape) {
    std::string bytes;
    protozero::pbf_writer message(bytes);
    {
      protozero::pbf_writer datum(message, 3);
      add_tensor(datum, "weights", dense, dtype, shape);
    }
    try {
      read_forward_backward(std::string_view(bytes));
    } catch (const ApiError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const std::string two = bytes_of(std::vector<float>{1, 2});
  EXPECT_EQ(refusal(two, 1, {2}), "accepted");
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{3}, {-1}, {1, 2, 1}, {2, 0}, {int64_t{1} << 62, 4}})
    EXPECT_NE(refusal(two, 1, shape).find("data[0].loss_fn_inputs.weights"), std::string::npos);
  EXPECT_NE(refusal("abc", 1, {1}).find("multiple of 4"), std::string::npos);
  EXPECT_NE(refusal(two, 9, {2}).find("dtype"), std::string::npos);
}

TEST(TinkerWire, ASmallBodyCannotFillTheMemory) {
  const OrderedJson tensor = {{"data", {1}},
                              {"shape", {1, 40'000'000}},
                              {"sparse_crow_indices", {0, 1}},
                              {"sparse_col_indices", {0}}};
  const OrderedJson datum = {{"model_input", {{"chunks", OrderedJson::array()}}},
                             {"loss_fn_inputs", {{"weights", tensor}, {"target_tokens", tensor}}}};
  const OrderedJson body = {
      {"model_id", "m"}, {"seq_id", 1}, {"forward_backward_input", {{"loss_fn", "ppo"}, {"data", {datum}}}}};
  try {
    read_forward_backward(body, false);
    FAIL() << "two tensors of 320 MB each";
  } catch (const ApiError& error) {
    EXPECT_NE(std::string(error.what()).find("in all sparse tensors"), std::string::npos);
  }
}

TEST(TinkerWire, WritesOneRecordForOutputsOfOneShape) {
  const ForwardBackwardResult result{{{{-1, -2}, 1}, {{-3}, 1}, {{-4, -5}, 2}}, {{"loss:sum", 2.5}}};
  const std::string bytes = result.protobuf();
  protozero::pbf_reader message(bytes);
  int records = 0;
  while (message.next())
    if (message.tag() == 2) {
      ++records;
      message.skip();
    } else {
      message.skip();
    }
  EXPECT_EQ(records, 2);
  EXPECT_EQ(result.json()["loss_fn_outputs"][2]["logprobs"]["shape"], (Json{1, 2}));
  EXPECT_EQ(result.json()["metrics"]["loss:sum"], 2.5);
}

}  // namespace
}  // namespace bough
