#include "report/tree_picture.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "base/error.h"
#include "base/format.h"
#include "report/chart.h"
#include "report/html_text.h"

namespace bough {
namespace {

constexpr double kTreeWidth = 1100, kTreeHeight = 380, kTreeLeft = 58, kTreeTop = 6;  // SVG user units
constexpr double kGap = 1.5;  // between siblings that are wide enough
constexpr double kNarrowest = 0.02;
constexpr size_t kMostNodes = 20'000;  // about 2 MB of HTML

struct Placed {
  size_t node;
  double first;  // number of sequences to its left
};

// Checks that the nodes are a forest, and places every node: the children of a node stand side by side,
// beginning at the node's left edge.
std::vector<Placed> place(const TreePicture& tree, int64_t& num_sequences, int64_t& depth) {
  std::vector<Placed> placed;
  // number of sequences of each node's children placed so far
  std::vector<int64_t> next(tree.nodes.size(), 0);
  num_sequences = 0;
  depth = 1;
  for (size_t i = 0; i < tree.nodes.size(); ++i) {
    const TreePictureNode& node = tree.nodes[i];
    BOUGH_CHECK(node.parent >= -1 && node.parent < static_cast<int64_t>(i), "node ", i, " parent ",
                node.parent);
    BOUGH_CHECK(node.begin <= node.end && node.num_sequences > 0, "node ", i, " [", node.begin, ", ",
                node.end, ") x ", node.num_sequences);
    depth = std::max(depth, node.end);
    if (node.parent < 0) {
      BOUGH_CHECK(node.begin == 0, "root ", i, " begins at ", node.begin);
      placed.push_back({i, static_cast<double>(num_sequences)});
      num_sequences += node.num_sequences;
      continue;
    }
    const auto p = static_cast<size_t>(node.parent);
    BOUGH_CHECK(node.begin == tree.nodes[p].end, "node ", i, " begins at ", node.begin,
                ", its parent ends at ", tree.nodes[p].end);
    placed.push_back({i, placed[p].first + static_cast<double>(next[p])});
    next[p] += node.num_sequences;
    BOUGH_CHECK(next[p] <= tree.nodes[p].num_sequences, "children of node ", p, " hold ", next[p],
                " sequences of ", tree.nodes[p].num_sequences);
  }
  return placed;
}

std::string rectangle(const char* kind, double x, double y, double width, double height) {
  return str("<rect class=\"", kind, "\" x=\"", svg_number(x, 2), "\" y=\"", svg_number(y, 2), "\" width=\"",
             svg_number(width, 2), "\" height=\"", svg_number(height, 2), "\"/>");
}

// Draws a rectangle for the whole node, and on top of it one for each range of trained positions.
std::string node_group(const TreePictureNode& node, double first, double per_sequence, double per_token) {
  const double whole = static_cast<double>(node.num_sequences) * per_sequence;
  const double gap = whole > 4 * kGap ? kGap : whole / 5;
  const double x = first * per_sequence, width = whole - gap;
  const bool shared = node.num_sequences > 1;
  const auto y = [&](int64_t position) { return static_cast<double>(position) * per_token; };
  int64_t num_trained = 0;
  std::string marks;
  for (const auto& [begin, end] : node.trained) {
    BOUGH_CHECK(begin >= node.begin && begin <= end && end <= node.end, "trained range [", begin, ", ", end,
                ") outside of node [", node.begin, ", ", node.end, ")");
    num_trained += end - begin;
    marks += rectangle(shared ? "shared trained" : "single trained", x, y(begin), width, y(end) - y(begin));
  }
  return str("<g data-n=\"", node.begin, ",", node.end, ",", node.num_sequences, ",", num_trained, ",",
             svg_number(x, 5), ",", svg_number(whole, 5), "\">",
             rectangle(shared ? "shared" : "single", x, y(node.begin), width, y(node.end) - y(node.begin)),
             marks, "</g>");
}

std::string tree_depth_axis(int64_t depth, double per_token) {
  std::string out = "<g class=\"axes\">";
  for (const double tick : axis_ticks(0, static_cast<double>(depth), 6)) {
    if (tick != static_cast<double>(static_cast<int64_t>(tick))) continue;
    const double y = kTreeTop + tick * per_token;
    out += str("<path class=\"grid\" d=\"M", svg_number(kTreeLeft - 5, 2), " ", svg_number(y, 2), "H",
               svg_number(kTreeWidth, 2), "\"/><text class=\"y\" x=\"", svg_number(kTreeLeft - 9, 2),
               "\" y=\"", svg_number(y + 4, 2), "\">",
               tick >= 10'000 ? format_count(tick) : format_significant(tick, 5), "</text>");
  }
  return out + "</g>";
}

std::string legend() {
  return "<span class=\"legend\"><span><i class=\"box shared trained\"></i>shared, trained</span>"
         "<span><i class=\"box shared\"></i>shared, not trained</span>"
         "<span><i class=\"box single trained\"></i>one sequence, trained</span>"
         "<span><i class=\"box single\"></i>one sequence, not trained</span></span>";
}
}  // namespace

std::string tree_figure(const TreePicture& tree) {
  if (tree.nodes.empty()) return "";
  int64_t num_sequences = 0, depth = 0, unique_tokens = 0;
  std::vector<Placed> placed = place(tree, num_sequences, depth);
  for (const TreePictureNode& node : tree.nodes) unique_tokens += node.end - node.begin;

  const double per_sequence = (kTreeWidth - kTreeLeft) / static_cast<double>(num_sequences);
  const double per_token = (kTreeHeight - 2 * kTreeTop) / static_cast<double>(depth);
  const auto sequences = [&](const Placed& p) { return tree.nodes[p.node].num_sequences; };
  std::stable_sort(placed.begin(), placed.end(),
                   [&](const Placed& a, const Placed& b) { return sequences(a) > sequences(b); });
  size_t num_sampled = std::min(placed.size(), kMostNodes);
  while (num_sampled > 0 &&
         static_cast<double>(sequences(placed[num_sampled - 1])) * per_sequence < kNarrowest)
    --num_sampled;
  placed.resize(num_sampled);

  std::string nodes;
  for (const Placed& p : placed) nodes += node_group(tree.nodes[p.node], p.first, per_sequence, per_token);
  std::string summary = str(format_thousands(num_sequences), " sequences, ", format_thousands(unique_tokens),
                            " tokens in the tree");
  if (tree.num_tokens > 0 && unique_tokens > 0)
    summary +=
        str(" for ", format_thousands(tree.num_tokens), " in the batch: ",
            format_significant(static_cast<double>(tree.num_tokens) / static_cast<double>(unique_tokens), 3),
            "x compression");
  if (num_sampled < tree.nodes.size())
    summary += str("; ", format_thousands(static_cast<int64_t>(tree.nodes.size() - num_sampled)),
                   " nodes too narrow to draw");
  return str("<figure class=\"tree\"><figcaption>", html_escape(tree.title), " <small>", summary, "</small>",
             legend(),
             "<button type=\"button\" class=\"whole\" hidden>show the whole tree</button></figcaption><svg "
             "viewBox=\"0 0 ",
             kTreeWidth, " ", kTreeHeight, "\" role=\"img\" aria-label=\"Prefix tree of ",
             html_escape(tree.title), ": width is sequences, height is depth in tokens\">",
             tree_depth_axis(depth, per_token), "<svg x=\"", kTreeLeft, "\" y=\"", kTreeTop, "\" width=\"",
             kTreeWidth - kTreeLeft, "\" height=\"", kTreeHeight - 2 * kTreeTop,
             "\" preserveAspectRatio=\"none\" viewBox=\"0 0 ", kTreeWidth - kTreeLeft, " ",
             kTreeHeight - 2 * kTreeTop, "\" class=\"nodes\">", nodes,
             "</svg></svg><p class=\"hint\">Height: depth in tokens. Width: sequences. Point at a "
             "node to read it, click to zoom into its subtree.</p></figure>\n");
}

}  // namespace bough
