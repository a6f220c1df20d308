#include "train/head.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "kernels/linear/linear.h"
#include "kernels/log_prob/log_prob.h"
#include "kernels/log_prob/log_prob_cost.h"
#include "models/tensor_parallel.h"

namespace bough {

namespace {
// Loss rows of each tree token, as a compressed list: token t has loss rows rows[begin[t]] to rows[begin[t +
// 1] - 1].
struct TokenRows {
  std::vector<int64_t> begin;  // [T + 1]
  std::vector<int64_t> rows;
};

TokenRows rows_by_token(const PlannedTree& planned, const TrainBatch& batch) {
  const auto& tree = *planned.tree;
  TokenRows result{std::vector<int64_t>(tree.num_tokens() + 1, 0), {}};
  const auto for_each = [&](const auto& visit) {
    for (size_t i = 0; i < planned.sequences.size(); ++i) {
      const int64_t s = planned.sequences[i];
      if (batch.trained_positions[s].empty()) continue;
      const auto path = tree.path(static_cast<int64_t>(i));
      int64_t row = batch.row_offset[s];
      for (const int32_t position : batch.trained_positions[s]) visit(path[position], row++);
    }
  };
  for_each([&](int32_t token, int64_t) { ++result.begin[token + 1]; });
  std::partial_sum(result.begin.begin(), result.begin.end(), result.begin.begin());
  result.rows.resize(result.begin.back());
  auto next = result.begin;
  for_each([&](int32_t token, int64_t row) { result.rows[next[token]++] = row; });
  return result;
}
}  // namespace

RowMap make_row_map(const PlannedTree& planned, const TrainBatch& batch) {
  const auto& tree = *planned.tree;
  const auto by_token = rows_by_token(planned, batch);
  const auto has_rows = [&](int32_t t) { return by_token.begin[t + 1] > by_token.begin[t]; };
  const size_t num_blocks = planned.blocks.size();
  std::vector<int32_t> block_of(tree.num_tokens()), local(tree.num_tokens());
  RowMap map{std::vector<BlockRows>(num_blocks), std::vector<std::vector<int64_t>>(num_blocks),
             std::vector<bool>(num_blocks)};
  for (size_t b = 0; b < num_blocks; ++b) {
    int32_t index = 0;
    for (const auto& range : planned.blocks[b].ranges) {
      for (int32_t t = range.begin; t < range.end; ++t) {
        block_of[t] = static_cast<int32_t>(b);
        local[t] = index++;
      }
      // An interior block's range is one path. It can receive gradients only from loss rows in the subtree of
      // its first token.
      if (by_token.begin[tree.subtree_end[range.begin]] > by_token.begin[range.begin]) map.needed[b] = true;
    }
    if (!planned.blocks[b].interior)  // a leaf block's range may have further roots outside that subtree
      for (const auto& range : planned.blocks[b].ranges)
        if (by_token.begin[range.end] > by_token.begin[range.begin]) map.needed[b] = true;
  }
  // A needed block also needs the prefix KV stack rows of its parent block (`above`).
  for (size_t b = num_blocks; b-- > 0;)
    if (map.needed[b] && planned.blocks[b].above >= 0) map.needed[planned.blocks[b].above] = true;
  std::vector<int32_t> boundary_row_of(tree.num_tokens(), -1);
  for (int32_t t = 0; t < tree.num_tokens(); ++t) {
    const int32_t p = tree.parent[t];
    if (p < 0 || !has_rows(t) || block_of[p] == block_of[t] || boundary_row_of[p] >= 0) continue;
    auto& boundary_rows = map.boundary_rows[block_of[p]];
    boundary_row_of[p] = static_cast<int32_t>(boundary_rows.size());
    boundary_rows.push_back(local[p]);
  }
  for (size_t b = 0; b < num_blocks; ++b) {
    auto& rows = map.blocks[b];
    rows.loss_begin.push_back(0);
    int32_t last_outside = -1;  // siblings have one parent, so one entry
    for (const auto& range : planned.blocks[b].ranges)
      for (int32_t t = range.begin; t < range.end; ++t) {
        if (!has_rows(t)) continue;
        const int32_t p = tree.parent[t];
        BOUGH_CHECK(p >= 0, "token ", t, " has a loss row but no parent");
        if (block_of[p] == static_cast<int32_t>(b)) {
          rows.sources.push_back(local[p]);
        } else {
          if (last_outside != p) rows.outside.push_back({block_of[p], boundary_row_of[p]});
          last_outside = p;
          rows.sources.push_back(planned.blocks[b].num_tokens + static_cast<int64_t>(rows.outside.size()) -
                                 1);
        }
        rows.labels.push_back(batch.token_of(tree.tokens[t]));
        rows.loss_rows.insert(rows.loss_rows.end(), by_token.rows.begin() + by_token.begin[t],
                              by_token.rows.begin() + by_token.begin[t + 1]);
        rows.loss_begin.push_back(static_cast<int64_t>(rows.loss_rows.size()));
      }
  }
  return map;
}

void add_rows_(const at::Tensor& to, const at::Tensor& rows, const at::Tensor& values) {
  if (to.is_cpu()) to.index_add_(0, rows, values);
  else at::index_put_(const_cast<at::Tensor&>(to), {rows}, values, /*accumulate=*/true);
}

void add_rows(HostToDeviceBatch& upload, const BlockRows& rows, RowIndices& indices) {
  std::vector<int64_t> row_of;
  row_of.reserve(rows.loss_rows.size());
  for (int64_t r = 0; r < rows.num_rows(); ++r)
    row_of.insert(row_of.end(), static_cast<size_t>(rows.loss_begin[r + 1] - rows.loss_begin[r]), r);
  upload.add(rows.labels, &indices.labels);
  upload.add(rows.sources, &indices.sources);
  upload.add(row_of, &indices.head_rows);
  upload.add(rows.loss_rows, &indices.loss_rows);
}

Head::Head(const Model& model, const TrainBatch& batch, const Options& options, ExecutionResult* result)
    : model_(model),
      batch_(batch),
      loss_(options.loss),
      chunk_rows_(options.chunk_rows),
      top_k_(options.top_k),
      result_(result) {
  if (chunk_rows_ == 0) chunk_rows_ = head_chunk_rows(model.config().vocab_size, model.device().is_cuda());
  const auto here = [&](const at::Tensor& x) { return x.defined() ? x.to(model.device()) : x; };
  if (loss_) fields_ = batch.fields.mapped(here);
  top_k_ids_RK_ = here(batch.top_k_ids_RK);
  if (const Seeds* seeds = options.seeds)
    seeds_ = {here(seeds->d_log_probs_R), here(seeds->d_entropies_R), here(seeds->d_top_k_RK)};
}

EvaluatedLoss evaluate_loss(const Loss& loss, LossRows fields, const at::Tensor& log_probs_R,
                            const at::Tensor& entropies_R, const at::Tensor& top_k_log_probs_RK) {
  at::AutoGradMode with_grad(true);
  fields.log_probs_R = log_probs_R.detach().requires_grad_(true);
  fields.entropies_R = entropies_R.detach().requires_grad_(true);
  torch::autograd::variable_list leaves = {fields.log_probs_R, fields.entropies_R};
  if (top_k_log_probs_RK.defined()) {
    fields.top_k_log_probs_RK = top_k_log_probs_RK.detach().requires_grad_(true);
    leaves.push_back(fields.top_k_log_probs_RK);
  }
  EvaluatedLoss result{loss(fields), {}};
  const auto gradients = torch::autograd::grad({result.output.loss}, leaves, {}, std::nullopt, false,
                                               /*allow_unused=*/true);
  result.seeds = {gradients[0], gradients[1], gradients.size() > 2 ? gradients[2] : at::Tensor()};
  return result;
}

at::Tensor Head::run(const BlockRows& rows, const RowIndices& indices, const at::Tensor& source_SD) {
  if (!loss_ || loss_->token_separable()) return run_chunks(rows, indices, source_SD, loss_ || seeds_);
  run_chunks(rows, indices, source_SD, false);
  seeds_ = block_seeds(rows);
  at::Tensor d_source_SD = run_chunks(rows, indices, source_SD, true);
  seeds_.reset();
  return d_source_SD;
}

Seeds Head::block_seeds(const BlockRows& rows) {
  // Sorted loss rows have the batch's order, in which the loss rows of a sequence are adjacent.
  std::vector<int64_t> ordered = rows.loss_rows;
  std::sort(ordered.begin(), ordered.end());
  const at::Tensor rows_L = upload(ordered, model_.device());
  const auto own = [&](const at::Tensor& x) {
    return x.defined() ? x.index_select(0, rows_L) : at::Tensor();
  };
  const RowValues& values = result_->values;
  auto evaluated = evaluate_loss(*loss_, fields_.mapped(own), own(values.log_probs_R),
                                 own(values.entropies_R), own(values.top_k_log_probs_RK));
  sums_.add(std::move(evaluated.output));
  const auto to_batch = [&](const at::Tensor& d, const at::Tensor& like) {
    return d.defined() ? at::zeros_like(like).index_copy_(0, rows_L, d) : at::Tensor();
  };
  Seeds seeds{to_batch(evaluated.seeds.d_log_probs_R, values.log_probs_R),
              to_batch(evaluated.seeds.d_entropies_R, values.entropies_R),
              to_batch(evaluated.seeds.d_top_k_RK, values.top_k_log_probs_RK)};
  if (!seeds.d_log_probs_R.defined()) seeds.d_log_probs_R = at::zeros_like(values.log_probs_R);
  return seeds;
}

// LossSums::add() reads the inputs of the metrics from the GPU as soon as they are more values than this.
constexpr int64_t kMostUnread = 1 << 18;

void LossSums::add(LossOutput output) {
  if (output.loss.is_cpu()) {
    loss_ += output.loss.item<double>();
  } else {
    const at::Tensor loss = output.loss.detach().to(at::kDouble);
    unread_loss_ = unread_loss_.defined() ? unread_loss_.add_(loss) : loss.clone();
  }
  merge(metrics_, output.metrics);
  unread_.append(std::move(output.unread));
  if (unread_.num_values() > kMostUnread) read_metrics();
}

void LossSums::read_metrics() {
  merge(metrics_, unread_.read());
  unread_ = {};
}

void LossSums::finish() {
  read_metrics();
  if (unread_loss_.defined()) loss_ += unread_loss_.item<double>();
  unread_loss_.reset();
}

void Head::finish() {
  sums_.finish();
  result_->loss += sums_.loss();
  merge(result_->metrics, sums_.metrics());
}

namespace {
// With tensor parallelism: each token id as an index into this rank's shard of the vocabulary; -1 for token
// ids of other ranks.
at::Tensor own_tokens(const at::Tensor& tokens, const Model& model) {
  if (!model.tensor_ranks()) return tokens;
  const at::Tensor own = tokens - model.first_token();
  return own.masked_fill((own < 0) | (own >= model.head().value.size(0)), -1);
}

// Merges the ranks' results into those of the whole vocabulary. Returns `own` if `ranks` is nullptr.
LogProbOutput of_all_columns(const LogProbOutput& own, Communicator* ranks) {
  if (!ranks) return own;
  const at::Tensor all = all_gather_stacked(at::stack({own.log_probs_R, own.lse_R, own.entropies_R}), *ranks);
  return merge_columns({all.select(1, 0), all.select(1, 1), all.select(1, 2)});
}

TopLogProbs top_of_all_columns(const at::Tensor& logits_RV, const at::Tensor& lse_R, int64_t k,
                               double temperature, const Model& model) {
  TopLogProbs top = top_log_probs(logits_RV, lse_R, k, temperature);
  if (!model.tensor_ranks()) return top;
  // A rank's shard may have fewer than k columns. The missing ones are filled with log-probability -inf.
  const int64_t missing = k - top.ids_RK.size(1);
  const at::Tensor ids = at::constant_pad_nd(top.ids_RK + model.first_token(), {0, missing}, -1);
  const at::Tensor values =
      at::constant_pad_nd(top.log_probs_RK, {0, missing}, -std::numeric_limits<double>::infinity());
  const auto beside = [&](const at::Tensor& own) {  // [size, R, K] to [R, size · K]
    return all_gather_stacked(own, *model.tensor_ranks()).transpose(0, 1).flatten(1);
  };
  const at::Tensor all_ids = beside(ids);
  const auto [best, places] = beside(values).topk(k, -1);
  return {all_ids.gather(1, places), best};
}
}  // namespace

at::Tensor Head::run_chunks(const BlockRows& rows, const RowIndices& indices, const at::Tensor& source_SD,
                            bool backward) {
  at::NoGradGuard no_grad;
  Communicator* const ranks = model_.tensor_ranks();
  const auto acc = accumulator_type(model_.dtype());
  at::Tensor d_source_SD =
      backward ? at::zeros(source_SD.sizes(), source_SD.options().dtype(acc)) : at::Tensor();
  for (int64_t begin = 0; begin < rows.num_rows(); begin += chunk_rows_) {
    const int64_t end = std::min(rows.num_rows(), begin + chunk_rows_);
    const auto sources = indices.sources.narrow(0, begin, end - begin);
    const auto labels = own_tokens(indices.labels.narrow(0, begin, end - begin), model_);
    const auto hidden_RD = source_SD.index_select(0, sources);
    const auto logits_RV = model_.own_logits(hidden_RD);
    const auto out = of_all_columns(log_prob_forward(logits_RV, labels, batch_.temperature), ranks);

    const int64_t loss_begin = rows.loss_begin[begin], num_loss_rows = rows.loss_begin[end] - loss_begin;
    const at::Tensor head_rows = indices.head_rows.narrow(0, loss_begin, num_loss_rows);
    Chunk chunk{out.log_probs_R,
                out.entropies_R,
                begin == 0 ? head_rows : head_rows.sub(begin),
                indices.loss_rows.narrow(0, loss_begin, num_loss_rows),
                {}};
    at::Tensor top_k_ids_LK;
    if (top_k_ids_RK_.defined()) {
      top_k_ids_LK = own_tokens(top_k_ids_RK_.index_select(0, chunk.loss_rows), model_);
      chunk.top_k_LK =
          top_k_log_probs(logits_RV, out.lse_R, chunk.head_rows, top_k_ids_LK, batch_.temperature);
      if (ranks) all_reduce_(chunk.top_k_LK, *ranks);
      result_->values.top_k_log_probs_RK.index_copy_(0, chunk.loss_rows, chunk.top_k_LK);
    }
    if (top_k_ > 0) {
      const auto top = top_of_all_columns(logits_RV, out.lse_R, top_k_, batch_.temperature, model_);
      result_->values.top_ids_RK.index_copy_(0, chunk.loss_rows, top.ids_RK.index_select(0, chunk.head_rows));
      result_->values.top_log_probs_RK.index_copy_(0, chunk.loss_rows,
                                                   top.log_probs_RK.index_select(0, chunk.head_rows));
    }
    result_->values.log_probs_R.index_copy_(0, chunk.loss_rows,
                                            chunk.log_probs.index_select(0, chunk.head_rows));
    result_->values.entropies_R.index_copy_(0, chunk.loss_rows,
                                            chunk.entropies.index_select(0, chunk.head_rows));
    if (!backward) continue;
    const auto gradients = chunk_gradients(chunk);
    log_prob_backward_(logits_RV, labels, out, gradients.d_log_probs_R, gradients.d_entropies_R,
                       batch_.temperature);
    if (gradients.d_top_k_LK.defined())
      add_top_k_gradient_(logits_RV, labels, chunk.head_rows, top_k_ids_LK, gradients.d_top_k_LK,
                          batch_.temperature);
    add_rows_(d_source_SD, sources, linear_backward(logits_RV, hidden_RD, model_.head()).to(acc));
  }
  if (ranks && backward) all_reduce_(d_source_SD, *ranks);
  return d_source_SD;
}

// The gradients of the chunk's head rows. The gradients of a token's loss rows are added.
Head::ChunkGradients Head::chunk_gradients(const Chunk& chunk) {
  const auto own = [&](const at::Tensor& x) {
    return x.defined() ? x.index_select(0, chunk.loss_rows) : at::Tensor();
  };
  Seeds seeds;
  if (seeds_) {
    seeds = {own(seeds_->d_log_probs_R), own(seeds_->d_entropies_R), own(seeds_->d_top_k_RK)};
  } else {
    auto evaluated =
        evaluate_loss(*loss_, fields_.mapped(own), chunk.log_probs.index_select(0, chunk.head_rows),
                      chunk.entropies.index_select(0, chunk.head_rows), chunk.top_k_LK);
    sums_.add(std::move(evaluated.output));
    seeds = evaluated.seeds;
  }
  const auto add = [&](const at::Tensor& d) {
    auto sum = at::zeros_like(chunk.log_probs);
    if (d.defined()) add_rows_(sum, chunk.head_rows, d);
    return sum;
  };
  ChunkGradients result{add(seeds.d_log_probs_R), add(seeds.d_entropies_R), seeds.d_top_k_RK};
  // Step 1 of the backward of top_k_log_probs (log_prob.h): each head row gets the sum of its d_top_k.
  if (seeds.d_top_k_RK.defined()) add_rows_(result.d_log_probs_R, chunk.head_rows, seeds.d_top_k_RK.sum(1));
  return result;
}

}  // namespace bough
