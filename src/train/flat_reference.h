// The flat reference for tests: a decoder in plain tensor ops under libtorch's autograd, one sequence at a
// time, in fp64. It uses no kernel, tree or plan of the executor. A matrix with an adapter is computed as W +
// scale · B A, where A and B are separate leaves.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "models/model.h"
#include "train/make_batch.h"

namespace bough {

struct FlatResult {
  double loss = 0;                               // without losses of routers
  double aux_loss = 0, z_loss = 0;               // of routers, without coefficients
  at::Tensor log_probs_R, entropies_R;           // fp64
  std::map<std::string, at::Tensor> gradients;   // by Hugging Face name, fp64
  std::map<std::string, double> sequence_norms;  // sum over sequences of each one's gradient norm
};

class FlatReference {
 public:
  // Returns the keys that queries of a layer do not attend to, in addition to the causal mask: bool [N, n, n]
  // (heads, queries, keys), or undefined if there are none. q [N, n, H] and k [G, n, H]: after norm and
  // rotation. is_sampled: tokens that are marked as sampled (mark_tokens).
  using HiddenKeys = std::function<at::Tensor(int64_t layer, const at::Tensor& q_NTH, const at::Tensor& k_GTH,
                                              const std::vector<uint8_t>& is_sampled)>;

  explicit FlatReference(Model& model, HiddenKeys hidden_keys = {})
      : config_(model.config()), hidden_keys_(std::move(hidden_keys)) {
    for (Parameter* parameter : model.parameters()) {
      add_weights(*parameter);
      for (size_t i = 0; i < parameter->adapter_slices.size(); ++i) {
        for (const Parameter& factor : parameter->adapter) add_weights(factor);
        for (const auto& part : parameter->parts)
          if (part.begin == parameter->adapter_slices[i].begin)
            adapters_[parameter == &model.embedding() ? kHead : part.name] = {
                parameter->adapter[0].parts[i].name, parameter->adapter[1].parts[i].name,
                parameter->adapter_scale};
      }
    }
  }

  // From now on, the leading tokens of each sequence use these experts. Other tokens use the router's choice.
  void replay(std::vector<RoutedExperts> by_sequence) { replayed_ = std::move(by_sequence); }

  // From now on, run() adds the gradients of these losses (router_losses.h).
  void add_router_losses(const RouterLossSettings& settings) { router_losses_ = settings; }

  // Results with an autograd graph, for the tokens of a sequence from index 1 on: log-probabilities and
  // entropies [n - 1], and log-probabilities of the whole vocabulary [n - 1, V].
  struct SequenceValues {
    at::Tensor log_probs, entropies, all_log_probs;
  };
  SequenceValues sequence(const std::vector<int64_t>& marked_ids, double temperature,
                          const RoutedExperts& routed = {}) const {
    const int64_t n = static_cast<int64_t>(marked_ids.size());
    routes_.clear();
    std::vector<int64_t> ids;
    std::vector<uint8_t> is_sampled;
    for (const int64_t id : marked_ids) {
      ids.push_back(token_id(static_cast<int32_t>(id)));
      is_sampled.push_back(ids.back() != id);
    }
    const auto tokens = at::tensor(ids, at::kLong);
    auto x = weight("model.embed_tokens.weight").index_select(0, tokens);
    if (config_.scale_embedding) x = x * std::sqrt(double(config_.hidden_size));
    const auto causal = at::ones({n, n}, at::kBool).tril();
    for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".";
      const auto h = config_.pre_norms ? norm(x, prefix + "input_layernorm.weight") : x;
      const auto project = [&](const std::string& name, int64_t heads) {
        auto y = at::matmul(h, weight(prefix + "self_attn." + name + "_proj.weight").t());
        if (config_.qkv_bias) y = y + weight(prefix + "self_attn." + name + "_proj.bias");
        const std::string norm_name = prefix + "self_attn." + name + "_norm.weight";
        if (config_.qk_norm_over_width && name != "v") y = norm(y, norm_name);
        if (config_.clip_qkv > 0) y = y.clamp(-config_.clip_qkv, config_.clip_qkv);
        y = y.view({n, heads, config_.head_dim});
        if (config_.qk_norm && !config_.qk_norm_over_width && name != "v") y = norm(y, norm_name);
        return name == "v" ? y : rotate(y, layer);
      };
      const int64_t repeat = config_.num_heads / config_.num_kv_heads;
      const auto q = project("q", config_.num_heads).transpose(0, 1);
      const auto k_GTH = project("k", config_.num_kv_heads).transpose(0, 1);
      const auto k = k_GTH.repeat_interleave(repeat, 0);
      const auto v = project("v", config_.num_kv_heads).repeat_interleave(repeat, 1).transpose(0, 1);
      const auto scores = at::matmul(q, k.transpose(1, 2)) * config_.attention_scale();
      auto hidden = causal.logical_not();
      if (hidden_keys_)
        if (const auto more = hidden_keys_(layer, q.detach(), k_GTH.detach(), is_sampled); more.defined())
          hidden = hidden.logical_or(more);
      const auto p = scores.masked_fill(hidden, -INFINITY).softmax(-1);
      const auto o = at::matmul(p, v).transpose(0, 1).reshape({n, -1});
      auto attended = at::matmul(o, weight(prefix + "self_attn.o_proj.weight").t());
      if (config_.output_bias) attended = attended + weight(prefix + "self_attn.o_proj.bias");
      if (config_.post_norms) attended = norm(attended, prefix + "post_attention_layernorm.weight");
      x = x + attended;
      x = x + feed_forward(x, layer, prefix, routed);
    }
    x = norm(x, "model.norm.weight");
    const auto head = weight(kHead);
    const auto log_p = (at::matmul(x, head.t()) / temperature).log_softmax(-1).narrow(0, 0, n - 1);
    const auto log_probs = log_p.gather(1, tokens.narrow(0, 1, n - 1).unsqueeze(1)).squeeze(1);
    return {log_probs, -(log_p.exp() * log_p).sum(-1), log_p};
  }

  // Computes loss, log-probabilities and gradients, one sequence at a time. If the loss couples loss rows, it
  // is evaluated once for all rows, and each sequence backpropagates the gradients of its rows.
  FlatResult run(const TrainBatch& batch, const Loss& loss) {
    FlatResult result;
    std::vector<at::Tensor> log_probs_R, entropies_R;
    const LossRows coupled = loss.token_separable() ? LossRows() : coupled_seeds(batch, loss, result.loss);
    const at::Tensor shares_E = router_losses_.is_used() ? expert_shares(batch) : at::Tensor();
    for (auto& [name, w] : weights_) result.gradients[name] = at::zeros_like(w).detach();
    for (size_t s = 0; s < batch.sequences.size(); ++s) {
      const int64_t begin = batch.row_offset[s], count = batch.row_offset[s + 1] - begin;
      if (count == 0) continue;
      const auto [log_probs, entropies, all_log_probs] =
          sequence({batch.sequences[s].begin(), batch.sequences[s].end()}, batch.temperature,
                   replayed_.empty() ? RoutedExperts() : replayed_[s]);
      const auto& positions = batch.trained_positions[s];
      const auto index = at::tensor(std::vector<int64_t>(positions.begin(), positions.end()), at::kLong) - 1;
      auto rows = slice(batch.fields, begin, count);
      rows.log_probs_R = log_probs.index_select(0, index);
      rows.entropies_R = entropies.index_select(0, index);
      if (batch.top_k_ids_RK.defined())
        rows.top_k_log_probs_RK =
            all_log_probs.index_select(0, index).gather(1, batch.top_k_ids_RK.narrow(0, begin, count));
      log_probs_R.push_back(rows.log_probs_R.detach());
      entropies_R.push_back(rows.entropies_R.detach());
      at::Tensor own;
      if (loss.token_separable()) {
        own = loss(rows).loss;
        result.loss += own.item<double>();
      } else {
        own = rows.log_probs_R.mul(coupled.log_probs_R.narrow(0, begin, count)).sum() +
              rows.entropies_R.mul(coupled.entropies_R.narrow(0, begin, count)).sum();
        if (rows.top_k_log_probs_RK.defined())
          own = own + rows.top_k_log_probs_RK.mul(coupled.top_k_log_probs_RK.narrow(0, begin, count)).sum();
      }
      if (shares_E.defined()) own = own + router_losses(batch, positions.back() + 1, shares_E, result);
      for (auto& [name, w] : weights_) w.mutable_grad() = at::Tensor();
      own.backward();
      for (auto& [name, w] : weights_) {
        if (!w.grad().defined()) continue;
        result.gradients[name] += w.grad();
        result.sequence_norms[name] += w.grad().norm().item<double>();
      }
    }
    if (!log_probs_R.empty())
      result.log_probs_R = at::cat(log_probs_R), result.entropies_R = at::cat(entropies_R);
    return result;
  }

 private:
  int64_t num_counted(const TrainBatch& batch) const {  // tokens in layers with experts
    int64_t count = 0;
    for (const auto& positions : batch.trained_positions)
      if (!positions.empty()) count += positions.back() + 1;
    return count * config_.num_sparse_layers();
  }
  // Each expert's share of the choices, over all tokens up to the last trained one of their sequence.
  at::Tensor expert_shares(const TrainBatch& batch) const {
    auto shares_E = at::zeros({config_.num_experts}, at::kDouble);
    for (size_t s = 0; s < batch.sequences.size(); ++s) {
      if (batch.trained_positions[s].empty()) continue;
      sequence({batch.sequences[s].begin(), batch.sequences[s].end()}, batch.temperature,
               replayed_.empty() ? RoutedExperts() : replayed_[s]);
      for (const auto& [logits_TE, chosen_TK] : routes_)
        shares_E += at::one_hot(chosen_TK.narrow(0, 0, batch.trained_positions[s].back() + 1).flatten(),
                                config_.num_experts)
                        .sum(0);
    }
    return shares_E / double(num_counted(batch));
  }
  // The weighted losses of the routers of the last sequence(), over its first num_tokens tokens.
  at::Tensor router_losses(const TrainBatch& batch, int64_t num_tokens, const at::Tensor& shares_E,
                           FlatResult& result) const {
    auto aux = at::zeros({}, at::kDouble), z = at::zeros({}, at::kDouble);
    for (const auto& [all_TE, chosen_TK] : routes_) {
      const auto logits_TE = all_TE.narrow(0, 0, num_tokens);
      aux = aux + double(config_.num_experts) * (logits_TE.softmax(1) * shares_E).sum();
      z = z + logits_TE.logsumexp(1).square().sum();
    }
    aux = aux / double(num_counted(batch));
    z = z / double(num_counted(batch));
    result.aux_loss += aux.item<double>();
    result.z_loss += z.item<double>();
    return router_losses_.router_aux_loss_coef * aux + router_losses_.router_z_loss_coef * z;
  }

  // Sets `total` to the loss of all loss rows. Returns its gradients in the fields log_probs_R, entropies_R
  // and top_k_log_probs_RK.
  LossRows coupled_seeds(const TrainBatch& batch, const Loss& loss, double& total) const {
    std::vector<at::Tensor> log_probs_R = {at::zeros({0}, at::kDouble)}, entropies_R = log_probs_R, given;
    for (size_t s = 0; s < batch.sequences.size(); ++s) {
      const auto& positions = batch.trained_positions[s];
      if (positions.empty()) continue;
      const auto [log_probs, entropies, all_log_probs] =
          sequence({batch.sequences[s].begin(), batch.sequences[s].end()}, batch.temperature,
                   replayed_.empty() ? RoutedExperts() : replayed_[s]);
      const auto index = at::tensor(std::vector<int64_t>(positions.begin(), positions.end()), at::kLong) - 1;
      log_probs_R.push_back(log_probs.index_select(0, index).detach());
      entropies_R.push_back(entropies.index_select(0, index).detach());
      if (batch.top_k_ids_RK.defined())
        given.push_back(all_log_probs.index_select(0, index)
                            .gather(1, batch.top_k_ids_RK.narrow(0, batch.row_offset[s], index.numel()))
                            .detach());
    }
    LossRows rows = slice(batch.fields, 0, batch.num_rows());
    rows.log_probs_R = at::cat(log_probs_R).requires_grad_(true);
    rows.entropies_R = at::cat(entropies_R).requires_grad_(true);
    if (batch.top_k_ids_RK.defined())
      rows.top_k_log_probs_RK =
          (given.empty() ? at::zeros({0, batch.top_k_ids_RK.size(1)}, at::kDouble) : at::cat(given))
              .requires_grad_(true);
    const auto out = loss(rows);
    total = out.loss.item<double>();
    out.loss.backward();
    LossRows seeds;
    const auto gradient = [](const at::Tensor& x) {
      return x.grad().defined() ? x.grad() : at::zeros_like(x);
    };
    seeds.log_probs_R = gradient(rows.log_probs_R);
    seeds.entropies_R = gradient(rows.entropies_R);
    if (rows.top_k_log_probs_RK.defined()) seeds.top_k_log_probs_RK = gradient(rows.top_k_log_probs_RK);
    return seeds;
  }

  // y: [n, heads, H] at positions 0, 1, ...
  at::Tensor rotate(const at::Tensor& y, int64_t layer) const {
    const LayerRope kind = config_.layer_rope(layer);
    if (kind == LayerRope::kNone) return y;
    const double theta = (kind == LayerRope::kLocal ? config_.local_rope : config_.rope).theta;
    const int64_t turned = config_.turned_elements(), half = turned / 2;
    const auto frequency = at::pow(theta, -at::arange(half, at::kDouble) * 2 / turned);
    const auto angle = at::arange(y.size(0), at::kDouble).unsqueeze(1) * frequency;
    const auto a = y.narrow(2, 0, half), b = y.narrow(2, half, half);
    const auto c = angle.cos().unsqueeze(1), s = angle.sin().unsqueeze(1);
    return at::cat({a * c - b * s, b * c + a * s, y.narrow(2, turned, y.size(2) - turned)}, 2);
  }

  // The result does not include the residual.
  at::Tensor feed_forward(const at::Tensor& x, int64_t layer, const std::string& prefix,
                          const RoutedExperts& routed) const {
    const char* norm_name = config_.post_norms ? "pre_feedforward_layernorm" : "post_attention_layernorm";
    const auto m = config_.pre_norms ? norm(x, prefix + norm_name + ".weight") : x;
    const auto y =
        config_.is_sparse(layer) ? experts(m, layer, prefix + "mlp.", routed) : gated(m, prefix + "mlp.");
    return config_.post_norms ? norm(y, prefix + "post_feedforward_layernorm.weight") : y;
  }

  at::Tensor gated(const at::Tensor& m, const std::string& prefix) const {
    const auto product = [&](const at::Tensor& y, const std::string& name) {
      const auto z = at::matmul(y, weight(prefix + name + "_proj.weight").t());
      return config_.mlp_bias ? z + weight(prefix + name + "_proj.bias") : z;
    };
    const auto gate = product(m, "gate");
    const bool silu = config_.activation == GateActivation::kSilu;
    return product((silu ? at::silu(gate) : at::gelu(gate, "tanh")) * product(m, "up"), "down");
  }

  // Computes every expert for every token. The weights of experts that a token does not use are 0.
  at::Tensor experts(const at::Tensor& m, int64_t layer, const std::string& prefix,
                     const RoutedExperts& routed) const {
    const auto logits_TE = at::matmul(m, weight(prefix + "gate.weight").t()), p_TE = logits_TE.softmax(-1);
    const auto chosen_TK = std::get<1>(p_TE.detach().topk(config_.experts_per_token, -1));
    int64_t index = 0;  // among the layers with experts
    for (int64_t below = 0; below < layer; ++below) index += config_.is_sparse(below);
    for (int64_t t = 0; t < std::min(routed.num_rows(), m.size(0)); ++t)
      for (int64_t k = 0; k < config_.experts_per_token; ++k)
        chosen_TK[t][k] = routed.row(t)[static_cast<size_t>(index * config_.experts_per_token + k)];
    routes_.emplace_back(logits_TE, chosen_TK);
    auto weights_TE = p_TE * at::zeros_like(p_TE).scatter(1, chosen_TK, 1.0);
    if (config_.renormalises_experts) weights_TE = weights_TE / weights_TE.sum(-1, true);
    auto y = at::zeros_like(m);
    for (int64_t e = 0; e < config_.num_experts; ++e)
      y = y + weights_TE.narrow(1, e, 1) * gated(m, prefix + "experts." + std::to_string(e) + ".");
    return y;
  }

  static LossRows slice(const LossRows& all, int64_t begin, int64_t count) {
    return all.mapped([&](const at::Tensor& x) {
      return x.narrow(0, begin, count).to(x.is_floating_point() ? at::kDouble : x.scalar_type());
    });
  }
  void add_weights(const Parameter& parameter) {
    for (const auto& part : parameter.parts)
      weights_[part.name] = parameter.part_value(part).to(at::kCPU, at::kDouble).clone().requires_grad_(true);
  }
  at::Tensor weight(const std::string& name) const {
    const auto found = adapters_.find(name);
    // The adapter of a tied lm_head acts on the logits only.
    const auto& own =
        weights_.at(name == kHead && config_.tie_word_embeddings ? "model.embed_tokens.weight" : name);
    if (found == adapters_.end()) return own;
    const auto& [a, b, scale] = found->second;
    return own + at::matmul(weights_.at(b), weights_.at(a)) * scale;
  }
  at::Tensor norm(const at::Tensor& x, const std::string& name) const {
    return x / (x.square().mean(-1, true) + config_.rms_norm_eps).sqrt() *
           (weight(name) + config_.norm_weight_offset);
  }

  static constexpr const char* kHead = "lm_head.weight";

  struct Adapter {  // names of the two factors
    std::string a, b;
    double scale;
  };

  ModelConfig config_;
  HiddenKeys hidden_keys_;
  std::vector<RoutedExperts> replayed_;
  RouterLossSettings router_losses_;
  mutable std::vector<std::pair<at::Tensor, at::Tensor>>
      routes_;  // last sequence(): logits, experts by layer
  std::map<std::string, at::Tensor> weights_;
  std::map<std::string, Adapter> adapters_;  // keyed by the matrix's name
};

}  // namespace bough
