// The decoder of all model families: layers of grouped-query attention and a gated feed-forward network.
// ModelConfig describes the differences: a layer's norms and biases, its rotary embedding, its activation.
#include "models/decoder.h"

#include <ATen/ATen.h>

#include <array>
#include <cmath>

#include "base/error.h"
#include "kernels/embedding/embedding.h"
#include "kernels/experts/experts.h"
#include "kernels/linear/linear.h"
#include "kernels/qk_norm_rotary/qk_norm_rotary.h"
#include "kernels/rms_norm/rms_norm.h"
#include "models/tensor_parallel.h"

namespace bough {

namespace {
// Matrix rows of a Parameter: `count` rows of this rank's shard of the checkpoint tensor `name`. `dimension`,
// `first`, `whole`: the shard begins at index `first` of `whole` along `dimension`. `copies`: the number of
// ranks with the same rows. `sums_copies`: their gradients are summands, not copies of the whole gradient.
struct Rows {
  std::string name;
  int64_t count = 0;
  int64_t dimension = 0, first = 0, whole = 0;
  int64_t copies = 1;
  bool sums_copies = true;
};

Parameter make_parameter(const std::vector<Rows>& rows, std::optional<int64_t> columns,
                         const at::TensorOptions& options) {
  Parameter parameter;
  int64_t total = 0;
  for (const Rows& each : rows) {
    parameter.parts.push_back({each.name, total, total + each.count, each.dimension, each.first, each.whole,
                               each.copies, each.sums_copies});
    total += each.count;
  }
  parameter.value = columns ? at::empty({total, *columns}, options) : at::empty({total}, options);
  return parameter;
}

class Decoder : public Model {
 public:
  // weights_on: where the parameters' values are allocated, the model's device or meta.
  Decoder(const ModelConfig& config, const at::TensorOptions& model_options, const ModelRanks& ranks,
          at::Device weights_on);

  at::Tensor forward(const at::Tensor& tokens_T, const at::Tensor& positions_T,
                     AttentionContext& attention) const override;
  std::vector<Parameter*> parameters() override;
  const Parameter& embedding() const override { return embedding_; }
  const Parameter& head() const override { return config_.tie_word_embeddings ? embedding_ : head_; }
  std::unique_ptr<Model> share() const override { return std::make_unique<Decoder>(*this); }
  std::vector<Parameter*> layer_matrices() override;
  std::vector<Parameter*> expert_matrices() override;
  void untie_head() override;

 private:
  // Parameters that the model lacks, or that another pipeline stage has, are undefined. A sparse layer has a
  // router, and its gate_up and down hold all experts, one after another.
  struct Layer {
    Parameter attention_norm, qkv, qkv_bias, q_norm, k_norm, output, output_bias, attention_post_norm;
    Parameter mlp_norm, router, gate_up, gate_up_bias, down, down_bias, mlp_post_norm;

    bool is_sparse() const { return router.value.defined(); }
    std::vector<Parameter*> parameters() {
      return {&attention_norm,      &qkv,      &qkv_bias, &q_norm,  &k_norm,       &output, &output_bias,
              &attention_post_norm, &mlp_norm, &router,   &gate_up, &gate_up_bias, &down,   &down_bias,
              &mlp_post_norm};
    }
  };
  Layer make_layer(int64_t index, const at::TensorOptions& options) const;
  void add_attention(Layer& layer, const std::string& prefix, const at::TensorOptions& options) const;
  void add_mlp(Layer& layer, const std::string& prefix, const at::TensorOptions& options) const;
  void add_experts(Layer& layer, const std::string& prefix, const at::TensorOptions& options) const;
  // Rows that every tensor rank holds. If whole_gradient, each rank computes their whole gradient, else a
  // summand of this gradient.
  Rows copied(const std::string& name, int64_t count, bool whole_gradient = false) const {
    return {.name = name, .count = count, .copies = num_ranks(), .sums_copies = !whole_gradient};
  }
  int64_t num_ranks() const { return ranks_.tensor ? ranks_.tensor->size() : 1; }
  int64_t rank() const { return ranks_.tensor ? ranks_.tensor->rank() : 0; }
  // Communication at the input and the output of a layer (tensor_parallel.h).
  at::Tensor into_layer(const at::Tensor& x_TD) const {
    return ranks_.tensor ? copy_to_ranks(x_TD, *ranks_.tensor) : x_TD;
  }
  at::Tensor out_of_layer(const at::Tensor& y_TD) const {
    return ranks_.tensor ? sum_over_ranks(y_TD, *ranks_.tensor) : y_TD;
  }
  // Returns the bias of a product that is summed over tensor ranks. nullptr on ranks other than 0, so that
  // the bias is added once.
  const Parameter* bias_of_sum(const Parameter& bias) const;
  at::Tensor embed(const at::Tensor& tokens_T) const;

  // The two halves of a layer (no plan blocks): attention and feed-forward, each with its norms and residual.
  at::Tensor attention_block(const Layer& layer, int64_t index, const at::Tensor& x_TD,
                             const RotaryTable& rotary, AttentionContext& attention) const;
  at::Tensor mlp_block(const Layer& layer, int64_t index, const at::Tensor& x_TD, bool output_is_read,
                       AttentionContext& attention) const;
  // The router and the experts of a sparse layer, without post-norm.
  at::Tensor experts_block(const Layer& layer, int64_t index, const at::Tensor& x_TD, bool output_is_read,
                           AttentionContext& attention) const;

  // Returns the table of each LayerRope that the model uses, indexed by the enum's value.
  std::array<RotaryTable, 3> rotary_tables(const at::Tensor& positions_T) const;

  Parameter embedding_;
  std::vector<Layer> layers_;
  Parameter final_norm_;
  Parameter head_;                                     // undefined if tied
  at::Tensor global_frequencies_, local_frequencies_;  // of rotary angles; undefined if no layer uses them
};

bool has_rope(const ModelConfig& config, LayerRope rope) {
  for (int64_t layer = 0; layer < config.num_layers; ++layer)
    if (config.layer_rope(layer) == rope) return true;
  return false;
}

Decoder::Decoder(const ModelConfig& config, const at::TensorOptions& model_options, const ModelRanks& ranks,
                 at::Device weights_on)
    : Model(config, model_options, ranks) {
  const at::TensorOptions options = model_options.device(weights_on);
  const int64_t width = config.hidden_size;
  const Slice tokens = vocabulary_slice(config.vocab_size, rank(), num_ranks());
  const auto of_vocabulary = [&](const char* name) -> Rows {
    return {.name = name, .count = tokens.count, .first = tokens.first, .whole = config.vocab_size};
  };
  if (stage_.is_first() || (stage_.is_last() && config.tie_word_embeddings && config.computes_logits))
    embedding_ = make_parameter({of_vocabulary("model.embed_tokens.weight")}, width, options);
  for (int64_t i = 0; i < stage_.num_layers; ++i)
    layers_.push_back(make_layer(stage_.first_layer + i, options));
  if (stage_.is_last()) {
    final_norm_ = make_parameter({copied("model.norm.weight", width, /*whole_gradient=*/true)}, {}, options);
    if (!config.tie_word_embeddings)
      head_ = make_parameter({of_vocabulary("lm_head.weight")}, width, options);
  }
  const auto frequencies = [&](const Rope& rope) {
    return rope_frequencies(rope, config.turned_elements(), accumulator_type(dtype())).to(device());
  };
  if (has_rope(config, LayerRope::kGlobal)) global_frequencies_ = frequencies(config.rope);
  if (has_rope(config, LayerRope::kLocal)) local_frequencies_ = frequencies(config.local_rope);
}

Decoder::Layer Decoder::make_layer(int64_t index, const at::TensorOptions& options) const {
  const int64_t width = config_.hidden_size;
  const std::string prefix = str("model.layers.", index, ".");
  // of_sum: the norm's input is already summed over the tensor ranks, so each rank computes the whole
  // gradient of the norm's weight. Otherwise each rank computes a summand of this gradient.
  const auto norm = [&](const char* name, bool of_sum = false) {
    return make_parameter({copied(prefix + name + ".weight", width, of_sum)}, {}, options);
  };
  Layer layer;
  // In a model without post-norms, post_attention_layernorm names the norm before the feed-forward network.
  if (config_.pre_norms) {
    layer.attention_norm = norm("input_layernorm");
    layer.mlp_norm = norm(config_.post_norms ? "pre_feedforward_layernorm" : "post_attention_layernorm");
  }
  if (config_.post_norms) {
    layer.attention_post_norm = norm("post_attention_layernorm", /*of_sum=*/true);
    layer.mlp_post_norm = norm("post_feedforward_layernorm", /*of_sum=*/true);
  }
  add_attention(layer, prefix + "self_attn.", options);
  if (config_.is_sparse(index)) add_experts(layer, prefix + config_.family->experts.block + ".", options);
  else add_mlp(layer, prefix + "mlp.", options);
  return layer;
}

void Decoder::add_attention(Layer& layer, const std::string& attn, const at::TensorOptions& options) const {
  const ModelConfig& config = config_;
  const int64_t width = config.hidden_size;
  const int64_t q_rows = config.query_width(), kv_rows = config.key_width();
  const int64_t all_q = unsharded_config_.query_width(), all_kv = unsharded_config_.key_width();
  // If there are fewer key heads than tensor ranks, several ranks have a copy of the same key head.
  const int64_t copies = num_ranks() * kv_rows / all_kv;
  const int64_t first_q = rank() * q_rows, first_kv = rank() / copies * kv_rows;
  const auto qkv = [&](const char* kind) -> std::vector<Rows> {
    const auto rows = [&](const char* name, int64_t count, int64_t first, int64_t whole, int64_t num_copies) {
      return Rows{attn + name + kind, count, 0, first, whole, num_copies};
    };
    if (!config.fused_projections)
      return {rows("q_proj", q_rows, first_q, all_q, 1), rows("k_proj", kv_rows, first_kv, all_kv, copies),
              rows("v_proj", kv_rows, first_kv, all_kv, copies)};
    const int64_t all = all_q + 2 * all_kv;
    if (!ranks_.tensor) return {rows("qkv_proj", all, 0, all, 1)};
    return {rows("qkv_proj", q_rows, first_q, all, 1),
            rows("qkv_proj", kv_rows, all_q + first_kv, all, copies),
            rows("qkv_proj", kv_rows, all_q + all_kv + first_kv, all, copies)};
  };
  layer.qkv = make_parameter(qkv(".weight"), width, options);
  if (config.qkv_bias) layer.qkv_bias = make_parameter(qkv(".bias"), {}, options);
  if (config.qk_norm_over_width) {
    layer.q_norm = make_parameter({{attn + "q_norm.weight", q_rows, 0, first_q, all_q}}, {}, options);
    layer.k_norm =
        make_parameter({{attn + "k_norm.weight", kv_rows, 0, first_kv, all_kv, copies}}, {}, options);
  } else if (config.qk_norm) {
    layer.q_norm = make_parameter({copied(attn + "q_norm.weight", config.head_dim)}, {}, options);
    layer.k_norm = make_parameter({copied(attn + "k_norm.weight", config.head_dim)}, {}, options);
  }
  layer.output = make_parameter({{attn + "o_proj.weight", width, 1, first_q, all_q}}, q_rows, options);
  if (config.output_bias)
    layer.output_bias = make_parameter({copied(attn + "o_proj.bias", width)}, {}, options);
}

void Decoder::add_mlp(Layer& layer, const std::string& mlp, const at::TensorOptions& options) const {
  const int64_t width = config_.hidden_size, inner = config_.intermediate_size;
  const auto gate_up = [&](const char* kind) -> std::vector<Rows> {
    const int64_t all = unsharded_config_.intermediate_size, first = rank() * inner;
    if (!config_.fused_projections)
      return {{mlp + "gate_proj" + kind, inner, 0, first, all},
              {mlp + "up_proj" + kind, inner, 0, first, all}};
    if (!ranks_.tensor) return {{mlp + "gate_up_proj" + kind, 2 * all, 0, 0, 2 * all}};
    return {{mlp + "gate_up_proj" + kind, inner, 0, first, 2 * all},
            {mlp + "gate_up_proj" + kind, inner, 0, all + first, 2 * all}};
  };
  layer.gate_up = make_parameter(gate_up(".weight"), width, options);
  layer.down = make_parameter(
      {{mlp + "down_proj.weight", width, 1, rank() * inner, unsharded_config_.intermediate_size}}, inner,
      options);
  if (config_.mlp_bias) {
    layer.gate_up_bias = make_parameter(gate_up(".bias"), {}, options);
    layer.down_bias = make_parameter({copied(mlp + "down_proj.bias", width)}, {}, options);
  }
}

void Decoder::add_experts(Layer& layer, const std::string& block, const at::TensorOptions& options) const {
  const Experts& names = config_.family->experts;
  const int64_t width = config_.hidden_size, inner = config_.expert_intermediate_size;
  std::vector<Rows> gate_up, down;
  for (int64_t e = 0; e < config_.num_experts; ++e) {
    const auto name = [&](const char* kind) { return str(block, "experts.", e, ".", kind, ".weight"); };
    gate_up.push_back(copied(name(names.gate), inner));
    gate_up.push_back(copied(name(names.up), inner));
    down.push_back(copied(name(names.down), width));
  }
  layer.router = make_parameter({copied(block + "gate.weight", config_.num_experts)}, width, options);
  layer.gate_up = make_parameter(gate_up, width, options);
  layer.down = make_parameter(down, inner, options);
}

std::vector<Parameter*> Decoder::parameters() {
  std::vector<Parameter*> all = {&embedding_};
  for (auto& layer : layers_)
    for (Parameter* parameter : layer.parameters()) all.push_back(parameter);
  all.push_back(&final_norm_);
  all.push_back(&head_);
  std::erase_if(all, [](const Parameter* parameter) { return !parameter->value.defined(); });
  return all;
}

std::vector<Parameter*> Decoder::layer_matrices() {
  std::vector<Parameter*> all;
  for (auto& layer : layers_)
    for (Parameter* parameter : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
      all.push_back(parameter);
  return all;
}

std::vector<Parameter*> Decoder::expert_matrices() {
  std::vector<Parameter*> all;
  for (auto& layer : layers_)
    if (layer.is_sparse()) all.insert(all.end(), {&layer.gate_up, &layer.down});
  return all;
}

void Decoder::untie_head() {
  if (!config_.tie_word_embeddings) return;
  BOUGH_CHECK(is_unsharded(), "only an unsharded model can be untied");
  head_ = embedding_;
  head_.value = embedding_.value.clone();
  head_.main_grad.reset();
  head_.parts[0].name = "lm_head.weight";
  embedding_.adapter.clear();
  embedding_.adapter_slices.clear();
  embedding_.frozen_adapter.clear();
  for (ModelConfig* config : {&config_, &unsharded_config_}) {
    config->tie_word_embeddings = false;
    if (config->source.is_object() && !config->source.empty()) config->source["tie_word_embeddings"] = false;
  }
}

const Parameter* if_defined(const Parameter& parameter) {
  return parameter.value.defined() ? &parameter : nullptr;
}

const Parameter* Decoder::bias_of_sum(const Parameter& bias) const {
  return rank() == 0 ? if_defined(bias) : nullptr;
}

// RMSNorm of elements that are sharded over tensor ranks. Divides by the RMS of the local elements, then
// multiplies by local RMS / global RMS. The sum of squares is all-reduced. So is its gradient, because every
// rank's output depends on the sum.
at::Tensor norm_over_ranks(const at::Tensor& x, const Parameter& weight, const NormSettings& norm,
                           Communicator* ranks) {
  const at::Tensor by_own = rms_norm(x.contiguous(), weight, norm);
  if (!ranks) return by_own;
  const Parameter::Part& part = weight.parts[0];
  const at::Tensor own_T1 = x.to(accumulator_type(x.scalar_type())).square().sum(-1, /*keepdim=*/true);
  const at::Tensor all_T1 =
      copy_to_ranks(sum_over_ranks(own_T1 / static_cast<double>(part.copies), *ranks), *ranks);
  const at::Tensor factor_T1 = at::sqrt((own_T1 / static_cast<double>(x.size(1)) + norm.eps) /
                                        (all_T1 / static_cast<double>(part.whole) + norm.eps));
  return (by_own * factor_T1).to(x.scalar_type());
}

// Applies one RMSNorm to all heads of q together, and another one to all heads of k. v is unchanged.
at::Tensor norm_qk_over_width(const at::Tensor& qkv, const QkvLayout& layout, const Parameter& q_norm,
                              const Parameter& k_norm, const NormSettings& norm, Communicator* ranks) {
  const int64_t q_width = layout.num_heads * layout.head_dim, k_width = layout.num_kv_heads * layout.head_dim;
  const auto parts = qkv.split_with_sizes({q_width, k_width, k_width}, 1);
  return at::cat({norm_over_ranks(parts[0], q_norm, norm, ranks),
                  norm_over_ranks(parts[1], k_norm, norm, ranks), parts[2]},
                 1);
}

at::Tensor Decoder::attention_block(const Layer& layer, int64_t index, const at::Tensor& x_TD,
                                    const RotaryTable& rotary, AttentionContext& attention) const {
  const QkvLayout layout{config_.num_heads, config_.num_kv_heads, config_.head_dim};
  const NormSettings norm = config_.norm();
  const at::Tensor in_TD = into_layer(x_TD);
  auto [qkv, residual_TD] =
      config_.pre_norms
          ? norm_linear(in_TD, layer.attention_norm, norm, layer.qkv, if_defined(layer.qkv_bias),
                        batch_invariant())
          : NormLinearOutput{linear(in_TD, layer.qkv, if_defined(layer.qkv_bias), batch_invariant()), x_TD};
  const bool norm_of_heads = config_.qk_norm && !config_.qk_norm_over_width;
  if (config_.qk_norm_over_width)
    qkv = norm_qk_over_width(qkv, layout, layer.q_norm, layer.k_norm, norm, ranks_.tensor);
  if (config_.clip_qkv > 0) qkv = at::clamp(qkv, -config_.clip_qkv, config_.clip_qkv);
  const auto [q_TNH, k_TGH, v_TGH] =
      qk_norm_rotary(qkv, layout, rotary, norm_of_heads ? &layer.q_norm : nullptr,
                     norm_of_heads ? &layer.k_norm : nullptr, norm);
  const auto o_TNH = attention.attend(index, q_TNH, k_TGH, v_TGH);
  const auto o_TD = o_TNH.reshape({o_TNH.size(0), -1});
  const Parameter* bias = bias_of_sum(layer.output_bias);
  if (ranks_.tensor) residual_TD = x_TD;  // bypasses `copy`, which would sum its gradient over the ranks
  else if (!config_.post_norms) return linear(o_TD, layer.output, bias, batch_invariant(), residual_TD);
  const auto y_TD = out_of_layer(linear(o_TD, layer.output, bias, batch_invariant()));
  return residual_TD + (config_.post_norms ? rms_norm(y_TD, layer.attention_post_norm, norm) : y_TD);
}

at::Tensor Decoder::experts_block(const Layer& layer, int64_t index, const at::Tensor& x_TD,
                                  bool output_is_read, AttentionContext& attention) const {
  const ExpertsParameters parameters{.norm = if_defined(layer.mlp_norm),
                                     .gate_up = layer.gate_up,
                                     .down = layer.down,
                                     .norm_settings = config_.norm(),
                                     .activation = config_.activation,
                                     .residual = !config_.post_norms,
                                     .output_is_read = output_is_read || config_.post_norms};
  const auto logits_TE = router_logits(x_TD, parameters.norm, parameters.norm_settings, layer.router,
                                       router_type() == RouterType::kModel, batch_invariant());
  const auto experts_TK = attention.route(index, logits_TE, config_.experts_per_token);
  const auto weights_TK = expert_weights(logits_TE, experts_TK, config_.renormalises_experts);
  return experts_mlp(x_TD, experts_TK, weights_TK, parameters, batch_invariant());
}

at::Tensor Decoder::mlp_block(const Layer& layer, int64_t index, const at::Tensor& x_TD, bool output_is_read,
                              AttentionContext& attention) const {
  if (layer.is_sparse()) {
    const auto y_TD = experts_block(layer, index, x_TD, output_is_read, attention);
    return config_.post_norms ? x_TD + rms_norm(y_TD, layer.mlp_post_norm, config_.norm()) : y_TD;
  }
  const MlpParameters parameters{.norm = if_defined(layer.mlp_norm),
                                 .gate_up = layer.gate_up,
                                 .down = layer.down,
                                 .norm_settings = config_.norm(),
                                 .activation = config_.activation,
                                 .gate_up_bias = if_defined(layer.gate_up_bias),
                                 .down_bias = bias_of_sum(layer.down_bias),
                                 .residual = !config_.post_norms && !ranks_.tensor,
                                 .output_is_read = output_is_read || config_.post_norms};
  const auto own_TD = mlp(into_layer(x_TD), parameters, batch_invariant());
  const auto y_TD = parameters.output_is_read ? out_of_layer(own_TD) : own_TD;
  if (parameters.residual) return y_TD;
  return x_TD + (config_.post_norms ? rms_norm(y_TD, layer.mlp_post_norm, config_.norm()) : y_TD);
}

std::array<RotaryTable, 3> Decoder::rotary_tables(const at::Tensor& positions_T) const {
  std::array<RotaryTable, 3> tables;
  const auto table = [&](LayerRope rope) -> RotaryTable& { return tables[static_cast<size_t>(rope)]; };
  if (global_frequencies_.defined())
    table(LayerRope::kGlobal) =
        make_rotary_table(positions_T, global_frequencies_, config_.rope.attention_factor);
  if (local_frequencies_.defined())
    table(LayerRope::kLocal) =
        make_rotary_table(positions_T, local_frequencies_, config_.local_rope.attention_factor);
  // LayerRope::kNone rotates no pair.
  const auto none =
      at::empty({positions_T.size(0), 0}, at::TensorOptions(device()).dtype(accumulator_type(dtype())));
  table(LayerRope::kNone) = {none, none};
  return tables;
}

at::Tensor Decoder::embed(const at::Tensor& tokens_T) const {
  const double scale = config_.scale_embedding ? std::sqrt(static_cast<double>(config_.hidden_size)) : 1;
  if (!ranks_.tensor) return bough::embedding(tokens_T, embedding_, scale);
  // A token whose embedding another rank holds gets a vector of zeros here. Its gradient is 0, too, so it may
  // be added to any matrix row.
  const at::Tensor own_T = tokens_T - embedding_.parts[0].first;
  const at::Tensor is_other_T = (own_T < 0) | (own_T >= embedding_.value.size(0));
  const at::Tensor x_TD = bough::embedding(own_T.masked_fill(is_other_T, 0), embedding_, scale);
  return out_of_layer(x_TD.masked_fill(is_other_T.unsqueeze(1), 0));
}

at::Tensor Decoder::forward(const at::Tensor& tokens_T, const at::Tensor& positions_T,
                            AttentionContext& attention) const {
  const auto rotary = rotary_tables(positions_T);
  auto x_TD = stage_.is_first() ? embed(tokens_T) : tokens_T;
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    const RotaryTable& table = rotary[static_cast<size_t>(config_.layer_rope(i))];
    const auto compute = [this, i, table, &attention](const at::Tensor& in_TD, bool output_is_read) {
      const auto attended_TD = attention_block(layers_[i], i, in_TD, table, attention);
      return mlp_block(layers_[i], i, attended_TD, output_is_read, attention);
    };
    x_TD = attention.layer(i, x_TD, compute);
  }
  return stage_.is_last() ? rms_norm(x_TD, final_norm_, config_.norm()) : x_TD;
}
}  // namespace

std::unique_ptr<Model> make_model(const ModelConfig& config, at::ScalarType dtype, at::Device device,
                                  const ModelRanks& ranks) {
  return std::make_unique<Decoder>(config, at::TensorOptions().dtype(dtype).device(device), ranks, device);
}

std::unique_ptr<Model> make_model_without_weights(const ModelConfig& config, at::ScalarType dtype,
                                                  at::Device device) {
  return std::make_unique<Decoder>(config, at::TensorOptions().dtype(dtype).device(device), ModelRanks(),
                                   at::kMeta);
}

}  // namespace bough
