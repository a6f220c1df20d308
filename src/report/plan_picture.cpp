#include "report/plan_picture.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <set>
#include <string_view>

#include "base/error.h"
#include "base/format.h"
#include "report/html_text.h"
#include "report/plan_layout.h"

namespace bough {
namespace {

using RecomputePolicy = PlanPictureBlock::RecomputePolicy;

constexpr double kPlanWidth = 1280, kMargin = 24, kPlanLeft = 78, kPlotHeight = 560;  // pixels
constexpr double kBetween = 1;  // the white line between two outlines

// Any two of these colours can be distinguished: they were chosen to maximize the least distance of a pair
// (Oklab) for normal, protan, deutan and tritan vision. Dark text is readable on the leaf colours, white text
// on the interior colours.
constexpr std::array<const char*, kNumLeafColours> kLeafColours = {"#8fdff3", "#bcb554", "#99adff",
                                                                   "#c6feda", "#ee90b1", "#fbd477"};
constexpr std::array<const char*, kNumInteriorColours> kInteriorColours = {"#244eb5", "#a11d06", "#530004",
                                                                           "#6f3f67", "#2c0268"};

struct KeepText {
  const char *name, *legend, *tooltip;
  const char* marks;  // drawn over the interior colour
};
// One pattern per recompute policy. The more activations a block keeps, the more solid it looks.
constexpr std::array<KeepText, 4> kKeepTexts = {{
    {"n", "interior, keeps keys and values only: backward recomputes everything else",
     "keeps keys and values only",
     "<path d=\"M-2 2L2 -2M0 8L8 0M6 10L10 6\" stroke=\"#fff\" stroke-opacity=\".38\"/>"},
    {"a", "interior, keeps attention outputs: recomputes the rest", "keeps attention outputs",
     "<circle cx=\"2\" cy=\"2\" r=\"1\" fill=\"#fff\" fill-opacity=\".5\"/>"
     "<circle cx=\"6\" cy=\"6\" r=\"1\" fill=\"#fff\" fill-opacity=\".5\"/>"},
    {"i", "interior, keeps layer inputs: recomputes layer by layer", "keeps layer inputs",
     "<path d=\"M0 4H8\" stroke=\"#fff\" stroke-opacity=\".45\"/>"},
    {"k", "interior, keeps activations: recomputes nothing", "keeps activations", ""},
}};
const KeepText& text_of(RecomputePolicy keep) {
  return kKeepTexts[static_cast<size_t>(keep)];
}

std::string short_number(double value) {
  std::array<char, 32> buffer;
  std::snprintf(buffer.data(), buffer.size(), "%.1f", value);
  std::string text = buffer.data();
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text;
}

std::string tokens_text(int64_t count) {
  return format_thousands(count) + (count == 1 ? " token" : " tokens");
}
std::string counted(int64_t count, const char* one, const char* several) {
  return str(format_thousands(count), " ", count == 1 ? one : several);
}
std::string range_text(int64_t first, int64_t last, const char* to) {
  return first == last ? format_thousands(first) : str(format_thousands(first), to, format_thousands(last));
}

// Breaks the text at spaces into lines of at most `columns` characters.
std::vector<std::string> wrapped(const std::string& text, int columns) {
  std::vector<std::string> lines(1);
  for (size_t at = 0; at <= text.size();) {
    const size_t space = std::min(text.find(' ', at), text.size());
    const std::string word = text.substr(at, space - at);
    std::string& line = lines.back();
    if (!line.empty() && display_width(line) + 1 + display_width(word) > columns) lines.push_back(word);
    else line += (line.empty() ? "" : " ") + word;
    at = space + 1;
  }
  for (auto& line : lines) line = fit(line, columns);
  return lines;
}

std::string text_element(double x, double y, const char* kind, std::string_view text) {
  return str("<text x=\"", short_number(x), "\" y=\"", short_number(y), "\" class=\"", kind, "\">",
             html_escape(text), "</text>");
}

// ---- Outlines ----

// The outline around strips that touch: along their upper edges to the right, then along their lower edges
// back.
std::string outline(const std::vector<PlanBox>& strips) {
  // Leaves a white line between neighbouring outlines, if there is room.
  const double whole = strips.back().right - strips.front().left;
  const double right_gap = whole > 4 * kBetween ? kBetween : whole / 6;
  const auto bottom = [](const PlanBox& strip) {
    return short_number(strip.height() > 3 * kBetween ? strip.bottom - kBetween
                                                      : std::max(strip.bottom, strip.top + 0.4));
  };
  std::string path = str("M", short_number(strips.front().left), " ", short_number(strips.front().top)),
              at = short_number(strips.front().top);
  std::string back;
  for (size_t i = 0; i < strips.size();) {
    size_t last = i;
    while (last + 1 < strips.size() && short_number(strips[last + 1].top) == short_number(strips[i].top))
      ++last;
    if (const auto top = short_number(strips[i].top); top != at) path += "V" + (at = top);
    path += "H" + short_number(strips[last].right - (last + 1 == strips.size() ? right_gap : 0));
    i = last + 1;
  }
  at = "";
  for (size_t i = strips.size(); i-- > 0;) {
    if (const auto low = bottom(strips[i]); low != at) path += "V" + (at = low);
    if (i == 0 || bottom(strips[i - 1]) != at) path += "H" + short_number(strips[i].left);
  }
  return path + "Z";
}

// The largest box that fits inside the outline.
PlanBox inside(const std::vector<PlanBox>& strips) {
  PlanBox best;
  for (size_t i = 0; i < strips.size(); ++i) {
    PlanBox box = strips[i];
    for (size_t k = i; k < strips.size(); ++k) {
      box = {box.left, strips[k].right, std::max(box.top, strips[k].top),
             std::min(box.bottom, strips[k].bottom)};
      if (box.height() <= 0) break;
      if (box.width() * box.height() > best.width() * best.height()) best = box;
    }
  }
  return best;
}

// ---- Text in and behind outlines ----

struct Label {
  std::string number, tokens, short_tokens;
};

Label label_of(const PlanShape& shape, const PlanBand& band) {
  if (band.first_number == 0) return {"", tokens_text(band.num_tokens), ""};
  Label label{.number = range_text(band.first_number, band.last_number, "–")};
  if (shape.num_tokens < 0 || band.num_blocks > 1) {
    label.short_tokens = format_thousands(band.num_tokens);
    label.tokens = label.short_tokens + " in all";
  } else if (shape.num_tokens == band.num_tokens) {
    label.short_tokens = format_thousands(band.num_tokens);
    label.tokens = tokens_text(band.num_tokens);
  } else {
    label.tokens = str(format_thousands(shape.num_tokens), " of ", format_thousands(band.num_tokens));
    label.short_tokens = format_thousands(shape.num_tokens);
  }
  return label;
}

// The block's number and its token count in one or two lines, upright, or turned by 90 degrees if the box is
// tall. Leaves out what does not fit.
std::string label_text(const Label& label, const PlanBox& box, bool interior) {
  constexpr double kPerBold = 7.6, kPerLight = 6.3, kLine = 14, kPad = 7;  // of the upright text
  constexpr double kSmall = 0.82;  // scale of turned text in a narrow box
  if (label.number.empty()) return "";
  const double x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2;
  const double bold = kPerBold * display_width(label.number);
  const auto light = [&](const std::string& text) { return kPerLight * display_width(text); };
  const auto element = [&](double dy, const std::string& attributes, const std::string& content) {
    return str("<text x=\"", short_number(x), "\" y=\"", short_number(y + dy), "\" class=\"",
               interior ? "w" : "d", "\"", attributes, ">", content, "</text>");
  };
  const auto bold_part = "<tspan class=\"b\">" + label.number + "</tspan>";
  const std::array<std::string, 2> tokens = {label.tokens, label.short_tokens};
  for (const auto& text : tokens) {
    if (box.height() >= 2 * kLine + 4 && box.width() >= std::max(bold, light(text)) + kPad)
      return element(-2.5, "", bold_part) + element(11.5, "", text);
    if (box.height() >= kLine && box.width() >= bold + light(text) + 8 + kPad)
      return element(4, "", str(bold_part, "  ", text));
  }
  if (box.width() < box.height()) {
    const bool slim = box.width() < kLine - 1;
    const double scale = slim ? kSmall : 1;
    const auto turned = str(" transform=\"translate(", short_number(x), " ", short_number(y), ") rotate(-90)",
                            slim ? str(" scale(", kSmall, ")") : "", "\"");
    const auto turned_element = [&](const std::string& content) {
      return str("<text y=\"4\" class=\"", interior ? "w" : "d", "\"", turned, ">", content, "</text>");
    };
    if (box.width() >= kSmall * (kLine - 2)) {
      for (const auto& text : tokens)
        if (box.height() >= scale * (bold + light(text) + 8 + kPad))
          return turned_element(str(bold_part, "  ", text));
      if (box.height() >= scale * bold + 4 && box.width() < bold + 4) return turned_element(bold_part);
    }
  }
  if (box.height() >= kLine - 2 && box.width() >= bold + 4) return element(4, "", bold_part);
  return "";
}

std::string tooltip(const PlanShape& shape, const PlanBand& band, const PlanPicture& plan) {
  std::string text;
  if (band.first_number == 0) {
    text = "never run: no trained token here or below";
  } else if (band.num_blocks > 1) {
    text = str("blocks ", range_text(band.first_number, band.last_number, " to "), ": ",
               tokens_text(band.num_tokens), "; passes ", range_text(band.first_pass, band.last_pass, " to "),
               "\n",
               shape.interior ? str("interior blocks here, each ", text_of(shape.keep).tooltip)
                              : "leaf blocks here");
  } else if (shape.interior) {
    text = str("block ", format_thousands(band.first_number), ", interior, ", tokens_text(band.num_tokens),
               "\nforward in pass ", format_thousands(band.first_pass), ", backward in pass ",
               format_thousands(band.last_pass), "; ", text_of(shape.keep).tooltip);
  } else {
    text = str("block ", format_thousands(band.first_number), ", leaf, ", tokens_text(band.num_tokens),
               "\nforward and backward in pass ", format_thousands(band.first_pass));
  }
  text += str("\nhere: ", shape.num_tokens >= 0 ? tokens_text(shape.num_tokens) + ", " : "", "positions ",
              range_text(shape.begin, shape.end - 1, " to "), " of ",
              counted(shape.last_sequence - shape.first_sequence + 1, "sequence", "sequences"));
  if (plan.trees.size() > 1)
    text += str(shape.first_tree == shape.last_tree ? ", tree " : ", trees ",
                range_text(shape.first_tree + 1, shape.last_tree + 1, " to "));
  return html_escape(text);
}

// ---- Colours ----

std::string class_of(const PlanShape& shape, const PlanBand& band) {
  if (band.first_number == 0) return "z";
  if (!shape.interior) return str("l", band.leaf_colour);
  return str(text_of(shape.keep).name, band.interior_colour);
}

std::string interior_pattern(RecomputePolicy keep, int colour) {
  const std::string back = kInteriorColours[static_cast<size_t>(colour)];
  const std::string name = str(text_of(keep).name, colour);
  return str("<pattern id=\"p", name, "\" width=\"8\" height=\"8\" patternUnits=\"userSpaceOnUse\">",
             "<rect width=\"8\" height=\"8\" fill=\"", back, "\"/>", text_of(keep).marks, "</pattern>");
}

struct Paint {
  std::string style, patterns;
};

Paint paint() {
  Paint result;
  for (size_t i = 0; i < kLeafColours.size(); ++i)
    result.style += str(".l", i, "{fill:", kLeafColours[i], "}");
  for (int i = 0; i < kNumInteriorColours; ++i) {
    result.style += str(".k", i, "{fill:", kInteriorColours[static_cast<size_t>(i)], "}");
    for (const RecomputePolicy keep :
         {RecomputePolicy::kNothing, RecomputePolicy::kAttention, RecomputePolicy::kLayerInputs}) {
      result.style += str(".", text_of(keep).name, i, "{fill:url(#p", text_of(keep).name, i, ")}");
      result.patterns += interior_pattern(keep, i);
    }
  }
  return result;
}

constexpr const char* kStyle =
    "text{font:11px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#55544f}"
    ".h{font-size:17px;font-weight:600;fill:#1d1d1b}.y{text-anchor:end}.m{text-anchor:middle}"
    ".g{font-size:12px;fill:#33322f}.axis{stroke:#d5d4ce}.z{fill:#e4e3de}"
    ".d,.w{text-anchor:middle;pointer-events:none;fill:#1d1d1b}.b{font-size:12px;font-weight:700}"
    ".w{fill:#fff;stroke:#1d1d1b;stroke-opacity:.6;stroke-width:2.2px;stroke-linejoin:round;paint-order:"
    "stroke}"
    ".s path:hover{opacity:.8}";

// ---- Around the trees ----

std::string plan_depth_axis(int64_t depth, double top) {
  std::string out = text_element(kPlanLeft - 10, top - 8, "y", "depth");
  for (const double tick : axis_ticks(0, static_cast<double>(depth), 8)) {
    if (tick != std::floor(tick)) continue;  // positions are integers; a tick at 2.5 is not
    const double y = top + kPlotHeight * tick / static_cast<double>(depth);
    out += str("<path class=\"axis\" d=\"M", short_number(kPlanLeft - 6), " ", short_number(y), "H",
               short_number(kPlanWidth - kMargin), "\"/>",
               text_element(kPlanLeft - 10, y + 4, "y", format_thousands(static_cast<int64_t>(tick))));
  }
  return out;
}

// Tree names, above the trees that are wide enough.
std::string tree_names(const PlanLayout& layout, double top) {
  if (layout.trees.size() < 2) return "";
  std::string out;
  for (size_t t = 0; t < layout.trees.size(); ++t) {
    const PlanBox& box = layout.trees[t];
    const auto name = str("tree ", format_thousands(static_cast<int64_t>(t) + 1));
    if (box.width() >= 6.3 * static_cast<double>(name.size()) + 4)
      out += text_element(kPlanLeft + (box.left + box.right) / 2, top - 8, "m", name);
  }
  return out;
}

// Draws the legend and moves y to its last row.
std::string legend(const PlanLayout& layout, double& y) {
  bool leaf = false;
  std::set<RecomputePolicy> keeps;
  for (const auto& shape : layout.shapes) {
    if (shape.interior) keeps.insert(shape.keep);
    else leaf |= layout.bands[static_cast<size_t>(shape.band)].first_number > 0;
  }
  struct Entry {
    std::vector<std::string> classes;
    std::string_view text;
  };
  std::vector<Entry> entries;
  if (leaf) entries.push_back({{"l0", "l1", "l2"}, "leaf: forward and backward in one pass"});
  for (const RecomputePolicy keep : keeps)
    entries.push_back({{str(text_of(keep).name, 0), str(text_of(keep).name, 1)}, text_of(keep).legend});
  if (layout.num_never_run > 0) entries.push_back({{"z"}, "never run: no trained token here or below"});
  std::string out;
  double x = kMargin;
  for (const auto& entry : entries) {
    const double width =
        15 * static_cast<double>(entry.classes.size()) + 5 + 6.6 * static_cast<double>(entry.text.size());
    if (x > kMargin && x + width > kPlanWidth - kMargin) x = kMargin, y += 20;
    for (const auto& name : entry.classes) {
      out += str("<rect class=\"", name, "\" x=\"", short_number(x), "\" y=\"", short_number(y - 11),
                 "\" width=\"14\" height=\"14\"/>");
      x += 15;
    }
    out += text_element(x + 5, y, "g", entry.text);
    x += width - 15 * static_cast<double>(entry.classes.size()) + 18;
  }
  return out;
}

std::string caption(const PlanPicture& plan, const PlanLayout& layout) {
  const auto num_run = static_cast<int64_t>(plan.blocks.size()) - layout.num_never_run;
  std::string text = str(counted(layout.num_sequences, "sequence", "sequences"), " in ",
                         counted(static_cast<int64_t>(plan.trees.size()), "tree", "trees"), ", ",
                         counted(num_run, "block", "blocks"));
  if (layout.num_never_run > 0)
    text += str(" and ", format_thousands(layout.num_never_run), " that never run");
  text += ".";
  if (layout.num_sequences_drawn < layout.num_sequences)
    text += str(
        " Thinned: ", format_thousands(layout.num_sequences_drawn),
        " evenly spread sequences are drawn, one in ",
        format_significant(
            static_cast<double>(layout.num_sequences) / static_cast<double>(layout.num_sequences_drawn), 3),
        ".");
  if (layout.num_merged > 0) {
    int64_t num_bands = 0;
    for (const auto& band : layout.bands) num_bands += band.first_number > 0 && band.num_blocks > 1;
    text += str(" Merged: ", format_thousands(layout.num_merged), " blocks that are too small to show share ",
                counted(num_bands, "band", "bands"),
                " of one colour with the blocks that run next to them, labelled first–last.");
  }
  return text;
}

}  // namespace

std::string plan_svg(const PlanPicture& plan) {
  const PlanLayout layout = lay_out(plan, kPlanWidth - kPlanLeft - kMargin, kPlotHeight);
  const Paint colours = paint();
  double y = kMargin;
  std::string head;
  for (const auto& line : wrapped(plan.headline, 128))
    head += text_element(kMargin, y += 8, "h", line), y += 14;
  y += 12;
  head += legend(layout, y);
  y += 22;
  head += text_element(
      kMargin, y, "g",
      "Width: sequences. Height: depth in tokens, roots at the top. Colour: a block, one pass of the model. "
      "Bold: its number in forward order. Then: its tokens here, of all its tokens.");
  const double top = y + 40;
  if (layout.depth > 0) head += plan_depth_axis(layout.depth, top) + tree_names(layout, top);

  std::string shapes, labels;
  for (const auto& shape : layout.shapes) {
    const PlanBand& band = layout.bands[static_cast<size_t>(shape.band)];
    shapes += str("<path class=\"", class_of(shape, band), "\" d=\"", outline(shape.strips), "\"><title>",
                  tooltip(shape, band, plan), "</title></path>\n");
    labels += label_text(label_of(shape, band), inside(shape.strips), shape.interior);
  }
  const auto last_lines = wrapped(caption(plan, layout), 190);
  const double bottom = top + kPlotHeight + 12;
  std::string tail;
  for (size_t i = 0; i < last_lines.size(); ++i)
    tail += text_element(kMargin, bottom + 14 + 17 * static_cast<double>(i), "g", last_lines[i]);
  const double height = bottom + 17 * static_cast<double>(last_lines.size()) + kMargin;
  return str("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"",
             short_number(kPlanWidth), "\" height=\"", short_number(height), "\" viewBox=\"0 0 ",
             short_number(kPlanWidth), " ", short_number(height), "\" role=\"img\" aria-label=\"",
             html_escape(plan.headline), "\">\n<style>", kStyle, colours.style, "</style>\n<defs>",
             colours.patterns, "</defs>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n", head,
             "\n<g transform=\"translate(", short_number(kPlanLeft), " ", short_number(top),
             ")\"><g class=\"s\">\n", shapes, "</g>\n", labels, "</g>\n", tail, "</svg>\n");
}

}  // namespace bough
