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
  std::string unit;                 // after values in the hover text: "s", "x", "tokens"
  std::vector<ChartSeries> series;  // at most four, because only four colours are distinct for everybody
  bool from_zero = false;           // the value axis begins at 0; suits amounts, not losses
};

// Returns a <figure> with title, legend (if there are several series), axes and lines. Returns "" if no
// series has a point. A series of many points is drawn pale, with a strong running mean. The attribute
// data-chart has the points: the page's script shows the values under the pointer. Throws InternalError for
// more than four series.
std::string chart_figure(const Chart& chart);

// Returns round numbers (1, 2, 5 times a power of ten) inside [low, high] that divide it into at most `most`
// parts.
std::vector<double> axis_ticks(double low, double high, int most);

// Reduces a curve to at most `most` points. Each new point is the mean of an equally long run of points.
std::vector<std::pair<double, double>> thinned(const std::vector<std::pair<double, double>>& points,
                                               size_t most);

}  // namespace bough
