#include "models/safetensors.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <random>

#include "base/base_test_util.h"
#include "base/error.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

class Safetensors : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) /
              str("safetensors_", ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  // Returns the message of the UserError that a file with these bytes causes.
  std::string refusal(const std::string& bytes) const {
    const fs::path path = folder_ / "bad.safetensors";
    std::ofstream(path, std::ios::binary) << bytes;
    try {
      SafetensorsFile file(path);
    } catch (const UserError& error) {
      return error.what();
    }
    return "(accepted)";
  }
  fs::path folder_;
};

std::string with_length(uint64_t length, const std::string& rest) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + rest;
}
std::string file_of(const std::string& header, size_t data_bytes) {
  return with_length(header.size(), header + std::string(data_bytes, '\1'));
}

TEST_F(Safetensors, RoundTripsEveryDtypeAndShape) {
  NamedTensors tensors;
  for (const at::ScalarType type : {at::kByte, at::kDouble, at::kBFloat16, at::kFloat, at::kHalf, at::kLong,
                                    at::kInt, at::kShort, at::kChar, at::kBool})
    tensors.emplace_back(str("t", static_cast<int>(type)), at::randn({3, 5}).mul(10).to(type));
  tensors.emplace_back("empty", at::empty({0, 7}));
  tensors.emplace_back("scalar", at::ones({}));
  tensors.emplace_back("strided", at::randn({4, 6}).t());
  tensors.emplace_back("part", at::randn({4, 6}).narrow(0, 1, 2));
  const fs::path path = folder_ / "a.safetensors";
  write_safetensors(path, tensors);
  const SafetensorsFile file(path);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  ASSERT_EQ(file.entries().size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor read = file.tensor(name);
    EXPECT_EQ(read.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(at::equal(read, tensor)) << name;
    EXPECT_EQ(file.entries().at(name).begin % std::max<size_t>(1, tensor.element_size()), 0u) << name;
  }
  uint64_t header_length = 0;
  std::memcpy(&header_length, read_file(path).data(), 8);
  EXPECT_EQ(header_length % 8, 0u);
  EXPECT_THROW(file.tensor("nothing"), UserError);
}

TEST_F(Safetensors, ConvertsOnTheWay) {
  const at::Tensor tensor = at::randn({100});
  write_safetensors(folder_ / "a.safetensors", {{"x", tensor}}, at::kBFloat16);
  const at::Tensor read = SafetensorsFile(folder_ / "a.safetensors").tensor("x");
  EXPECT_TRUE(at::equal(read, tensor.to(at::kBFloat16)));  // the mapping outlives the file object
  EXPECT_EQ(stored_bytes(tensor, at::kBFloat16), 200);
  EXPECT_EQ(stored_bytes(tensor, {}), 400);
}

// Tensors at odd addresses (Bough's writer makes none) are copied, not read in place.
TEST_F(Safetensors, ReadsUnalignedTensors) {
  std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                       R"("b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})";
  const float values[2] = {1.5f, -2.0f};
  std::string bytes = with_length(header.size(), header + "\x07");
  bytes.append(reinterpret_cast<const char*>(values), sizeof values);
  std::ofstream(folder_ / "u.safetensors", std::ios::binary) << bytes;
  const SafetensorsFile file(folder_ / "u.safetensors");
  EXPECT_TRUE(at::equal(file.tensor("b"), at::tensor({1.5f, -2.0f})));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(file.tensor("b").data_ptr()) % sizeof(float), 0u);
}

TEST_F(Safetensors, RefusesDamagedHeaders) {
  expect_names(refusal("1234567"), {"bad.safetensors", "7 bytes"});
  expect_names(refusal(with_length(uint64_t{1} << 60, "{}")), {"header length", "1152921504606846976"});
  expect_names(refusal(with_length(~uint64_t{0}, "{}")), {"header length"});
  expect_names(refusal(with_length(3, "{}")), {"header length", "3", "2"});
  expect_names(refusal(with_length(1'000'000, "{}")), {"header length", "1000000"});
  expect_names(refusal(with_length(4, "nope")), {"header"});
  expect_names(refusal(with_length(2, "[]")), {"header", "object"});
  expect_names(refusal(with_length(0, "")), {"header"});
  expect_names(refusal(file_of(std::string(200'000, '['), 0)), {"header"});
  expect_names(refusal(file_of("{\"\xff\": 1}", 0)), {"header"});
  expect_names(refusal(file_of(R"({"__metadata__": 3})", 0)), {"__metadata__"});
  expect_names(refusal(file_of(R"({"__metadata__": {"a": 3}})", 0)), {"__metadata__", "'a'"});
  EXPECT_EQ(refusal(file_of(R"({"__metadata__": {"a": "b"}}   )", 0)), "(accepted)");
}

std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return str(R"({"w.x":{"dtype":)", dtype, R"(,"shape":)", shape, R"(,"data_offsets":)", offsets, "}}");
}

TEST_F(Safetensors, RefusesDamagedEntries) {
  EXPECT_EQ(refusal(file_of(one("\"F32\"", "[2,3]", "[0,24]"), 24)), "(accepted)");
  expect_names(refusal(file_of(R"({"w.x": 3})", 0)), {"w.x", "data_offsets"});
  expect_names(refusal(file_of(R"({"w.x": {"dtype": "F32"}})", 0)), {"w.x", "shape"});
  for (const char* dtype : {"\"F31\"", "3", "null", "\"\""})
    expect_names(refusal(file_of(one(dtype, "[2,3]", "[0,24]"), 24)), {"w.x", "dtype"});
  for (const char* shape : {"[2,-3]", "[2,3.0]", "6", "[\"2\",3]", "[2,null]", "[18446744073709551615]"})
    expect_names(refusal(file_of(one("\"F32\"", shape, "[0,24]"), 24)), {"w.x", "shape"});
  for (const char* shape : {"[2,2]", "[]", "[0]", "[25]"})
    expect_names(refusal(file_of(one("\"F32\"", shape, "[0,24]"), 24)), {"w.x", "got 24 bytes"});
  for (const char* shape :
       {"[9223372036854775807,2]", "[4611686018427387904,4]", "[4294967296,4294967296,4294967296]"})
    expect_names(refusal(file_of(one("\"F32\"", shape, "[0,24]"), 24)), {"w.x", "2^63"});
  expect_names(refusal(file_of(one("\"F32\"", "[9223372036854775807,9223372036854775807,0]", "[0,24]"), 24)),
               {"w.x", "got 24 bytes"});
  for (const char* offsets : {"[0,25]", "[24,0]", "[-1,23]", "[0]", "[0,12,24]", "24", "[0,1e1]",
                              "[0,18446744073709551615]", "[1,25]", "[0.0,24]", "[null,24]"})
    expect_names(refusal(file_of(one("\"F32\"", "[2,3]", offsets), 24)), {"w.x", "data_offsets"});
  expect_names(refusal(file_of(one("\"F32\"", "[2,3]", "[0,24]"), 25)), {"got 25 bytes", "24"});
  expect_names(refusal(file_of(one("\"F32\"", "[2,3]", "[4,28]"), 28)), {"w.x", "begin at 4"});
}

TEST_F(Safetensors, RefusesOverlapsHolesAndDuplicates) {
  const auto two = [](const char* second, const char* name = "b") {
    return str(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},")", name,
               R"(":{"dtype":"F32","shape":[2],"data_offsets":)", second, "}}");
  };
  EXPECT_EQ(refusal(file_of(two("[8,16]"), 16)), "(accepted)");
  expect_names(refusal(file_of(two("[4,12]"), 12)), {"'b'", "begin at 4", "overlap"});
  expect_names(refusal(file_of(two("[0,8]"), 8)), {"overlap"});
  expect_names(refusal(file_of(two("[12,20]"), 20)), {"'b'", "begin at 12", "holes"});
  expect_names(refusal(file_of(two("[8,16]", "a"), 16)), {"header"});
}

// A file cut anywhere is refused. A file with a damaged header is refused or read, without any other effect.
TEST_F(Safetensors, SurvivesEveryTruncationAndRandomDamage) {
  write_safetensors(folder_ / "a.safetensors", {{"x", at::randn({3})}, {"y", at::arange(6).view({2, 3})}});
  const std::string good = read_file(folder_ / "a.safetensors");
  for (size_t length = 1; length < good.size(); ++length)
    EXPECT_NE(refusal(good.substr(0, length)), "(accepted)") << length;
  std::mt19937 random(5);
  for (int i = 0; i < 300; ++i) {
    std::string damaged = good;
    for (int k = 0; k < 2; ++k) damaged[random() % (damaged.size() - 60)] = static_cast<char>(random());
    const std::string message = refusal(damaged);
    EXPECT_LT(message.size(), 600u);
    if (message != "(accepted)") continue;
    const SafetensorsFile file(folder_ / "bad.safetensors");
    for (const auto& [name, entry] : file.entries())
      EXPECT_GE(file.tensor(name).sum().item<double>(), -1e300);
  }
}

TEST_F(Safetensors, RefusesFoldersMissingAndEmptyFiles) {
  EXPECT_THROW(SafetensorsFile{folder_}, UserError);
  EXPECT_THROW(SafetensorsFile{folder_ / "missing"}, UserError);
  expect_names(refusal(""), {"bad.safetensors"});
}

TEST_F(Safetensors, WritingADuplicateOrReservedNameIsAnInternalError) {
  EXPECT_THROW(write_safetensors(folder_ / "a", {{"x", at::ones({1})}, {"x", at::ones({1})}}), InternalError);
  EXPECT_THROW(write_safetensors(folder_ / "a", {{"__metadata__", at::ones({1})}}), InternalError);
  EXPECT_FALSE(fs::exists(folder_ / "a"));
}

// Simulates a full disk by a limit on the file size.
TEST_F(Safetensors, FullDiskLeavesTheOldFile) {
  const fs::path path = folder_ / "a.safetensors";
  write_safetensors(path, {{"x", at::ones({10})}});
  const std::string before = read_file(path);
  rlimit old_limit;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const rlimit limit{100'000, old_limit.rlim_max};
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_THROW(write_safetensors(path, {{"x", at::ones({100'000})}}), IoError);
  setrlimit(RLIMIT_FSIZE, &old_limit);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(read_file(path), before);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 1);
}

}  // namespace
}  // namespace bough
