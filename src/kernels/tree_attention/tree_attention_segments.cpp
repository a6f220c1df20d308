#include "kernels/tree_attention/tree_attention_segments.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "kernels/common/cuda_library.h"
#include "kernels/parameter.h"

namespace bough {

namespace {
// If the keys of a run lie in more ranges than this, the tree attention kernel computes the run, because
// gathering so many ranges is slow.
constexpr size_t kMostRanges = 32;
// For segments that are not runs: fewer invisible keys than this between visible keys are gathered, too.
constexpr int64_t kLeastGap = 512;

// Returns the ranges of keys below P + begin that query `begin` or a later query sees. Ranges with fewer than
// least_gap keys between them are joined, including these keys.
std::vector<KeyRange> visible_keys(std::span<const int32_t> end_local, int64_t num_stack, int64_t begin,
                                   int64_t least_gap) {
  std::vector<KeyRange> ranges;
  for (int64_t j = 0; j < num_stack + begin; ++j) {
    if (end_local[static_cast<size_t>(j)] <= begin) continue;
    if (!ranges.empty() && j - ranges.back().end < least_gap) ranges.back().end = j + 1;
    else ranges.push_back({j, j + 1});
  }
  return ranges;
}

// Calls function(part, at) for each part of a range. part: rows of `stack` or `own`. at: number of the part's
// first row, counted over all ranges.
template <class Function>
void for_each_part(const std::vector<KeyRange>& ranges, const at::Tensor& stack, const at::Tensor& own,
                   Function&& function) {
  const int64_t num_stack = stack.size(0);
  int64_t at = 0;
  for (const auto& [begin, end] : ranges) {
    if (begin < num_stack) function(stack.narrow(0, begin, std::min(end, num_stack) - begin), at);
    const int64_t own_begin = std::max(begin, num_stack);
    if (own_begin < end)
      function(own.narrow(0, own_begin - num_stack, end - own_begin), at + own_begin - begin);
    at += end - begin;
  }
}

at::Tensor gather(const std::vector<KeyRange>& ranges, const at::Tensor& stack, const at::Tensor& own) {
  std::vector<at::Tensor> parts;
  for_each_part(ranges, stack, own, [&](const at::Tensor& part, int64_t) { parts.push_back(part); });
  if (parts.empty()) return stack.narrow(0, 0, 0);
  return parts.size() == 1 ? parts[0] : at::cat(parts);
}

// Adds each gathered row of `rows` to the row of `stack` or `own` from which it was gathered.
void scatter(const std::vector<KeyRange>& ranges, const at::Tensor& stack, const at::Tensor& own,
             const at::Tensor& rows) {
  for_each_part(ranges, stack, own,
                [&](const at::Tensor& part, int64_t at) { part.add_(rows.narrow(0, at, part.size(0))); });
}

// Returns the segment as a separate pass.
TreeAttentionInput segment_input(const TreeAttentionInput& in, const QuerySegment& segment) {
  const int64_t size = segment.end - segment.begin;
  const auto own = [&](const at::Tensor& x) { return x.narrow(0, segment.begin, size); };
  return {own(in.q_TNH),
          own(in.k_TGH),
          own(in.v_TGH),
          gather(segment.earlier, in.k_stack_PGH, in.k_TGH),
          gather(segment.earlier, in.v_stack_PGH, in.v_TGH),
          segment.ends.end_local,
          in.scale,
          segment.ends.spans};
}

// Returns the keys or values of earlier tokens on a run's path, followed by those of the run's tokens.
at::Tensor with_own(const at::Tensor& earlier, const at::Tensor& own) {
  return (earlier.size(0) == 0 ? own : at::cat({earlier, own})).unsqueeze(0);
}

// libtorch's FlashAttention-2 takes [batch, tokens, heads, head size]. Its causal mask lets the last query
// see the last key, and each query before it one key less. Its log-sum-exp is [batch, heads, tokens].
TreeAttentionOutput run_forward(const TreeAttentionInput& in) {
  if (!in.q_TNH.is_cuda()) return tree_attention_forward(in);
  const at::Tensor k = with_own(in.k_stack_PGH, in.k_TGH), v = with_own(in.v_stack_PGH, in.v_TGH);
  const auto out =
      at::_flash_attention_forward(in.q_TNH.unsqueeze(0), k, v, {}, {}, in.q_TNH.size(0), k.size(1),
                                   /*dropout_p=*/0, /*is_causal=*/true,
                                   /*return_debug_mask=*/false, in.scale);
  return {std::get<0>(out).squeeze(0), std::get<1>(out).squeeze(0).t()};
}

// Adds the gradients of the earlier tokens' keys and values to d_k_earlier and d_v_earlier.
TreeAttentionGradient run_backward(const TreeAttentionInput& in, const TreeAttentionOutput& out,
                                   const at::Tensor& d_o, const at::Tensor& d_k_earlier,
                                   const at::Tensor& d_v_earlier) {
  if (!in.q_TNH.is_cuda()) return tree_attention_backward(in, out, d_o, d_k_earlier, d_v_earlier);
  const at::Tensor k = with_own(in.k_stack_PGH, in.k_TGH), v = with_own(in.v_stack_PGH, in.v_TGH);
  const at::Tensor no_dropout = at::empty({2}, in.q_TNH.options().dtype(at::kLong));  // is never read
  auto [d_q, d_k, d_v] = at::_flash_attention_backward(
      d_o.unsqueeze(0), in.q_TNH.unsqueeze(0), k, v, out.o_TNH.unsqueeze(0),
      out.lse_TN.t().contiguous().unsqueeze(0), {}, {}, in.q_TNH.size(0), k.size(1), /*dropout_p=*/0,
      /*is_causal=*/true, no_dropout, no_dropout, in.scale);
  const int64_t earlier = in.k_stack_PGH.size(0), size = in.q_TNH.size(0);
  d_k_earlier.add_(d_k[0].narrow(0, 0, earlier));
  d_v_earlier.add_(d_v[0].narrow(0, 0, earlier));
  const auto own = [&](const at::Tensor& x) {
    return x[0].narrow(0, earlier, size).to(d_k_earlier.scalar_type());
  };
  return {d_q.squeeze(0), own(d_k), own(d_v)};
}
}  // namespace

std::vector<QuerySegment> cut_into_segments(std::span<const int32_t> end_local, int64_t num_stack,
                                            int64_t least_run) {
  const int64_t num_tokens = std::ssize(end_local) - num_stack;
  std::vector<QuerySegment> segments;
  int64_t rest = 0;  // the first query that is in no segment yet
  const auto add = [&](int64_t begin, int64_t end, bool is_run, std::vector<KeyRange> earlier) {
    std::vector<int32_t> ends;
    const auto append = [&](const KeyRange& keys) {
      for (int64_t j = keys.begin; j < keys.end; ++j)
        ends.push_back(static_cast<int32_t>(
            std::clamp<int64_t>(end_local[static_cast<size_t>(j)] - begin, 0, end - begin)));
    };
    for (const KeyRange& keys : earlier) append(keys);
    append({num_stack + begin, num_stack + end});
    segments.push_back({begin, end, is_run, std::move(earlier), std::move(ends)});
  };
  const auto close_rest = [&](int64_t end) {
    if (rest < end) add(rest, end, false, visible_keys(end_local, num_stack, rest, kLeastGap));
  };
  for (int64_t begin = 0, end = 0; begin < num_tokens; begin = end) {
    // Query `end` continues the run if it sees query `end - 1`.
    for (end = begin + 1; end < num_tokens && end_local[static_cast<size_t>(num_stack + end - 1)] > end;)
      ++end;
    if (end - begin < least_run) continue;
    std::vector<KeyRange> earlier = visible_keys(end_local, num_stack, begin, 1);
    if (earlier.size() > kMostRanges) continue;
    close_rest(begin);
    add(begin, end, true, std::move(earlier));
    rest = end;
  }
  if (!segments.empty()) close_rest(num_tokens);
  return segments;
}

void add_segments(HostToDeviceBatch& upload, std::vector<QuerySegment>& segments) {
  for (QuerySegment& segment : segments) {
    if (segment.is_run && upload.device().is_cuda()) continue;  // FlashAttention-2 takes no ends
    const int64_t num_own = segment.end - segment.begin;
    add_key_ends(upload, segment.end_local, std::ssize(segment.end_local) - num_own, &segment.ends);
  }
}

void upload_segments(std::vector<QuerySegment>& segments, at::Device device) {
  HostToDeviceBatch upload(device);
  add_segments(upload, segments);
  upload.send();
}

bool vendor_attends_runs(const at::Device& device, at::ScalarType type, int64_t head_dim, bool same_bits) {
  static const bool own = [] {
    if (is_left_out("flash_segments")) return true;
    const char* const wanted = std::getenv("BOUGH_CUDA_ATTENTION");
    if (!wanted || std::string_view(wanted) == "vendor") return false;
    if (std::string_view(wanted) == "own") return true;
    throw UserError(
        str("environment variable BOUGH_CUDA_ATTENTION: got '", wanted, "', expected own or vendor"));
  }();
  return !own && !same_bits && device.is_cuda() && type == at::kBFloat16 && head_dim <= 256 &&
         head_dim % 8 == 0;
}

TreeAttentionOutput tree_attention_forward_by_segments(const TreeAttentionInput& in,
                                                       const std::vector<QuerySegment>& segments) {
  at::AutoDispatchBelowADInplaceOrView guard;
  TreeAttentionOutput out{at::empty_like(in.q_TNH),
                          at::empty({in.q_TNH.size(0), in.q_TNH.size(1)},
                                    in.q_TNH.options().dtype(accumulator_type(in.q_TNH.scalar_type())))};
  for (const QuerySegment& segment : segments) {
    const TreeAttentionInput part = segment_input(in, segment);
    const auto [o, lse] = segment.is_run ? run_forward(part) : tree_attention_forward(part);
    out.o_TNH.narrow(0, segment.begin, o.size(0)).copy_(o);
    out.lse_TN.narrow(0, segment.begin, o.size(0)).copy_(lse);
  }
  return out;
}

TreeAttentionGradient tree_attention_backward_by_segments(const TreeAttentionInput& in,
                                                          const TreeAttentionOutput& out,
                                                          const at::Tensor& d_o_TNH,
                                                          const at::Tensor& d_k_stack_PGH,
                                                          const at::Tensor& d_v_stack_PGH,
                                                          const std::vector<QuerySegment>& segments) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto options = in.k_TGH.options().dtype(accumulator_type(in.k_TGH.scalar_type()));
  TreeAttentionGradient d{at::empty_like(in.q_TNH), at::zeros(in.k_TGH.sizes(), options),
                          at::zeros(in.k_TGH.sizes(), options)};
  for (const QuerySegment& segment : segments) {
    const TreeAttentionInput part = segment_input(in, segment);
    const int64_t size = segment.end - segment.begin;
    const auto own = [&](const at::Tensor& x) { return x.narrow(0, segment.begin, size); };
    const at::Tensor d_k_earlier = at::zeros(part.k_stack_PGH.sizes(), options),
                     d_v_earlier = at::zeros(part.k_stack_PGH.sizes(), options);
    const TreeAttentionOutput part_out{own(out.o_TNH), own(out.lse_TN)};
    const TreeAttentionGradient part_d =
        segment.is_run ? run_backward(part, part_out, own(d_o_TNH), d_k_earlier, d_v_earlier)
                       : tree_attention_backward(part, part_out, own(d_o_TNH), d_k_earlier, d_v_earlier);
    own(d.d_q_TNH).copy_(part_d.d_q_TNH);
    own(d.d_k_TGH).add_(part_d.d_k_TGH);
    own(d.d_v_TGH).add_(part_d.d_v_TGH);
    scatter(segment.earlier, d_k_stack_PGH, d.d_k_TGH, d_k_earlier);
    scatter(segment.earlier, d_v_stack_PGH, d.d_v_TGH, d_v_earlier);
  }
  return d;
}

}  // namespace bough
