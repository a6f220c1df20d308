#include "kernels/tree_attention/tree_attention.h"

#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "kernels/common/op.h"
#include "kernels/parameter.h"
#include "kernels/tree_attention/key_spans.h"

// key_spans takes end_local on the CPU. On CUDA, the other ops take its result as `spans`.
TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def("key_spans(Tensor end_local, int num_stack) -> Tensor");
  m.def(
      "tree_attention_forward(Tensor q, Tensor k, Tensor v, Tensor k_stack, Tensor v_stack, Tensor "
      "end_local, Tensor? spans, float scale) -> (Tensor, Tensor)");
  m.def(
      "tree_attention_backward(Tensor d_o, Tensor q, Tensor k, Tensor v, Tensor k_stack, Tensor v_stack, "
      "Tensor end_local, Tensor? spans, Tensor o, Tensor lse, float scale, Tensor(a!) d_k_stack, Tensor(b!) "
      "d_v_stack) -> (Tensor, Tensor, Tensor)");
}

namespace bough {

namespace {
using T = const at::Tensor&;

void check(const TreeAttentionInput& in) {
  BOUGH_CHECK(in.q_TNH.dim() == 3 && in.k_TGH.dim() == 3 && in.k_TGH.sizes() == in.v_TGH.sizes() &&
                  in.k_stack_PGH.sizes() == in.v_stack_PGH.sizes() && in.q_TNH.size(0) == in.k_TGH.size(0) &&
                  in.q_TNH.size(2) == in.k_TGH.size(2) && in.q_TNH.size(1) % in.k_TGH.size(1) == 0 &&
                  in.k_stack_PGH.size(1) == in.k_TGH.size(1) && in.k_stack_PGH.size(2) == in.k_TGH.size(2),
              "tree_attention: q ", in.q_TNH.sizes(), ", k ", in.k_TGH.sizes(), ", v ", in.v_TGH.sizes(),
              ", k_stack ", in.k_stack_PGH.sizes(), ", v_stack ", in.v_stack_PGH.sizes());
  BOUGH_CHECK(in.end_local.dim() == 1 && in.end_local.scalar_type() == at::kInt &&
                  in.end_local.size(0) == in.k_stack_PGH.size(0) + in.q_TNH.size(0),
              "tree_attention: end_local ", in.end_local.sizes(), " ", in.end_local.scalar_type());
  for (T tensor : {in.q_TNH, in.k_TGH, in.v_TGH, in.k_stack_PGH, in.v_stack_PGH})
    BOUGH_CHECK(tensor.is_contiguous() && tensor.scalar_type() == in.q_TNH.scalar_type() &&
                    tensor.device() == in.q_TNH.device(),
                "tree_attention: a tensor is not contiguous, or its dtype or device differs from q's");
}

std::optional<at::Tensor> spans_of(const TreeAttentionInput& in) {
  return in.spans.defined() ? std::optional(in.spans) : std::nullopt;
}

void add_spans(std::vector<int32_t>& spans, std::span<const int32_t> ends, size_t tile_size) {
  for (size_t begin = 0; begin < ends.size(); begin += tile_size) {
    const auto tile = ends.subspan(begin, std::min(tile_size, ends.size() - begin));
    const auto [least, largest] = std::ranges::minmax(tile);
    spans.push_back(tile.size() < tile_size ? 0 : least);
    spans.push_back(largest);
  }
}

at::Tensor key_spans_op(T end_local, int64_t num_stack) {
  BOUGH_CHECK(end_local.dim() == 1 && end_local.scalar_type() == at::kInt && end_local.is_contiguous() &&
                  num_stack >= 0 && num_stack <= end_local.size(0),
              "key_spans: end_local ", end_local.sizes(), " ", end_local.scalar_type(), ", stack of ",
              num_stack);
  return upload(key_spans({data<int32_t>(end_local), static_cast<size_t>(end_local.numel())}, num_stack),
                at::kCPU);
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

void add_key_ends(HostToDeviceBatch& upload, std::span<const int32_t> end_local, int64_t num_stack,
                  KeyEnds* to) {
  upload.add(end_local, &to->end_local);
  if (!upload.device().is_cpu()) upload.add(key_spans(end_local, num_stack), &to->spans);
}

KeyEnds upload_key_ends(std::span<const int32_t> end_local, int64_t num_stack, at::Device device) {
  KeyEnds ends;
  HostToDeviceBatch upload(device);
  add_key_ends(upload, end_local, num_stack, &ends);
  upload.send();
  return ends;
}

TreeAttentionOutput tree_attention_forward(const TreeAttentionInput& in) {
  check(in);
  at::AutoDispatchBelowADInplaceOrView guard;
  static const auto op =
      find_op<std::tuple<at::Tensor, at::Tensor>(T, T, T, T, T, T, const std::optional<at::Tensor>&, double)>(
          "bough::tree_attention_forward");
  auto [o, lse] = op.call(in.q_TNH, in.k_TGH, in.v_TGH, in.k_stack_PGH, in.v_stack_PGH, in.end_local,
                          spans_of(in), in.scale);
  return {o, lse};
}

TreeAttentionGradient tree_attention_backward(const TreeAttentionInput& in, const TreeAttentionOutput& out,
                                              T d_o_TNH, T d_k_stack_PGH, T d_v_stack_PGH) {
  check(in);
  BOUGH_CHECK(d_k_stack_PGH.sizes() == in.k_stack_PGH.sizes() &&
                  d_v_stack_PGH.sizes() == in.k_stack_PGH.sizes() && d_o_TNH.sizes() == in.q_TNH.sizes() &&
                  d_o_TNH.is_contiguous() && d_k_stack_PGH.is_contiguous() && d_v_stack_PGH.is_contiguous() &&
                  d_k_stack_PGH.scalar_type() == accumulator_type(in.q_TNH.scalar_type()) &&
                  d_v_stack_PGH.scalar_type() == d_k_stack_PGH.scalar_type(),
              "tree_attention: d_o ", d_o_TNH.sizes(), ", d_k_stack ", d_k_stack_PGH.sizes(), " ",
              d_k_stack_PGH.scalar_type(), ", d_v_stack ", d_v_stack_PGH.sizes(), " ",
              d_v_stack_PGH.scalar_type());
  at::AutoDispatchBelowADInplaceOrView guard;
  static const auto op = find_op<std::tuple<at::Tensor, at::Tensor, at::Tensor>(
      T, T, T, T, T, T, T, const std::optional<at::Tensor>&, T, T, double, T, T)>(
      "bough::tree_attention_backward");
  auto [d_q, d_k, d_v] =
      op.call(d_o_TNH, in.q_TNH, in.k_TGH, in.v_TGH, in.k_stack_PGH, in.v_stack_PGH, in.end_local,
              spans_of(in), out.o_TNH, out.lse_TN, in.scale, d_k_stack_PGH, d_v_stack_PGH);
  return {d_q, d_k, d_v};
}

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("key_spans", TORCH_FN(bough::key_spans_op));
}
