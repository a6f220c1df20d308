#include "report/plan_picture.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <regex>

#include "base/error.h"
#include "base/random.h"
#include "report/plan_layout.h"

namespace bough {
namespace {

using RecomputePolicy = PlanPictureBlock::RecomputePolicy;

size_t count_in_picture(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

// Checks that opened elements are closed in the right order. Returns the first wrong tag; "" if all are
// right.
std::string unbalanced_svg(const std::string& svg) {
  static const std::regex tag("<(/?)([a-z]+)([^<>]*)>");
  std::vector<std::string> open;
  for (std::sregex_iterator it(svg.begin(), svg.end(), tag), end; it != end; ++it) {
    const std::string rest = (*it)[3];
    if (!rest.empty() && rest.back() == '/') continue;
    if ((*it)[1].length() == 0) open.push_back((*it)[2]);
    else if (open.empty() || open.back() != (*it)[2]) return "</" + (*it)[2].str() + ">";
    else open.pop_back();
  }
  return open.empty() ? "" : "<" + open.back() + ">";
}

// The plan of one group of samples: the prompt is one interior block, and each leaf block has `per_block`
// samples.
PlanPicture group(int64_t num_samples, int64_t per_block, RecomputePolicy keep = RecomputePolicy::kNothing) {
  PlanPicture plan{.headline = "blocks", .trees = {{}}};
  auto& nodes = plan.trees[0].nodes;
  plan.blocks.push_back({.interior = true, .keep = keep, .num_tokens = 500, .forward_pass = 1});
  nodes.push_back({.begin = 0, .end = 500, .num_sequences = num_samples, .block = 0});
  for (int64_t s = 0; s < num_samples; ++s) {
    if (s % per_block == 0) {
      const auto pass = static_cast<int64_t>(plan.blocks.size()) + 1;
      plan.blocks.push_back({.forward_pass = pass, .backward_pass = pass});
    }
    const int64_t length = 900 - s * 800 / num_samples;
    const auto block = static_cast<int64_t>(plan.blocks.size()) - 1;
    nodes.push_back({.parent = 0,
                     .begin = 500,
                     .end = 500 + length,
                     .first_sequence = s,
                     .num_sequences = 1,
                     .block = block});
    plan.blocks.back().num_tokens += length;
  }
  plan.blocks[0].backward_pass = static_cast<int64_t>(plan.blocks.size()) + 1;
  return plan;
}

// A plan whose trees have random runs of at most `length` tokens in random blocks. Some blocks never run, and
// some sequences end inside a run.
PlanPicture random_plan(uint64_t seed, int64_t num_trees, int64_t num_sequences, int64_t length) {
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  PlanPicture plan;
  for (int64_t t = 0; t < num_trees; ++t) {
    auto& nodes = plan.trees.emplace_back().nodes;
    struct Open {
      int64_t parent, begin, first, count;
    };
    std::vector<Open> open = {{-1, 0, 0, num_sequences}};
    while (!open.empty()) {
      const Open own = open.back();
      open.pop_back();
      const int64_t end = own.begin + 1 + below(length);
      if (plan.blocks.empty() || below(2) == 0) {
        const auto pass = below(9) == 0 ? 0 : static_cast<int64_t>(plan.blocks.size()) + 1;
        plan.blocks.push_back(
            {below(2) == 0, static_cast<RecomputePolicy>(below(4)), 1 + below(100), pass, pass});
      }
      const auto block =
          static_cast<int64_t>(plan.blocks.size()) - 1 - (plan.blocks.size() > 1 ? below(2) : 0);
      const auto index = static_cast<int64_t>(nodes.size());
      nodes.push_back({own.parent, own.begin, end, own.first, own.count, block});
      for (int64_t first = own.first, last = own.first + own.count; own.count > 1 && first < last;) {
        const int64_t share = 1 + below(last - first);
        if (below(8) != 0) open.push_back({index, end, first, share});
        first += share;
      }
    }
  }
  return plan;
}

// Number of tokens on the path of each sequence, tree after tree.
std::vector<int64_t> path_lengths(const PlanPicture& plan) {
  std::vector<int64_t> lengths;
  for (const auto& tree : plan.trees) {
    const size_t first = lengths.size();
    for (const auto& node : tree.nodes) {
      const auto end = static_cast<size_t>(node.first_sequence + node.num_sequences);
      lengths.resize(std::max(lengths.size(), first + end));
      for (auto s = static_cast<size_t>(node.first_sequence); s < end; ++s)
        lengths[first + s] = std::max(lengths[first + s], node.end);
    }
  }
  return lengths;
}

double area(const PlanLayout& layout) {
  double sum = 0;
  for (const auto& shape : layout.shapes)
    for (const auto& strip : shape.strips) sum += strip.width() * strip.height();
  return sum;
}

TEST(PlanLayout, EveryTokenOfEveryDrawnSequenceIsDrawnOnce) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const auto plan =
        random_plan(seed, 1 + static_cast<int64_t>(seed % 5), 1 + static_cast<int64_t>(seed * 7 % 300), 40);
    const auto layout = lay_out(plan, 1000, 500);
    const auto lengths = path_lengths(plan);
    ASSERT_EQ(layout.num_sequences, static_cast<int64_t>(lengths.size()));
    double drawn_width = 0;
    for (const auto& tree : layout.trees) drawn_width += tree.width();
    const auto count = layout.num_sequences_drawn;
    const double column = drawn_width / static_cast<double>(count);
    EXPECT_GE(column, 2.999);
    double expected = 0;
    for (int64_t c = 0; c < count; ++c) {
      const int64_t sequence = (2 * c + 1) * layout.num_sequences / (2 * count);
      expected += column * 500 * static_cast<double>(lengths[static_cast<size_t>(sequence)]) /
                  static_cast<double>(layout.depth);
    }
    ASSERT_NEAR(area(layout), expected, 1e-6 * expected) << "seed " << seed;
    for (const auto& shape : layout.shapes)
      for (size_t i = 1; i < shape.strips.size(); ++i) {
        ASSERT_NEAR(shape.strips[i].left, shape.strips[i - 1].right, 1e-6) << "seed " << seed;
        ASSERT_LT(std::max(shape.strips[i].top, shape.strips[i - 1].top),
                  std::min(shape.strips[i].bottom, shape.strips[i - 1].bottom));
      }
  }
}

TEST(PlanLayout, NeighboursDifferInColour) {
  auto plan = group(8, 1);
  // By default the seventh leaf block would get the colour of the first. Here the two are drawn side by side.
  for (const auto& [node, block] : {std::pair(2, 7), {3, 2}, {4, 3}, {5, 4}, {6, 5}, {7, 6}})
    plan.trees[0].nodes[static_cast<size_t>(node)].block = block;
  const auto layout = lay_out(plan, 1000, 500);
  ASSERT_EQ(layout.shapes.size(), 9u);
  for (size_t i = 2; i < 9; ++i)
    EXPECT_NE(layout.bands[static_cast<size_t>(layout.shapes[i].band)].leaf_colour,
              layout.bands[static_cast<size_t>(layout.shapes[i - 1].band)].leaf_colour)
        << i;
}

TEST(PlanLayout, ManyLeavesOfFewBlocksBecomeOneOutlineABlock) {
  const auto layout = lay_out(group(1000, 25), 1000, 500);
  EXPECT_EQ(layout.num_sequences_drawn, 333);
  EXPECT_EQ(layout.shapes.size(), 41u);
  EXPECT_EQ(layout.num_merged, 0);
}

TEST(PlanLayout, BlocksTooSmallToBeSeenShareAColour) {
  const auto plan = group(1000, 1);
  const auto layout = lay_out(plan, 1000, 500);
  EXPECT_EQ(layout.num_merged, 1000);
  EXPECT_LT(layout.bands.size(), 90u);
  EXPECT_GT(layout.bands.size(), 50u);
  int64_t next = 1, tokens = 0;
  for (const auto& band : layout.bands) {  // each block is in one band, in order
    EXPECT_EQ(band.first_number, next);
    EXPECT_EQ(band.num_blocks, band.last_number - band.first_number + 1);
    next = band.last_number + 1;
    tokens += band.num_tokens;
  }
  EXPECT_EQ(next, 1002);
  int64_t all = 0;
  for (const auto& block : plan.blocks) all += block.num_tokens;
  EXPECT_EQ(tokens, all);
}

TEST(PlanPicture, AGroupOfSamplesIsLabelledAndExplained) {
  for (const auto& [keep, text] : {std::pair(RecomputePolicy::kNothing, "keeps keys and values only: "),
                                   std::pair(RecomputePolicy::kAttention, "keeps attention outputs: "),
                                   std::pair(RecomputePolicy::kLayerInputs, "keeps layer inputs: "),
                                   std::pair(RecomputePolicy::kActivations, "keeps activations: ")}) {
    const std::string svg = plan_svg(group(10, 2, keep));
    EXPECT_EQ(unbalanced_svg(svg), "");
    EXPECT_EQ(count_in_picture(svg, "<title>"), 11u);  // the prompt and each sample
    EXPECT_EQ(count_in_picture(svg, ">6</tspan>"), 2u);
    EXPECT_NE(svg.find("block 1, interior, 500 tokens\nforward in pass 1, backward in pass 7"),
              std::string::npos);
    EXPECT_NE(svg.find(">900 of 1,720</text>"), std::string::npos);
    EXPECT_EQ(count_in_picture(svg, text), 1u);
    EXPECT_NE(svg.find("10 sequences in 1 tree, 6 blocks."), std::string::npos);
    EXPECT_EQ(svg.find("Thinned"), std::string::npos);
    EXPECT_EQ(svg.find("never run"), std::string::npos);
  }
}

TEST(PlanPicture, SaysWhatIsThinnedAndMerged) {
  const std::string svg = plan_svg(group(1000, 1));
  EXPECT_EQ(unbalanced_svg(svg), "");
  EXPECT_NE(svg.find("Thinned: 392 evenly spread sequences are drawn, one in 2.55."), std::string::npos);
  EXPECT_NE(svg.find("Merged: 1,000 blocks"), std::string::npos);
}

TEST(PlanPicture, StaysSmall) {
  // The plan with the most outlines: as many columns as are drawn one by one, each with many blocks that are
  // just large enough to be visible.
  PlanPicture chunks{.headline = "path", .trees = {{}}};
  for (int64_t s = 0; s < 160; ++s)
    for (int64_t i = 0; i < 1000; ++i) {
      const auto pass = static_cast<int64_t>(chunks.blocks.size()) + 1;
      const auto parent = static_cast<int64_t>(chunks.trees[0].nodes.size()) - 1;
      chunks.blocks.push_back(
          {.interior = i + 1 < 1000, .num_tokens = 1, .forward_pass = pass, .backward_pass = pass});
      chunks.trees[0].nodes.push_back({i == 0 ? -1 : parent, i, i + 1, s, 1, pass - 1});
    }
  EXPECT_LT(plan_svg(chunks).size(), 2'000'000u);
  for (const auto& plan :
       {random_plan(1, 1, 50'000, 20), random_plan(2, 3'000, 20, 20), random_plan(3, 40, 1'000, 300)}) {
    const std::string svg = plan_svg(plan);
    EXPECT_LT(svg.size(), 2'000'000u);
    EXPECT_EQ(unbalanced_svg(svg).size(), 0u);
  }
}

TEST(PlanPicture, LoadsNothingAndEscapesItsHeadline) {
  auto plan = group(3, 1);
  plan.headline = "</text><script>alert(1)</script> & \"quotes\"";
  plan.blocks.push_back({.num_tokens = 7});
  plan.trees.push_back({{{-1, 0, 7, 0, 1, 4}}});
  const std::string svg = plan_svg(plan);
  EXPECT_EQ(unbalanced_svg(svg), "");
  EXPECT_EQ(svg.find("<script"), std::string::npos);
  EXPECT_EQ(count_in_picture(svg, "http"), 1u);  // the namespace URI
  EXPECT_EQ(svg.find("href"), std::string::npos);
  EXPECT_NE(svg.find("4 blocks and 1 that never run."), std::string::npos);
  EXPECT_EQ(unbalanced_svg(plan_svg({.headline = "nothing"})), "");
}

TEST(PlanPicture, RefusesInvalidTrees) {
  const auto broken = [](auto change) {
    auto plan = group(4, 2);
    change(plan);
    EXPECT_THROW(plan_svg(plan), InternalError);
  };
  broken([](auto& plan) { plan.trees[0].nodes[2].begin = 499; });
  broken([](auto& plan) { plan.trees[0].nodes[4].first_sequence = 4; });
  broken([](auto& plan) { plan.trees[0].nodes[1].parent = 1; });
  broken([](auto& plan) { plan.trees[0].nodes[1].block = 3; });
  broken([](auto& plan) { plan.trees[0].nodes[0].begin = 1; });
}

TEST(PlanPicture, TicksAreRoundAndInside) {
  EXPECT_EQ(axis_ticks(0, 10, 5), (std::vector<double>{0, 2, 4, 6, 8, 10}));
  const CounterRandom random(1, Purpose::test);
  for (uint64_t i = 0; i < 2000; ++i) {
    const double low = random.normal(0, i) * std::pow(10, random.normal(1, i) * 3);
    const double high = low + std::pow(10, random.normal(2, i) * 3) + std::abs(low) * 1e-6;
    const auto ticks = axis_ticks(low, high, 5);
    ASSERT_GE(ticks.size(), 1u);
    ASSERT_LE(ticks.size(), 6u);
    const double slack = (high - low) * 1e-6;
    for (const double tick : ticks) {
      ASSERT_GE(tick, low - slack);
      ASSERT_LE(tick, high + slack);
    }
    if (ticks.size() > 1) {
      const double unit = ticks[1] - ticks[0],
                   digits = unit / std::pow(10, std::floor(std::log10(unit * 1.0001)));
      ASSERT_TRUE(std::abs(digits - 1) < 1e-3 || std::abs(digits - 2) < 1e-3 || std::abs(digits - 5) < 1e-3)
          << unit;
    }
  }
}

}  // namespace
}  // namespace bough
