// Runs the model over the tokens of one pass. Attention reads the KV pages.
//
// On CUDA, a decode-only pass (one token of each sequence) runs as a captured graph. The pass is padded to
// one of a few sizes with tokens whose outputs are not used. The first pass of a size is captured. Later
// passes upload their tokens and their PagedWork (which kernel reads which pages), and replay the graph. A
// pass that fits no graph runs without one, and so do passes with sparse attention, of a mixture whose
// experts wait for the device (groups_on_device() in kernels/experts), and passes that replay recorded
// experts.
//
// Graphs keep the addresses of the weights and of the pages, so the caller must change both in place.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "kernels/common/cuda_library.h"
#include "kernels/paged_attention/paged_attention.h"
#include "models/expert_routes.h"
#include "models/model.h"
#include "rollout/kv_storage.h"

namespace bough {

// Returns the padded size of a pass of `num_tokens` decode tokens: a power of two up to 16, then a multiple
// of 16.
int64_t rounded_decode_size(int64_t num_tokens);
// Returns how many records a graph of `num_tokens` decode tokens has room for: attention items (large and
// small), rows, merges and tokens, as paged_work.h defines them. `num_groups`: key/value heads. has_large,
// has_merges: whether the pass has large items, and merges.
PagedLayout decode_capacities(int64_t num_tokens, int64_t num_groups, bool has_large, bool has_merges);
// Returns the bytes that the graphs of passes of up to `max_decode` tokens keep on the device: partial
// results of attention, and for each graph the work of attention with page tables for the longest sequences.
// The activations of a pass and the recorded kernels are not included. For a mixture an upper bound: its
// passes may run without graphs.
int64_t decode_graph_bytes(const ModelConfig& config, int64_t max_decode);

// Chooses a mixture's experts by `routes`; nullptr: the router does.
class RoutedContext : public AttentionContext {
 public:
  explicit RoutedContext(ExpertRoutes* routes) : routes_(routes) {}
  at::Tensor route(int64_t layer, const at::Tensor& logits_TE, int64_t num_chosen) override {
    return routes_ ? routes_->route(layer, logits_TE, num_chosen)
                   : AttentionContext::route(layer, logits_TE, num_chosen);
  }

 private:
  ExpertRoutes* routes_;
};

// Attention of a pass: each token attends to the pages of its sequence.
class PagedContext : public RoutedContext {
 public:
  // The storage must outlive this object. `scale` multiplies q · k. routes: chooses the experts; nullptr: the
  // router does.
  PagedContext(KvStorage& storage, PagedPlan plan, double scale, ExpertRoutes* routes = nullptr)
      : RoutedContext(routes), storage_(storage), plan_(std::move(plan)), scale_(scale) {}

  PagedPlan& plan() { return plan_; }
  at::Tensor attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                    const at::Tensor& v_TGH) override;

 private:
  KvStorage& storage_;
  PagedPlan plan_;
  double scale_;
};

// Attention of a pass with sparse attention. With the CUDA kernels, the work of a pass is planned once, with
// open tables of pages. Each layer chooses its pages on the device, which writes them to the tables, so the
// host never waits in attend(). Otherwise each layer except the dense ones has its own PagedPlan, which is
// made when the layer's queries are known.
class SparseContext : public RoutedContext {
 public:
  // The storage and the data that `segments` point to must outlive this object. is_sampled: one flag per
  // token of the pass, 1 if the policy sampled it.
  // routes: as in PagedContext.
  SparseContext(KvStorage& storage, const PagedShape& shape, AttentionPath path, double scale,
                std::span<const PagedSegment> segments, std::span<const uint8_t> is_sampled,
                ExpertRoutes* routes = nullptr);

  const BlockChooser& chooser() const { return chooser_; }
  at::Tensor attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                    const at::Tensor& v_TGH) override;
  // Stores the choices of all layers if the storage keeps them. Call it after the pass. With the CUDA kernels
  // it then waits for the device, once.
  void keep_choices();

 private:
  // Tensors and plans of the CUDA kernels, shared by all layers.
  struct OnDevice {
    at::Tensor complete_C;  // complete_
    PagedPlan stores;       // without items: only stores keys and values
    PagedPlan open;         // whose tables `chooser` fills
    std::optional<DevicePageChooser> chooser;
    std::vector<std::pair<int64_t, at::Tensor>> chosen;  // layer and DevicePageChooser::choose()
  };
  void plan_on_device(std::span<const PagedSegment> segments);
  at::Tensor attend_by(const PagedPlan& plan, int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                       const at::Tensor& v_TGH) const;
  at::Tensor attend_on_device(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                              const at::Tensor& v_TGH);

  KvStorage& storage_;
  PagedShape shape_;
  AttentionPath path_;
  double scale_;
  PagedPlan all_;  // attention to all pages, for dense layers; also stores keys and values
  BlockChooser chooser_;
  std::vector<int32_t> complete_;  // completed_blocks() of this pass
  std::vector<TokenSlot> slots_;
  std::optional<OnDevice> on_device_;
};

// Blocks of one sparse layer and key/value head, summed over sampled tokens.
struct BlocksRead {
  int64_t blocks = 0, of = 0;  // blocks: attended to; of: in the tokens' contexts
};

class ForwardPass {
 public:
  // Model and storage must outlive this object. Graphs are made for decode passes of up to max_decode tokens.
  ForwardPass(const Model& model, KvStorage& storage, AttentionPath path, int64_t max_decode);

  // Returns the final hidden states [T, D] of the segments' tokens, in order; valid until the next pass.
  // is_sampled: one flag per token, read only if the storage's policy is sparse: tokens with 1 choose blocks.
  // routes: chooses the experts of a mixture; nullptr: the router does.
  at::Tensor run(std::span<const int64_t> tokens, std::span<const int64_t> positions,
                 std::span<const PagedSegment> segments, std::span<const uint8_t> is_sampled = {},
                 ExpertRoutes* routes = nullptr);
  const BlocksRead& blocks_read() const { return blocks_read_; }  // sum over all passes

 private:
  struct Captured {
    std::unique_ptr<PagedContext> attention;
    std::unique_ptr<DeviceGraph> graph;
    at::Tensor hidden_TD;
    ExpertRoutes routes;  // of a mixture: the experts that the last replay used
  };
  using Key = std::tuple<int64_t, bool, bool>;  // size, has large items, has merges

  at::Tensor run_sparse(const at::Tensor& tokens_T, const at::Tensor& positions_T,
                        std::span<const PagedSegment> segments, std::span<const uint8_t> is_sampled,
                        ExpertRoutes* routes);
  bool suits_graph(std::span<const PagedSegment> segments, const ExpertRoutes* routes) const;
  Captured* captured(const Key& key, const PagedWork& work);

  const Model& model_;
  KvStorage& storage_;
  PagedShape shape_;
  AttentionPath path_;
  int64_t max_decode_;
  bool has_graphs_;
  at::Tensor inputs_2T_, parts_;  // of graphs: tokens and positions; partial results
  OptionalGraphs device_graphs_;  // before graphs_: destroyed after them
  std::map<Key, Captured> graphs_;
  BlocksRead blocks_read_;
};

}  // namespace bough
