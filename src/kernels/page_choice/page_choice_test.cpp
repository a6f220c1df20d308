#include "kernels/page_choice/page_choice.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "kernels/common/device_test.h"
#include "kernels/common/kernel_test.h"
#include "kernels/common/op.h"
#include "kernels/paged_attention/paged_attention.h"

namespace bough {
namespace {

// The query of the last token of full pages.
ChoosingQuery choosing_query(int64_t token, std::span<const int32_t> pages, int64_t budget) {
  return {.token = token, .pages = pages, .budget = budget, .position = std::ssize(pages) * kPageTokens - 1};
}

struct Case {
  int64_t N, G, H;
  at::ScalarType dtype;
  BlockSummary summary;
};

// Pages filled with random keys. Summaries are NaN until summarise_blocks() writes them.
struct Layer {
  Layer(const Case& c, int64_t num_pages) {
    const auto options = at::TensorOptions().dtype(c.dtype);
    pages = at::full(page_sizes({c.N, c.G, c.H, c.dtype, at::kCPU}, num_pages), NAN, options);
    keys_BTGH = at::randn({num_pages, kPageTokens, c.G, c.H}, options);
    summaries = at::full(summary_sizes({.summary = c.summary}, num_pages, c.G, c.H), NAN, options);
    std::vector<TokenSlot> slots;
    for (int64_t i = 0; i < num_pages * kPageTokens; ++i) slots.push_back({i, i});
    const at::Tensor k_TGH = keys_BTGH.flatten(0, 1);
    store_in_pages(pages, k_TGH, k_TGH, slots);
  }
  at::Tensor pages, keys_BTGH, summaries;
};

// Returns the scores of the pages for key/value head g, computed in fp64 from the keys: [B].
at::Tensor reference_scores(const Case& c, const Layer& layer, const at::Tensor& q_NH, int64_t g) {
  const int64_t heads = c.N / c.G;
  const at::Tensor q_H = q_NH.narrow(0, g * heads, heads).to(at::kDouble).mean(0);
  const at::Tensor k_BTH = layer.keys_BTGH.select(2, g).to(at::kDouble);
  if (c.summary == BlockSummary::kMean) return k_BTH.mean(1).to(c.dtype).to(at::kDouble).matmul(q_H);
  return at::maximum(q_H * k_BTH.amin(1), q_H * k_BTH.amax(1)).sum(-1);
}

class PageChoice : public testing::TestWithParam<Case> {};

TEST_P(PageChoice, KeepsTheEndsAndThePagesWithTheHighestScores) {
  const Case c = GetParam();
  at::manual_seed(1);
  const int64_t num_pages = 70, budget = 9;
  Layer layer(c, num_pages);
  std::vector<int32_t> all;
  for (int32_t i = 0; i < num_pages; ++i) all.push_back(i);
  summarise_blocks(layer.pages, all, {.summary = c.summary}, c.H, layer.summaries);
  const at::Tensor q_TNH = at::randn({3, c.N, c.H}, layer.keys_BTGH.options());
  // The pages of a context may have any ids. In the second query, the ids descend.
  const std::vector<int32_t> backwards(all.rbegin(), all.rend());
  const std::vector<ChoosingQuery> queries{choosing_query(2, all, budget),
                                           choosing_query(0, backwards, budget),
                                           choosing_query(1, std::span(all).first(9), budget)};
  std::vector<std::vector<int32_t>> lists(queries.size() * static_cast<size_t>(c.G));
  choose_blocks(q_TNH, layer.summaries, {.summary = c.summary}, queries, lists);
  for (size_t i = 0; i < lists.size(); ++i) {
    const ChoosingQuery& query = queries[i / static_cast<size_t>(c.G)];
    const auto count = static_cast<int32_t>(query.pages.size());
    ASSERT_EQ(lists[i].size(), 9u);
    EXPECT_TRUE(std::is_sorted(lists[i].begin(), lists[i].end()));
    EXPECT_EQ(std::adjacent_find(lists[i].begin(), lists[i].end()), lists[i].end());
    EXPECT_EQ(lists[i].front(), 0);
    EXPECT_EQ(lists[i][7], count - 2);
    EXPECT_EQ(lists[i][8], count - 1);
    const at::Tensor scores =
        reference_scores(c, layer, q_TNH[query.token], static_cast<int64_t>(i) % c.G).contiguous();
    const auto score = [&](int32_t index) {
      return scores.const_data_ptr<double>()[query.pages[static_cast<size_t>(index)]];
    };
    double least = INFINITY, most = -INFINITY;  // lowest selected score, highest score that was not selected
    for (int32_t index = 1; index < count - 2; ++index) {
      const bool chosen = std::binary_search(lists[i].begin(), lists[i].end(), index);
      if (chosen) least = std::min(least, score(index));
      else most = std::max(most, score(index));
    }
    EXPECT_GT(least, most - (c.dtype == at::kDouble ? 1e-12 : 2e-2));
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, PageChoice,
                         testing::Values(Case{4, 2, 64, at::kFloat, BlockSummary::kMean},
                                         Case{4, 2, 24, at::kFloat, BlockSummary::kMinMax},
                                         Case{6, 2, 64, at::kBFloat16, BlockSummary::kMean},
                                         Case{3, 1, 128, at::kBFloat16, BlockSummary::kMinMax},
                                         Case{8, 8, 40, at::kDouble, BlockSummary::kMean},
                                         Case{4, 1, 32, at::kDouble, BlockSummary::kMinMax}));

TEST(PageChoice, KeepsTheLowerPageIfScoresAreEqual) {
  const Case c{1, 1, 32, at::kFloat, BlockSummary::kMean};
  Layer layer(c, 20);
  layer.summaries.zero_();
  layer.summaries[12][0][0][0] = 1;
  at::Tensor q_TNH = at::zeros({1, 1, 32});
  q_TNH[0][0][0] = 1;
  std::vector<int32_t> all;
  for (int32_t i = 0; i < 20; ++i) all.push_back(i);
  const std::vector<ChoosingQuery> queries{choosing_query(0, all, 6)};
  std::vector<std::vector<int32_t>> lists(1);
  choose_blocks(q_TNH, layer.summaries, {.summary = c.summary}, queries, lists);
  EXPECT_EQ(lists[0], (std::vector<int32_t>{0, 1, 2, 12, 18, 19}));
  q_TNH[0][0][0] = NAN;  // as from a diverged model: NaN has no order and must do no harm
  choose_blocks(q_TNH, layer.summaries, {.summary = c.summary}, queries, lists);
  EXPECT_EQ(lists[0], (std::vector<int32_t>{0, 1, 2, 3, 18, 19}));
}

// There are few distinct scores, so many are equal. Numbers of pages and budgets are combined in all ways.
TEST(PageChoice, EqualsAStableSortByScore) {
  const Case c{1, 1, 32, at::kFloat, BlockSummary::kMean};
  for (const int32_t num_pages : {10, 37, 200, 701, 1500})
    for (const int64_t budget : {4, 5, 9, 32, 100})
      for (const int64_t levels : {2, 7, 300}) {
        if (num_pages <= budget) continue;
        at::manual_seed(num_pages + budget + levels);
        Layer layer(c, num_pages);
        layer.summaries.zero_();
        const at::Tensor scores_B = at::randint(-levels, 0, {num_pages}, at::kFloat);
        layer.summaries.select(3, 0).copy_(scores_B.view({num_pages, 1, 1}));
        at::Tensor q_TNH = at::zeros({1, 1, 32});
        q_TNH[0][0][0] = 1;
        std::vector<int32_t> all(static_cast<size_t>(num_pages)), best;
        std::iota(all.begin(), all.end(), 0);
        best.assign(all.begin() + 1, all.end() - 2);
        const float* score = scores_B.const_data_ptr<float>();
        std::stable_sort(best.begin(), best.end(), [&](int32_t a, int32_t b) { return score[a] > score[b]; });
        best.resize(static_cast<size_t>(budget - 3));
        best.insert(best.end(), {0, num_pages - 2, num_pages - 1});
        std::sort(best.begin(), best.end());
        std::vector<std::vector<int32_t>> lists(1);
        choose_blocks(q_TNH, layer.summaries, {.summary = c.summary},
                      std::vector<ChoosingQuery>{choosing_query(0, all, budget)}, lists);
        EXPECT_EQ(lists[0], best) << num_pages << " pages, budget " << budget << ", levels " << levels;
      }
}

// Neighbours of one sequence are scored together, with the bits of a query alone. All elements of a query are
// equal, and all summaries have the same elements in other orders, so scores differ by rounding only.
TEST(PageChoice, AQueryChoosesTheSameBlocksBesideOthers) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble})
    for (const int64_t block_tokens : {4, 16, 64})
      for (const auto summary : {BlockSummary::kMean, BlockSummary::kMinMax}) {
        at::manual_seed(block_tokens);
        const Case c{6, 2, 40, dtype, summary};
        const int64_t num_pages = 150;
        const SparsePolicy policy{.summary = summary, .block_tokens = block_tokens};
        Layer layer(c, num_pages);
        std::vector<int32_t> all(static_cast<size_t>(num_pages));
        std::iota(all.rbegin(), all.rend(), 0);
        const at::Tensor summaries = at::zeros(summary_sizes(policy, num_pages, c.G, c.H), dtype);
        const at::Tensor base = at::randn({c.H}, dtype);
        for (int64_t part = 0; part < summaries.size(0); ++part)
          summaries.select(0, part).slice(-1, 0, c.H).copy_(base.index_select(0, at::randperm(c.H)));
        std::vector<ChoosingQuery> queries;
        for (int64_t position = 1800; position < 1879; ++position)
          queries.push_back({.token = position - 1800,
                             .pages = std::span(all).first(static_cast<size_t>(position / kPageTokens) + 1),
                             .budget = position < 1850 ? 9 : 11,
                             .position = position});
        const at::Tensor q_TNH =
            at::randn({std::ssize(queries), 1, 1}, dtype).expand({-1, c.N, c.H}).contiguous();
        std::vector<std::vector<int32_t>> together(queries.size() * 2), alone(2);
        choose_blocks(q_TNH, summaries, policy, queries, together);
        for (size_t i = 0; i < queries.size(); ++i) {
          choose_blocks(q_TNH, summaries, policy, std::span(queries).subspan(i, 1), alone);
          EXPECT_EQ(alone[0], together[2 * i]) << dtype << ", block " << block_tokens << ", query " << i;
          EXPECT_EQ(alone[1], together[2 * i + 1]) << dtype << ", block " << block_tokens << ", query " << i;
        }
      }
}

using CudaPageChoice = OnCuda;

// The inputs are small integers, and the heads of a group a power of two: sums are exact in any order, and
// many scores are equal.
TEST_F(CudaPageChoice, ChoosesTheSamePagesAsTheCpu) {
  const int64_t num_pages = 900;
  std::vector<int32_t> all;
  for (int32_t i = 0; i < num_pages; ++i) all.push_back((i * 7) % static_cast<int32_t>(num_pages));
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const auto summary : {BlockSummary::kMean, BlockSummary::kMinMax}) {
      const int64_t N = 8, G = 2, H = 40;
      const auto options = at::TensorOptions().dtype(dtype);
      const at::Tensor k_TGH = at::randint(-2, 3, {num_pages * kPageTokens, G, H}).to(dtype);
      const at::Tensor q_TNH = at::randint(-1, 2, {4, N, H}).to(dtype);
      std::vector<TokenSlot> slots;
      for (int64_t i = 0; i < num_pages * kPageTokens; ++i) slots.push_back({i, i});
      const std::vector<ChoosingQuery> queries{
          choosing_query(1, all, 40), choosing_query(3, std::span(all).first(5), 4),
          choosing_query(0, std::span(all).first(300), 299), choosing_query(2, std::span(all).first(20), 20)};
      std::vector<std::vector<int32_t>> lists[2];
      at::Tensor summaries[2];
      for (const int device : {0, 1}) {
        const at::Device on = device == 0 ? at::kCPU : at::kCUDA;
        const at::Tensor pages =
            at::full(page_sizes({N, G, H, dtype, on}, num_pages), NAN, options.device(on));
        store_in_pages(pages, k_TGH.to(on), k_TGH.to(on), slots);
        const at::Tensor own =
            at::full(summary_sizes({.summary = summary}, num_pages, G, H), NAN, options.device(on));
        summarise_blocks(pages, all, {.summary = summary}, H, own);
        lists[device].resize(queries.size() * static_cast<size_t>(G));
        choose_blocks(q_TNH.to(on), own, {.summary = summary}, queries, lists[device]);
        summaries[device] = own.cpu();
      }
      EXPECT_TRUE(at::equal(summaries[0], summaries[1])) << dtype;
      EXPECT_EQ(lists[0], lists[1]) << dtype;
    }
}

// `ids` of choose_pages for these lists: 600 numbers, -1 outside the tables.
at::Tensor expected_ids(std::span<const ChoosingQuery> queries, std::span<const std::vector<int32_t>> lists,
                        const at::Tensor& tables) {
  at::Tensor ids = at::full({600}, -1, at::kInt);
  for (size_t i = 0; i < lists.size(); ++i)
    for (size_t j = 0; j < lists[i].size(); ++j)
      ids[tables[static_cast<int64_t>(i)].item<int64_t>() + static_cast<int64_t>(j)] =
          queries[i / (lists.size() / queries.size())].pages[static_cast<size_t>(lists[i][j])];
  return ids;
}

TEST_F(CudaPageChoice, WritesTheIdsOfTheKeptPagesToTheirTables) {
  const int64_t N = 4, G = 2, H = 32, num_pages = 90;
  std::vector<int32_t> all;
  for (int32_t i = 0; i < num_pages; ++i) all.push_back((i * 7) % static_cast<int32_t>(num_pages));
  const at::Tensor q_TNH = at::randint(-1, 2, {2, N, H}).to(at::kFloat);
  const at::Tensor summaries = at::randint(-2, 3, {num_pages, G, 1, H}).to(at::kFloat);
  const std::vector<ChoosingQuery> queries{choosing_query(1, all, 40),
                                           choosing_query(0, std::span(all).first(5), 4)};
  std::vector<std::vector<int32_t>> expected(queries.size() * G), got(queries.size() * G);
  choose_blocks(q_TNH, summaries, {}, queries, expected);
  const std::vector<int32_t> tables{300, 0, 50, 500};
  const at::Tensor ids = at::full({600}, -1, at::TensorOptions().dtype(at::kInt).device(at::kCUDA));
  const at::Tensor chosen = DevicePageChooser(queries, tables, at::kCUDA)
                                .choose(q_TNH.cuda(), summaries.cuda(), BlockSummary::kMean, &ids);
  complete_lists(chosen.cpu(), queries, got);
  EXPECT_EQ(got, expected);
  EXPECT_TRUE(at::equal(ids.cpu(), expected_ids(queries, expected, at::tensor(tables, at::kInt))));
}

// The references take pages as CUDA has them. The inputs are small integers, as above.
TEST(PageChoice, TheReferencesChooseTheSamePages) {
  using Summarise = void(const at::Tensor&, const at::Tensor&, bool, int64_t, const at::Tensor&);
  using Choose =
      at::Tensor(const at::Tensor&, const at::Tensor&, bool, const at::Tensor&, const at::Tensor&, int64_t,
                 int64_t, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&);
  const int64_t N = 8, G = 2, H = 40, num_pages = 200;
  std::vector<int32_t> all;
  for (int32_t i = 0; i < num_pages; ++i) all.push_back((i * 7) % static_cast<int32_t>(num_pages));
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const auto summary : {BlockSummary::kMean, BlockSummary::kMinMax}) {
      const Case c{N, G, H, dtype, summary};
      Layer layer(c, num_pages);
      const at::Tensor k_TGH = at::randint(-2, 3, {num_pages * kPageTokens, G, H}).to(dtype);
      const at::Tensor q_TNH = at::randint(-1, 2, {3, N, H}).to(dtype);
      q_TNH[1][7][0] = NAN;
      std::vector<TokenSlot> slots;
      for (int64_t i = 0; i < num_pages * kPageTokens; ++i) slots.push_back({i, i});
      store_in_pages(layer.pages, k_TGH, k_TGH, slots);
      summarise_blocks(layer.pages, all, {.summary = summary}, H, layer.summaries);
      const at::Tensor k_BGTH = k_TGH.unflatten(0, {num_pages, kPageTokens}).transpose(1, 2);
      const at::Tensor got = at::full_like(layer.summaries, NAN);
      const bool has_extremes = summary == BlockSummary::kMinMax;
      find_op<Summarise>("bough::summarise_pages_")
          .call(at::stack({k_BGTH, k_BGTH}), at::tensor(all, at::kInt), has_extremes, H, got);
      EXPECT_TRUE(at::equal(got, layer.summaries)) << dtype;
      const std::vector<ChoosingQuery> queries{choosing_query(2, all, 40),
                                               choosing_query(0, std::span(all).first(9), 8),
                                               choosing_query(1, all, 199)};
      std::vector<std::vector<int32_t>> lists(queries.size() * static_cast<size_t>(G));
      choose_blocks(q_TNH, layer.summaries, {.summary = summary}, queries, lists);
      const at::Tensor records =
          at::tensor({2, 0, 200, 37, 0, 0, 9, 5, 1, 0, 200, 196}, at::kInt).view({-1, 4});
      // The tables of query i and head g: tables[i][g], in `ids` of which the rest is -1.
      const at::Tensor tables = at::tensor({500, 0, 50, 60, 100, 300}, at::kInt);
      const at::Tensor ids = at::full({600}, -1, at::kInt);
      const at::Tensor chosen = find_op<Choose>("bough::choose_pages")
                                    .call(q_TNH, layer.summaries, has_extremes, records,
                                          at::tensor(all, at::kInt), num_pages, 196, tables, ids);
      EXPECT_TRUE(at::equal(ids, expected_ids(queries, lists, tables))) << dtype;
      ASSERT_EQ(chosen.sizes(), at::IntArrayRef({3, G, 196}));
      for (size_t i = 0; i < lists.size(); ++i) {
        const int64_t query = static_cast<int64_t>(i) / G, head = static_cast<int64_t>(i) % G;
        const std::vector<int32_t> by_score(lists[i].begin() + 1, lists[i].end() - 2);
        EXPECT_TRUE(
            at::equal(chosen[query][head].slice(0, 0, std::ssize(by_score)), at::tensor(by_score, at::kInt)))
            << dtype << ", query " << query << ", head " << head;
      }
    }
}

TEST(PageChoice, ABudgetBelowTheMinimumIsRefused) {
  const Case c{1, 1, 32, at::kFloat, BlockSummary::kMean};
  Layer layer(c, 8);
  std::vector<int32_t> all{0, 1, 2, 3, 4, 5, 6, 7};
  const std::vector<ChoosingQuery> queries{choosing_query(0, all, 3)};
  std::vector<std::vector<int32_t>> lists(1);
  EXPECT_THROW(choose_blocks(at::zeros({1, 1, 32}), layer.summaries, {.summary = c.summary}, queries, lists),
               InternalError);
}

BOUGH_HAS_CUDA_KERNELS(PageChoice, "summarise_pages_", "choose_pages")

}  // namespace
}  // namespace bough
