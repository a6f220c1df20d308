#include "kernels/tree_attention/key_spans.h"

#include <algorithm>

namespace bough {

namespace {
void add_spans(std::vector<int32_t>& spans, std::span<const int32_t> ends, size_t tile_size) {
  for (size_t begin = 0; begin < ends.size(); begin += tile_size) {
    const auto tile = ends.subspan(begin, std::min(tile_size, ends.size() - begin));
    const auto [least, largest] = std::ranges::minmax(tile);
    spans.push_back(tile.size() < tile_size ? 0 : least);
    spans.push_back(largest);
  }
}
}  // namespace

std::vector<int32_t> key_spans(std::span<const int32_t> end_local, int64_t num_stack) {
  const auto stack = static_cast<size_t>(num_stack);
  std::vector<int32_t> spans;
  spans.reserve(static_cast<size_t>(key_spans_size(num_stack, std::ssize(end_local) - num_stack)));
  for (const size_t tile_size : {kPlainTile, kTensorTile}) {
    add_spans(spans, end_local.first(stack), tile_size);
    add_spans(spans, end_local.subspan(stack), tile_size);
  }
  return spans;
}

}  // namespace bough
