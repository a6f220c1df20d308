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
    v("name", name, "all-linear, or the last part of a module's name, for example q_proj");
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
    v("rank", rank,
      "rank of the adapters; 0: the rank in path, or without path no adapters: every weight is trained",
      range(0, 65'536));
    v("alpha", alpha, "scale of the adapters: B A x is multiplied by alpha / rank", above(0.0));
    v("targets", targets,
      "modules with an adapter: all-linear (every matrix of the layers, except experts), lm_head, or other "
      "names");
    v("dropout", dropout, "must be 0: dropout makes the trainer's log-probabilities differ from the engine's",
      range(0.0, 1.0));
    v("path", path,
      "adapter to start from, in PEFT's format, with its rank, alpha and targets; empty: a new adapter");
  }
  void check() const;  // throws UserError if dropout is not 0, or targets is empty and rank above 0
};

}  // namespace bough
