// Divides a pass into segments of consecutive queries, which are attended one after another. A run is a long
// chain of queries, each the parent of the next. On a GPU, the vendor's kernel for plain causal attention
// computes a run over the keys of its path, which is faster. The queries between runs stay with the tree
// attention kernel.
//
// A segment [begin, end) is a separate pass, whose stack is all keys before it. Query i of the segment,
// counted from `begin`, sees key j < P + begin if i < end_local[j] - begin. Forward and backward are those of
// tree_attention.h, on keys that are gathered for each segment. Gradients are added to the rows that the keys
// were gathered from. A run sees all keys of its path, so no partial softmaxes are merged and no precision is
// lost.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/tree_attention/tree_attention.h"

namespace bough {

struct KeyRange {
  int64_t begin, end;  // keys of the stack, then of the pass: [0, P + T)
  bool operator==(const KeyRange&) const = default;
};

struct QuerySegment {
  int64_t begin, end;  // queries of the pass
  bool is_run;         // each query sees the query before it, and all keys of `earlier`
  // Keys below P + begin, in order. For a run: the keys that it sees. Else keys that none of its queries sees
  // may be included.
  std::vector<KeyRange> earlier;
  std::vector<int32_t> end_local;  // of the keys of `earlier`, then of the segment, counted from `begin`
  KeyEnds ends = {};               // the same on the device, set by upload_segments() or add_segments()
};

// Fewest queries of a run: enough to keep a GPU busy with one run.
constexpr int64_t kLeastRun = 512;

// Returns the segments of a pass in order: runs of at least `least_run` queries whose keys lie in few ranges,
// and the queries between them. Returns an empty list if there is no such run: the pass is then attended as a
// whole. end_local: [P + T] on the host.
std::vector<QuerySegment> cut_into_segments(std::span<const int32_t> end_local, int64_t num_stack,
                                            int64_t least_run = kLeastRun);

// upload.send() sets `ends` of the segments, except for runs on CUDA, which need none. The vector must not
// move until then.
void add_segments(HostToDeviceBatch& upload, std::vector<QuerySegment>& segments);
// The same with an upload of its own.
void upload_segments(std::vector<QuerySegment>& segments, at::Device device);

// Whether the vendor's kernel computes runs: on CUDA, for bf16 heads of up to 256, a multiple of 8. Never if
// BOUGH_CUDA_ATTENTION=own. Throws UserError if this variable is neither own nor vendor.
bool vendor_attends_runs(const at::Device& device, at::ScalarType type, int64_t head_dim);

// tree_attention_forward and _backward by segments that have been uploaded. end_local and spans of the input
// are not read. On CUDA, runs use libtorch's FlashAttention-2. On the CPU, they use the kernels of
// tree_attention.h, for tests. If same_bits, the backward of runs on CUDA adds in a fixed order, which is
// slower.
TreeAttentionOutput tree_attention_forward_by_segments(const TreeAttentionInput& input,
                                                       const std::vector<QuerySegment>& segments);
TreeAttentionGradient tree_attention_backward_by_segments(
    const TreeAttentionInput& input, const TreeAttentionOutput& output, const at::Tensor& d_o_TNH,
    const at::Tensor& d_k_stack_PGH, const at::Tensor& d_v_stack_PGH,
    const std::vector<QuerySegment>& segments, bool same_bits);

}  // namespace bough
