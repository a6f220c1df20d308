#include "models/pipeline_stage.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <set>

#include "base/error.h"
#include "base/json.h"
#include "models/tensor_parallel.h"

namespace bough {

std::vector<int64_t> cut_layers(const ModelConfig& whole, int64_t num_stages) {
  const int64_t num_layers = whole.num_layers;
  if (num_stages > num_layers)
    throw UserError(str("pipeline parallelism: got ", num_stages, " stages for a model with ", num_layers,
                        " layers; expected at most one stage per layer"));
  const auto width = static_cast<double>(whole.hidden_size), query = static_cast<double>(whole.query_width()),
             key = static_cast<double>(whole.key_width()),
             inner = static_cast<double>(whole.intermediate_size);
  const double layer = 2 * (width * (query + 2 * key) + query * width + 3 * width * inner) +
                       4 * query * static_cast<double>(kCutContext);
  const double head = whole.computes_logits ? 2 * width * static_cast<double>(whole.vocab_size) : 0;
  const double embedding = 2 * width;
  // Returns the forward FLOPs per token of a stage with the layers [begin, end).
  const auto work = [&](int64_t begin, int64_t end) {
    return static_cast<double>(end - begin) * layer + (begin == 0 ? embedding : 0) +
           (end == num_layers ? head : 0);
  };
  // Dynamic programming over stages and layers. The first round minimizes the largest work() of a stage. The
  // second round keeps this maximum and minimizes the sum of the squares of work().
  const double infinity = std::numeric_limits<double>::infinity();
  double most = infinity;
  std::vector<int64_t> cut;
  for (const bool by_squares : {false, true}) {
    std::vector<std::vector<double>> best(static_cast<size_t>(num_stages + 1),
                                          std::vector<double>(static_cast<size_t>(num_layers + 1), infinity));
    auto from = std::vector(best.size(), std::vector<int64_t>(best[0].size(), 0));
    best[0][0] = 0;
    for (size_t stage = 1; stage < best.size(); ++stage)
      for (size_t end = stage; end < best[0].size(); ++end)
        for (size_t begin = stage - 1; begin < end; ++begin) {
          const double own = work(static_cast<int64_t>(begin), static_cast<int64_t>(end));
          if (own > most) continue;
          const double all =
              by_squares ? best[stage - 1][begin] + own * own : std::max(best[stage - 1][begin], own);
          if (all >= best[stage][end]) continue;
          best[stage][end] = all;
          from[stage][end] = static_cast<int64_t>(begin);
        }
    if (!by_squares) most = best.back().back();
    cut = {num_layers};
    for (size_t stage = best.size() - 1; stage > 0; --stage)
      cut.push_back(from[stage][static_cast<size_t>(cut.back())]);
  }
  std::ranges::reverse(cut);
  return cut;
}

Stage stage_of(const ModelConfig& whole, int64_t index, int64_t size) {
  BOUGH_CHECK(index >= 0 && index < size, "stage ", index, " of ", size);
  if (size > 1 && whole.is_mixture())
    throw UserError(str("pipeline parallelism: got ", size, " stages for a mixture of experts (",
                        whole.family->name, "); expected 1 (p1)"));
  const std::vector<int64_t> cut = cut_layers(whole, size);
  const auto at = static_cast<size_t>(index);
  return {.index = index, .size = size, .first_layer = cut[at], .num_layers = cut[at + 1] - cut[at]};
}

ModelConfig stage_config(const ModelConfig& whole, const Stage& stage) {
  ModelConfig own = whole;
  own.num_layers = stage.num_layers;
  if (!whole.layer_ropes.empty()) {
    const auto begin = whole.layer_ropes.begin() + stage.first_layer;
    own.layer_ropes.assign(begin, begin + stage.num_layers);
  }
  return own;
}

Collective message_of(Collective::Kind kind, const at::Tensor& buffer, int64_t other) {
  return {.kind = kind,
          .send = buffer.data_ptr(),
          .receive = buffer.data_ptr(),
          .count = buffer.numel() * static_cast<int64_t>(buffer.element_size()),
          .root = other,
          .on_device = buffer.is_cuda()};
}

void gather_to_first_stage(
    const NamedTensors& own, Communicator& stages,
    const std::function<void(const std::string& name, const at::Tensor& tensor)>& use) {
  Json names = Json::array();
  for (const auto& [name, tensor] : own)
    names.push_back(
        {{"name", name}, {"sizes", tensor.sizes().vec()}, {"type", static_cast<int>(tensor.scalar_type())}});
  const std::vector<std::string> all = stages.all_gather(names.dump());
  if (stages.rank() > 0) {
    for (const auto& [name, tensor] : own)
      stages.run(message_of(Collective::Kind::kSend, tensor.to(at::kCPU).contiguous(), 0));
    return;
  }
  std::set<std::string> seen;
  for (const auto& [name, tensor] : own)
    if (seen.insert(name).second) use(name, tensor);
  for (int64_t stage = 1; stage < stages.size(); ++stage)
    for (const Json& each : Json::parse(all[static_cast<size_t>(stage)])) {
      const at::Tensor tensor = at::empty(each.at("sizes").get<std::vector<int64_t>>(),
                                          static_cast<at::ScalarType>(each.at("type").get<int>()));
      stages.run(message_of(Collective::Kind::kReceive, tensor, stage));
      const std::string name = each.at("name").get<std::string>();
      if (seen.insert(name).second) use(name, tensor);
    }
}

void sum_over_ends_(const at::Tensor& values, Communicator& stages) {
  if (values.numel() == 0) return;
  const at::Tensor buffer = values.to(buffer_device(values, stages)).contiguous();
  if (stages.rank() > 0) {
    stages.run(message_of(Collective::Kind::kSend, buffer, 0));
    stages.run(message_of(Collective::Kind::kReceive, buffer, 0));
  } else {
    const at::Tensor other = at::empty_like(buffer);
    stages.run(message_of(Collective::Kind::kReceive, other, stages.size() - 1));
    buffer.add_(other);
    stages.run(message_of(Collective::Kind::kSend, buffer, stages.size() - 1));
  }
  if (!buffer.is_same(values)) values.copy_(buffer);
}

}  // namespace bough
