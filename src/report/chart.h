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
  bool from_zero = false;           // the value axis begins at 0; for amounts, not for losses
};

// Returns a <figure> with title, legend (if there are several series), axes and lines. Returns "" if no
// series has a point. A series of many points is drawn in a pale colour, with its running mean in a strong
// one. The attribute data-chart has the points, which the page's script shows under the mouse pointer. Throws
// InternalError if there are more than four series.
std::string chart_figure(const Chart& chart);

// Returns round numbers (1, 2 or 5 times a power of ten) inside [low, high]. They divide the range into at
// most `most` parts.
std::vector<double> axis_ticks(double low, double high, int most);

// Reduces a curve to at most `most` points. Each new point is the mean of equally many points.
std::vector<std::pair<double, double>> thinned(const std::vector<std::pair<double, double>>& points,
                                               size_t most);

}  // namespace bough
