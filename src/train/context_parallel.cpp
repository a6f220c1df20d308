#include "train/context_parallel.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/error.h"
#include "models/tensor_parallel.h"
#include "train/tree_context.h"

namespace bough {

std::vector<TokenRun> context_runs(int64_t num_tokens, int64_t rank, int64_t size) {
  std::vector<TokenRun> runs;
  for (const int64_t index : {rank, 2 * size - 1 - rank}) {
    const TokenRun run{index * num_tokens / (2 * size), (index + 1) * num_tokens / (2 * size)};
    if (run.begin == run.end) continue;
    if (!runs.empty() && runs.back().end == run.begin) runs.back().end = run.end;
    else runs.push_back(run);
  }
  return runs;
}

ContextPass::ContextPass(Communicator& ranks, int64_t stack_rows, const std::vector<int32_t>& end_local,
                         int64_t least_run, HostToDeviceBatch& upload)
    : ranks_(ranks), stack_rows_(stack_rows), num_tokens_(std::ssize(end_local) - stack_rows) {
  std::vector<std::vector<int64_t>> tokens(static_cast<size_t>(ranks.size()));
  for (int64_t rank = 0; rank < ranks.size(); ++rank) {
    auto& own = tokens[static_cast<size_t>(rank)];
    for (const TokenRun& run : context_runs(num_tokens_, rank, ranks.size()))
      for (int64_t t = run.begin; t < run.end; ++t) own.push_back(t);
    most_ = std::max(most_, std::ssize(own));
  }
  std::vector<int64_t> places(static_cast<size_t>(num_tokens_));
  for (int64_t rank = 0; rank < ranks.size(); ++rank) {
    const auto& own = tokens[static_cast<size_t>(rank)];
    for (size_t i = 0; i < own.size(); ++i)
      places[static_cast<size_t>(own[i])] = rank * most_ + static_cast<int64_t>(i);
  }
  upload.add(places, &places_);
  std::vector<int64_t> own = tokens[static_cast<size_t>(ranks.rank())];
  if (own.empty()) own.push_back(0);
  upload.add(own, &own_tokens_);
  int64_t at = 0;
  const std::vector<TokenRun> runs = context_runs(num_tokens_, ranks.rank(), ranks.size());
  pieces_.reserve(runs.size());  // the upload keeps pointers to them
  for (const TokenRun& run : runs) {
    const int64_t length = run.end - run.begin;
    std::vector<int32_t> ends(end_local.begin(), end_local.begin() + stack_rows + run.end);
    for (int32_t& end : ends) end = static_cast<int32_t>(std::clamp<int64_t>(end - run.begin, 0, length));
    Piece& piece = pieces_.emplace_back(Piece{run, at, {}, {}});
    add_key_ends(upload, ends, stack_rows + run.begin, &piece.ends);
    if (least_run > 0) piece.segments = cut_into_segments(ends, stack_rows + run.begin, least_run);
    add_segments(upload, piece.segments);
    at += length;
  }
}

at::Tensor ContextPass::gather(const at::Tensor& own) const {
  std::vector<int64_t> sizes = own.sizes().vec();
  sizes[0] = most_;
  at::Tensor padded = own;
  if (own.size(0) != most_ || !has_tokens()) {
    padded = at::zeros(sizes, own.options());
    if (has_tokens()) padded.narrow(0, 0, own.size(0)).copy_(own);
  }
  return all_gather_stacked(padded, ranks_).flatten(0, 1).index_select(0, places_);
}

at::Tensor ContextPass::own_of(const at::Tensor& whole) const {
  const at::Tensor own = whole.index_select(0, own_tokens_);
  return has_tokens() ? own : at::zeros_like(own);
}

TreeAttentionInput ContextPass::input_of(const Piece& piece, const LayerInput& in) const {
  const int64_t length = piece.run.end - piece.run.begin, below = stack_rows_ + piece.run.begin;
  const auto own = [&](const at::Tensor& x) { return x.narrow(0, piece.at, length); };
  return {own(in.q_TNH),
          own(in.k_TGH),
          own(in.v_TGH),
          in.stack.k(in.layer, 0, below),
          in.stack.v(in.layer, 0, below),
          piece.ends.end_local,
          in.scale,
          piece.ends.spans};
}

TreeAttentionOutput ContextPass::forward(const LayerInput& in, bool verify_rows) {
  const int64_t layer = in.layer;
  const at::Tensor all = gather(at::stack({in.k_TGH, in.v_TGH}, 1));
  at::Tensor k_rows = in.stack.k(layer, stack_rows_, num_tokens_),
             v_rows = in.stack.v(layer, stack_rows_, num_tokens_);
  // is_again: this is a second forward of a pass with keep_rows(). It is compared with the kept rows, because
  // other passes may have overwritten the rows on the stack.
  const bool is_again = std::ssize(kept_rows_) > layer;
  if (verify_rows)
    BOUGH_CHECK(is_again ? at::equal(kept_rows_[static_cast<size_t>(layer)], all)
                         : at::equal(k_rows, all.select(1, 0)) && at::equal(v_rows, all.select(1, 1)),
                "a recompute differs from its first forward, layer ", layer, ", stack row ", stack_rows_);
  k_rows.copy_(all.select(1, 0));
  v_rows.copy_(all.select(1, 1));
  if (keeps_rows_ && !is_again) kept_rows_.push_back(all);
  const at::Tensor& q = in.q_TNH;
  const auto acc = accumulator_type(q.scalar_type());
  if (!has_tokens()) {  // the stand-in token 0 of own_tokens(): nothing reads its output
    const at::Tensor lse = at::zeros({1, q.size(1)}, q.options().dtype(acc));
    return {at::zeros_like(q), lse};
  }
  std::vector<at::Tensor> outputs, lses;
  for (const Piece& piece : pieces_) {
    const TreeAttentionInput input = input_of(piece, in);
    const TreeAttentionOutput out = piece.segments.empty()
                                        ? tree_attention_forward(input)
                                        : tree_attention_forward_by_segments(input, piece.segments);
    outputs.push_back(out.o_TNH);
    lses.push_back(out.lse_TN);
  }
  return {at::cat(outputs), at::cat(lses)};
}

TreeAttentionGradient ContextPass::backward(const LayerInput& in, const TreeAttentionOutput& out,
                                            const at::Tensor& d_o) const {
  const PrefixKvStack& stack = in.stack;
  const int64_t layer = in.layer;
  if (keeps_rows_) {
    const at::Tensor& all = kept_rows_[static_cast<size_t>(layer)];
    stack.k(layer, stack_rows_, num_tokens_).copy_(all.select(1, 0));
    stack.v(layer, stack_rows_, num_tokens_).copy_(all.select(1, 1));
  }
  TreeAttentionGradient own;
  if (d_o.defined()) own.d_q_TNH = at::zeros_like(in.q_TNH);
  for (const Piece& piece : pieces_) {
    if (!d_o.defined()) break;
    const int64_t length = piece.run.end - piece.run.begin, first = stack_rows_ + piece.run.begin;
    const TreeAttentionInput input = input_of(piece, in);
    const TreeAttentionOutput own_out{out.o_TNH.narrow(0, piece.at, length),
                                      out.lse_TN.narrow(0, piece.at, length)};
    const at::Tensor d_o_piece = d_o.narrow(0, piece.at, length);
    const at::Tensor d_k = stack.d_k(layer, 0, first), d_v = stack.d_v(layer, 0, first);
    const TreeAttentionGradient d =
        piece.segments.empty()
            ? tree_attention_backward(input, own_out, d_o_piece, d_k, d_v)
            : tree_attention_backward_by_segments(input, own_out, d_o_piece, d_k, d_v, piece.segments);
    own.d_q_TNH.narrow(0, piece.at, length).copy_(d.d_q_TNH);
    stack.d_k(layer, first, length).add_(d.d_k_TGH);
    stack.d_v(layer, first, length).add_(d.d_v_TGH);
  }
  const at::Tensor rows =
      at::stack({stack.d_k(layer, stack_rows_, num_tokens_), stack.d_v(layer, stack_rows_, num_tokens_)}, 1);
  all_reduce_(rows, ranks_);
  const at::Tensor of_own = own_of(rows);
  own.d_k_TGH = of_own.select(1, 0).contiguous();
  own.d_v_TGH = of_own.select(1, 1).contiguous();
  return own;
}

namespace {
class ContextCosts final : public PassCosts {
 public:
  ContextCosts(std::shared_ptr<const PassCosts> whole, int64_t size)
      : whole_(std::move(whole)), size_(size) {}

  double forward_seconds(const PassShape& pass) const override { return whole_->forward_seconds(own(pass)); }
  double backward_seconds(const PassShape& pass) const override {
    return whole_->backward_seconds(own(pass));
  }
  double attention_forward_seconds(const PassShape& pass) const override {
    return whole_->attention_forward_seconds(own(pass));
  }
  double attention_backward_seconds(const PassShape& pass) const override {
    return whole_->attention_backward_seconds(own(pass));
  }
  double head_forward_seconds(const PassShape& pass) const override {
    return whole_->head_forward_seconds(own(pass));
  }
  double head_backward_seconds(const PassShape& pass) const override {
    return whole_->head_backward_seconds(own(pass));
  }
  double recompute_seconds(const PassShape& pass, RecomputePolicy keep) const override {
    return whole_->recompute_seconds(own(pass), keep);
  }

  int64_t stack_row_bytes() const override { return whole_->stack_row_bytes(); }
  int64_t kept_bytes(RecomputePolicy keep) const override {
    const int64_t bytes = whole_->kept_bytes(keep);
    return bytes == 0 ? 0 : part(bytes) + stack_row_bytes();
  }
  int64_t boundary_bytes() const override { return whole_->boundary_bytes(); }
  int64_t row_bytes() const override { return whole_->row_bytes(); }
  int64_t temporary_bytes(const PassShape& pass, RecomputePolicy keep) const override {
    return whole_->temporary_bytes(own(pass), keep);
  }

 private:
  int64_t part(int64_t count) const { return (count + size_ - 1) / size_; }
  PassShape own(PassShape pass) const {
    for (int64_t* count : {&pass.tokens, &pass.pairs, &pass.head_rows}) *count = part(*count);
    for (int64_t* count : {&pass.stack_pairs, &pass.loss_rows})
      if (*count >= 0) *count = part(*count);
    return pass;
  }

  const std::shared_ptr<const PassCosts> whole_;
  const int64_t size_;
};
}  // namespace

std::shared_ptr<const PassCosts> context_costs(std::shared_ptr<const PassCosts> whole, int64_t size) {
  if (!whole || size == 1) return whole;
  return std::make_shared<ContextCosts>(std::move(whole), size);
}

}  // namespace bough
