// Line charts as inline SVG.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace bough {

struct ChartSeries {
  std::string name;
  std::vector<std::pair<double, double>> points;  // (step, value), steps ascending, values finite
};

struct Chart {
  std::string title;
  std::string unit;                 // behind values in the hover text: "s", "x", "tokens"
  std::vector<ChartSeries> series;  // at most four: the colours that stay apart for everybody
  bool from_zero = false;           // the value axis begins at 0: for amounts, not for losses
};

// A <figure> with title, legend (two series or more), axes and lines; "" when no series has a point. A series
// of many points is drawn pale, its running mean strong. The points travel along in data-chart for the page's
// script, which shows values under the pointer; without script the chart is complete but for that.
std::string chart_figure(const Chart& chart);

// Round numbers (1, 2, 5 times a power of ten) that divide [low, high] into at most `most` parts; they lie
// inside.
std::vector<double> axis_ticks(double low, double high, int most);

// The curve in at most `most` points: means of equal runs of points where there are more.
std::vector<std::pair<double, double>> thinned(const std::vector<std::pair<double, double>>& points,
                                               size_t most);

}  // namespace bough
