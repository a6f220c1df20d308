#include "report/timeline.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>

#include "base/error.h"
#include "base/format.h"
#include "base/json.h"
#include "report/html_text.h"

namespace bough {

std::string to_line(const TimelineSpan& span) {
  const auto milliseconds = [](double seconds) { return std::round(seconds * 1e3) / 1e3; };
  return Json::array({span.lane, span.what, milliseconds(span.begin), milliseconds(span.end)}).dump();
}

std::vector<TimelineSpan> read_timeline(const std::filesystem::path& path) {
  std::vector<TimelineSpan> spans;
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_array() || json.size() != 4 || !json[0].is_string() || !json[1].is_string() ||
        !json[2].is_number() || !json[3].is_number())
      continue;
    spans.push_back({json[0], json[1], json[2], json[3]});
  }
  return spans;
}

namespace {

constexpr double kTimelineWidth = 1180, kLabel = 74, kLane = 26, kTimelineTop = 6, kTimelineBottom = 28;
constexpr size_t kMostSpans = 1500;

// The thing that a lane waits for while it is idle; "" if no text is known for the lane.
std::string idle_name(const std::string& lane) {
  if (lane == "engine") return "idle: the staleness limiter waits for new weights";
  if (lane == "trainer") return "idle: waits for samples";
  return "";
}

// A colour for each activity. There are four colours. They are assigned in order of total time, longest
// first.
std::map<std::string, int> colours_of(const std::vector<TimelineSpan>& spans) {
  std::map<std::string, double> seconds;
  for (const TimelineSpan& span : spans) seconds[span.what] += span.end - span.begin;
  std::vector<std::pair<double, std::string>> order;
  for (const auto& [what, total] : seconds) order.emplace_back(-total, what);
  std::sort(order.begin(), order.end());
  std::map<std::string, int> colours;
  for (const auto& [total, what] : order)
    colours.emplace(what, std::min<int>(3, static_cast<int>(colours.size())));
  return colours;
}

// The legend of the colours. The activities with the least time all have the last colour.
std::string legend(const std::map<std::string, int>& colours) {
  std::array<std::string, 4> names;
  for (const auto& [what, colour] : colours) {
    std::string& name = names[static_cast<size_t>(colour)];
    name += (name.empty() ? "" : ", ") + what;
  }
  std::string out = "<span class=\"legend\">";
  for (size_t colour = 0; colour < names.size(); ++colour)
    if (!names[colour].empty())
      out += str("<span><i class=\"key c", colour, "\"></i>", html_escape(names[colour]), "</span>");
  return out + "<span>empty: idle</span></span>";
}

std::string share(double part, double whole) {
  return svg_number(100 * part / std::max(1e-9, whole)) + "%";
}

// The smallest round interval of at least `seconds` for clock times. Below one second, a power of ten.
double round_step(double seconds) {
  if (seconds < 1) return std::pow(10., std::ceil(std::log10(std::max(seconds, 1e-6))));
  for (const double step :
       {1., 2., 5., 10., 15., 30., 60., 120., 300., 600., 900., 1800., 3600., 7200., 21600.})
    if (step >= seconds) return step;
  return 86400 * std::ceil(seconds / 86400);
}

}  // namespace

std::string timeline_figure(const std::vector<TimelineSpan>& spans) {
  if (spans.empty()) return "";
  const std::vector<std::string> lanes = {"engine", "trainer", "rewards", "writer"};
  const std::map<std::string, int> colours = colours_of(spans);
  double end = 0;
  for (const TimelineSpan& span : spans) end = std::max(end, span.end);
  // Shows the last spans. The picture begins at the latest end of an omitted span, and spans that began
  // before are cut there. So empty parts of the picture are idle time.
  std::vector<TimelineSpan> shown = spans;
  std::ranges::stable_sort(shown, {}, &TimelineSpan::end);
  double begin = 0;
  if (shown.size() > kMostSpans) {
    const auto first = shown.end() - static_cast<std::ptrdiff_t>(kMostSpans);
    begin = std::prev(first)->end;
    shown.erase(shown.begin(), first);
  } else {
    begin = std::ranges::min(shown, {}, &TimelineSpan::begin).begin;
  }
  for (TimelineSpan& span : shown) span.begin = std::max(span.begin, begin);
  const double scale = (kTimelineWidth - kLabel) / std::max(1e-9, end - begin);
  const double height = kTimelineTop + kLane * static_cast<double>(lanes.size()) + kTimelineBottom;
  std::string svg = str("<svg viewBox=\"0 0 ", kTimelineWidth, " ", height, "\" role=\"img\">");
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    const double y = kTimelineTop + kLane * static_cast<double>(lane);
    svg += str("<text x=\"0\" y=\"", svg_number(y + 16), "\">", lanes[lane],
               "</text><rect class=\"lane\" x=\"", kLabel, "\" y=\"", svg_number(y + 2), "\" width=\"",
               kTimelineWidth - kLabel, "\" height=\"", kLane - 6, "\"/>");
    for (const TimelineSpan& span : shown) {
      if (span.lane != lanes[lane]) continue;
      svg += str("<rect class=\"dot c", colours.at(span.what), "\" style=\"stroke:none\" x=\"",
                 svg_number(kLabel + (span.begin - begin) * scale), "\" y=\"", svg_number(y + 2),
                 "\" width=\"", svg_number(std::max(0.3, (span.end - span.begin) * scale)), "\" height=\"",
                 kLane - 6, "\"><title>", html_escape(span.what), " ", format_duration(span.end - span.begin),
                 "</title></rect>");
    }
  }
  const double step = round_step((end - begin) / 8);
  for (double at = std::ceil(begin / step) * step; at <= end; at += step)
    svg += str("<text class=\"x\" x=\"",
               svg_number(std::min(kTimelineWidth - 24, kLabel + (at - begin) * scale)), "\" y=\"",
               svg_number(height - 6), "\">", at == 0 ? "0" : format_duration(at), "</text>");
  svg += "</svg>";

  std::string rows;
  for (const std::string& lane : lanes) {
    std::map<std::string, double> seconds;
    double busy = 0;
    for (const TimelineSpan& span : spans) {
      if (span.lane != lane) continue;
      seconds[span.what] += span.end - span.begin;
      busy += span.end - span.begin;
    }
    for (const auto& [what, total] : seconds)
      rows += str("<tr><td>", lane, "</td><td><span class=\"box dot c", colours.at(what), "\"></span>",
                  html_escape(what), "</td><td class=\"number\">", format_duration(total),
                  "</td><td class=\"number\">", share(total, end), "</td></tr>\n");
    if (!idle_name(lane).empty() && end > busy)
      rows += str("<tr><td>", lane, "</td><td>", idle_name(lane), "</td><td class=\"number\">",
                  format_duration(end - busy), "</td><td class=\"number\">", share(end - busy, end),
                  "</td></tr>\n");
  }
  return str("<figure><figcaption>What each thread did <small>the last ", format_duration(end - begin),
             " of ", format_duration(end), "</small>", legend(colours), "</figcaption>", svg,
             "<details><summary>Shares of the whole run</summary>"
             "<table><thead><tr><th>thread</th><th>activity</th>"
             "<th class=\"number\">time</th><th class=\"number\">share</th></tr></thead><tbody>\n",
             rows, "</tbody></table></details></figure>\n");
}

}  // namespace bough
