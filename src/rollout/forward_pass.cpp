#include "rollout/forward_pass.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "rollout/upload.h"

namespace bough {

namespace {
constexpr int64_t kSizeStep = 16;
}  // namespace

int64_t rounded_decode_size(int64_t num_tokens) {
  int64_t size = 1;
  while (size < num_tokens && size < kSizeStep) size *= 2;
  return size >= num_tokens ? size : (num_tokens + kSizeStep - 1) / kSizeStep * kSizeStep;
}

// There is room for twice the sequences, which a tree with so many leaves has as pieces, and for a number of
// cuts of long ones; an unused place costs a block that ends at once. Rows and parts are what groups of
// samples with prompts of thousands of tokens need.
PagedLayout decode_capacities(int64_t num_tokens, int64_t num_groups, bool has_large, bool has_merges) {
  const int64_t cuts = 1024 / num_groups;
  return {.max_large = has_large ? num_tokens + cuts : 0,
          .max_small = 2 * num_tokens + cuts,
          .max_rows = 16 * num_tokens + 1024,
          .max_merges = has_merges ? num_tokens : 0,
          .max_tokens = num_tokens};
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

// The pages whose last token is among the segments' tokens.
static std::vector<int32_t> completed_pages(std::span<const PagedSegment> segments) {
  std::vector<int32_t> complete;
  for (const PagedSegment& segment : segments)
    for (int64_t i = segment.begin / kPageTokens; i < (segment.begin + segment.count) / kPageTokens; ++i)
      complete.push_back(segment.pages[static_cast<size_t>(i)]);
  return complete;
}

SparseContext::SparseContext(KvStorage& storage, const PagedShape& shape, AttentionPath path, double scale,
                             std::span<const PagedSegment> segments, std::vector<PagedSegment> cut,
                             std::vector<size_t> choosing)
    : storage_(storage),
      shape_(shape),
      path_(path),
      scale_(scale),
      segments_(std::move(cut)),
      all_(segments, shape, nullptr, path),
      complete_(completed_pages(segments_)),
      choosing_(std::move(choosing)) {
  std::vector<int64_t> first_token;
  int64_t token = 0;
  for (const PagedSegment& segment : segments_) {
    first_token.push_back(token);
    for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i, ++token)
      slots_.push_back(
          {token, segment.pages[static_cast<size_t>(i / kPageTokens)] * kPageTokens + i % kPageTokens});
  }
  // Of the tokens of a page that of its first place comes first; a page's tokens are one sequence's.
  if (choosing_.empty()) return;
  const auto heads = static_cast<size_t>(shape.num_kv_heads);
  lists_.resize(segments_.size() * heads);
  for (size_t s = 0; s < segments_.size(); ++s)
    for (size_t g = 0; g < heads; ++g) {
      auto& list = lists_[s * heads + g];
      list.resize(static_cast<size_t>(pages_for(segments_[s].begin + segments_[s].count)));
      std::iota(list.begin(), list.end(), 0);
    }
  for (const size_t s : choosing_) {
    const PagedSegment& segment = segments_[s];
    BOUGH_CHECK(segment.count == 1, "a segment of ", segment.count, " tokens chooses pages");
    queries_.push_back({.token = first_token[s],
                        .pages = segment.pages.first(static_cast<size_t>(pages_for(segment.begin + 1)))});
  }
  chosen_.resize(queries_.size() * heads);
}

at::Tensor SparseContext::attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                                 const at::Tensor& v_TGH) {
  BOUGH_CHECK(layer >= 0 && layer < storage_.num_layers(), "layer ", layer, " of ", storage_.num_layers());
  const at::Tensor& pages = storage_.pages(layer);
  const SparsePolicy& sparse = storage_.sparse();
  const auto attend_by = [&](const PagedPlan& plan, bool stores) {
    return paged_attention({.q_TNH = q_TNH,
                            .k_TGH = stores ? k_TGH : at::Tensor(),
                            .v_TGH = stores ? v_TGH : at::Tensor(),
                            .pages = pages,
                            .plan = plan,
                            .scale = scale_});
  };
  if (layer < sparse.dense_layers) return attend_by(all_, true);
  const auto summarise = [&] {
    summarise_pages(pages, complete_, sparse.summary, shape_.head_dim, storage_.summaries(layer));
  };
  if (queries_.empty()) {
    at::Tensor o_TNH = attend_by(all_, true);
    summarise();
    return o_TNH;
  }
  // A page that this pass completes may be chosen by a later token of the same pass.
  store_in_pages(pages, k_TGH, v_TGH, slots_);
  summarise();
  choose_pages(q_TNH, storage_.summaries(layer), sparse.summary, queries_, sparse.budget_pages, chosen_);
  const auto heads = static_cast<size_t>(shape_.num_kv_heads);
  for (size_t i = 0; i < choosing_.size(); ++i)
    for (size_t g = 0; g < heads; ++g) std::swap(lists_[choosing_[i] * heads + g], chosen_[i * heads + g]);
  const PageSelection selection{.lists = lists_, .per_head = true};
  return attend_by(PagedPlan(segments_, shape_, &selection, path_), false);
}

ForwardPass::ForwardPass(const Model& model, KvStorage& storage, AttentionPath path, int64_t max_decode)
    : model_(model),
      storage_(storage),
      shape_{model.config().num_heads, storage.num_kv_heads(), storage.head_dim(), storage.dtype(),
             storage.device()},
      path_(path),
      max_decode_(rounded_decode_size(max_decode)) {}

bool ForwardPass::suits_graph(std::span<const PagedSegment> segments) const {
  return path_ == AttentionPath::kFastest && PagedPlan::on_cuda(shape_) &&
         static_cast<int64_t>(segments.size()) <= max_decode_ &&
         std::all_of(segments.begin(), segments.end(), [](const PagedSegment& s) { return s.count == 1; });
}

at::Tensor ForwardPass::run(std::span<const int64_t> tokens, std::span<const int64_t> positions,
                            std::span<const PagedSegment> segments, std::span<const uint8_t> is_drawn) {
  const at::Device device = model_.device();
  const auto num_tokens = static_cast<int64_t>(tokens.size());
  const at::Tensor tokens_T = upload(tokens, device), positions_T = upload(positions, device);
  if (storage_.sparse().is_sparse()) return run_sparse(tokens_T, positions_T, segments, is_drawn);
  if (suits_graph(segments)) {
    const PagedWork work = plan_paged_work(segments, shape_.num_heads, shape_.num_kv_heads);
    const int64_t size = rounded_decode_size(num_tokens);
    if (!tokens_T_.defined()) {
      tokens_T_ = at::zeros({max_decode_}, tokens_T.options());
      positions_T_ = at::zeros({max_decode_}, tokens_T.options());
    }
    tokens_T_.narrow(0, 0, num_tokens).copy_(tokens_T);
    positions_T_.narrow(0, 0, num_tokens).copy_(positions_T);
    if (Captured* pass = captured({size, !work.large.empty(), !work.merges.empty()}, work)) {
      pass->graph->replay();
      return pass->hidden_TD.narrow(0, 0, num_tokens);
    }
  }
  PagedContext attention(storage_, PagedPlan(segments, shape_, nullptr, path_),
                         model_.config().attention_scale());
  return model_.forward(tokens_T, positions_T, attention);
}

at::Tensor ForwardPass::run_sparse(const at::Tensor& tokens_T, const at::Tensor& positions_T,
                                   std::span<const PagedSegment> segments,
                                   std::span<const uint8_t> is_drawn) {
  BOUGH_CHECK(static_cast<int64_t>(is_drawn.size()) == tokens_T.size(0), is_drawn.size(), " marks for ",
              tokens_T.size(0), " tokens");
  const int64_t budget = storage_.sparse().budget_pages;
  std::vector<PagedSegment> cut;
  std::vector<size_t> choosing;
  size_t token = 0;
  for (const PagedSegment& segment : segments) {
    PagedSegment open = segment;  // what is not cut yet
    open.count = 0;
    for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i, ++token) {
      const int64_t pages = pages_for(i + 1);
      const bool chooses = is_drawn[token] != 0 && pages > budget;
      if (is_drawn[token] != 0) {
        pages_read_.pages += std::min(pages, budget);
        pages_read_.of += pages;
      }
      if (!chooses) {
        ++open.count;
        continue;
      }
      if (open.count > 0) cut.push_back(open);
      open.begin = i;
      open.count = 1;
      choosing.push_back(cut.size());
      cut.push_back(open);
      open.begin = i + 1;
      open.count = 0;
    }
    if (open.count > 0) cut.push_back(open);
  }
  SparseContext attention(storage_, shape_, path_, model_.config().attention_scale(), segments,
                          std::move(cut), std::move(choosing));
  return model_.forward(tokens_T, positions_T, attention);
}

// Returns the graph of these sizes, with `work` as its next; null if it has no room for it.
ForwardPass::Captured* ForwardPass::captured(const Key& key, const PagedWork& work) {
  const auto [size, has_large, has_merges] = key;
  Captured& pass = graphs_[key];
  if (pass.attention) return pass.graph && pass.attention->plan().set_work(work) ? &pass : nullptr;
  const int64_t num_groups = shape_.num_kv_heads;
  if (!parts_.defined()) {
    const int64_t num_parts = decode_capacities(max_decode_, num_groups, true, true).max_rows;
    parts_ = PagedPlan::make_parts(shape_, num_parts);
  }
  const int64_t max_pages = size * pages_for(model_.config().max_length());
  pass.attention = std::make_unique<PagedContext>(
      storage_,
      PagedPlan(shape_, decode_capacities(size, num_groups, has_large, has_merges), max_pages, parts_),
      model_.config().attention_scale());
  if (!pass.attention->plan().set_work(work)) {
    graphs_.erase(key);
    return nullptr;
  }
  pass.graph = capture_device_graph([&] {
    pass.hidden_TD =
        model_.forward(tokens_T_.narrow(0, 0, size), positions_T_.narrow(0, 0, size), *pass.attention);
  });
  return pass.graph ? &pass : nullptr;
}

}  // namespace bough
