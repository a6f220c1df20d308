#include "report/html_report.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <regex>

#include "base/error.h"
#include "base/file.h"
#include "base/random.h"
#include "report/chart.h"
#include "report/html_text.h"
#include "report/timeline.h"

namespace bough {
namespace fs = std::filesystem;
namespace {

// Checks that opened elements are closed in the right order. Returns the first wrong tag; "" if all are
// right.
std::string unbalanced(const std::string& html) {
  static const std::regex tag("<(/?)([a-z][a-z0-9]*)([^<>]*)>");
  std::vector<std::string> open;
  std::string body = html;
  for (const char* raw : {"style", "script"})  // their content is not markup
    for (size_t at = 0; (at = body.find(str("<", raw, ">"), at)) != std::string::npos; ++at) {
      const size_t begin = body.find('>', at) + 1;
      body.erase(begin, body.find(str("</", raw), begin) - begin);
    }
  for (std::sregex_iterator it(body.begin(), body.end(), tag), end; it != end; ++it) {
    const std::string name = (*it)[2], rest = (*it)[3];
    if (name == "meta" || (!rest.empty() && rest.back() == '/')) continue;
    if ((*it)[1].length() == 0) open.push_back(name);
    else if (open.empty() || open.back() != name) return "</" + name + ">";
    else open.pop_back();
  }
  return open.empty() ? "" : "<" + open.back() + ">";
}

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

ReportInput small_run(const std::string& untrusted) {
  ReportInput input;
  input.title = untrusted;
  input.settings = "seed: 1 # " + untrusted;
  for (int64_t step = 1; step <= 40; ++step)
    input.metrics.push_back(
        {step, {{"reward/mean", 0.1 * static_cast<double>(step)}, {"eval/avg_at_k", 0.5}, {untrusted, 1.0}}});
  input.trees.push_back(
      {untrusted, {{-1, 0, 10, 2, {}}, {0, 10, 20, 1, {{10, 20}}}, {0, 10, 15, 1, {{10, 15}}}}, 35});
  input.samples.push_back({40, untrusted, untrusted, 1.0, untrusted});
  return input;
}

TEST(HtmlReport, IsOneBalancedFileThatLoadsNothing) {
  const std::string html = html_report(small_run("plain"));
  EXPECT_EQ(unbalanced(html), "");
  for (const char* loading : {" src=", " href=", "url(", "@import", "fetch(", "<link", "<img", "<iframe"})
    EXPECT_EQ(html.find(loading), std::string::npos) << loading;
  EXPECT_NE(html.find("default-src 'none'"), std::string::npos);
  EXPECT_EQ(unbalanced(html_report({})), "");
  EXPECT_EQ(unbalanced("<p><b></p></b>"), "</p>");  // the check itself can fail
}

TEST(HtmlReport, EscapesWhateverIsUntrusted) {
  const std::string attack =
      "\"'></pre></script><script>alert(1)</script><img src=x onerror=alert(1)>&\xff\x01";
  const std::string html = html_report(small_run(attack)), harmless = html_report(small_run("plain"));
  EXPECT_EQ(unbalanced(html), "");
  EXPECT_EQ(count(html, "<script"), count(harmless, "<script"));
  EXPECT_EQ(count(html, "</script"), count(harmless, "</script"));
  EXPECT_EQ(html.find("<img"), std::string::npos);
  EXPECT_EQ(html.find('\xff'), std::string::npos);
  EXPECT_NE(html.find("&lt;img src=x"), std::string::npos);
  EXPECT_EQ(html_escape("a<b>&\"'\n\x01\x7f\xff"), "a&lt;b&gt;&amp;&quot;&#39;\n\u2401\u2421\uFFFD");
}

TEST(HtmlReport, ShowsEveryMetricOnce) {
  const std::string html = html_report(small_run("plain"));
  EXPECT_EQ(count(html, "<figure class=\"chart\""), 3u);  // reward, accuracy, and "plain" in <details>
  EXPECT_NE(html.find("1 more curves"), std::string::npos);
  EXPECT_NE(html.find("aria-label=\"plain over steps\""), std::string::npos);
}

TEST(HtmlReport, ChartsOfSparseSamplesComeFirst) {
  ReportInput input;
  for (int64_t step = 1; step <= 3; ++step)
    input.metrics.push_back({step,
                             {{"sparse/overlap_to_255", 0.9},
                              {"sparse/overlap_to_1023", 0.8},
                              {"sparse/ratio_p5_to_255", 0.7},
                              {"sparse/kl_drawn", 0.01},
                              {"time/recompute", 1},
                              {"oversampling/reward_8", 0.25},
                              {"oversampling/reward_12", 0.5},
                              {"oversampling/reward_16", 0.75},
                              {"oversampling/reward_x", 1}}});
  const std::string html = html_report(input);
  EXPECT_EQ(unbalanced(html), "");
  for (const char* title : {"Acceptance by position in the response", "Importance ratio, 5th percentile",
                            "KL from the behavior policy", "Cost of a step", "Reward of the samples kept"})
    EXPECT_LT(html.find(title), html.find("more curves")) << title;
  EXPECT_LT(html.find("N = 8"), html.find("N = 12"));
  EXPECT_LT(html.find("N = 12"), html.find("N = 16"));
  EXPECT_NE(html.find("1 more curves"), std::string::npos) << "oversampling/reward_x";
}

TEST(HtmlReport, LongTextsAndManySamplesAreCut) {
  ReportInput input;
  for (int i = 0; i < 500; ++i) input.samples.push_back({i, std::string(100'000, 'p'), "é", {}, ""});
  const std::string html = html_report(input);
  EXPECT_LT(html.size(), 1'000'000u);
  EXPECT_NE(html.find("60 of 500 shown"), std::string::npos);
  EXPECT_EQ(cut_text("aé", 2), "a…");
  EXPECT_EQ(cut_text("aé", 3), "aé");
}

TEST(HtmlReport, SamplesComeFromRolloutLines) {
  const ReportSample text =
      sample_of_rollout({{"prompt", "p"}, {"response", "r"}, {"reward", 0.5}, {"answer", 7}}, 3);
  EXPECT_EQ(text.prompt, "p");
  EXPECT_EQ(text.completion, "r");
  EXPECT_EQ(text.reward, 0.5);
  EXPECT_EQ(text.note, "answer: 7");
  const ReportSample ids = sample_of_rollout({{"input_ids", {5, 6, 7}}, {"loss_mask", {0, 0, 1}}}, 3);
  EXPECT_EQ(ids.prompt, "5 6");
  EXPECT_EQ(ids.completion, "7");
  EXPECT_FALSE(ids.reward);
  EXPECT_THROW(sample_of_rollout(Json::array(), 1), UserError);
}

TEST(HtmlReport, IsWrittenIntoTheRunsFolder) {
  std::string name = (fs::temp_directory_path() / "bough_report_test.XXXXXX").string();
  ASSERT_NE(::mkdtemp(name.data()), nullptr);
  const fs::path folder = fs::path(name) / "sums" / "trial0";
  make_directories(folder);
  write_file_atomically(folder / "config.yaml", "seed: 17\n");
  JsonlMetrics(folder / "metrics.jsonl").write(1, {{"reward/mean", 0.25}});
  EXPECT_EQ(write_html_report(folder / "", {}, {}), folder / "" / "report.html");
  const std::string html = read_file(folder / "report.html");
  EXPECT_NE(html.find("<h1>sums / trial0</h1>"), std::string::npos);
  EXPECT_NE(html.find("seed: 17"), std::string::npos);
  EXPECT_THROW(write_html_report(folder / "config.yaml", {}, {}), UserError);
  fs::remove_all(name);
}

TEST(Chart, TicksAreRoundAndInside) {
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

TEST(Chart, ThinsByMeans) {
  std::vector<std::pair<double, double>> points;
  for (int i = 0; i < 1000; ++i) points.emplace_back(i, 2 * i);
  const auto thin = thinned(points, 10);
  ASSERT_EQ(thin.size(), 10u);
  EXPECT_EQ(thin[0], (std::pair<double, double>{49.5, 99.0}));
  EXPECT_EQ(thinned(points, 1000), points);
}

TEST(Chart, DrawsHigherValuesHigherAndInsideThePicture) {
  const std::string svg = chart_figure({"t", "", {{"s", {{1, 5}, {2, 7}, {3, -4}}}}, false});
  std::smatch match;
  ASSERT_TRUE(std::regex_search(
      svg, match,
      std::regex("class=\"line c0\" d=\"M([0-9.]+) ([0-9.]+)L([0-9.]+) ([0-9.]+)L([0-9.]+) ([0-9.]+)\"")));
  const auto at = [&](size_t i) { return std::stod(match[i]); };
  EXPECT_LT(at(1), at(3));
  EXPECT_LT(at(3), at(5));
  EXPECT_GT(at(2), at(4));
  EXPECT_GT(at(6), at(2));
  for (const size_t i : {2, 4, 6}) EXPECT_TRUE(at(i) > 0 && at(i) < 250);
  // A series of equal, single or huge numbers also gives an axis. A series without points gives no figure.
  for (const double value : {0.0, 1.0, -3.0, 1e300, 1e-300})
    EXPECT_EQ(unbalanced(chart_figure({"t", "", {{"s", {{1, value}}}}, true})), "");
  EXPECT_EQ(chart_figure({"t", "", {{"s", {}}}, false}), "");
}

struct Rectangle {
  double x, y, width, height;
};
std::vector<Rectangle> rectangles(const std::string& figure, const std::string& kind) {
  static const std::string number = "=\"(-?[0-9.]+)\"";
  const std::regex pattern("<rect class=\"" + kind + "\" x" + number + " y" + number + " width" + number +
                           " height" + number);
  std::vector<Rectangle> out;
  for (std::sregex_iterator it(figure.begin(), figure.end(), pattern), end; it != end; ++it)
    out.push_back({std::stod((*it)[1]), std::stod((*it)[2]), std::stod((*it)[3]), std::stod((*it)[4])});
  return out;
}

TEST(TreePicture, WidthIsSequencesAndHeightIsTokens) {
  // Two trees. The first has three sequences, one of which ends in the root node. The second has one
  // sequence.
  const std::string figure = tree_figure(
      {"t", {{-1, 0, 10, 3, {{5, 10}}}, {0, 10, 40, 1, {}}, {0, 10, 20, 1, {}}, {-1, 0, 20, 1, {}}}, 100});
  const auto shared = rectangles(figure, "shared"), single = rectangles(figure, "single"),
             trained = rectangles(figure, "shared trained");
  ASSERT_EQ(shared.size(), 1u);
  ASSERT_EQ(single.size(), 3u);
  ASSERT_EQ(trained.size(), 1u);
  EXPECT_NEAR(shared[0].width, 3 * single[0].width, 4);
  EXPECT_NEAR(single[0].height, 3 * shared[0].height, 0.05);
  EXPECT_NEAR(single[0].y, shared[0].height, 0.05);
  EXPECT_EQ(single[0].x, shared[0].x);
  EXPECT_GT(single[1].x, single[0].x + single[0].width);
  EXPECT_NEAR(single[2].x / shared[0].width, 1, 0.01);
  EXPECT_NEAR(trained[0].y, shared[0].height / 2, 0.05);
  EXPECT_NE(figure.find("4 sequences, 70 tokens in the tree for 100 in the batch: 1.43x compression"),
            std::string::npos)
      << figure;
  EXPECT_EQ(unbalanced(figure), "");
  EXPECT_EQ(tree_figure({}), "");
}

TEST(TreePicture, ManyNodesStayReadableInSize) {
  TreePicture tree{"big", {{-1, 0, 5, 100'000, {}}}, 0};
  for (int i = 0; i < 100'000; ++i) tree.nodes.push_back({0, 5, 6, 1, {}});
  const std::string figure = tree_figure(tree);
  EXPECT_LT(figure.size(), 5'000'000u);
  EXPECT_NE(figure.find("nodes too narrow to draw"), std::string::npos);
}

TEST(TreePicture, RefusesForestsThatAreNotInPreorder) {
  using Nodes = std::vector<TreePictureNode>;
  const Nodes wrong[] = {{{0, 0, 5, 1, {}}},
                         {{-1, 1, 5, 1, {}}},
                         {{-1, 0, 5, 1, {}}, {0, 6, 7, 1, {}}},
                         {{-1, 0, 5, 1, {}}, {0, 5, 7, 2, {}}},
                         {{-1, 0, 5, 1, {}}, {0, 5, 7, 1, {}}, {0, 5, 7, 1, {}}},
                         {{-1, 0, 5, 0, {}}},
                         {{-1, 0, 5, 1, {{4, 6}}}}};
  for (const Nodes& nodes : wrong) EXPECT_THROW(tree_figure({"t", nodes, 0}), InternalError);
}

TEST(ConversationPage, EscapesItsTextsAndShowsEveryTurn) {
  const std::string adversarial = "</pre><script>alert(1)</script>\"'&<b>\x01\xff";
  ConversationView view{.name = adversarial, .reason = adversarial, .failure = adversarial, .reward = 0.5};
  view.rewards = {{adversarial, 1}};
  view.turns = 1;
  view.invalid_calls = 2;
  view.forks_from = adversarial;
  view.fork_turn = 0;
  view.common_tokens = 3;
  view.runs = {{2, false}, {4, true}};
  view.messages.push_back({.role = adversarial, .name = adversarial, .content = adversarial});
  view.messages.push_back({.role = "assistant",
                           .reasoning = adversarial,
                           .content = adversarial,
                           .calls = {{adversarial, adversarial}},
                           .turn = 0,
                           .tokens = 4,
                           .engine_seconds = 1.25,
                           .environment_seconds = 0.5,
                           .reward = 0.5,
                           .retokenized = true});
  const std::string page = html_report({.conversations = {{3, adversarial, {view}}}});
  EXPECT_EQ(unbalanced(page), "");
  EXPECT_EQ(count(page, "<script>"), 1u) << "the page's own";
  EXPECT_NE(page.find("turn 0, 4 tokens, 1.25 s; answered after 0.5 s; reward 0.5"), std::string::npos);
  EXPECT_NE(page.find("in turn 0, 3 tokens in common"), std::string::npos);
  // The bar has two shown tokens and one model token in common with the other conversation, and three more
  // model tokens.
  EXPECT_NE(page.find("<i class=\"shown common\" style=\"flex:2\"></i><i class=\"model common\" "
                      "style=\"flex:1\"></i><i class=\"model\" style=\"flex:3\"></i>"),
            std::string::npos);
}

TEST(ConversationPage, IsBounded) {
  ConversationView view{.name = "#0"};
  for (int i = 0; i < 100; ++i) view.messages.push_back({.role = "user", .content = std::string(8000, 'x')});
  std::vector<ConversationGroup> groups;
  for (int g = 0; g < 4; ++g) groups.push_back({g, str("g", g), std::vector<ConversationView>(10, view)});
  const std::string section = conversations_section(groups);
  EXPECT_LT(section.size(), 3'100'000u);
  EXPECT_EQ(unbalanced(section), "");
  EXPECT_NE(section.find("36 messages are not shown"), std::string::npos);
  EXPECT_NE(section.find("8 of 10 conversations"), std::string::npos);
  EXPECT_NE(section.find("groups are too long to be shown"), std::string::npos);
  EXPECT_EQ(conversations_section({}), "");
}

// One long span (a checkpoint) ends after many short spans that run in parallel. The first short spans are
// left out.
TEST(TimelineFigure, BeginsAfterTheLastOmittedSpan) {
  std::vector<TimelineSpan> spans;
  for (int i = 0; i < 2000; ++i) spans.push_back({"engine", "generate", 0.05 * i, 0.05 * (i + 1)});
  spans.push_back({"writer", "checkpoint", 0, 100});
  const std::string figure = timeline_figure(spans);
  EXPECT_NE(figure.find("the last 1:15 of 1:40"), std::string::npos) << figure.substr(0, 200);
  EXPECT_NE(figure.find(">30 s</text>"), std::string::npos) << "marks are round";
  spans.resize(10);
  EXPECT_NE(timeline_figure(spans).find("the last 500 ms of 500 ms"), std::string::npos);
}

}  // namespace
}  // namespace bough
