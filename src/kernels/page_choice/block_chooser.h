// Which queries of a pass choose blocks, and what attention needs to know about their choices.
#pragma once

#include "kernels/page_choice/page_choice.h"

namespace bough {

// Chooses the blocks of a pass's queries, layer by layer. Generation and training both use this class.
class BlockChooser {
 public:
  // Index: number of the choosing query · G + key/value head. Contents as `lists` of choose_blocks().
  using Lists = std::vector<std::vector<int32_t>>;

  // segments: those of the pass. The memory that their spans refer to must outlive this object. is_sampled:
  // for each token, whether a policy sampled it. A sampled token chooses blocks if it sees more blocks than
  // its budget.
  BlockChooser(std::span<const PagedSegment> segments, std::span<const uint8_t> is_sampled,
               const SparsePolicy& policy, int64_t num_kv_heads);

  bool chooses() const { return !queries_.empty(); }
  const SparsePolicy& policy() const { return policy_; }
  // The tokens of the pass, in segments such that each choosing token is a segment alone.
  const std::vector<PagedSegment>& segments() const { return segments_; }
  const std::vector<size_t>& choosing() const { return choosing_; }  // ascending indices in segments()
  const std::vector<ChoosingQuery>& queries() const { return queries_; }
  // Sums over all sampled tokens, for one layer and head: blocks attended to, and blocks in the context.
  int64_t blocks_read() const { return blocks_read_; }
  int64_t blocks_in_context() const { return blocks_in_context_; }

  // complete_blocks() of the segments, found at the first call.
  const std::vector<int32_t>& complete();
  // Returns the blocks that the choosing queries keep in one layer.
  Lists choose(const at::Tensor& q_TNH, const at::Tensor& summaries) const;
  // Returns the selection for a plan of segments(). The selection refers to lists in this object, which the
  // next call overwrites.
  PageSelection selection(const Lists& chosen);

 private:
  SparsePolicy policy_;
  size_t num_kv_heads_;
  std::vector<PagedSegment> segments_;
  std::vector<size_t> choosing_;
  std::vector<ChoosingQuery> queries_;
  Lists lists_;                               // page lists of segments()
  std::vector<std::vector<uint16_t>> masks_;  // of the lists; empty if blocks are whole pages
  std::vector<int32_t> complete_;
  int64_t blocks_read_ = 0, blocks_in_context_ = 0;
};

}  // namespace bough
