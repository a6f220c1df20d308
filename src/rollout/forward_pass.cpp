#include "rollout/forward_pass.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "kernels/common/host_to_device.h"
#include "kernels/experts/experts.h"
#include "kernels/page_choice/top_keys.h"
#include "models/quantized_model.h"

namespace bough {

namespace {
constexpr int64_t kSizeStep = 16;
}  // namespace

int64_t rounded_decode_size(int64_t num_tokens) {
  int64_t size = 1;
  while (size < num_tokens && size < kSizeStep) size *= 2;
  return size >= num_tokens ? size : (num_tokens + kSizeStep - 1) / kSizeStep * kSizeStep;
}

// An item is a run of pages that the same sequences read, or a part of a long run. Each decode token belongs
// to another sequence, and the prefix tree of n sequences has fewer than 2 n runs. `cuts` bounds the
// additional items from cutting long runs. An unused item costs one CUDA thread block that ends at once. The
// limits suit samples of common prompts of thousands of tokens.
PagedLayout decode_capacities(int64_t num_tokens, int64_t num_groups, bool has_large, bool has_merges) {
  const int64_t cuts = 1024 / num_groups;
  return {.max_large = has_large ? num_tokens + cuts : 0,
          .max_small = 2 * num_tokens + cuts,
          .max_rows = 16 * num_tokens + 1024,
          .max_merges = has_merges ? num_tokens : 0,
          .max_tokens = num_tokens};
}

static int64_t num_graph_parts(const PagedShape& shape, int64_t max_decode) {
  return decode_capacities(max_decode, shape.num_kv_heads, true, true).max_rows;
}

int64_t decode_graph_bytes(const ModelConfig& config, int64_t max_decode) {
  const PagedShape shape{config.num_heads, config.num_kv_heads, config.head_dim, at::kFloat, at::kMeta};
  const int64_t largest = rounded_decode_size(max_decode);
  auto bytes = static_cast<int64_t>(PagedPlan::make_parts(shape, num_graph_parts(shape, largest)).nbytes());
  for (int64_t size = 1; size <= largest; size = rounded_decode_size(size + 1))
    for (const bool has_large : {false, true})
      for (const bool has_merges : {false, true}) {
        const PagedLayout layout = decode_capacities(size, shape.num_kv_heads, has_large, has_merges);
        bytes += int64_t{sizeof(int32_t)} * (layout.pages() + size * pages_for(config.max_length()));
      }
  return bytes;
}

at::Tensor PagedContext::attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                                const at::Tensor& v_TGH) {
  BOUGH_CHECK(layer >= 0 && layer < storage_.num_layers(), "layer ", layer, " of ", storage_.num_layers());
  return paged_attention({.q_TNH = q_TNH,
                          .k_TGH = k_TGH,
                          .v_TGH = v_TGH,
                          .pages = storage_.pages(layer),
                          .plan = plan_,
                          .scale = scale_});
}

// Returns, for each query and key/value head, the block that has the query.
static BlockChooser::Lists own_blocks(const BlockChooser& chooser, int64_t num_kv_heads) {
  BlockChooser::Lists lists;
  for (const ChoosingQuery& query : chooser.queries())
    lists.resize(lists.size() + static_cast<size_t>(num_kv_heads),
                 {static_cast<int32_t>(query.position / chooser.policy().block_tokens)});
  return lists;
}

SparseContext::SparseContext(KvStorage& storage, const PagedShape& shape, AttentionPath path, double scale,
                             std::span<const PagedSegment> segments, std::span<const uint8_t> is_sampled,
                             ExpertRoutes* routes)
    : RoutedContext(routes),
      storage_(storage),
      shape_(shape),
      path_(path),
      scale_(scale),
      all_(segments, shape, nullptr, path),
      chooser_(segments, is_sampled, storage.sparse(), shape.num_kv_heads),
      complete_(completed_blocks(segments, storage.sparse())) {
  // Within a page the tokens must be in slot order (TokenSlot). This loop lists them so, because a page's
  // tokens belong to one sequence.
  int64_t token = 0;
  for (const PagedSegment& segment : segments)
    for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i, ++token)
      slots_.push_back(
          {token, segment.pages[static_cast<size_t>(i / kPageTokens)] * kPageTokens + i % kPageTokens});
  if (path == AttentionPath::kFastest && PagedPlan::on_cuda(shape) && storage.sparse().has_summaries())
    plan_on_device(segments);
}

void SparseContext::plan_on_device(std::span<const PagedSegment> segments) {
  OnDevice& own = on_device_.emplace();
  own.complete_C = upload(complete_, shape_.device);
  if (!chooser_.chooses()) return;
  std::vector<OpenSegment> open;
  for (size_t i = 0; i < chooser_.choosing().size(); ++i)
    open.push_back({chooser_.choosing()[i], chooser_.queries()[i].budget});
  OpenPagedWork planned =
      plan_open_paged_work(chooser_.segments(), open, shape_.num_heads, shape_.num_kv_heads);
  const auto plan_of = [&](const PagedWork& work) {
    PagedPlan plan(shape_, work.layout(), std::ssize(work.pages),
                   PagedPlan::make_parts(shape_, work.num_parts));
    plan.set_work(work);
    return plan;
  };
  own.open = plan_of(planned.work);
  for (int32_t& table : planned.tables) table += static_cast<int32_t>(own.open.layout().pages());
  own.chooser.emplace(chooser_.queries(), planned.tables, shape_.device);
  PagedWork stores;
  for (const TokenSlot& token : slots_) stores.slots.push_back(static_cast<int32_t>(token.slot));
  own.stores = plan_of(stores);
}

at::Tensor SparseContext::attend_by(const PagedPlan& plan, int64_t layer, const at::Tensor& q_TNH,
                                    const at::Tensor& k_TGH, const at::Tensor& v_TGH) const {
  return paged_attention({.q_TNH = q_TNH,
                          .k_TGH = k_TGH,
                          .v_TGH = v_TGH,
                          .pages = storage_.pages(layer),
                          .plan = plan,
                          .scale = scale_});
}

at::Tensor SparseContext::attend_on_device(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                                           const at::Tensor& v_TGH) {
  OnDevice& own = *on_device_;
  const SparsePolicy& sparse = storage_.sparse();
  const at::Tensor& summaries = storage_.summaries(layer);
  const auto summarise = [&] {
    if (!complete_.empty())
      summarise_pages(storage_.pages(layer), own.complete_C, sparse.summary, shape_.head_dim, summaries);
  };
  if (!own.chooser) {
    at::Tensor o_TNH = attend_by(all_, layer, q_TNH, k_TGH, v_TGH);
    summarise();
    return o_TNH;
  }
  // As in attend(), keys and summaries are stored before pages are chosen.
  attend_by(own.stores, layer, q_TNH, k_TGH, v_TGH);
  summarise();
  const at::Tensor chosen_QGK = own.chooser->choose(q_TNH, summaries, sparse.summary, &own.open.work());
  if (sparse.keeps_choices) own.chosen.emplace_back(layer, chosen_QGK);
  return attend_by(own.open, layer, q_TNH, k_TGH, v_TGH);
}

void SparseContext::keep_choices() {
  if (!on_device_ || on_device_->chosen.empty()) return;
  std::vector<at::Tensor> of_layers;
  for (const auto& [layer, chosen_QGK] : on_device_->chosen) of_layers.push_back(chosen_QGK);
  const at::Tensor chosen_LQGK = at::stack(of_layers).cpu();
  for (size_t i = 0; i < of_layers.size(); ++i) {
    BlockChooser::Lists lists(chooser_.queries().size() * static_cast<size_t>(shape_.num_kv_heads));
    complete_lists(chosen_LQGK[static_cast<int64_t>(i)], chooser_.queries(), lists);
    storage_.keep_choices(on_device_->chosen[i].first, chooser_, lists);
  }
}

at::Tensor SparseContext::attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                                 const at::Tensor& v_TGH) {
  BOUGH_CHECK(layer >= 0 && layer < storage_.num_layers(), "layer ", layer, " of ", storage_.num_layers());
  const at::Tensor& pages = storage_.pages(layer);
  const SparsePolicy& sparse = storage_.sparse();
  if (layer < sparse.dense_layers) return attend_by(all_, layer, q_TNH, k_TGH, v_TGH);
  if (on_device_) return attend_on_device(layer, q_TNH, k_TGH, v_TGH);
  const bool by_keys = sparse.summary == BlockSummary::kExact;
  const auto summarise = [&] {
    if (by_keys) return;
    summarise_blocks(pages, complete_, sparse, shape_.head_dim, storage_.summaries(layer));
  };
  if (!chooser_.chooses()) {
    at::Tensor o_TNH = attend_by(all_, layer, q_TNH, k_TGH, v_TGH);
    summarise();
    return o_TNH;
  }
  // Keys and summaries are stored before blocks are chosen, because a later token of this pass may choose a
  // block that this pass completes.
  store_in_pages(pages, k_TGH, v_TGH, slots_);
  summarise();
  // If single keys are selected (`by_keys`), this attention is only to the query's own block, the smallest
  // valid selection. attend_to_top_keys then overwrites its output.
  const BlockChooser::Lists chosen =
      by_keys ? own_blocks(chooser_, shape_.num_kv_heads) : chooser_.choose(q_TNH, storage_.summaries(layer));
  if (!by_keys) storage_.keep_choices(layer, chooser_, chosen);
  const PageSelection selection = chooser_.selection(chosen);
  // The CUDA kernel always stores k and v, even if they are already stored.
  const bool stores = q_TNH.is_cuda();
  at::Tensor o_TNH = attend_by(PagedPlan(chooser_.segments(), shape_, &selection, path_), layer, q_TNH,
                               stores ? k_TGH : at::Tensor(), stores ? v_TGH : at::Tensor());
  if (by_keys)
    attend_to_top_keys({q_TNH, pages, chooser_.queries(), sparse.block_tokens, scale_}, o_TNH, nullptr);
  return o_TNH;
}

// Whether a layer of a mixture waits for the device.
static bool experts_wait(const Model& model) {
  const ModelConfig& config = model.config();
  return config.is_mixture() &&
         !groups_on_device(model.device(), is_quantized(model) ? at::kChar : model.dtype(),
                           config.num_experts, config.hidden_size, config.expert_intermediate_size);
}

ForwardPass::ForwardPass(const Model& model, KvStorage& storage, AttentionPath path, int64_t max_decode)
    : model_(model),
      storage_(storage),
      shape_{model.config().num_heads, storage.num_kv_heads(), storage.head_dim(), storage.dtype(),
             storage.device()},
      path_(path),
      max_decode_(rounded_decode_size(max_decode)),
      has_graphs_(path == AttentionPath::kFastest && PagedPlan::on_cuda(shape_)) {
  if (!has_graphs_ || !experts_wait(model)) return;
  has_graphs_ = false;
  if (!wants_device_graphs()) return;
  log_info(
      "CUDA graphs: not used, because this mixture's experts wait for the GPU in each layer; bf16 matrices "
      "whose "
      "sizes are multiples of 8 do not, on a GPU of compute capability 9 or 10 (docs/moe.md)");
}

bool ForwardPass::suits_graph(std::span<const PagedSegment> segments, const ExpertRoutes* routes) const {
  return has_graphs_ && !(routes && routes->has_records()) &&
         static_cast<int64_t>(segments.size()) <= max_decode_ &&
         std::all_of(segments.begin(), segments.end(), [](const PagedSegment& s) { return s.count == 1; });
}

at::Tensor ForwardPass::run(std::span<const int64_t> tokens, std::span<const int64_t> positions,
                            std::span<const PagedSegment> segments, std::span<const uint8_t> is_sampled,
                            ExpertRoutes* routes) {
  const at::Device device = model_.device();
  const auto num_tokens = static_cast<int64_t>(tokens.size());
  std::vector<int64_t> inputs(tokens.begin(), tokens.end());
  inputs.insert(inputs.end(), positions.begin(), positions.end());
  const at::Tensor inputs_2T = upload(inputs, device).view({2, num_tokens});
  const at::Tensor tokens_T = inputs_2T[0], positions_T = inputs_2T[1];
  if (storage_.sparse().is_sparse()) return run_sparse(tokens_T, positions_T, segments, is_sampled, routes);
  if (suits_graph(segments, routes)) {
    const PagedWork work = plan_paged_work(segments, shape_.num_heads, shape_.num_kv_heads);
    const int64_t size = rounded_decode_size(num_tokens);
    if (!inputs_2T_.defined()) inputs_2T_ = at::zeros({2, max_decode_}, inputs_2T.options());
    inputs_2T_.narrow(1, 0, num_tokens).copy_(inputs_2T);
    if (Captured* pass = captured({size, !work.large.empty(), !work.merges.empty()}, work)) {
      pass->graph->replay();
      if (routes) routes->use(pass->routes.used_of(num_tokens));
      return pass->hidden_TD.narrow(0, 0, num_tokens);
    }
  }
  PagedContext attention(storage_, PagedPlan(segments, shape_, nullptr, path_),
                         model_.config().attention_scale(), routes);
  return model_.forward(tokens_T, positions_T, attention);
}

at::Tensor ForwardPass::run_sparse(const at::Tensor& tokens_T, const at::Tensor& positions_T,
                                   std::span<const PagedSegment> segments,
                                   std::span<const uint8_t> is_sampled, ExpertRoutes* routes) {
  SparseContext attention(storage_, shape_, path_, model_.config().attention_scale(), segments, is_sampled,
                          routes);
  blocks_read_.blocks += attention.chooser().blocks_read();
  blocks_read_.of += attention.chooser().blocks_in_context();
  at::Tensor hidden_TD = model_.forward(tokens_T, positions_T, attention);
  attention.keep_choices();
  return hidden_TD;
}

// Returns the graph of this key, captured if it is new, with `work` set for the next replay. nullptr if
// `work` exceeds the graph's capacities, the device has no graphs or it could not be captured.
ForwardPass::Captured* ForwardPass::captured(const Key& key, const PagedWork& work) {
  const auto [size, has_large, has_merges] = key;
  Captured& pass = graphs_[key];
  if (pass.attention) return pass.graph && pass.attention->plan().set_work(work) ? &pass : nullptr;
  const int64_t num_groups = shape_.num_kv_heads;
  if (!parts_.defined()) parts_ = PagedPlan::make_parts(shape_, num_graph_parts(shape_, max_decode_));
  const int64_t max_pages = size * pages_for(model_.config().max_length());
  pass.attention = std::make_unique<PagedContext>(
      storage_,
      PagedPlan(shape_, decode_capacities(size, num_groups, has_large, has_merges), max_pages, parts_),
      model_.config().attention_scale(), &pass.routes);
  if (!pass.attention->plan().set_work(work)) {
    graphs_.erase(key);
    return nullptr;
  }
  pass.graph = device_graphs_.capture([&] {
    pass.routes = ExpertRoutes();  // the work runs twice
    pass.hidden_TD =
        model_.forward(inputs_2T_[0].narrow(0, 0, size), inputs_2T_[1].narrow(0, 0, size), *pass.attention);
  });
  return pass.graph ? &pass : nullptr;
}

}  // namespace bough
