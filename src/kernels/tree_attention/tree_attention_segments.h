// Divides a pass into segments of consecutive queries, which are computed one after another. A run is a
// segment that is a long chain of queries, each the parent of the next. On a GPU, libtorch's FlashAttention-2
// (plain causal attention) computes a run with the keys of its path, which is faster. The tree attention
// kernel computes the segments between runs.
//
// A segment [begin, end) is computed as if it were a pass whose stack is all keys before the segment. Query i
// of the segment, counted from `begin`, sees key j < P + begin if i < end_local[j] - begin. Forward and
// backward are those of tree_attention.h, on keys that are gathered for each segment. The gradient of a
// gathered key is added to the row from which the key was gathered. A run sees all keys of its path, so no
// partial softmaxes are merged and no precision is lost.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/tree_attention/tree_attention.h"

namespace bough {

struct KeyRange {
  int64_t begin, end;  // numbers of keys in [0, P + T): stack, then pass
  bool operator==(const KeyRange&) const = default;
};

struct QuerySegment {
  int64_t begin, end;  // queries of the pass
  bool is_run;         // each query sees the query before it, and all keys of `earlier`
  // Keys below P + begin, in order. For a run: exactly the keys that it sees. Otherwise some ranges may
  // include keys that none of the segment's queries sees.
  std::vector<KeyRange> earlier;
  std::vector<int32_t> end_local;  // of the keys of `earlier`, then of the segment, counted from `begin`
  KeyEnds ends = {};               // end_local on the device, set by upload_segments() or add_segments()
};

// The fewest queries of a run: enough to use a whole GPU.
constexpr int64_t kLeastRun = 512;

// Returns the segments of a pass in order: runs of at least `least_run` queries whose keys lie in few ranges,
// and the queries between runs. Returns an empty list if there is no such run; the caller then computes the
// pass as a whole. end_local: [P + T] on the host.
std::vector<QuerySegment> cut_into_segments(std::span<const int32_t> end_local, int64_t num_stack,
                                            int64_t least_run = kLeastRun);

// Adds the ends of the segments to `upload`, except for runs on CUDA, which need no ends. upload.send() sets
// QuerySegment::ends. The elements of the vector must stay in place until then.
void add_segments(HostToDeviceBatch& upload, std::vector<QuerySegment>& segments);
// Like add_segments(), but uploads immediately, without a HostToDeviceBatch of the caller.
void upload_segments(std::vector<QuerySegment>& segments, at::Device device);

// Whether FlashAttention-2 computes runs: on CUDA, for bf16 heads of up to 256, a multiple of 8, unless the
// environment variable BOUGH_CUDA_ATTENTION is "own" or flash_segments is left out (cuda_library.h). Throws
// UserError if the variable is set to anything but "own" or "vendor".
//
// If same_bits, Bough's kernels compute them, whose sums have a fixed order. FlashAttention-2 adds gradients
// of queries with atomics, unless at::globalContext().deterministicAlgorithms() is true. This flag is the
// process's: while it is set, operators of an engine on another thread also read it, and throw or compute
// other bits. libtorch exports no function that takes the choice as an argument.
bool vendor_attends_runs(const at::Device& device, at::ScalarType type, int64_t head_dim, bool same_bits);

// Compute what tree_attention_forward and _backward compute, segment by segment. `ends` of the segments must
// be set: by upload_segments(), or by add_segments() and upload.send(). end_local and spans of the input are
// not read. On CUDA, runs use FlashAttention-2, so vendor_attends_runs() must be true. On the CPU, for tests,
// runs use the kernels of tree_attention.h.
TreeAttentionOutput tree_attention_forward_by_segments(const TreeAttentionInput& input,
                                                       const std::vector<QuerySegment>& segments);
TreeAttentionGradient tree_attention_backward_by_segments(const TreeAttentionInput& input,
                                                          const TreeAttentionOutput& output,
                                                          const at::Tensor& d_o_TNH,
                                                          const at::Tensor& d_k_stack_PGH,
                                                          const at::Tensor& d_v_stack_PGH,
                                                          const std::vector<QuerySegment>& segments);

}  // namespace bough
