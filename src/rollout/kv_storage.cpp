#include "rollout/kv_storage.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/large_pages.h"
#include "kernels/paged_attention/paged_attention.h"
#include "rollout/upload.h"

namespace bough {

namespace {
// Maps addresses without memory: the system gives pages, large ones where it can, as they are first written.
at::Tensor map_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const size_t num_bytes = c10::multiply_integers(sizes) * options.dtype().itemsize();
  void* memory =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    throw UserError(str("rollout.kv_memory: the system refuses ", num_bytes,
                        " bytes of addresses for a layer (", std::strerror(errno),
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
  BOUGH_CHECK(!sparse.is_sparse() || device.is_cpu(), "sparse attention on ", device.str());
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  const auto sizes =
      page_sizes({.num_kv_heads = num_kv_heads_, .head_dim = head_dim_, .device = device}, max_pages);
  for (at::Tensor& layer : layers_)
    layer = device.is_cuda() ? at::empty(sizes, options) : map_tensor(sizes, options);
  for (int64_t layer = sparse.dense_layers; sparse.has_summaries() && layer < num_layers(); ++layer)
    summaries_[static_cast<size_t>(layer)] =
        map_tensor(summary_sizes(sparse.summary, max_pages, num_kv_heads_, head_dim_), options);
}

int64_t KvStorage::bytes_per_page(const ModelConfig& config, at::ScalarType dtype,
                                  const SparsePolicy& sparse) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t keys_and_values =
      2 * config.num_layers * config.num_kv_heads * kPageTokens * padded_head_dim(config.head_dim) * element;
  if (!sparse.has_summaries()) return keys_and_values;
  const int64_t of_layer =
      c10::multiply_integers(summary_sizes(sparse.summary, 1, config.num_kv_heads, config.head_dim));
  return keys_and_values + std::max<int64_t>(0, config.num_layers - sparse.dense_layers) * of_layer * element;
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
}

}  // namespace bough
