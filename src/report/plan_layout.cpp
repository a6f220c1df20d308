#include "report/plan_layout.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "base/error.h"

namespace bough {
namespace {

// In pixels. A column shows one drawn sequence. Narrower columns could not be distinguished, and outlines of
// smaller rectangles would only disturb.
constexpr double kNarrowestColumn = 3, kNarrowestRectangle = 7, kLowestRectangle = 6;
// A plan block counts as visible from this width and height on. Smaller blocks share a colour with neighbours
// until their joint area is kSeenArea.
constexpr double kSeenWidth = 7, kSeenHeight = 4, kSeenArea = 150;
constexpr double kBandWidth = 14, kBandHeight = 8;
constexpr double kTouching = 2.5;

// A node, or a chain of nodes that look the same. It covers the columns [left, right).
struct Cell {
  int64_t tree, left, right, begin, end, block, num_tokens;
};

// Two cells look the same if these members are equal.
struct Look {
  int64_t band;
  bool interior;
  PlanPictureBlock::RecomputePolicy keep;
  bool operator==(const Look&) const = default;
};

class Layout {
 public:
  Layout(const PlanPicture& plan, double width, double height)
      : plan_(plan), width_(width), height_(height) {}

  PlanLayout run() {
    check_and_measure();
    choose_columns();
    place_nodes();
    make_bands();
    join_chains();
    make_shapes();
    choose_colours();
    return std::move(result_);
  }

 private:
  const PlanPictureBlock& block(int64_t index) const { return plan_.blocks[static_cast<size_t>(index)]; }

  void check_and_measure() {
    for (const auto& tree : plan_.trees) {
      int64_t count = 0;
      for (size_t i = 0; i < tree.nodes.size(); ++i) {
        const auto& node = tree.nodes[i];
        BOUGH_CHECK(node.parent >= -1 && node.parent < static_cast<int64_t>(i) && node.begin < node.end &&
                        node.num_sequences > 0 && node.first_sequence >= 0 && node.block >= 0 &&
                        node.block < static_cast<int64_t>(plan_.blocks.size()),
                    "node ", i, ": positions [", node.begin, ", ", node.end,
                    "), sequences=", node.num_sequences, ", parent=", node.parent, ", block=", node.block,
                    " of ", plan_.blocks.size());
        const int64_t end = node.first_sequence + node.num_sequences;
        if (node.parent < 0) {
          BOUGH_CHECK(node.begin == 0, "root ", i, " begins at ", node.begin);
        } else {
          const auto& parent = tree.nodes[static_cast<size_t>(node.parent)];
          BOUGH_CHECK(node.begin == parent.end && node.first_sequence >= parent.first_sequence &&
                          end <= parent.first_sequence + parent.num_sequences,
                      "node ", i, " is not below its parent ", node.parent);
        }
        count = std::max(count, end);
        result_.depth = std::max(result_.depth, node.end);
      }
      first_of_tree_.push_back(result_.num_sequences);
      result_.num_sequences += count;
    }
    first_of_tree_.push_back(result_.num_sequences);
  }

  // If each sequence has room for a column, draws every sequence; otherwise evenly spaced ones. Trees are
  // separated by a small gap if the gaps take little of the width.
  void choose_columns() {
    result_.trees.resize(plan_.trees.size());
    if (result_.num_sequences == 0) return;
    const auto num_gaps = static_cast<double>(plan_.trees.size() - 1);
    double gap = num_gaps > 0 ? std::min(12.0, 0.12 * width_ / num_gaps) : 0;
    if (gap < 2) gap = 0;
    const auto room = static_cast<int64_t>((width_ - gap * num_gaps) / kNarrowestColumn);
    const int64_t count = std::min(result_.num_sequences, room);
    result_.num_sequences_drawn = count;
    std::vector<size_t> tree_of;
    for (int64_t c = 0; c < count; ++c) {
      sampled_.push_back((2 * c + 1) * result_.num_sequences / (2 * count));
      tree_of.push_back(std::upper_bound(first_of_tree_.begin(), first_of_tree_.end(), sampled_.back()) -
                        first_of_tree_.begin() - 1);
    }
    double num_drawn_gaps = 0;
    for (size_t c = 1; c < tree_of.size(); ++c) num_drawn_gaps += tree_of[c] != tree_of[c - 1];
    column_ = (width_ - gap * num_drawn_gaps) / static_cast<double>(count);
    gap_ = gap;
    double x = 0;
    for (size_t c = 0; c < tree_of.size(); ++c) {
      PlanBox& box = result_.trees[tree_of[c]];
      if (box.width() == 0) {
        if (c > 0) x += gap;
        box = {x, x, 0, height_};
      }
      left_.push_back(x);
      box.right = x += column_;
    }
  }

  double y(int64_t position) const {
    return height_ * static_cast<double>(position) / static_cast<double>(result_.depth);
  }
  double right_of(int64_t column) const { return left_[static_cast<size_t>(column)] + column_; }
  PlanBox box(const Cell& cell) const {
    return {left_[static_cast<size_t>(cell.left)], right_of(cell.right - 1), y(cell.begin), y(cell.end)};
  }

  int64_t column_of(int64_t sequence) const {  // the first column whose sequence is not left of it
    return std::lower_bound(sampled_.begin(), sampled_.end(), sequence) - sampled_.begin();
  }

  void place_nodes() {
    for (size_t t = 0; t < plan_.trees.size(); ++t)
      for (const auto& node : plan_.trees[t].nodes) {
        const int64_t first = first_of_tree_[t] + node.first_sequence;
        const int64_t left = column_of(first), right = column_of(first + node.num_sequences);
        if (left < right)
          cells_.push_back({static_cast<int64_t>(t), left, right, node.begin, node.end, node.block,
                            node.end - node.begin});
      }
  }

  // For each plan block: the bounding box of its largest part. A part is a set of pieces that touch side by
  // side.
  std::vector<PlanBox> block_boxes() const {
    std::vector<std::vector<PlanBox>> pieces(plan_.blocks.size());
    for (const auto& cell : cells_) pieces[static_cast<size_t>(cell.block)].push_back(box(cell));
    std::vector<PlanBox> boxes(plan_.blocks.size());
    for (size_t b = 0; b < pieces.size(); ++b) {
      auto& own = pieces[b];
      std::sort(own.begin(), own.end(), [](const auto& x, const auto& y) { return x.left < y.left; });
      PlanBox part;
      for (size_t i = 0; i < own.size(); ++i) {
        if (i == 0 || own[i].left > part.right + 0.01) {
          part = own[i];
        } else {
          part.right = std::max(part.right, own[i].right);
          part.top = std::min(part.top, own[i].top);
          part.bottom = std::max(part.bottom, own[i].bottom);
        }
        if (part.width() * part.height() >= boxes[b].width() * boxes[b].height()) boxes[b] = part;
      }
    }
    return boxes;
  }

  bool near(const PlanBox& a, const PlanBox& b) const {
    const double reach = std::max(kTouching, gap_ + 1);
    return a.left <= b.right + reach && b.left <= a.right + reach && a.top <= b.bottom + kTouching &&
           b.top <= a.bottom + kTouching;
  }

  // Each visible block gets a band of its own. A small block joins the band of the small blocks that run
  // directly before and after it, as long as these are near in the picture. Blocks that are not drawn join
  // the band that is being filled, so that block numbers have no gaps.
  void make_bands() {
    const auto boxes = block_boxes();
    band_of_.assign(plan_.blocks.size(), -1);
    int64_t open = -1, never_run = -1, number = 0;
    PlanBox around;
    for (size_t b = 0; b < plan_.blocks.size(); ++b) {
      const auto& one = plan_.blocks[b];
      if (one.forward_pass == 0) {
        if (never_run < 0) never_run = new_band(0, 0);
        add_to_band(never_run, b, 0);
        ++result_.num_never_run;
        continue;
      }
      ++number;
      const PlanBox& own = boxes[b];
      const bool sampled = own.width() > 0;
      const bool seen =
          own.width() >= kSeenWidth && own.height() >= kSeenHeight && own.width() * own.height() >= kSeenArea;
      if (seen) {
        add_to_band(new_band(number, one.forward_pass), b, number);
        continue;
      }
      if (open >= 0 && sampled && around.width() > 0 && !near(around, own)) open = -1;
      if (open < 0) {
        open = new_band(number, one.forward_pass);
        around = {};
      }
      add_to_band(open, b, number);
      if (!sampled) continue;
      if (around.width() == 0) around = own;
      around = {std::min(around.left, own.left), std::max(around.right, own.right),
                std::min(around.top, own.top), std::max(around.bottom, own.bottom)};
      if (around.width() >= kBandWidth && around.height() >= kBandHeight &&
          around.width() * around.height() >= kSeenArea)
        open = -1;
    }
    for (const auto& band : result_.bands)
      if (band.first_number > 0 && band.num_blocks > 1) result_.num_merged += band.num_blocks;
  }

  int64_t new_band(int64_t number, int64_t pass) {
    result_.bands.push_back({.first_number = number, .last_number = number, .first_pass = pass});
    return static_cast<int64_t>(result_.bands.size()) - 1;
  }
  void add_to_band(int64_t index, size_t b, int64_t number) {
    PlanBand& band = result_.bands[static_cast<size_t>(index)];
    band.last_number = number;
    ++band.num_blocks;
    band.num_tokens += plan_.blocks[b].num_tokens;
    band.first_pass = std::min(band.first_pass, plan_.blocks[b].forward_pass);
    band.last_pass = std::max(band.last_pass, plan_.blocks[b].backward_pass);
    band_of_[b] = index;
  }

  Look look(const Cell& cell) const {
    const auto& one = block(cell.block);
    const bool interior = one.interior && one.forward_pass > 0;
    return {band_of_[static_cast<size_t>(cell.block)], interior,
            interior ? one.keep : PlanPictureBlock::RecomputePolicy::kNothing};
  }

  // Joins consecutive cells of the same columns that look the same. These are small blocks of one band, or
  // nodes between which only sequences that are not drawn branch off.
  void join_chains() {
    std::map<std::array<int64_t, 3>, size_t> ending;  // left, right, end -> joined cell
    std::vector<Cell> joined;
    for (const auto& cell : cells_) {
      const auto above = ending.find({cell.left, cell.right, cell.begin});
      size_t index = joined.size();
      if (above != ending.end() && look(joined[above->second]) == look(cell)) {
        index = above->second;
        ending.erase(above);
        Cell& whole = joined[index];
        whole.end = cell.end;
        whole.num_tokens = -1;
      } else {
        joined.push_back(cell);
      }
      ending[{cell.left, cell.right, cell.end}] = index;
    }
    cells_ = std::move(joined);
  }

  void make_shapes() {
    std::vector<std::vector<size_t>> small(sampled_.size());  // cells by column
    for (size_t i = 0; i < cells_.size(); ++i) {
      const Cell& cell = cells_[i];
      const PlanBox own = box(cell);
      if (own.width() >= kNarrowestRectangle && own.height() >= kLowestRectangle) {
        const int64_t shape = new_shape(i);
        result_.shapes[static_cast<size_t>(shape)].strips.push_back(own);
        continue;
      }
      for (int64_t c = cell.left; c < cell.right; ++c) small[static_cast<size_t>(c)].push_back(i);
    }
    join_columns(small);
  }

  // Goes column by column. Touching cells that look the same become one strip. A strip that overlaps a strip
  // of the previous column continues the shape of that strip.
  void join_columns(std::vector<std::vector<size_t>>& small) {
    std::vector<int64_t> open;  // shapes that reach the last column
    for (size_t c = 0; c < small.size(); ++c) {
      auto& own = small[c];
      std::sort(own.begin(), own.end(),
                [&](size_t a, size_t b) { return cells_[a].begin < cells_[b].begin; });
      std::vector<int64_t> reached;
      for (size_t i = 0; i < own.size();) {
        size_t last = i + 1;
        const Look like = look(cells_[own[i]]);
        while (last < own.size() && look(cells_[own[last]]) == like &&
               cells_[own[last]].begin == cells_[own[last - 1]].end)
          ++last;
        const PlanBox strip{left_[c], left_[c] + column_, y(cells_[own[i]].begin),
                            y(cells_[own[last - 1]].end)};
        const auto goes_on = std::find_if(open.begin(), open.end(), [&](int64_t s) {
          const PlanShape& shape = result_.shapes[static_cast<size_t>(s)];
          const PlanBox& before = shape.strips.back();
          return shape_look(shape) == like && before.right > strip.left - 0.01 && before.top < strip.bottom &&
                 strip.top < before.bottom;
        });
        int64_t index;
        if (goes_on == open.end()) {
          index = new_shape(own[i]);
        } else {
          index = *goes_on;
          open.erase(goes_on);
          extend(index, own[i]);
        }
        for (size_t k = i + 1; k < last; ++k) extend(index, own[k]);
        result_.shapes[static_cast<size_t>(index)].strips.push_back(strip);
        reached.push_back(index);
        i = last;
      }
      open = std::move(reached);
    }
  }

  static Look shape_look(const PlanShape& shape) { return {shape.band, shape.interior, shape.keep}; }

  int64_t new_shape(size_t index) {
    const Cell& cell = cells_[index];
    const Look like = look(cell);
    result_.shapes.push_back({.band = like.band,
                              .interior = like.interior,
                              .keep = like.keep,
                              .num_tokens = cell.num_tokens,
                              .begin = cell.begin,
                              .end = cell.end,
                              .first_sequence = first_sequence(cell),
                              .last_sequence = last_sequence(cell),
                              .first_tree = cell.tree,
                              .last_tree = cell.tree});
    last_cell_.push_back(index);
    return static_cast<int64_t>(result_.shapes.size()) - 1;
  }

  void extend(int64_t index, size_t cell_index) {
    if (last_cell_[static_cast<size_t>(index)] == cell_index) return;  // the same cell, in its next column
    last_cell_[static_cast<size_t>(index)] = cell_index;
    const Cell& cell = cells_[cell_index];
    PlanShape& shape = result_.shapes[static_cast<size_t>(index)];
    shape.num_tokens = -1;
    shape.begin = std::min(shape.begin, cell.begin);
    shape.end = std::max(shape.end, cell.end);
    shape.last_sequence = std::max(shape.last_sequence, last_sequence(cell));
    shape.last_tree = cell.tree;
  }

  // The first sequence that a cell represents. The cell's sequences reach up to half way to the neighbouring
  // drawn ones.
  int64_t first_sequence(const Cell& cell) const {
    return std::max(cell.left * result_.num_sequences / result_.num_sequences_drawn,
                    first_of_tree_[static_cast<size_t>(cell.tree)]);
  }
  int64_t last_sequence(const Cell& cell) const {
    return std::min(cell.right * result_.num_sequences / result_.num_sequences_drawn,
                    first_of_tree_[static_cast<size_t>(cell.tree) + 1]) -
           1;
  }

  // Each band takes the colour that the fewest neighbouring bands of the same kind (interior or leaf) have.
  // On a tie it takes the first colour after that of the previous band, so that bands that run one after the
  // other differ too.
  void choose_colours() {
    for (const bool interior : {false, true}) {
      const auto neighbours = find_neighbours(interior);
      const int count = interior ? kNumInteriorColours : kNumLeafColours;
      std::vector<int> colour(result_.bands.size(), -1);
      int last = -1;
      for (size_t band = 0; band < result_.bands.size(); ++band) {
        if (result_.bands[band].first_number == 0 || !has_[interior][band]) continue;
        std::vector<int> taken(static_cast<size_t>(count), 0);
        for (const int64_t other : neighbours[band])
          if (colour[static_cast<size_t>(other)] >= 0)
            ++taken[static_cast<size_t>(colour[static_cast<size_t>(other)])];
        int best = (last + 1) % count;
        for (int k = 1; k < count; ++k)
          if (const int next = (last + 1 + k) % count;
              taken[static_cast<size_t>(next)] < taken[static_cast<size_t>(best)])
            best = next;
        colour[band] = last = best;
        (interior ? result_.bands[band].interior_colour : result_.bands[band].leaf_colour) = best;
      }
    }
  }

  std::vector<std::vector<int64_t>> find_neighbours(bool interior) {
    struct Strip {
      PlanBox box;
      int64_t band;
    };
    std::vector<Strip> strips;
    has_[interior].assign(result_.bands.size(), false);
    for (const auto& shape : result_.shapes) {
      if (shape.interior != interior) continue;
      has_[interior][static_cast<size_t>(shape.band)] = true;
      for (const auto& strip : shape.strips) strips.push_back({strip, shape.band});
    }
    std::sort(strips.begin(), strips.end(),
              [](const auto& a, const auto& b) { return a.box.left < b.box.left; });
    std::vector<std::vector<int64_t>> neighbours(result_.bands.size());
    const double reach = std::max(kTouching, gap_ + 1);
    for (size_t i = 0; i < strips.size(); ++i)
      for (size_t k = i + 1; k < strips.size() && strips[k].box.left <= strips[i].box.right + reach; ++k) {
        if (strips[i].band == strips[k].band || !near(strips[i].box, strips[k].box)) continue;
        for (const auto& [one, other] : {std::pair(i, k), std::pair(k, i)}) {
          auto& list = neighbours[static_cast<size_t>(strips[one].band)];
          if (std::find(list.begin(), list.end(), strips[other].band) == list.end())
            list.push_back(strips[other].band);
        }
      }
    return neighbours;
  }

  const PlanPicture& plan_;
  double width_, height_;
  PlanLayout result_;
  std::vector<int64_t> first_of_tree_;  // [trees + 1]: number of sequences left of the tree
  std::vector<int64_t> sampled_;        // [columns]: the sequence that each column draws
  std::vector<double> left_;            // [columns]
  double column_ = 0, gap_ = 0;
  std::vector<Cell> cells_;
  std::vector<int64_t> band_of_;          // by block
  std::vector<size_t> last_cell_;         // by shape: the last cell that extended it
  std::array<std::vector<bool>, 2> has_;  // [interior][band]: whether anything is drawn
};

}  // namespace

PlanLayout lay_out(const PlanPicture& plan, double width, double height) {
  return Layout(plan, width, height).run();
}

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

}  // namespace bough
