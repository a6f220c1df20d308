#include "report/html_report.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <map>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/format.h"
#include "report/chart.h"
#include "report/html_text.h"
#include "report/page.h"

namespace bough {
namespace {

constexpr size_t kMostSamples = 60;       // few enough to read in one table
constexpr size_t kMostTextBytes = 6000;   // per prompt or completion
constexpr size_t kMostTokensShown = 400;  // if token ids replace the text

ChartSeries series_of(const std::vector<MetricRecord>& metrics, const std::string& metric, std::string name) {
  ChartSeries out{std::move(name), {}};
  for (const MetricRecord& record : metrics)
    if (const auto it = record.values.find(metric); it != record.values.end())
      out.points.emplace_back(static_cast<double>(record.step), it->second);
  return out;
}

struct ChartPlan {
  const char* title;
  const char* unit;
  bool from_zero;
  std::vector<std::pair<const char*, const char*>> metrics;  // name in the file, name in the legend
};

// The charts at the top of the page. Every metric that they do not have gets a chart of its own, in a closed
// section.
const std::vector<ChartPlan>& main_charts() {
  static const std::vector<ChartPlan> plans = {
      {"Reward, mean", "", false, {{"reward/mean", "reward"}}},
      {"Accuracy on held-out problems",
       "",
       false,
       {{"eval/avg_at_k", "avg@k"},
        {"eval/pass_at_k", "pass@k"},
        {"eval_sparse/avg_at_k", "avg@k, sparse policy"}}},
      {"Completion length, mean", "tokens", true, {{"rollout/length_mean", "length"}}},
      {"Time per step",
       "s",
       true,
       {{"time/step", "step"}, {"time/rollout", "rollout"}, {"time/train", "train"}}},
      {"Compression by the prefix tree",
       "x",
       false,
       {{"tree/compression", "tokens"}, {"tree/attention_compression", "attention"}}},
      {"Tokens per second",
       "tokens/s",
       true,
       {{"perf/generated_tokens_per_s", "generated"}, {"perf/train_tokens_per_s", "trained (flat)"}}},
      {"Critic: means of values and returns",
       "",
       false,
       {{"critic/value_mean", "values"}, {"critic/return_mean", "returns"}}},
      {"Staleness: versions behind", "", true, {{"staleness/mean", "mean"}, {"staleness/max", "largest"}}},
      {"Idle time per step",
       "s",
       true,
       {{"idle/trainer_seconds", "trainer waits for samples"},
        {"idle/engine_seconds", "engine waits for weights"}}},
      {"Cost of a step: its parts",
       "s",
       true,
       {{"time/rollout", "rollout"},
        {"time/recompute", "recompute"},
        {"time/update", "update"},
        {"time/sparse_train", "sparse policy's step"}}},
      {"Acceptance by position in the response: sum of min(p, q) over the top-k tokens and the rest",
       "",
       false,
       {{"sparse/overlap_to_255", "to 255"},
        {"sparse/overlap_to_1023", "to 1,023"},
        {"sparse/overlap_to_4095", "to 4,095"},
        {"sparse/overlap_beyond", "beyond"}}},
      {"Acceptance by position in the response: 5th percentile over tokens",
       "",
       false,
       {{"sparse/overlap_p5_to_255", "to 255"},
        {"sparse/overlap_p5_to_1023", "to 1,023"},
        {"sparse/overlap_p5_to_4095", "to 4,095"},
        {"sparse/overlap_p5_beyond", "beyond"}}},
      {"Acceptance by position, estimated from the sampled tokens",
       "",
       false,
       {{"sparse/acceptance_to_255", "to 255"},
        {"sparse/acceptance_to_1023", "to 1,023"},
        {"sparse/acceptance_to_4095", "to 4,095"},
        {"sparse/acceptance_beyond", "beyond"}}},
      {"Importance ratio by position, mean",
       "",
       false,
       {{"sparse/ratio_to_255", "to 255"},
        {"sparse/ratio_to_1023", "to 1,023"},
        {"sparse/ratio_to_4095", "to 4,095"},
        {"sparse/ratio_beyond", "beyond"}}},
      {"Importance ratio, 5th percentile by position",
       "",
       false,
       {{"sparse/ratio_p5_to_255", "to 255"},
        {"sparse/ratio_p5_to_1023", "to 1,023"},
        {"sparse/ratio_p5_to_4095", "to 4,095"},
        {"sparse/ratio_p5_beyond", "beyond"}}},
      {"Importance ratio, 95th percentile by position",
       "",
       false,
       {{"sparse/ratio_p95_to_255", "to 255"},
        {"sparse/ratio_p95_to_1023", "to 1,023"},
        {"sparse/ratio_p95_to_4095", "to 4,095"},
        {"sparse/ratio_p95_beyond", "beyond"}}},
      {"KL from the behavior policy to the dense policy",
       "",
       true,
       {{"sparse/kl_drawn", "sampled by the current weights"},
        {"staleness/kl", "sampled by older weights"},
        {"sparse/kl", "sparse policy before its step"}}},
  };
  return plans;
}

// Makes one chart of all metrics whose names are `prefix` and a number, such as "oversampling/reward_8" and
// "oversampling/reward_12". If there are too many for one chart, it has those with the smallest numbers.
Chart chart_by_number(const std::vector<MetricRecord>& metrics, const std::string& title,
                      const std::string& prefix, std::set<std::string>& sampled) {
  std::map<int64_t, std::string> names;
  for (const MetricRecord& record : metrics)
    for (const auto& [name, value] : record.values)
      if (name.starts_with(prefix) && std::all_of(name.begin() + std::ssize(prefix), name.end(), ::isdigit))
        names[std::strtoll(name.c_str() + prefix.size(), nullptr, 10)] = name;
  Chart chart{title, "", {}, false};
  for (const auto& [number, name] : names) {
    if (chart.series.size() == 4) break;
    chart.series.push_back(series_of(metrics, name, str("N = ", number)));
    sampled.insert(name);
  }
  return chart;
}

std::string charts_section(const std::vector<MetricRecord>& metrics) {
  std::set<std::string> sampled;
  std::string out = "<h2>Curves</h2>\n<div class=\"charts\">\n";
  for (const ChartPlan& plan : main_charts()) {
    Chart chart{plan.title, plan.unit, {}, plan.from_zero};
    for (const auto& [metric, name] : plan.metrics) {
      ChartSeries series = series_of(metrics, metric, name);
      if (!series.points.empty()) chart.series.push_back(std::move(series));
      sampled.insert(metric);
    }
    out += chart_figure(chart);
  }
  for (const auto& [title, prefix] :
       {std::pair{"Reward of the samples kept from the first N", "oversampling/reward_"},
        std::pair{"Acceptance of the samples kept from the first N", "oversampling/acceptance_"}})
    out += chart_figure(chart_by_number(metrics, title, prefix, sampled));
  std::set<std::string> others;
  for (const MetricRecord& record : metrics)
    for (const auto& [name, value] : record.values)
      if (!sampled.contains(name)) others.insert(name);
  out += "</div>\n";
  if (others.empty()) return out;
  out += str("<details><summary>", others.size(), " more curves</summary><div class=\"charts\">\n");
  for (const std::string& name : others)
    out += chart_figure({name, "", {series_of(metrics, name, name)}, false});
  return out + "</div></details>\n";
}

std::string tile(const std::string& what, const std::string& value, const std::string& note) {
  return str("<div class=\"tile\"><span>", html_escape(what), "</span><b>", html_escape(value), "</b><small>",
             html_escape(note), "</small></div>\n");
}

std::string tiles(const ReportInput& input) {
  const auto points = [&](const char* name) { return series_of(input.metrics, name, "").points; };
  const auto mean = [](const auto& list, size_t begin, size_t end) {
    double sum = 0;
    for (size_t i = begin; i < end; ++i) sum += list[i].second;
    return sum / static_cast<double>(end - begin);
  };
  const auto short_number = [](double value) { return format_significant(value, 3); };
  std::string out = "<div class=\"tiles\">\n";
  if (const auto list = points("eval/avg_at_k"); !list.empty())
    out += tile("Accuracy (avg@k)", short_number(list.back().second),
                list.size() > 1 ? "from " + short_number(list[0].second) : "");
  if (const auto list = points("reward/mean"); !list.empty()) {
    // Averages a tenth of the training steps, because single batches are too noisy to compare.
    const size_t window = std::max<size_t>(1, list.size() / 10);
    out += tile("Reward", short_number(mean(list, list.size() - window, list.size())),
                list.size() > 1 ? str("from ", short_number(mean(list, 0, window)), ", means of ", window,
                                      window == 1 ? " step" : " steps")
                                : "");
  }
  if (const auto list = points("tree/compression"); !list.empty())
    out += tile("Compression", short_number(mean(list, 0, list.size())) + "x",
                "tokens of the batch / tokens of its prefix tree");
  if (const auto list = points("rollout/length_mean"); !list.empty())
    out +=
        tile("Length", short_number(list.back().second), str("tokens, from ", short_number(list[0].second)));
  if (const auto list = points("time/step"); !list.empty()) {
    const double whole = mean(list, 0, list.size()) * static_cast<double>(list.size());
    out += tile("Time", format_duration(whole),
                format_duration(whole / static_cast<double>(list.size())) + " per step");
  }
  if (!input.metrics.empty()) out += tile("Steps", format_thousands(input.metrics.back().step), "");
  return out + "</div>\n";
}

std::string samples_section(const std::vector<ReportSample>& samples) {
  std::string out = "<h2>Sample rollouts</h2>\n<div class=\"panel\">";
  if (samples.empty()) return out + "<p class=\"empty\">No rollouts were given to this report.</p></div>\n";
  out +=
      "<table><thead><tr><th class=\"number\">step</th><th class=\"number\">reward</th><th>prompt</th>"
      "<th>completion</th></tr></thead><tbody>\n";
  for (size_t i = 0; i < std::min(samples.size(), kMostSamples); ++i) {
    const ReportSample& sample = samples[i];
    out += str(
        "<tr><td class=\"number\">", sample.step, "</td><td class=\"number ",
        !sample.reward       ? ""
        : *sample.reward > 0 ? "good"
                             : "bad",
        "\">", sample.reward ? format_significant(*sample.reward, 3) : "–", "</td><td class=\"text\"><pre>",
        html_escape(cut_text(sample.prompt, kMostTextBytes)), "</pre></td><td class=\"text\"><pre>",
        html_escape(cut_text(sample.completion, kMostTextBytes)), "</pre>",
        sample.note.empty() ? ""
                            : str("<div class=\"note\">", html_escape(cut_text(sample.note, 400)), "</div>"),
        "</td></tr>\n");
  }
  out += "</tbody></table></div>\n";
  if (samples.size() > kMostSamples)
    out += str("<p class=\"hint\">", kMostSamples, " of ",
               format_thousands(static_cast<int64_t>(samples.size())), " shown.</p>\n");
  return out;
}

std::string tokens_text(const Json& ids, const Json& mask, bool trained) {
  std::string out;
  size_t shown = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const bool is_trained = i < mask.size() && mask[i].is_number_integer() && mask[i].get<int64_t>() != 0;
    if (is_trained != trained) continue;
    if (++shown > kMostTokensShown) return out + "…";
    out += (out.empty() ? "" : " ") + ids[i].dump();
  }
  return out;
}
}  // namespace

ReportSample sample_of_rollout(const Json& line, int64_t step) {
  if (!line.is_object()) throw UserError(str("a rollout must be an object, got ", quoted(dump_line(line))));
  const auto text = [&](std::initializer_list<const char*> names) -> std::optional<std::string> {
    for (const char* name : names)
      if (const auto it = line.find(name); it != line.end() && !it->is_null())
        return it->is_string() ? it->get<std::string>() : dump_line(*it);
    return {};
  };
  const Json ids = line.value("input_ids", Json::array()), mask = line.value("loss_mask", Json::array());
  ReportSample sample;
  sample.step = step;
  sample.prompt = text({"prompt"}).value_or("");
  if (sample.prompt.empty()) sample.prompt = tokens_text(ids, mask, false);
  sample.completion = text({"completion", "response"}).value_or("");
  if (sample.completion.empty()) sample.completion = tokens_text(ids, mask, true);
  if (const auto it = line.find("reward"); it != line.end() && it->is_number())
    sample.reward = it->get<double>();
  if (const auto answer = text({"answer"})) sample.note = "answer: " + *answer;
  return sample;
}

std::string html_report(const ReportInput& input) {
  const std::string title = html_escape(input.title);
  std::string body = str("<h1>", title, "</h1>\n<p class=\"subtitle\">Bough run report</p>\n");
  if (input.metrics.empty())
    body += "<div class=\"panel\"><p class=\"empty\">No step has been recorded yet.</p></div>\n";
  else body += tiles(input) + charts_section(input.metrics);
  if (!input.timeline.empty()) body += "<h2>Timeline</h2>\n" + timeline_figure(input.timeline);
  if (!input.trees.empty()) {
    body += "<h2>Prefix trees</h2>\n";
    for (const TreePicture& tree : input.trees) body += tree_figure(tree);
  }
  body += conversations_section(input.conversations);
  // The conversations section shows the same rollouts in a more readable form, so it replaces the samples.
  if (input.conversations.empty()) body += samples_section(input.samples);
  if (!input.settings.empty())
    body += str("<h2>Settings</h2>\n<div class=\"panel\"><pre class=\"settings\">",
                html_escape(input.settings), "</pre></div>\n");
  return str(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
      "script-src 'unsafe-inline'\">\n<title>",
      title, "</title>\n<style>", kPageStyle, "</style>\n</head>\n<body>\n<main>\n", body,
      "</main>\n<div id=\"tip\" hidden></div>\n<script>", kPageScript, "</script>\n</body>\n</html>\n");
}

std::filesystem::path write_html_report(const std::filesystem::path& folder, std::vector<TreePicture> trees,
                                        std::vector<ReportSample> samples,
                                        std::vector<ConversationGroup> conversations) {
  namespace fs = std::filesystem;
  if (!fs::is_directory(folder))
    throw UserError(
        str("cannot report on ", quoted(folder.string(), 300), ": not a folder; give a run's folder"));
  const fs::path full = fs::canonical(folder);  // "." and a path with a trailing slash have no file name
  ReportInput input;
  input.title = str(full.parent_path().filename().string(), " / ", full.filename().string());
  if (fs::exists(folder / "config.yaml")) input.settings = read_file(folder / "config.yaml");
  input.metrics = read_metrics(folder / "metrics.jsonl");
  input.timeline = read_timeline(folder / "timeline.jsonl");
  input.trees = std::move(trees);
  input.samples = std::move(samples);
  input.conversations = std::move(conversations);
  const fs::path path = folder / "report.html";
  write_file_atomically(path, html_report(input));
  return path;
}

}  // namespace bough
