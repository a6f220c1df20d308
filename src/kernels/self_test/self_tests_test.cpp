#include "kernels/self_test/self_tests.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "base/base_test_util.h"
#include "kernels/common/cuda_library.h"
#include "kernels/common/device_test.h"
#include "kernels/common/op.h"
#include "kernels/paged_attention/paged_attention.h"
#include "kernels/self_test/op_check.h"
#include "kernels/tree_attention/random_case.h"

namespace bough {
namespace {

class CudaSelfTest : public ::testing::TestWithParam<SelfTest> {
 protected:
  void SetUp() override {
    if (!kCuda->reason().empty()) GTEST_SKIP() << kCuda->reason();
  }
};
INSTANTIATE_TEST_SUITE_P(Cuda, CudaSelfTest, ::testing::ValuesIn(self_tests()),
                         [](const auto& info) { return info.param.name; });

TEST_P(CudaSelfTest, EqualsItsReference) {
  GetParam().run(at::kCUDA);
}

using CudaSelfTests = OnCuda;

TEST_F(CudaSelfTests, ExistForEveryOpOfTheLibrary) {
  const auto tests = self_tests();
  int found = 0;
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!op.name.starts_with("bough::") || !has_cuda_kernel(op.name.c_str())) continue;
    ++found;
    const std::string name = op.name.substr(7);
    EXPECT_TRUE(std::any_of(
        tests.begin(), tests.end(),
        [&](const SelfTest& test) { return test.name == name && test.kernels.front().name == name; }))
        << name << " has a CUDA kernel and no self-test";
  }
  EXPECT_GT(found + std::ssize(left_out_kernels()), 15);
}

// The kernels with tensor cores round weights of keys to bf16. The plain kernels and the references round
// only the output. tests/cuda_emulation/test_self_test.py runs this test with kernels left out.
bool is_rounded_once(const at::Tensor& got, const at::Tensor& exact) {
  return (got.cpu().to(at::kDouble) - exact).abs().le(exact.abs() * 0.00392 + 2e-5).all().item<bool>();
}

TEST_F(CudaSelfTests, PlainKernelsRunIfTheFastestAreLeftOut) {
  const RandomAttention random = random_attention_case({130, 70, 4, 2, 64}, at::kBFloat16, 1);
  const std::span ends(random.in.end_local.const_data_ptr<int32_t>(), 200);
  const auto input = [&](at::Device device, at::ScalarType type) {
    const KeyEnds key_ends = upload_key_ends(ends, 130, device);
    const auto move = [&](const at::Tensor& x) { return x.to(device, type); };
    return TreeAttentionInput{move(random.in.q_TNH),
                              move(random.in.k_TGH),
                              move(random.in.v_TGH),
                              move(random.in.k_stack_PGH),
                              move(random.in.v_stack_PGH),
                              key_ends.end_local,
                              random.in.scale,
                              key_ends.spans};
  };
  EXPECT_EQ(is_rounded_once(tree_attention_forward(input(at::kCUDA, at::kBFloat16)).o_TNH,
                            tree_attention_forward(input(at::kCPU, at::kDouble)).o_TNH),
            is_left_out("tree_attention_forward"));

  std::vector<int32_t> pages(13);
  std::iota(pages.begin(), pages.end(), 0);
  const std::vector<PagedSegment> segments{{pages, 130, 70}};
  const auto paged = [&](at::Device device, at::ScalarType type) {
    const PagedShape shape{4, 2, 64, type, device};
    const auto move = [&](const at::Tensor& x) { return x.to(device, type); };
    const at::Tensor memory =
        at::zeros(page_sizes(shape, 13), at::TensorOptions().dtype(type).device(device));
    std::vector<TokenSlot> stored;
    for (int64_t i = 0; i < 130; ++i) stored.push_back({i, i});
    store_in_pages(memory, move(random.in.k_stack_PGH), move(random.in.v_stack_PGH), stored);
    return paged_attention({.q_TNH = move(random.in.q_TNH),
                            .k_TGH = move(random.in.k_TGH),
                            .v_TGH = move(random.in.v_TGH),
                            .pages = memory,
                            .plan = PagedPlan(segments, shape),
                            .scale = random.in.scale})
        .cpu();
  };
  EXPECT_EQ(is_rounded_once(paged(at::kCUDA, at::kBFloat16), paged(at::kCPU, at::kDouble)),
            is_left_out("paged_attention_"));
}

at::Tensor add_one(const at::Tensor& gate_up, int64_t) {
  return gate_up.chunk(2, -1)[0] + 1;
}

TEST_F(CudaSelfTests, FindAWrongKernel) {
  const auto tests = self_tests();
  const auto test = std::find_if(tests.begin(), tests.end(),
                                 [](const auto& each) { return each.name == "swiglu_forward"; });
  const auto fails = [&]() -> std::string {
    try {
      test->run(at::kCUDA);
    } catch (const WrongResult& wrong) {
      return wrong.what();
    }
    return "";
  };
  {
    torch::Library faulty(torch::Library::IMPL, "bough", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    faulty.impl("swiglu_forward", TORCH_FN(add_one));
    expect_names(fails(), {"swiglu_forward", "result 0", "Float"});
  }
  EXPECT_EQ(fails(), "");
}

std::string wrong_of(const std::function<void()>& check) {
  try {
    check();
  } catch (const WrongResult& wrong) {
    return wrong.what();
  }
  return "";
}

TEST(OpCheck, ComparesByTheNumberFormat) {
  const at::Tensor x = at::ones({3, 5}), nearly = x + 1e-4;
  const auto wrong = [&](const at::Tensor& got, at::ScalarType precision) {
    return wrong_of([&] { check_close("y", got, x, precision); });
  };
  EXPECT_EQ(wrong(nearly, at::kBFloat16), "");
  expect_names(wrong(nearly, at::kFloat), {"y differs", "at most"});
  expect_names(wrong(at::ones({5, 3}), at::kFloat), {"[5, 3]", "[3, 5]"});
  at::Tensor nan = x.clone();
  nan[2][4] = NAN;
  expect_names(wrong(nan, at::kBFloat16), {"y differs"});
}

TEST(OpCheck, ComparesWhatAnOpWrites) {
  torch::Library library(torch::Library::FRAGMENT, "bough", std::nullopt, __FILE__, __LINE__);
  library.def("test_write_(Tensor(a!) x, Tensor by) -> ()");
  library.impl("test_write_", [](const at::Tensor& x, const at::Tensor& by) {
    x.mul_(by.scalar_type() == at::kDouble ? 2 : 3);
  });
  const at::Tensor x = at::ones({4});
  expect_names(wrong_of([&] { check_op("test_write_", {x, x}, at::kCPU); }), {"test_write_: x", "Float"});
  EXPECT_EQ(wrong_of([&] { check_op("test_write_", {x, x.to(at::kDouble)}, at::kCPU); }), "");
  EXPECT_TRUE(x.equal(at::ones({4}))) << "the caller's tensors stay";
}

at::Tensor identity(const at::Tensor& x) {
  return x.clone();
}

TEST(LeftOutKernels, AreNotRegistered) {
  torch::Library defined(torch::Library::FRAGMENT, "bough", std::nullopt, __FILE__, __LINE__);
  defined.def("test_fast(Tensor x) -> Tensor");
  defined.def("test_two(Tensor x) -> Tensor");
  const auto registered = [](const char* left_out) {
    setenv(kLeaveOutVariable, left_out, 1);
    torch::Library m(torch::Library::IMPL, "bough", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    register_cuda_kernel(m, "test_fast", TORCH_FN(identity));
    register_cuda_kernel(m, "test_two", TORCH_FN(identity), TORCH_FN(identity));
    unsetenv(kLeaveOutVariable);
    return std::pair(has_cuda_kernel("bough::test_fast"), has_cuda_kernel("bough::test_two"));
  };
  EXPECT_EQ(registered(""), std::pair(true, true));
  EXPECT_EQ(registered("test_fast"), std::pair(false, true));
  EXPECT_EQ(registered("test_two,test_fast"), std::pair(false, true)) << "the plain kernel";
  EXPECT_EQ(registered("test_two,test_two/plain"), std::pair(true, false));
}

}  // namespace
}  // namespace bough
