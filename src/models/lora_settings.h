// Settings of low-rank adapters (lora.h): `lora` in the settings of a run, of sft and of the sparse policy.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/settings.h"

namespace bough {

// One module name. In settings, a single name may stand for a list of one.
struct LoraTarget {
  std::string name;

  template <class V>
  void visit(V& v) {
    v("name", name, "all-linear, or the last part of modules' names, as q_proj");
  }
  static LoraTarget from_text(const std::string& text) { return {text}; }
  std::optional<std::string> to_text() const { return name; }
};

struct LoraSettings {
  int64_t rank = 0;
  double alpha = 16;
  std::vector<LoraTarget> targets = {{"all-linear"}};
  double dropout = 0;
  std::string path;

  bool enabled() const { return rank > 0 || !path.empty(); }

  template <class V>
  void visit(V& v) {
    v("rank", rank, "of the adapters; 0: of those in path, or none and every weight is trained",
      range(0, 65'536));
    v("alpha", alpha, "what B A x is multiplied by, times rank", above(0.0));
    v("targets", targets, "modules with an adapter: all-linear (every matrix of the layers), or names");
    v("dropout", dropout, "must be 0: log-probabilities would be those of no policy", range(0.0, 1.0));
    v("path", path,
      "an adapter to start from, in PEFT's format, which says rank, alpha and targets itself; empty: B = 0");
  }
  void check() const;  // throws UserError if dropout is not 0, or targets is empty and rank above 0
};

}  // namespace bough
