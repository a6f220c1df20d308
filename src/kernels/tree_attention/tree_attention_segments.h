// A pass cut into segments of consecutive queries that are attended one after another: where a GPU's vendor
// has a faster kernel for plain causal attention, a long run (a chain of queries, each the parent of the
// next) goes to it by itself, over the keys of its path; what lies between such runs stays with the kernel
// that knows the tree.
//
// A segment [begin, end) is a pass of its own, whose stack is what lies before it: key j < P + begin is seen
// by its queries numbered below end_local[j] - begin. So forward and backward are those of tree_attention.h,
// over keys that are gathered for each segment; their gradients are added where they came from. Queries of a
// run see all keys of their path: no parts of a softmax are merged, and no bits are lost to the cut.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/tree_attention/tree_attention.h"

namespace bough {

struct KeyRange {
  int64_t begin, end;  // keys of the stack and then of the pass: [0, P + T)
  bool operator==(const KeyRange&) const = default;
};

struct QuerySegment {
  int64_t begin, end;  // queries of the pass
  bool is_run;         // each query sees the one before, and all keys of `earlier`
  // Keys below P + begin, in order: of a run those that it sees; else some that none of its queries sees may
  // be among them.
  std::vector<KeyRange> earlier;
  std::vector<int32_t> end_local;  // of these keys and then its own, for its queries
  KeyEnds ends = {};               // of the segment's device: upload_segments()
};

// Queries from which on a run goes by itself: that is where a GPU's kernels are busy with one.
constexpr int64_t kLeastRun = 512;

// The segments of a pass, in order: runs of at least `least_run` queries whose keys lie in few ranges, and
// what is between. Empty where no run is that long: the pass is attended whole. end_local: on the host, [P +
// T].
std::vector<QuerySegment> cut_into_segments(std::span<const int32_t> end_local, int64_t num_stack,
                                            int64_t least_run = kLeastRun);

// Gives the segments the `ends` that their kernels read: once `upload` is sent, until when the vector must
// stay where it is.
void add_segments(Upload& upload, std::vector<QuerySegment>& segments);
// By an upload of their own.
void upload_segments(std::vector<QuerySegment>& segments, at::Device device);

// Whether runs of this dtype and head size go to the vendor's kernel on this device: bf16 heads of up to
// 256, a multiple of 8, on a GPU. BOUGH_CUDA_ATTENTION=own: never.
bool vendor_attends_runs(const at::Device& device, at::ScalarType type, int64_t head_dim);

// tree_attention_forward and _backward by segments that have been uploaded; the input's own ends are not
// read. On CUDA runs go to FlashAttention-2 as libtorch has it;
// elsewhere to tree_attention's own kernel, for tests. With `same_bits` a run's backward adds in a fixed
// order on CUDA, too, which costs it some time.
TreeAttentionOutput tree_attention_forward_by_segments(const TreeAttentionInput& input,
                                                       const std::vector<QuerySegment>& segments);
TreeAttentionGradient tree_attention_backward_by_segments(
    const TreeAttentionInput& input, const TreeAttentionOutput& output, const at::Tensor& d_o_TNH,
    const at::Tensor& d_k_stack_PGH, const at::Tensor& d_v_stack_PGH,
    const std::vector<QuerySegment>& segments, bool same_bits);

}  // namespace bough
