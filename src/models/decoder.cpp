// The decoder that Qwen3, Qwen2.5 and Llama 3 share: pre-norm blocks of grouped-head attention and SwiGLU.
// What differs is in ModelConfig: q/k norm (Qwen3), biases (Qwen2.5), tied head.
#include "models/decoder.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "kernels/embedding/embedding.h"
#include "kernels/linear/linear.h"
#include "kernels/qk_norm_rotary/qk_norm_rotary.h"
#include "kernels/rms_norm/rms_norm.h"

namespace bough {

namespace {
using Rows = std::vector<std::pair<std::string, int64_t>>;  // Hugging Face name, rows

Parameter make_parameter(const Rows& rows, std::optional<int64_t> columns, const at::TensorOptions& options) {
  Parameter parameter;
  int64_t total = 0;
  for (const auto& [name, count] : rows) {
    parameter.parts.push_back({name, total, total + count});
    total += count;
  }
  parameter.value = columns ? at::empty({total, *columns}, options) : at::empty({total}, options);
  return parameter;
}

class Decoder : public Model {
 public:
  Decoder(const ModelConfig& config, const at::TensorOptions& options);

  at::Tensor forward(const at::Tensor& tokens_T, const at::Tensor& positions_T,
                     AttentionContext& attention) const override;
  std::vector<Parameter*> parameters() override;
  const Parameter& embedding() const override { return embedding_; }
  const Parameter& head() const override { return config_.tie_word_embeddings ? embedding_ : head_; }
  std::unique_ptr<Model> share() const override { return std::make_unique<Decoder>(*this); }
  std::vector<Parameter*> layer_matrices() override;

 private:
  struct Layer {
    Parameter input_norm, qkv, qkv_bias, q_norm, k_norm, output, output_bias, post_norm, gate_up, down;
  };
  // With its norm and residual.
  at::Tensor attention_block(const Layer& layer, int64_t index, const at::Tensor& x_TD,
                             const RotaryTable& rotary, AttentionContext& attention) const;

  Parameter embedding_;
  std::vector<Layer> layers_;
  Parameter final_norm_;
  Parameter head_;  // undefined where tied
};

Decoder::Decoder(const ModelConfig& config, const at::TensorOptions& options) : Model(config) {
  const int64_t width = config.hidden_size;
  const int64_t q_rows = config.num_heads * config.head_dim;
  const int64_t kv_rows = config.num_kv_heads * config.head_dim;
  embedding_ = make_parameter({{"model.embed_tokens.weight", config.vocab_size}}, width, options);
  for (int64_t i = 0; i < config.num_layers; ++i) {
    const std::string prefix = str("model.layers.", i, ".");
    const std::string attn = prefix + "self_attn.";
    const std::string mlp = prefix + "mlp.";
    Layer layer;
    layer.input_norm = make_parameter({{prefix + "input_layernorm.weight", width}}, {}, options);
    layer.qkv = make_parameter({{attn + "q_proj.weight", q_rows},
                                {attn + "k_proj.weight", kv_rows},
                                {attn + "v_proj.weight", kv_rows}},
                               width, options);
    if (config.qkv_bias)
      layer.qkv_bias = make_parameter(
          {{attn + "q_proj.bias", q_rows}, {attn + "k_proj.bias", kv_rows}, {attn + "v_proj.bias", kv_rows}},
          {}, options);
    if (config.qk_norm) {
      layer.q_norm = make_parameter({{attn + "q_norm.weight", config.head_dim}}, {}, options);
      layer.k_norm = make_parameter({{attn + "k_norm.weight", config.head_dim}}, {}, options);
    }
    layer.output = make_parameter({{attn + "o_proj.weight", width}}, q_rows, options);
    if (config.output_bias) layer.output_bias = make_parameter({{attn + "o_proj.bias", width}}, {}, options);
    layer.post_norm = make_parameter({{prefix + "post_attention_layernorm.weight", width}}, {}, options);
    layer.gate_up = make_parameter({{mlp + "gate_proj.weight", config.intermediate_size},
                                    {mlp + "up_proj.weight", config.intermediate_size}},
                                   width, options);
    layer.down = make_parameter({{mlp + "down_proj.weight", width}}, config.intermediate_size, options);
    layers_.push_back(std::move(layer));
  }
  final_norm_ = make_parameter({{"model.norm.weight", width}}, {}, options);
  if (!config.tie_word_embeddings)
    head_ = make_parameter({{"lm_head.weight", config.vocab_size}}, width, options);
}

std::vector<Parameter*> Decoder::parameters() {
  std::vector<Parameter*> all = {&embedding_};
  for (auto& layer : layers_)
    for (Parameter* parameter :
         {&layer.input_norm, &layer.qkv, &layer.qkv_bias, &layer.q_norm, &layer.k_norm, &layer.output,
          &layer.output_bias, &layer.post_norm, &layer.gate_up, &layer.down})
      all.push_back(parameter);
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

const Parameter* if_defined(const Parameter& parameter) {
  return parameter.value.defined() ? &parameter : nullptr;
}

at::Tensor Decoder::attention_block(const Layer& layer, int64_t index, const at::Tensor& x_TD,
                                    const RotaryTable& rotary, AttentionContext& attention) const {
  const QkvLayout layout{config_.num_heads, config_.num_kv_heads, config_.head_dim};
  const auto [qkv, residual_TD] = norm_linear(x_TD, layer.input_norm, config_.rms_norm_eps, layer.qkv,
                                              if_defined(layer.qkv_bias), batch_invariant());
  const auto [q_TNH, k_TGH, v_TGH] = qk_norm_rotary(qkv, layout, rotary, if_defined(layer.q_norm),
                                                    if_defined(layer.k_norm), config_.rms_norm_eps);
  const auto o_TNH = attention.attend(index, q_TNH, k_TGH, v_TGH);
  return linear(o_TNH.reshape({o_TNH.size(0), -1}), layer.output, if_defined(layer.output_bias),
                batch_invariant(), residual_TD);
}

at::Tensor Decoder::forward(const at::Tensor& tokens_T, const at::Tensor& positions_T,
                            AttentionContext& attention) const {
  const auto rotary =
      make_rotary_table(positions_T, config_.head_dim, config_.rope_theta, accumulator_type(dtype()));
  auto x_TD = bough::embedding(tokens_T, embedding_);
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    const auto& layer = layers_[i];
    x_TD = attention_block(layer, i, x_TD, rotary, attention);
    x_TD = mlp(x_TD, {layer.post_norm, layer.gate_up, layer.down, config_.rms_norm_eps}, batch_invariant());
  }
  return rms_norm(x_TD, final_norm_, config_.rms_norm_eps);
}
}  // namespace

std::unique_ptr<Model> make_decoder(const ModelConfig& config, const at::TensorOptions& options) {
  return std::make_unique<Decoder>(config, options);
}

}  // namespace bough
