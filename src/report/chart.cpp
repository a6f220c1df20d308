#include "report/chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

#include "base/error.h"
#include "base/format.h"
#include "base/json.h"
#include "report/html_text.h"

namespace bough {
namespace {

// In SVG user units; the page scales the drawing to its width. The margins hold the labels.
constexpr double kChartWidth = 560, kChartHeight = 250, kChartLeft = 58, kChartRight = 14, kChartTop = 12,
                 kChartBottom = 36;
constexpr size_t kMostPoints = 600;   // more than one point per SVG unit is not visible
constexpr size_t kSmoothedFrom = 30;  // with fewer points the running mean is not drawn

struct Scale {
  double low, high, from, to;
  double operator()(double value) const { return from + (value - low) / (high - low) * (to - from); }
};

using Points = std::vector<std::pair<double, double>>;

std::string path_of(const Points& points, const Scale& x, const Scale& y) {
  std::string out;
  for (const auto& [step, value] : points)
    out += str(out.empty() ? "M" : "L", svg_number(x(step)), " ", svg_number(y(value)));
  return out;
}

// Running mean over a window of a twelfth of the points. At the ends of the run the window is cut.
Points running_mean(const Points& points) {
  const auto size = static_cast<ptrdiff_t>(points.size()), reach = std::max<ptrdiff_t>(2, size / 24);
  Points out;
  for (ptrdiff_t i = 0; i < size; ++i) {
    const ptrdiff_t begin = std::max<ptrdiff_t>(0, i - reach), end = std::min(size, i + reach + 1);
    double sum = 0;
    for (ptrdiff_t k = begin; k < end; ++k) sum += points[static_cast<size_t>(k)].second;
    out.emplace_back(points[static_cast<size_t>(i)].first, sum / static_cast<double>(end - begin));
  }
  return out;
}

// The range of the vertical axis: the range of the plotted values with a small margin, never empty.
Scale value_scale(const Chart& chart) {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (const ChartSeries& series : chart.series)
    for (const auto& [step, value] : series.points) low = std::min(low, value), high = std::max(high, value);
  if (chart.from_zero) low = std::min(low, 0.0), high = std::max(high, 0.0);
  if (high - low < 1e-12 * std::max(1.0, std::abs(high))) {
    const double half = high == 0 ? 0.5 : std::abs(high) / 2;
    if (!chart.from_zero || low != 0) low -= half;
    high += half;
  }
  const double margin = (high - low) * 0.06;
  if (!chart.from_zero || low != 0) low -= margin;
  return {low, high + margin, kChartHeight - kChartBottom, kChartTop};
}

Scale step_scale(const Chart& chart) {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (const ChartSeries& series : chart.series)
    for (const auto& [step, value] : series.points) low = std::min(low, step), high = std::max(high, step);
  if (low == high) low -= 1, high += 1;
  return {low, high, kChartLeft, kChartWidth - kChartRight};
}

std::string tick_label(double value, double step) {
  if (std::abs(value) < step * 1e-9) return "0";
  if (std::abs(value) >= 10'000) return format_count(value);
  return format_significant(value, 4);
}

std::string axes(const Scale& x, const Scale& y) {
  std::string out = "<g class=\"axes\">";
  const auto values = axis_ticks(y.low, y.high, 5);
  for (const double value : values)
    out +=
        str("<path class=\"grid\" d=\"M", svg_number(kChartLeft), " ", svg_number(y(value)), "H",
            svg_number(kChartWidth - kChartRight), "\"/><text class=\"y\" x=\"", svg_number(kChartLeft - 8),
            "\" y=\"", svg_number(y(value) + 4), "\">", tick_label(value, y.high - y.low), "</text>");
  for (const double step : axis_ticks(x.low, x.high, 6))
    if (step == std::floor(step))  // step numbers are integers; a tick at 2.5 is not
      out += str("<text class=\"x\" x=\"", svg_number(x(step)), "\" y=\"",
                 svg_number(kChartHeight - kChartBottom + 17), "\">", tick_label(step, x.high - x.low),
                 "</text>");
  out += str("<path class=\"base\" d=\"M", svg_number(kChartLeft), " ",
             svg_number(kChartHeight - kChartBottom), "H", svg_number(kChartWidth - kChartRight),
             "\"/><text class=\"x\" x=\"", svg_number((kChartLeft + kChartWidth - kChartRight) / 2),
             "\" y=\"", svg_number(kChartHeight - 4), "\">step</text></g>");
  return out;
}

// The data that the page's script needs to show the values of the point nearest to the mouse pointer.
std::string hover_data(const Chart& chart, const std::vector<Points>& sampled, const Scale& x,
                       const Scale& y) {
  Json data = {{"unit", chart.unit}, {"series", Json::array()}};
  for (size_t i = 0; i < sampled.size(); ++i) {
    Json points = Json::array();
    for (const auto& [step, value] : sampled[i])
      points.push_back({std::round(x(step) * 10) / 10, std::round(y(value) * 10) / 10, std::round(step),
                        format_significant(value, 4)});
    data["series"].push_back({{"name", chart.series[i].name}, {"points", points}});
  }
  return html_escape(dump_line(data));
}
}  // namespace

std::vector<double> axis_ticks(double low, double high, int most) {
  BOUGH_CHECK(low < high && most >= 1, "low=", low, " high=", high, " most=", most);
  double unit = std::pow(10, std::floor(std::log10((high - low) / most)));
  for (const double factor : {1.0, 2.0, 5.0, 10.0}) {
    if ((high - low) / (unit * factor) > most) continue;
    unit *= factor;
    break;
  }
  std::vector<double> ticks;
  // Multiples of an integer count, because repeated addition would accumulate rounding errors.
  for (double k = std::ceil(low / unit - 1e-9); k * unit <= high + unit * 1e-9; ++k)
    ticks.push_back(k == 0 ? 0.0 : k * unit);  // never -0
  return ticks;
}

Points thinned(const Points& points, size_t most) {
  if (points.size() <= most) return points;
  Points out;
  for (size_t i = 0; i < most; ++i) {
    const size_t begin = i * points.size() / most, end = (i + 1) * points.size() / most;
    double step = 0, value = 0;
    for (size_t k = begin; k < end; ++k) step += points[k].first, value += points[k].second;
    out.emplace_back(step / static_cast<double>(end - begin), value / static_cast<double>(end - begin));
  }
  return out;
}

std::string chart_figure(const Chart& chart) {
  BOUGH_CHECK(chart.series.size() <= 4, "series=", chart.series.size());
  const bool has_points = std::any_of(chart.series.begin(), chart.series.end(),
                                      [](const ChartSeries& series) { return !series.points.empty(); });
  if (!has_points) return "";
  const Scale x = step_scale(chart), y = value_scale(chart);
  std::vector<Points> sampled;
  for (const ChartSeries& series : chart.series) sampled.push_back(thinned(series.points, kMostPoints));

  std::string legend, lines, means;
  for (size_t i = 0; i < sampled.size(); ++i) {
    const bool smoothed = sampled[i].size() >= kSmoothedFrom;
    if (sampled.size() > 1)
      legend += str("<span><i class=\"key c", i, "\"></i>", html_escape(chart.series[i].name), "</span>");
    else if (smoothed)
      legend =
          "<span><i class=\"key c0 pale\"></i>each step</span><span><i class=\"key c0\"></i>running "
          "mean</span>";
    lines +=
        str("<path class=\"line c", i, smoothed ? " pale" : "", "\" d=\"", path_of(sampled[i], x, y), "\"/>");
    if (smoothed)
      means += str("<path class=\"line c", i, "\" d=\"", path_of(running_mean(sampled[i]), x, y), "\"/>");
    if (sampled[i].size() == 1)
      lines += str("<circle class=\"dot c", i, "\" cx=\"", svg_number(x(sampled[i][0].first)), "\" cy=\"",
                   svg_number(y(sampled[i][0].second)), "\" r=\"4\"/>");
  }
  const std::string title = html_escape(chart.title);
  return str("<figure class=\"chart\" data-chart=\"", hover_data(chart, sampled, x, y), "\"><figcaption>",
             title, chart.unit.empty() ? "" : str(" <small>", html_escape(chart.unit), "</small>"),
             "<span class=\"legend\">", legend, "</span></figcaption><svg viewBox=\"0 0 ", kChartWidth, " ",
             kChartHeight, "\" role=\"img\" aria-label=\"", title, " over steps\">", axes(x, y), lines, means,
             "<g class=\"hover\"></g></svg></figure>\n");
}

}  // namespace bough
