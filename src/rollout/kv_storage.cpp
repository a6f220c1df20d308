#include "rollout/kv_storage.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/large_pages.h"
#include "kernels/common/host_to_device.h"
#include "kernels/paged_attention/paged_attention.h"

namespace bough {

namespace {
// Reserves address space only. The system supplies pages on first write, large pages if it can.
at::Tensor map_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const size_t num_bytes = c10::multiply_integers(sizes) * options.dtype().itemsize();
  void* memory =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    throw UserError(str("rollout.kv_memory: the system refused ", num_bytes,
                        " bytes of address space for a layer (", std::strerror(errno),
                        "); lower it, or raise the limit (ulimit -v)"));
  ask_for_large_pages(memory, num_bytes);
  return at::from_blob(
      memory, sizes, [num_bytes](void* mapped) { munmap(mapped, num_bytes); }, options);
}
}  // namespace

KvStorage::KvStorage(const ModelConfig& config, at::ScalarType dtype, at::Device device, int64_t max_pages,
                     const SparsePolicy& sparse)
    : num_kv_heads_(config.num_kv_heads),
      head_dim_(config.head_dim),
      dtype_(dtype),
      device_(device),
      sparse_(sparse),
      layers_(static_cast<size_t>(config.num_layers)),
      summaries_(layers_.size()) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  const auto allocate = [&](at::IntArrayRef of) {
    return device.is_cuda() ? at::empty(of, options) : map_tensor(of, options);
  };
  const auto sizes =
      page_sizes({.num_kv_heads = num_kv_heads_, .head_dim = head_dim_, .device = device}, max_pages);
  for (at::Tensor& layer : layers_) layer = allocate(sizes);
  for (int64_t layer = sparse.dense_layers; sparse.has_summaries() && layer < num_layers(); ++layer)
    summaries_[static_cast<size_t>(layer)] =
        allocate(summary_sizes(sparse, max_pages, num_kv_heads_, head_dim_));
  if (const int64_t bytes = choice_bytes_per_token(config, sparse); bytes > 0)
    choices_ = map_tensor({max_pages, kPageTokens, std::max<int64_t>(0, num_layers() - sparse.dense_layers),
                           num_kv_heads_, sparse.chosen_of(sparse.largest_budget())},
                          at::TensorOptions().dtype(at::kShort));
}

int64_t KvStorage::choice_bytes_per_token(const ModelConfig& config, const SparsePolicy& sparse) {
  if (!sparse.keeps_choices) return 0;
  return std::max<int64_t>(0, config.num_layers - sparse.dense_layers) * config.num_kv_heads *
         sparse.chosen_of(sparse.largest_budget()) * static_cast<int64_t>(sizeof(uint16_t));
}

void KvStorage::keep_choices(int64_t layer, const BlockChooser& chooser, const BlockChooser::Lists& chosen) {
  if (!choices_.defined()) return;
  auto* const all = static_cast<uint16_t*>(choices_.mutable_data_ptr());
  for (size_t i = 0; i < chooser.queries().size(); ++i) {
    const ChoosingQuery& query = chooser.queries()[i];
    const int64_t page = query.pages[static_cast<size_t>(query.position / kPageTokens)];
    for (int64_t g = 0; g < num_kv_heads_; ++g) {
      const auto& list = chosen[i * static_cast<size_t>(num_kv_heads_) + static_cast<size_t>(g)];
      std::copy(list.begin() + sparse_.first_blocks, list.end() - sparse_.last_blocks,
                all + page * choices_.stride(0) + query.position % kPageTokens * choices_.stride(1) +
                    (layer - sparse_.dense_layers) * choices_.stride(2) + g * choices_.stride(3));
    }
  }
}

PageChoices KvStorage::kept_choices(std::span<const int32_t> pages, int64_t num_tokens,
                                    const std::function<bool(int64_t)>& is_sampled) const {
  PageChoices kept;
  if (!choices_.defined()) return kept;
  const auto* const all = static_cast<const uint16_t*>(choices_.const_data_ptr());
  for (int64_t i = 0; i < num_tokens; ++i) {
    const int64_t budget = sparse_.budget_of(i + 1);
    if (!is_sampled(i) || sparse_.blocks_for(i + 1) <= budget) continue;
    kept.positions.push_back(static_cast<int32_t>(i));
    kept.begin.push_back(kept.pages.size());
    const uint16_t* list = all + pages[static_cast<size_t>(i / kPageTokens)] * choices_.stride(0) +
                           i % kPageTokens * choices_.stride(1);
    for (int64_t each = choices_.size(2) * choices_.size(3); each > 0; --each, list += choices_.stride(3))
      kept.pages.insert(kept.pages.end(), list, list + sparse_.chosen_of(budget));
  }
  return kept;
}

int64_t KvStorage::bytes_per_page(const ModelConfig& config, at::ScalarType dtype, const SparsePolicy& sparse,
                                  at::Device device) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  const PagedShape shape{.num_kv_heads = config.num_kv_heads, .head_dim = config.head_dim, .device = device};
  const int64_t keys_and_values =
      config.num_layers * c10::multiply_integers(page_sizes(shape, /*num_pages=*/1)) * element;
  if (!sparse.has_summaries()) return keys_and_values;
  const int64_t choices = kPageTokens * choice_bytes_per_token(config, sparse);
  const int64_t of_layer =
      c10::multiply_integers(summary_sizes(sparse, 1, config.num_kv_heads, config.head_dim));
  return keys_and_values + choices +
         std::max<int64_t>(0, config.num_layers - sparse.dense_layers) * of_layer * element;
}

void KvStorage::copy_pages(std::span<const std::pair<int32_t, int32_t>> pairs) {
  if (pairs.empty()) return;
  std::vector<int64_t> from, to;
  for (const auto& [source, target] : pairs) {
    from.push_back(source);
    to.push_back(target);
  }
  const at::Tensor from_S = upload(from, device_), to_S = upload(to, device_);
  for (at::Tensor& layer : layers_)
    layer.index_copy_(page_dim(), to_S, layer.index_select(page_dim(), from_S));
  if (sparse_.parts_per_page() > 1)  // a page that is not full has complete blocks
    for (at::Tensor& summaries : summaries_) {
      if (!summaries.defined()) continue;
      const at::Tensor by_page = summaries.unflatten(0, {-1, sparse_.parts_per_page()});
      by_page.index_copy_(0, to_S, by_page.index_select(0, from_S));
    }
  if (choices_.defined()) choices_.index_copy_(0, to_S.cpu(), choices_.index_select(0, from_S.cpu()));
}

}  // namespace bough
