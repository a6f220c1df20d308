// Collective calls over lists of tensors. Each call waits for all ranks, and a model has hundreds of small
// tensors. The tensors are therefore packed into buckets, and a bucket takes one call. A tensor that is
// larger than a bucket is cut, so buffers are at most a bucket large.
//
// A sum over ranks has the same terms for each element as a call per tensor, in the order that the
// communicator chooses. NCCL and MPI choose this order by the element's position in the bucket.
//
// All ranks pass tensors of the same sizes and dtypes in the same order. Tensors are contiguous and on one
// device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/communicator.h"

namespace bough {

// Bytes of a bucket, counting the elements of all ranks. A call has a fixed cost (some 20 microseconds are
// assumed, run/cluster.cpp). A link of 400 GB/s moves 8 MB in this time, so 64 MiB make the fixed cost small.
// A smaller bucket would save memory that is little beside the weights.
inline constexpr int64_t kCollectiveBucketBytes = int64_t{64} << 20;
// Upper bound of the buffers' bytes in a call: a bucket is sent, and at most as much is received.
inline constexpr int64_t kCollectiveBufferBytes = 2 * kCollectiveBucketBytes;

// With actor.deterministic, results must not depend on the number of ranks. The batch and each parameter's
// elements are then always cut into kFixedShares parts, called shares. The number of ranks must divide
// kFixedShares. Each rank gets equally many consecutive shares. Sums over shares have the order
// ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
inline constexpr int64_t kFixedShares = 8;

// One rank's shard of a tensor's elements, in memory order. The last ranks may have fewer elements or none.
struct ElementShare {
  int64_t most = 0;              // elements of the largest shard
  int64_t begin = 0, count = 0;  // this rank's elements
};
// `ranks`: nullptr if there is one rank. `fixed`: the elements are cut into kFixedShares shares first.
ElementShare share_of(int64_t num_elements, const Communicator* ranks, bool fixed = false);

// Sums the tensors over the ranks in place. fp32 or fp64.
void sum_in_buckets_(const std::vector<at::Tensor>& tensors, Communicator& ranks,
                     int64_t bucket_bytes = kCollectiveBucketBytes);
// Sets this rank's shard of each tensor to the sum over ranks, and the other elements to 0. fp32 or fp64.
// `fixed`: the sum has the order that is defined at kFixedShares.
void reduce_scatter_(const std::vector<at::Tensor>& tensors, Communicator& ranks, bool fixed = false,
                     int64_t bucket_bytes = kCollectiveBucketBytes);
// Sets the other ranks' shards of each tensor to their values there.
void all_gather_(const std::vector<at::Tensor>& tensors, Communicator& ranks, bool fixed = false,
                 int64_t bucket_bytes = kCollectiveBucketBytes);
// Returns all shards concatenated, [num_elements]. own: this rank's shard, [count].
at::Tensor all_gather(const at::Tensor& own, int64_t num_elements, Communicator& ranks, bool fixed = false);

}  // namespace bough
