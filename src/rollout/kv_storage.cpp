#include "rollout/kv_storage.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "kernels/paged_attention/pages.h"
#include "rollout/upload.h"
#include "base/large_pages.h"

namespace bough {

namespace {
// Addresses without memory: the system gives pages, large ones where it can, as they are first written.
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

KvStorage::KvStorage(const ModelConfig& config, at::ScalarType dtype, at::Device device, int64_t max_pages)
    : num_kv_heads_(config.num_kv_heads),
      head_dim_(config.head_dim),
      num_pages_(max_pages),
      dtype_(dtype),
      device_(device),
      layers_(static_cast<size_t>(config.num_layers)) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  for (at::Tensor& layer : layers_)
    layer =
        device.is_cuda()
            ? at::empty({2, max_pages, num_kv_heads_, kPageTokens, head_dim_}, options)
            : map_tensor({max_pages, num_kv_heads_, 2, kPageTokens * padded_head_dim(head_dim_)}, options);
}

int64_t KvStorage::bytes_per_page(const ModelConfig& config, at::ScalarType dtype) {
  return 2 * config.num_layers * config.num_kv_heads * kPageTokens * padded_head_dim(config.head_dim) *
         static_cast<int64_t>(c10::elementSize(dtype));
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

at::Tensor KvStorage::keys(int64_t layer) const {
  const int64_t pair = pair_size();
  if (device_.is_cuda()) return pages(layer).select(0, 0).transpose(2, 3).unsqueeze(-1);
  return pages(layer).select(2, 0).view(
      {num_pages_, num_kv_heads_, padded_head_dim(head_dim_) / pair, kPageTokens, pair});
}
at::Tensor KvStorage::values(int64_t layer) const {
  const int64_t pair = pair_size();
  if (device_.is_cuda()) return pages(layer).select(0, 1).unsqueeze(-1);
  return pages(layer).select(2, 1).view(
      {num_pages_, num_kv_heads_, kPageTokens / pair, padded_head_dim(head_dim_), pair});
}

}  // namespace bough
