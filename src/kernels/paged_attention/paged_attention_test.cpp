#include "kernels/paged_attention/paged_attention.h"

#include <cmath>

#include "kernels/common/device_test.h"
#include "kernels/common/kernel_test.h"

namespace bough {
namespace {

struct Shape {
  int64_t N, G, H;
};

// Sequences, some with common pages, and the keys and values of all their tokens. expected() is a plain
// softmax in fp64, with which the tests compare attention.
class Fixture {
 public:
  Fixture(Shape shape, at::ScalarType dtype, at::Device device = at::kCPU)
      : shape_(shape),
        dtype_(dtype),
        device_(device),
        paged_shape_{shape.N, shape.G, shape.H, dtype, device},
        // Slots that were never written hold NaN.
        pages_(
            at::full(page_sizes(paged_shape_, 400), NAN, at::TensorOptions().dtype(dtype).device(device))) {}

  // Adds a sequence of `length` tokens. Its first `shared` pages (all full) are those of sequence `parent`.
  int64_t add_sequence(int64_t length, int64_t parent = -1, int64_t shared = 0) {
    Sequence sequence;
    sequence.k = random({length, shape_.G, shape_.H});
    sequence.v = random({length, shape_.G, shape_.H});
    if (parent >= 0) {
      const Sequence& other = sequences_[static_cast<size_t>(parent)];
      sequence.pages.assign(other.pages.begin(), other.pages.begin() + shared);
      sequence.k.narrow(0, 0, shared * kPageTokens).copy_(other.k.narrow(0, 0, shared * kPageTokens));
      sequence.v.narrow(0, 0, shared * kPageTokens).copy_(other.v.narrow(0, 0, shared * kPageTokens));
    }
    while (static_cast<int64_t>(sequence.pages.size()) < pages_for(length))
      sequence.pages.push_back(next_page_++);
    sequences_.push_back(std::move(sequence));
    return static_cast<int64_t>(sequences_.size()) - 1;
  }

  // Removes all but these pages from a sequence's page list.
  void keep_pages(int64_t s, const std::vector<int32_t>& kept) {
    Sequence& sequence = sequences_[static_cast<size_t>(s)];
    std::vector<int32_t> pages;
    for (const int32_t i : kept) {
      pages.push_back(sequence.pages[static_cast<size_t>(i)]);
      sequence.first_keys.push_back(i * static_cast<int32_t>(kPageTokens));
    }
    sequence.pages = pages;
  }

  struct Part {
    int64_t sequence, begin, count;
  };
  // Runs one pass and returns its output on the CPU.
  at::Tensor run(const std::vector<Part>& parts, AttentionPath path,
                 const PageSelection* selection = nullptr) {
    std::vector<PagedSegment> segments;
    std::vector<at::Tensor> q, k, v;
    for (const Part& part : parts) {
      const Sequence& sequence = sequences_[static_cast<size_t>(part.sequence)];
      segments.push_back({sequence.pages, part.begin, part.count, sequence.first_keys});
      k.push_back(sequence.k.narrow(0, part.begin, part.count));
      v.push_back(sequence.v.narrow(0, part.begin, part.count));
      q.push_back(query(part));
    }
    // q, k and v are strided views, as in a model.
    const auto qkv = at::cat({at::cat(q), at::cat(k), at::cat(v)}, 1).to(device_);
    const PagedPlan plan(segments, paged_shape_, selection, path);
    return paged_attention({.q_TNH = qkv.narrow(1, 0, shape_.N),
                            .k_TGH = qkv.narrow(1, shape_.N, shape_.G),
                            .v_TGH = qkv.narrow(1, shape_.N + shape_.G, shape_.G),
                            .pages = pages_,
                            .plan = plan,
                            .scale = 1 / std::sqrt(static_cast<double>(shape_.H))})
        .cpu();
  }
  // Returns the expected output of a pass: dense attention over the keys of the selected pages.
  at::Tensor expected(const std::vector<Part>& parts, const PageSelection* selection = nullptr) {
    std::vector<at::Tensor> o;
    for (size_t s = 0; s < parts.size(); ++s) {
      const Part& part = parts[s];
      const Sequence& sequence = sequences_[static_cast<size_t>(part.sequence)];
      const auto q = query(part).to(at::kDouble);
      auto hidden = at::zeros({shape_.N, sequence.k.size(0)}, at::kBool);  // by query head
      for (int64_t n = 0; selection && n < shape_.N; ++n) {
        hidden[n].fill_(true);
        const int64_t g = n / (shape_.N / shape_.G);
        const auto list =
            selection->per_head ? s * static_cast<size_t>(shape_.G) + static_cast<size_t>(g) : s;
        for (const int32_t page : selection->lists[list])
          hidden[n].slice(0, page * kPageTokens, (page + 1) * kPageTokens).fill_(false);
      }
      for (int64_t i = 0; i < part.count; ++i) {
        const int64_t length = part.begin + i + 1, repeat = shape_.N / shape_.G;
        const auto k = sequence.k.narrow(0, 0, length).to(at::kDouble).repeat_interleave(repeat, 1);
        const auto v = sequence.v.narrow(0, 0, length).to(at::kDouble).repeat_interleave(repeat, 1);
        auto scores = (q[i].unsqueeze(0) * k).sum(-1) / std::sqrt(static_cast<double>(shape_.H));
        scores.masked_fill_(hidden.slice(1, 0, length).t(), -INFINITY);
        o.push_back((at::softmax(scores, 0).unsqueeze(-1) * v).sum(0, true));
      }
    }
    return at::cat(o);
  }

 private:
  struct Sequence {
    at::Tensor k, v;
    std::vector<int32_t> pages, first_keys;  // first_keys: empty if the pages are consecutive
  };
  at::Tensor random(at::IntArrayRef sizes, int64_t seed = -1) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed >= 0 ? seed : 1000 + seed_++));
    return at::randn(sizes, generator, at::TensorOptions().dtype(at::kDouble)).mul_(2).to(dtype_);
  }
  at::Tensor query(const Part& part) {
    std::vector<at::Tensor> q;
    for (int64_t i = part.begin; i < part.begin + part.count; ++i)
      q.push_back(random({shape_.N, shape_.H}, part.sequence * 4096 + i));
    return at::stack(q);
  }

  Shape shape_;
  at::ScalarType dtype_;
  at::Device device_;
  PagedShape paged_shape_;
  at::Tensor pages_;
  std::vector<Sequence> sequences_;
  int32_t next_page_ = 3;
  int64_t seed_ = 0;
};

// Tolerance for sums of up to 100 products of order 10, in the accumulator type, and in proportion for scores
// of heads wider than 128. In bf16 the output is rounded, and the weights may be rounded. Each rounding adds
// 2^-8 of the largest element.
double paged_tolerance(const at::Tensor& expected, at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return 2.1 * expected.abs().max().item<double>() / 256;
  const double wide = std::max(1.0, static_cast<double>(expected.size(2)) / 128);
  return wide * (dtype == at::kDouble ? 1e-13 : 3e-5);
}

std::vector<Fixture::Part> fill(Fixture& fixture, AttentionPath path) {
  // The sequences' pages form a tree: 0 is the root, 1 to 3 branch off 0, 4 and 5 branch off 1. The pass
  // mixes prefill chunks and decode.
  const int64_t lengths[] = {70, 55, 90, 33, 81, 17};
  fixture.add_sequence(70);
  fixture.add_sequence(55, 0, 2);
  fixture.add_sequence(90, 0, 4);
  fixture.add_sequence(33, 0, 1);
  fixture.add_sequence(81, 1, 3);
  fixture.add_sequence(17, 1, 1);
  for (int64_t s = 0; s < 6; ++s) {
    fixture.run({{s, 0, 16}}, path);
    if (s < 3) fixture.run({{s, 16, lengths[s] - 17}}, path);
  }
  return {{0, 69, 1}, {3, 16, 17}, {1, 54, 1}, {4, 16, 65}, {2, 89, 1}, {5, 16, 1}};
}

class PagedAttentionOn : public OnDevice {};
BOUGH_ON_DEVICES(PagedAttentionOn);

TEST_P(PagedAttentionOn, EqualsSoftmaxOverTheSequence) {
  for (const Shape shape : {Shape{4, 2, 12}, Shape{3, 3, 16}, Shape{8, 1, 64}, Shape{5, 1, 7},
                            Shape{16, 2, 128}, Shape{40, 2, 64}, Shape{16, 2, 256}, Shape{3, 1, 136}}) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      for (const auto path : {AttentionPath::kFastest, AttentionPath::kReference}) {
        Fixture fixture(shape, dtype, device());
        const auto parts = fill(fixture, path);
        const auto got = fixture.run(parts, path).to(at::kDouble);
        const auto expected = fixture.expected(parts);
        EXPECT_LT((got - expected).abs().max().item<double>(), paged_tolerance(expected, dtype))
            << "N " << shape.N << " G " << shape.G << " H " << shape.H << " " << dtype << " path "
            << int(path);
        EXPECT_TRUE(at::equal(fixture.run(parts, path).to(at::kDouble), got)) << "the same pass again";
      }
    }
  }
}

// The weights and values of CudaTreeAttention.Bf16HeadsOfAllWidthsRunOnTheTensorCores, in a small item and,
// with 32 heads that share a key/value head, in a large one.
using CudaPagedAttention = OnCuda;
TEST_F(CudaPagedAttention, Bf16HeadsOfAllWidthsRunOnTheTensorCores) {
  for (const int64_t num_heads : {1, 32})
    for (const int64_t head_dim : {8, 64, 128, 136, 256}) {
      const PagedShape shape{num_heads, 1, head_dim, at::kBFloat16, at::kCUDA};
      const auto options = at::TensorOptions().dtype(at::kBFloat16).device(at::kCUDA);
      const at::Tensor pages = at::full(page_sizes(shape, 1), NAN, options);
      const at::Tensor q_TNH = at::full({1, num_heads, head_dim}, 1 / static_cast<double>(head_dim), options);
      const at::Tensor k_TGH = at::zeros({2, 1, head_dim}, options),
                       v_TGH = at::ones({2, 1, head_dim}, options);
      k_TGH[0].fill_(-1.1);
      const double score = (q_TNH[0][0] * k_TGH[0][0]).to(at::kDouble).sum().item<double>();
      v_TGH[1].fill_(-std::exp(score));
      store_in_pages(pages, k_TGH, v_TGH, std::vector<TokenSlot>{{0, 0}});
      const std::vector<int32_t> page{0};
      const std::vector<PagedSegment> segments{{page, 1, 1}};
      const at::Tensor o_TNH = paged_attention({.q_TNH = q_TNH,
                                                .k_TGH = k_TGH.narrow(0, 1, 1),
                                                .v_TGH = v_TGH.narrow(0, 1, 1),
                                                .pages = pages,
                                                .plan = PagedPlan(segments, shape),
                                                .scale = 1.0});
      EXPECT_EQ(o_TNH.abs().max().item<double>(), 0) << num_heads << " heads of " << head_dim;
    }
}

// The pass has 40 samples of one long prompt; each sample has more pages after the prompt. On CUDA, items
// then have the prompt's pages and several rows, are cut, and their parts are merged.
TEST_P(PagedAttentionOn, SamplesOfOnePromptEqualSoftmaxOverTheSequence) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    Fixture fixture({4, 2, 64}, dtype, device());
    std::vector<Fixture::Part> parts;
    fixture.add_sequence(700);
    fixture.run({{0, 0, 690}}, AttentionPath::kFastest);
    for (int64_t s = 1; s < 40; ++s) {
      const int64_t length = 640 + 1 + s * 3;
      fixture.add_sequence(length, 0, 40);
      if (length - 1 > 640) fixture.run({{s, 640, length - 1 - 640}}, AttentionPath::kFastest);
      parts.push_back({s, length - 1, 1});
    }
    parts.push_back({0, 690, 10});
    const auto got = fixture.run(parts, AttentionPath::kFastest).to(at::kDouble);
    const auto expected = fixture.expected(parts);
    EXPECT_LT((got - expected).abs().max().item<double>(), paged_tolerance(expected, dtype)) << dtype;
  }
}

TEST(PagedAttention, ATokensResultDoesNotDependOnItsNeighbours) {
  // A page is visited by 2 to 40 entries. The scores differ enough for maxima to rise in the middle of a run.
  for (const Shape shape : {Shape{4, 2, 12}, Shape{8, 1, 64}, Shape{40, 1, 32}}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      Fixture fixture(shape, dtype);
      const auto parts = fill(fixture, AttentionPath::kFastest);
      const auto together = fixture.run(parts, AttentionPath::kFastest);
      int64_t token = 0;
      for (const auto& part : parts) {
        for (int64_t i = 0; i < part.count; ++i, ++token) {
          const auto alone = fixture.run({{part.sequence, part.begin + i, 1}}, AttentionPath::kFastest);
          ASSERT_TRUE(at::equal(alone[0], together[token]))
              << "N " << shape.N << " " << dtype << " sequence " << part.sequence << ", token " << i;
        }
      }
    }
  }
}

TEST(PagedAttention, SharedPagesAreVisitedOncePerTask) {
  // The pass has 8 samples of one prompt of 4 full pages. Each sample has two pages after the prompt.
  std::vector<std::vector<int32_t>> tables;
  for (int32_t s = 0; s < 8; ++s) tables.push_back({10, 11, 12, 13, 20 + 2 * s, 21 + 2 * s});
  std::vector<PagedSegment> segments;
  for (const auto& table : tables) segments.push_back({table, 90, 1});
  const PagedSchedule schedule = schedule_paged(segments, 1, nullptr, 32);
  ASSERT_EQ(schedule.tasks.size(), 1u);
  int64_t pages_visited = 0, rows_times_pages = 0;
  for (const AttentionRun& run : schedule.runs) {
    pages_visited += run.page_end - run.page_begin;
    rows_times_pages += (run.page_end - run.page_begin) * (run.row_end - run.row_begin);
  }
  EXPECT_EQ(pages_visited, 4 + 8 * 2);
  EXPECT_EQ(rows_times_pages, 8 * 6);
}

// Selects from each segment's list the first page, the pages of the segment's tokens (the last ones), and
// some in between. If `all`, selects every page.
std::vector<std::vector<int32_t>> selected_pages(const std::vector<Fixture::Part>& parts, int64_t heads,
                                                 bool all) {
  std::vector<std::vector<int32_t>> lists;
  for (const auto& part : parts)
    for (int64_t g = 0; g < heads; ++g) {
      auto& list = lists.emplace_back();
      const auto own = static_cast<int32_t>(part.begin / kPageTokens);
      for (int32_t i = 0; i < pages_for(part.begin + part.count); ++i)
        if (all || i == 0 || i >= own || (i + g + part.sequence) % 2 == 0) list.push_back(i);
    }
  return lists;
}

TEST_P(PagedAttentionOn, SelectedPagesEqualDenseAttentionOverTheirKeys) {
  for (const Shape shape : {Shape{4, 2, 12}, Shape{16, 2, 128}, Shape{6, 1, 64}})
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16})
      for (const auto path : {AttentionPath::kFastest, AttentionPath::kReference})
        for (const bool per_head : {false, true}) {
          Fixture fixture(shape, dtype, device());
          const auto parts = fill(fixture, path);
          const auto whole = fixture.run(parts, path);
          const auto lists = selected_pages(parts, per_head ? shape.G : 1, false);
          const PageSelection selection{lists, per_head};
          const auto got = fixture.run(parts, path, &selection).to(at::kDouble);
          const auto expected = fixture.expected(parts, &selection);
          EXPECT_LT((got - expected).abs().max().item<double>(), paged_tolerance(expected, dtype))
              << "N " << shape.N << " H " << shape.H << " " << dtype << " path " << int(path) << ", per head "
              << per_head;
          EXPECT_GT((got - whole.to(at::kDouble)).abs().max().item<double>(), 0.1) << "something is left out";
          if (device().is_cuda() && per_head) continue;  // other items give other sums
          const auto all_lists = selected_pages(parts, per_head ? shape.G : 1, true);
          const PageSelection all{all_lists, per_head};
          EXPECT_TRUE(at::equal(fixture.run(parts, path, &all), whole)) << "all are selected, " << dtype;
        }
}

// The lists lack some pages of the sequence, so first_keys tells the positions of the listed pages.
TEST_P(PagedAttentionOn, ListsWithGapsEqualASelection) {
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const auto path : {AttentionPath::kFastest, AttentionPath::kReference}) {
      Fixture fixture({4, 2, 64}, dtype, device());
      fixture.add_sequence(200);
      fixture.run({{0, 0, 150}}, path);
      const std::vector<Fixture::Part> parts = {{0, 150, 45}};
      const std::vector<std::vector<int32_t>> lists = {{0, 3, 4, 9, 10, 11, 12}};
      const PageSelection selection{lists, false};
      const auto selected = fixture.run(parts, path, &selection);
      fixture.keep_pages(0, lists[0]);
      EXPECT_TRUE(at::equal(fixture.run(parts, path), selected)) << dtype;
    }
}

TEST(PagedAttention, LogSumExpEqualsTheReference) {
  const PagedShape shape{4, 2, 12, at::kDouble};
  const std::vector<int32_t> pages = {2, 0};
  const std::vector<PagedSegment> segments = {{pages, 0, 20}};
  const auto q = random_tensor({20, 4, 12}, at::kDouble, 1), k = random_tensor({20, 2, 12}, at::kDouble, 2);
  at::Tensor layer = at::full(page_sizes(shape, 3), NAN, at::kDouble);
  std::vector<at::Tensor> lse;
  for (const auto path : {AttentionPath::kFastest, AttentionPath::kReference}) {
    const PagedPlan plan(segments, shape, nullptr, path);
    lse.push_back(at::empty({20, 4}, at::kDouble));
    paged_attention({.q_TNH = q, .k_TGH = k, .v_TGH = k, .pages = layer, .plan = plan, .scale = 0.3},
                    &lse.back());
  }
  EXPECT_CLOSE(lse[0], lse[1], at::kDouble);
}

TEST(PagedAttention, RefusesWrongShapesAndLists) {
  const PagedShape shape{4, 2, 12};
  const at::Tensor layer = at::zeros(page_sizes(shape, 8));
  const std::vector<int32_t> pages = {0};
  const auto plan_of = [&](const PagedSegment& segment, const PageSelection* selection = nullptr) {
    return PagedPlan(std::span(&segment, 1), shape, selection);
  };
  const PagedPlan plan = plan_of({pages, 0, 2});
  const auto attend = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return paged_attention({.q_TNH = q, .k_TGH = k, .v_TGH = v, .pages = layer, .plan = plan, .scale = 1});
  };
  const auto q = at::zeros({2, 4, 12}), kv = at::zeros({2, 2, 12});
  EXPECT_NO_THROW(attend(q, kv, kv));
  EXPECT_THROW(attend(at::zeros({3, 4, 12}), kv, kv), InternalError);
  EXPECT_THROW(attend(q, at::zeros({2, 3, 12}), kv), InternalError);
  EXPECT_THROW(attend(q.to(at::kDouble), kv, kv), InternalError);
  EXPECT_THROW(attend(at::zeros({2, 4, 40}), kv, kv), InternalError);
  EXPECT_THROW(plan_of({pages, 15, 2}), InternalError) << "position 16 needs a second page";
  const std::vector<int32_t> three = {0, 1, 2}, unordered = {0, 32, 40}, gap = {0, 16, 64};
  EXPECT_THROW(plan_of({three, 41, 1, unordered}), InternalError) << "pages overlap";
  EXPECT_THROW(plan_of({three, 40, 1, gap}), InternalError) << "position 40 lies between pages";
  EXPECT_NO_THROW(plan_of({three, 64, 1, gap}));
  const std::vector<std::vector<int32_t>> without_own = {{0, 1}}, descending = {{2, 0}}, none;
  for (const auto* lists : {&without_own, &descending, &none}) {
    const PageSelection selection{*lists, false};
    EXPECT_THROW(plan_of({three, 40, 1}, &selection), InternalError);
  }
}

BOUGH_HAS_CUDA_KERNELS(PagedAttention, "paged_attention_")

}  // namespace
}  // namespace bough
