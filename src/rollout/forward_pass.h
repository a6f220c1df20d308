// The model over the tokens of one pass, with attention to the pages.
//
// On CUDA a pass of decode alone (one token of each sequence) has the same kernels again and again: it is
// rounded up to one of a few sizes, with tokens that nobody reads, and captured as a graph when that size
// first comes; later passes only bring their tokens and attention's work over and replay it. A pass that does
// not fit a graph runs as it is. Nothing here waits for the device.
//
// Graphs keep the addresses of the weights and of the pages: both must be changed in place.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "kernels/common/cuda_library.h"
#include "kernels/paged_attention/paged_attention.h"
#include "models/model.h"
#include "rollout/kv_storage.h"

namespace bough {

// The size at which a pass of `num_tokens` decoding tokens is captured: powers of two, from 16 on multiples
// of 16.
int64_t rounded_decode_size(int64_t num_tokens);
// What a captured graph of `num_tokens` decoding tokens has room for.
PagedLayout decode_capacities(int64_t num_tokens, int64_t num_groups, bool has_large, bool has_merges);

// What a pass answers when the model asks a token to attend: the pages of its sequence.
class PagedContext : public AttentionContext {
 public:
  // The storage must outlive this object. q · k is multiplied by `scale`.
  PagedContext(KvStorage& storage, PagedPlan plan, double scale)
      : storage_(storage), plan_(std::move(plan)), scale_(scale) {}

  PagedPlan& plan() { return plan_; }
  at::Tensor attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                    const at::Tensor& v_TGH) override;

 private:
  KvStorage& storage_;
  PagedPlan plan_;
  double scale_;
};

// A pass some of whose tokens attend by choice: each layer but the dense ones has a plan of its own, made
// when its queries are there.
class SparseContext : public AttentionContext {
 public:
  // The storage and what the segments point to must outlive this object. is_drawn: of each token.
  SparseContext(KvStorage& storage, const PagedShape& shape, AttentionPath path, double scale,
                std::span<const PagedSegment> segments, std::span<const uint8_t> is_drawn);

  const PageChooser& chooser() const { return chooser_; }
  at::Tensor attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                    const at::Tensor& v_TGH) override;

 private:
  KvStorage& storage_;
  PagedShape shape_;
  AttentionPath path_;
  double scale_;
  PagedPlan all_;  // of the layers that attend to all: of uncut segments, whose tokens are stored first
  PageChooser chooser_;
  std::vector<int32_t> complete_;  // pages whose last token is the pass's
  std::vector<TokenSlot> slots_;
};

// What a pass read of its context, in one layer and key/value head of those that attend by choice.
struct PagesRead {
  int64_t pages = 0, of = 0;  // read by drawn tokens; in their contexts
};

class ForwardPass {
 public:
  // Graphs are made of passes of decode of up to max_decode tokens.
  ForwardPass(const Model& model, KvStorage& storage, AttentionPath path, int64_t max_decode);

  // Returns the final hidden states [T, D] of the segments' tokens, in order; valid until the next pass.
  // is_drawn: of each token, where the storage's policy is sparse: those attend by choice.
  at::Tensor run(std::span<const int64_t> tokens, std::span<const int64_t> positions,
                 std::span<const PagedSegment> segments, std::span<const uint8_t> is_drawn = {});
  const PagesRead& pages_read() const { return pages_read_; }  // of all passes

 private:
  struct Captured {
    std::unique_ptr<PagedContext> attention;
    std::unique_ptr<DeviceGraph> graph;
    at::Tensor hidden_TD;
  };
  using Key = std::tuple<int64_t, bool, bool>;  // size, large items, merges

  at::Tensor run_sparse(const at::Tensor& tokens_T, const at::Tensor& positions_T,
                        std::span<const PagedSegment> segments, std::span<const uint8_t> is_drawn);
  bool suits_graph(std::span<const PagedSegment> segments) const;
  Captured* captured(const Key& key, const PagedWork& work);

  const Model& model_;
  KvStorage& storage_;
  PagedShape shape_;
  AttentionPath path_;
  int64_t max_decode_;
  at::Tensor inputs_2T_, parts_;                 // of graphs; tokens and positions
  std::unique_ptr<DeviceGraphs> device_graphs_;  // before what is recorded by it
  std::map<Key, Captured> graphs_;
  PagesRead pages_read_;
};

}  // namespace bough
