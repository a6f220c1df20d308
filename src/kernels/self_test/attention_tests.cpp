#include <ATen/ATen.h>

#include <cmath>
#include <numeric>
#include <random>

#include "kernels/common/closeness.h"
#include "kernels/page_choice/page_choice.h"
#include "kernels/paged_attention/paged_attention.h"
#include "kernels/self_test/op_check.h"
#include "kernels/tree_attention/key_spans.h"
#include "kernels/tree_attention/random_case.h"
#include "kernels/tree_attention/tree_attention_segments.h"

namespace bough {

namespace {
// The kernels have fp32 and bf16. bf16 heads of up to 128 use the tensor cores.
constexpr at::ScalarType kKernelTypes[] = {at::kFloat, at::kBFloat16};

const std::vector<AttentionCase> kAttentionCases = {
    {130, 300, 6, 2, 64}, {17, 129, 8, 1, 128}, {40, 100, 2, 1, 256}};

std::vector<TestedKernel> with_plain_kernel(const std::string& op) {
  return {{op, "its kernel without tensor cores", /*is_much_faster=*/true},
          {op + "/plain", "its reference in tensor ops", /*is_much_faster=*/true}};
}

// The arguments of tree_attention_forward from q on.
std::vector<c10::IValue> forward_arguments(const TreeAttentionInput& in, at::ScalarType type) {
  const std::span<const int32_t> ends(in.end_local.const_data_ptr<int32_t>(),
                                      static_cast<size_t>(in.end_local.numel()));
  return {in.q_TNH.to(type),
          in.k_TGH.to(type),
          in.v_TGH.to(type),
          in.k_stack_PGH.to(type),
          in.v_stack_PGH.to(type),
          in.end_local,
          upload(key_spans(ends, in.k_stack_PGH.size(0)), at::kCPU),
          in.scale};
}

SelfTest tree_attention_forward_test() {
  return {"tree_attention_forward", with_plain_kernel("tree_attention_forward"), [](at::Device device) {
            for (const auto type : kKernelTypes)
              for (const AttentionCase& c : kAttentionCases)
                check_op("tree_attention_forward",
                         forward_arguments(random_attention_case(c, type, 1).in, type), device);
          }};
}

SelfTest tree_attention_backward_test() {
  return {"tree_attention_backward", with_plain_kernel("tree_attention_backward"), [](at::Device device) {
            for (const auto type : kKernelTypes)
              for (const AttentionCase& c : kAttentionCases) {
                const RandomAttention random = random_attention_case(c, type, 2);
                const auto out =
                    call_on_cpu("tree_attention_forward", forward_arguments(random.in, at::kDouble));
                std::vector<c10::IValue> arguments = forward_arguments(random.in, type);
                const c10::IValue scale = arguments.back();
                arguments.pop_back();
                arguments.insert(arguments.begin(), random.d_o);
                arguments.insert(arguments.end(), {out[0].to(type), out[1].to(at::kFloat), scale,
                                                   random.d_k_stack, random.d_v_stack});
                // Terms of order 1 cancel in d_q and d_k, so errors are relative to at least 1. Kernels round
                // weights to bf16 within.
                check_op("tree_attention_backward", arguments, device, {.precision = type, .least_scale = 1});
              }
          }};
}

// A chain of tokens behind a stack, then a branch: a run for FlashAttention-2, and a segment for our kernel.
void test_flash_segments(at::Device device) {
  const AttentionCase c{100, 700, 4, 2, 64};
  const int64_t branch = c.num_tokens - 40;
  if (!vendor_attends_runs(device, at::kBFloat16, c.head_dim, /*same_bits=*/false)) return;
  RandomAttention random = random_attention_case(c, at::kBFloat16, 3);
  std::vector<int32_t> ends(static_cast<size_t>(c.num_stack + c.num_tokens),
                            static_cast<int32_t>(c.num_tokens));
  std::fill(ends.begin() + c.num_stack / 2, ends.begin() + c.num_stack + branch,
            static_cast<int32_t>(branch));
  random.in.end_local = at::tensor(ends, at::kInt);
  const auto move = [&](const at::Tensor& x, at::Device to, at::ScalarType type) {
    return x.to(to, type, /*non_blocking=*/false, /*copy=*/true);
  };
  const auto input = [&](at::Device to, at::ScalarType type) {
    const KeyEnds key_ends = upload_key_ends(ends, c.num_stack, to);
    return TreeAttentionInput{move(random.in.q_TNH, to, type),
                              move(random.in.k_TGH, to, type),
                              move(random.in.v_TGH, to, type),
                              move(random.in.k_stack_PGH, to, type),
                              move(random.in.v_stack_PGH, to, type),
                              key_ends.end_local,
                              random.in.scale,
                              key_ends.spans};
  };
  const auto exact = input(at::kCPU, at::kDouble), in = input(device, at::kBFloat16);
  const auto stack_sums = [&](at::Device to, at::ScalarType type) {
    return at::zeros(random.in.k_stack_PGH.sizes(), at::TensorOptions().dtype(type).device(to));
  };
  const auto expected = tree_attention_forward(exact);
  const at::Tensor d_k_expected = stack_sums(at::kCPU, at::kDouble),
                   d_v_expected = stack_sums(at::kCPU, at::kDouble);
  const auto d_expected =
      tree_attention_backward(exact, expected, random.d_o.to(at::kDouble), d_k_expected, d_v_expected);
  auto segments = cut_into_segments(ends, c.num_stack);
  upload_segments(segments, device);
  const auto out = tree_attention_forward_by_segments(in, segments);
  const at::Tensor d_k = stack_sums(device, at::kFloat), d_v = stack_sums(device, at::kFloat);
  const auto d = tree_attention_backward_by_segments(in, out, random.d_o.to(device), d_k, d_v, segments);
  const auto check = [](const char* what, const at::Tensor& got, const at::Tensor& want) {
    check_close(std::string("flash_segments: ") + what, got, want, at::kBFloat16, /*least_scale=*/1);
  };
  check("the output", out.o_TNH, expected.o_TNH);
  check("the log-sum-exp", out.lse_TN, expected.lse_TN);
  check("the gradient of q", d.d_q_TNH, d_expected.d_q_TNH);
  check("the gradient of k", d.d_k_TGH, d_expected.d_k_TGH);
  check("the gradient of v", d.d_v_TGH, d_expected.d_v_TGH);
  check("the gradient of the stack's k", d_k, d_k_expected);
  check("the gradient of the stack's v", d_v, d_v_expected);
}

// A prefill of 30 tokens, and decoding of 20 samples with a common prompt of four pages.
struct PagedCase {
  static constexpr int64_t kSamples = 20, kPrompt = 64, kDecoded = 75, kPrefill = 30, kPrefillEnd = 130;

  PagedCase() {
    const auto extend = [&](std::vector<int32_t>& pages, int64_t length) {
      while (static_cast<int64_t>(pages.size()) < pages_for(length)) pages.push_back(num_pages++);
    };
    extend(prefill, kPrefillEnd);
    std::vector<int32_t> prompt;
    extend(prompt, kPrompt);
    samples.assign(kSamples, prompt);
    for (auto& pages : samples) extend(pages, kDecoded);
    segments.push_back({prefill, kPrefillEnd - kPrefill, kPrefill});
    for (const auto& pages : samples) segments.push_back({pages, kDecoded - 1, 1});
  }

  // Returns the output of the pass on the CPU.
  at::Tensor run(const PagedShape& shape, at::ScalarType inputs) const {
    const auto random = [&](at::IntArrayRef sizes, uint64_t seed) {
      return random_tensor(sizes, inputs, seed).to(shape.device, shape.dtype);
    };
    const int64_t slots = num_pages * kPageTokens, tokens = kPrefill + kSamples;
    const at::Tensor pages =
        at::zeros(page_sizes(shape, num_pages), at::TensorOptions().dtype(shape.dtype).device(shape.device));
    std::vector<TokenSlot> stored;
    for (int64_t i = 0; i < slots; ++i) stored.push_back({i, i});
    store_in_pages(pages, random({slots, shape.num_kv_heads, shape.head_dim}, 1),
                   random({slots, shape.num_kv_heads, shape.head_dim}, 2), stored);
    return paged_attention({.q_TNH = random({tokens, shape.num_heads, shape.head_dim}, 3),
                            .k_TGH = random({tokens, shape.num_kv_heads, shape.head_dim}, 4),
                            .v_TGH = random({tokens, shape.num_kv_heads, shape.head_dim}, 5),
                            .pages = pages,
                            .plan = PagedPlan(segments, shape),
                            .scale = 1 / std::sqrt(static_cast<double>(shape.head_dim))})
        .cpu();
  }

  int32_t num_pages = 0;
  std::vector<int32_t> prefill;
  std::vector<std::vector<int32_t>> samples;
  std::vector<PagedSegment> segments;  // refer to the lists above
};

SelfTest paged_attention_test() {
  return {"paged_attention_", with_plain_kernel("paged_attention_"), [](at::Device device) {
            const PagedCase pass;
            for (const auto type : kKernelTypes)
              for (const int64_t head_dim : {64, 128, 256}) {
                PagedShape shape{8, 2, head_dim, type, device};
                const at::Tensor got = pass.run(shape, type);
                shape.dtype = at::kDouble;
                shape.device = at::kCPU;
                check_close("paged_attention_: the output", got, pass.run(shape, type), type);
              }
          }};
}

// Small integers, and a power of two as the heads of a group: sums are exact in any order, and many scores
// are equal.
struct PageChoiceCase {
  static constexpr int64_t kPages = 300, N = 8, G = 2, H = 40;

  PageChoiceCase(at::ScalarType type, BlockSummary how, at::Device device)
      : how(how),
        pages(at::zeros(page_sizes({N, G, H, type, device}, kPages),
                        at::TensorOptions().dtype(type).device(device))),
        summaries(at::zeros(summary_sizes({.summary = how}, kPages, G, H), pages.options())) {
    std::vector<TokenSlot> slots;
    for (int64_t i = 0; i < kPages * kPageTokens; ++i) slots.push_back({i, i});
    const at::Tensor k = integers(-2, 3, {kPages * kPageTokens, G, H}, 1);
    store_in_pages(pages, k, k, slots);
    for (int32_t i = 0; i < kPages; ++i) all.push_back((i * 7) % static_cast<int32_t>(kPages));
  }

  at::Tensor integers(int64_t low, int64_t high, at::IntArrayRef sizes, uint64_t seed) const {
    return at::randint(low, high, sizes, at::detail::createCPUGenerator(seed), at::kLong)
        .to(pages.device(), pages.scalar_type());
  }
  void summarise() const { summarise_blocks(pages, all, {.summary = how}, H, summaries); }
  static ChoosingQuery query(int64_t token, std::span<const int32_t> pages, int64_t budget) {
    return {
        .token = token, .pages = pages, .budget = budget, .position = std::ssize(pages) * kPageTokens - 1};
  }
  // All but the last have more pages than their budget.
  std::vector<ChoosingQuery> queries() const {
    return {query(1, all, 40), query(3, std::span(all).first(5), 4), query(0, std::span(all).first(200), 199),
            query(2, std::span(all).first(20), 20)};
  }
  std::vector<std::vector<int32_t>> choose() const {
    std::vector<std::vector<int32_t>> lists(queries().size() * static_cast<size_t>(G));
    choose_blocks(integers(-1, 2, {4, N, H}, 2), summaries, {.summary = how}, queries(), lists);
    return lists;
  }
  // The ids of the kept pages, in one table of 200 for each query and head; -1 beyond them.
  at::Tensor ids() const {
    std::vector<ChoosingQuery> asked = queries();
    asked.pop_back();
    std::vector<int32_t> tables;
    for (size_t i = 0; i < asked.size() * static_cast<size_t>(G); ++i)
      tables.push_back(static_cast<int32_t>(200 * i));
    const auto options = at::TensorOptions().dtype(at::kInt).device(pages.device());
    const at::Tensor ids = at::full({static_cast<int64_t>(200 * tables.size())}, -1, options);
    DevicePageChooser(asked, tables, pages.device())
        .choose(integers(-1, 2, {4, N, H}, 2), summaries, how, &ids);
    return ids;
  }

  BlockSummary how;
  at::Tensor pages, summaries;
  std::vector<int32_t> all;
};

template <class Check>
void for_each_page_choice(at::Device device, Check&& check) {
  for (const auto type : kKernelTypes)
    for (const auto how : {BlockSummary::kMean, BlockSummary::kMinMax}) {
      const PageChoiceCase expected(type, how, at::kCPU), got(type, how, device);
      expected.summarise();
      check(expected, got);
    }
}

SelfTest summarise_pages_test() {
  return {"summarise_pages_", {{"summarise_pages_", "its reference in tensor ops"}}, [](at::Device device) {
            for_each_page_choice(device, [](const PageChoiceCase& expected, const PageChoiceCase& got) {
              got.summarise();
              check_equal("summarise_pages_: a summary", got.summaries, expected.summaries);
            });
          }};
}

SelfTest choose_pages_test() {
  return {"choose_pages", {{"choose_pages", "its reference in tensor ops"}}, [](at::Device device) {
            for_each_page_choice(device, [](const PageChoiceCase& expected, const PageChoiceCase& got) {
              got.summaries.copy_(expected.summaries);
              if (got.choose() != expected.choose())
                throw WrongResult("choose_pages: the chosen pages differ from the CPU's");
              check_equal("choose_pages: the id of a chosen page", got.ids(), expected.ids());
            });
          }};
}
}  // namespace

std::vector<SelfTest> attention_tests() {
  return {tree_attention_forward_test(),
          tree_attention_backward_test(),
          {"flash_segments", {{"flash_segments", "the kernels of tree attention"}}, test_flash_segments},
          paged_attention_test(),
          summarise_pages_test(),
          choose_pages_test()};
}

}  // namespace bough
