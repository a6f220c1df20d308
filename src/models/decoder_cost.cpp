#include "models/decoder_cost.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/error.h"
#include "kernels/embedding/embedding_cost.h"
#include "kernels/log_prob/log_prob_cost.h"
#include "kernels/matrix_product/matrix_product_cost.h"
#include "kernels/qk_norm_rotary/qk_norm_rotary_cost.h"
#include "kernels/rms_norm/rms_norm_cost.h"
#include "kernels/swiglu/swiglu_cost.h"
#include "kernels/tree_attention/tree_attention_cost.h"

namespace bough {

namespace {

struct NamedShape {
  const char* name;
  int64_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab;
  bool tied;
};
constexpr std::array kShapes = {
    NamedShape{"qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, 151936, true},
    NamedShape{"qwen3-1.7b", 28, 2048, 6144, 16, 8, 128, 151936, true},
    NamedShape{"qwen3-4b", 36, 2560, 9728, 32, 8, 128, 151936, true},
    NamedShape{"qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936, false},
    NamedShape{"qwen3-14b", 40, 5120, 17408, 40, 8, 128, 151936, false},
    NamedShape{"small", 8, 512, 1536, 8, 4, 64, 4096, true},
};

}  // namespace

double ModelShape::linear_flops_per_token() const {
  const int64_t attention = matrix_product_flops(1, hidden_size, query_width() + 2 * key_width()) +
                            matrix_product_flops(1, query_width(), hidden_size);
  const int64_t feed_forward = matrix_product_flops(1, hidden_size, 3 * feed_forward_elements());
  const int64_t routers = num_sparse_layers() * matrix_product_flops(1, hidden_size, num_experts);
  return static_cast<double>(num_layers * attention + feed_forward + routers +
                             2 * (adapter_elements - head_adapter_elements));
}

double ModelShape::last_flops_per_token() const {
  return static_cast<double>(matrix_product_flops(1, feed_forward_elements(), hidden_size));
}

double ModelShape::expert_flops_per_token() const {
  return 3 * last_expert_flops_per_token();
}

double ModelShape::last_expert_flops_per_token() const {
  return static_cast<double>(num_sparse_layers() * matrix_product_flops(1, expert_elements(), hidden_size));
}

double ModelShape::distinct_experts(int64_t tokens) const {
  if (!is_mixture()) return 0;
  const auto count = static_cast<double>(num_experts);
  return count *
         (1 - std::pow(1 - static_cast<double>(experts_per_token) / count, static_cast<double>(tokens)));
}

namespace {
// Forward FLOPs of a trained model whose backward takes as long as that of frozen matrices with adapters.
// `flops`: forward of both, in which `elements` are those of the adapters. Backward of a frozen matrix takes
// one product instead of two. Backward of an adapter recomputes A x, half of its forward: for this half it
// takes three products instead of two.
double trained_flops(double flops, int64_t elements) {
  const auto adapters = static_cast<double>(2 * elements);
  return (flops - adapters) / 2 + 1.25 * adapters;
}
}  // namespace

double ModelShape::trained_linear_flops_per_token() const {
  const double flops = linear_flops_per_token();
  return is_frozen() ? trained_flops(flops, adapter_elements - head_adapter_elements) : flops;
}

double ModelShape::flops_per_pair() const {
  return static_cast<double>(num_layers * num_heads * tree_attention_flops(head_dim));
}

double ModelShape::scores_per_pair() const {
  return static_cast<double>(num_layers * num_heads);
}

double ModelShape::flops_per_head_row() const {
  return static_cast<double>(matrix_product_flops(1, hidden_size, vocab_size) + 2 * head_adapter_elements);
}

double ModelShape::trained_flops_per_head_row() const {
  const double flops = flops_per_head_row();
  return is_frozen() ? trained_flops(flops, head_adapter_elements) : flops;
}

double ModelShape::elements_per_token() const {
  // Elements that a layer reads and writes per token. The embedding lookup and the final norm are added once.
  const int64_t norms = (pre_norms ? 2 : 0) + (post_norms ? 2 : 0);
  const int64_t qkv = query_width() + 2 * key_width();
  // With qk_norm_over_width, q, k and v are also split, normed and concatenated.
  const int64_t over_width = qk_norm_over_width ? 2 * qkv + rms_norm_elements(qkv) + 2 * qkv : 0;
  const int64_t layer = norms * rms_norm_elements(hidden_size) + 2 * residual_elements(hidden_size) +
                        qk_norm_rotary_elements(qkv) + over_width + (clip_qkv > 0 ? 2 * qkv : 0);
  return static_cast<double>(num_layers * layer + swiglu_elements(feed_forward_elements()) +
                             embedding_elements(hidden_size) + rms_norm_elements(hidden_size));
}

WorkModel work_model(const ModelShape& shape) {
  // WorkModel counts a training step as three forward passes. For a frozen matrix it takes only two.
  const double part = shape.is_frozen() ? 2.0 / 3 : 1.0;
  return {.flops_per_token = part * shape.linear_flops_per_token(),
          .flops_per_head_row = part * shape.flops_per_head_row(),
          .flops_per_pair = shape.flops_per_pair()};
}

int64_t ModelShape::parameter_bytes() const {
  const int64_t trained = is_frozen() ? adapter_elements : num_parameters();
  return (num_parameters() + adapter_elements) * element_bytes + trained * accumulator_bytes;
}

void set_dtype(ModelShape& shape, std::string_view dtype) {
  if (dtype != "fp32" && dtype != "bf16" && dtype != "fp64")
    throw UserError(str("dtype: got ", quoted(dtype), ", expected fp32, bf16 or fp64"));
  shape.element_bytes = dtype == "bf16" ? 2 : dtype == "fp32" ? 4 : 8;
  shape.accumulator_bytes = dtype == "fp64" ? 8 : 4;
}

ModelShape named_model_shape(std::string_view name, std::string_view dtype) {
  const auto found =
      std::find_if(kShapes.begin(), kShapes.end(), [&](const NamedShape& s) { return s.name == name; });
  if (found == kShapes.end()) {
    std::string names;
    for (const auto& shape : kShapes)
      names += str(&shape == &kShapes.front() ? "" : &shape == &kShapes.back() ? " or " : ", ", shape.name);
    throw UserError(str("shape: got ", quoted(name), ", expected ", names));
  }
  ModelShape shape;
  shape.name = found->name;
  shape.num_layers = found->layers;
  shape.hidden_size = found->hidden;
  shape.intermediate_size = found->intermediate;
  shape.num_heads = found->heads;
  shape.num_kv_heads = found->kv_heads;
  shape.head_dim = found->head_dim;
  shape.vocab_size = found->vocab;
  shape.tie_word_embeddings = found->tied;
  shape.qk_norm = true;
  set_dtype(shape, dtype);
  return shape;
}

ModelShape model_shape(const ModelConfig& config, std::string_view dtype) {
  ModelShape shape{config};
  shape.name = "model";
  set_dtype(shape, dtype);
  return shape;
}

int64_t DecoderBytes::of_stack_row() const {
  return shape_.num_layers * 2 * shape_.key_width() * (shape_.element_bytes + shape_.accumulator_bytes);
}

int64_t DecoderBytes::of_attention() const {
  return shape_.query_width() * shape_.element_bytes + shape_.num_heads * shape_.accumulator_bytes;
}

std::vector<DecoderBytes::LayerKind> DecoderBytes::kinds() const {
  std::vector<LayerKind> kinds;
  if (shape_.num_dense_layers() > 0) kinds.push_back(LayerKind::kDense);
  if (shape_.num_sparse_layers() > 0) kinds.push_back(LayerKind::kSparse);
  return kinds;
}

int64_t DecoderBytes::of_feed_forward(LayerKind kind) const {
  if (kind == LayerKind::kDense) return 2 * shape_.intermediate_size * shape_.element_bytes;
  // Gate and up of each expert; the experts' indices, the order of the pairs and its inverse; the weights.
  // Without renormalisation the softmax keeps its output for all experts. Losses of routers keep the logits.
  const int64_t accumulator = shape_.accumulator_bytes;
  const int64_t of_all = (shape_.renormalises_experts ? 0 : 1) + (shape_.has_router_losses ? 1 : 0);
  const int64_t weights = (shape_.experts_per_token + of_all * shape_.num_experts) * accumulator;
  return 2 * shape_.expert_elements() * shape_.element_bytes + 3 * shape_.experts_per_token * int64_t{8} +
         weights + (shape_.pre_norms ? accumulator : 0);  // the router's own scale of the norm
}

int64_t DecoderBytes::of_layers() const {
  return shape_.num_dense_layers() * of_layer(LayerKind::kDense) +
         shape_.num_sparse_layers() * of_layer(LayerKind::kSparse);
}

int64_t DecoderBytes::of_layer(LayerKind kind) const {
  const int64_t element = shape_.element_bytes, accumulator = shape_.accumulator_bytes;
  const int64_t projection = shape_.query_width() + 2 * shape_.key_width();
  // A layer stores its input and the residual after attention; q, k, v before and after norm and rotary
  // embedding; gate and up; the norms' scales; and the inputs of post-norms and of clamping.
  int64_t layer = (2 * shape_.hidden_size + 2 * projection) * element + of_feed_forward(kind);
  if (shape_.clip_qkv > 0) layer += projection * element;
  if (shape_.pre_norms) layer += 2 * accumulator;
  if (shape_.post_norms) layer += 2 * (shape_.hidden_size * element + accumulator);
  if (shape_.qk_norm_over_width)
    layer += (shape_.query_width() + shape_.key_width()) * element + 2 * accumulator;
  return layer;
}

int64_t DecoderBytes::of_pass() const {
  // The last residual, its norm and the norm's scale, rotary angles, token id, position and subtree_end.
  const bool has_local = std::find(shape_.layer_ropes.begin(), shape_.layer_ropes.end(), LayerRope::kLocal) !=
                         shape_.layer_ropes.end();
  const int64_t angles = (has_local ? 2 : 1) * shape_.turned_elements();
  return 2 * shape_.hidden_size * shape_.element_bytes + (angles + 1) * shape_.accumulator_bytes +
         2 * int64_t{8} + 4;
}

int64_t DecoderBytes::of_kept(RecomputePolicy keep) const {
  const int64_t layers = shape_.num_layers;
  // The experts' indices, so that a recomputation uses the same experts.
  const int64_t routes = shape_.num_sparse_layers() * shape_.experts_per_token * int64_t{8};
  switch (keep) {
    case RecomputePolicy::kKeysValues: return routes;
    case RecomputePolicy::kAttention: return routes + layers * of_attention();
    case RecomputePolicy::kLayerInputs: return routes + layers * of_layer_input() + of_pass();
    case RecomputePolicy::kLayerInputsAndAttention:
      return routes + layers * (of_layer_input() + of_attention()) + of_pass();
    case RecomputePolicy::kLayerInputsOnHost:
      return routes + (kernels_.on_gpu() ? std::min<int64_t>(layers, 2) : layers) * of_layer_input() +
             of_pass();
    case RecomputePolicy::kActivations: break;
  }
  return of_layers() + layers * of_attention() + of_pass();
}

int64_t DecoderBytes::copied_to_host() const {
  return (shape_.num_layers - 1) * of_layer_input();
}

int64_t DecoderBytes::of_exit() const {
  return shape_.hidden_size * (shape_.element_bytes + shape_.accumulator_bytes);
}

int64_t DecoderBytes::of_loss_row() const {
  // A loss row has the advantage, two old log-probabilities, weight, log-probability, entropy, and the
  // sequence index.
  return 6 * shape_.accumulator_bytes + 8;
}

int64_t DecoderBytes::product(int64_t rows, int64_t depth, int64_t columns) const {
  return matrix_product_bytes(kernels_, shape_.element_sizes(), rows, depth, columns);
}

int64_t DecoderBytes::weight_gradient(int64_t tokens, int64_t outputs, int64_t inputs) const {
  if (shape_.is_frozen()) return 0;
  return weight_gradient_bytes(kernels_, shape_.element_sizes(), tokens, outputs, inputs);
}

int64_t DecoderBytes::of_head(const PassShape& pass) const {
  const int64_t element = shape_.element_bytes, accumulator = shape_.accumulator_bytes;
  const int64_t width = shape_.hidden_size, vocab = shape_.vocab_size;
  const int64_t rows = std::min(pass.head_rows, head_chunk_rows(vocab, kernels_.on_gpu()));
  if (rows == 0) return 0;
  // If the pass reads the prefix KV stack, boundary hidden states of other blocks are appended to its hidden
  // states. The concatenation holds the pass's hidden states a second time.
  const int64_t sources = pass.stack_rows > 0 ? pass.tokens * width * element : 0;
  ElementSizes sizes = shape_.element_sizes();
  // Wide logits are split into two narrow tensors. The second one is made from a wide difference.
  const int64_t parts = shape_.has_wide_logits ? rows * vocab * (2 * sizes.element + sizes.accumulator) : 0;
  if (shape_.has_wide_logits) sizes.element = sizes.accumulator;
  const int64_t logits = log_prob_bytes(sizes, rows, vocab) + parts + rows * width * element;
  // The loss and its autograd graph hold tens of tensors with an element per loss row. The gradients of
  // lm_head's weight and of the hidden states follow.
  const int64_t loss_rows = pass.loss_rows >= 0 ? pass.loss_rows : pass.head_rows;
  const int64_t chunk_loss_rows = (loss_rows * rows + pass.head_rows - 1) / pass.head_rows;
  const int64_t loss = chunk_loss_rows * (24 * accumulator + 24);
  const int64_t weight = weight_gradient(rows, vocab, width);
  const int64_t gradients =
      rows * width * element + std::max({product(rows, vocab, width), of_head_adapter(rows),
                                         element < accumulator ? rows * width * accumulator : 0});
  return sources + logits + std::max({product(rows, width, vocab), loss, weight, gradients});
}

// The inner products A x and their gradient, and the largest product with them.
int64_t DecoderBytes::of_head_adapter(int64_t rows) const {
  const int64_t vocab = shape_.vocab_size;
  const int64_t rank = shape_.head_adapter_elements / (shape_.hidden_size + vocab);
  if (rank == 0) return 0;
  const int64_t of_gradient = weight_gradient_bytes(kernels_, shape_.element_sizes(), rows, vocab, rank);
  return 2 * rows * rank * shape_.element_bytes +
         std::max({product(rows, rank, vocab), product(rows, vocab, rank), of_gradient});
}

int64_t DecoderBytes::of_mlp(int64_t tokens) const {
  const int64_t element = shape_.element_bytes;
  const int64_t width = shape_.hidden_size, inner = shape_.intermediate_size;
  // The residual's gradient is in memory all the time. Backward of `down` also needs SwiGLU's output; that of
  // gate and up needs the norm's output. The weight gradient of gate and up is computed after their input's
  // gradient, while the latter stays in memory.
  const int64_t down = tokens * inner * element +
                       std::max(product(tokens, width, inner), weight_gradient(tokens, width, inner));
  const int64_t gate_up = tokens * width * element +
                          std::max(product(tokens, 2 * inner, width),
                                   tokens * width * element + weight_gradient(tokens, 2 * inner, width));
  // An adapter's inner products, on the CPU also its term, in addition to the tensor that it is added to, and
  // copies of the gradients of its slices. cuBLAS adds to the tensor and reads the slices in place.
  const int64_t of_slices = kernels_.on_gpu() ? 0 : 4 * inner;
  const int64_t adapters = shape_.is_frozen() ? tokens * (of_slices + width) * element : 0;
  return tokens * width * element + std::max(down, gate_up) + adapters;
}

// Pairs of a token and an expert are sorted by expert. The rows of all pairs exist at once, the tensors of
// one expert after another. On a GPU, at most the tensors of all experts exist at once (groups_on_device() in
// kernels/experts).
int64_t DecoderBytes::of_experts(int64_t tokens) const {
  const int64_t element = shape_.element_bytes;
  const int64_t width = shape_.hidden_size, inner = shape_.expert_intermediate_size;
  const int64_t pairs = tokens * shape_.experts_per_token;
  // The largest expert is assumed to have twice the mean.
  const int64_t rows = kernels_.on_gpu() ? pairs : std::min(tokens, 2 * pairs / shape_.num_experts + 1);
  // Two rows a pair: the gradients of the output and of h. For the expert at work: the gradient of SwiGLU's
  // output, this output, and a product, which is copied if there are several.
  const int64_t copied = kernels_.on_gpu() ? 0 : rows * width * element;
  const int64_t products =
      2 * pairs * width * element + 2 * rows * inner * element +
      std::max(weight_gradient(rows, width, inner), copied + product(rows, 2 * inner, width));
  // h, and again a row a pair, for the gradients of gate and up; the input's gradient.
  const int64_t gate_up = (pairs + 2 * tokens) * width * element + weight_gradient(rows, 2 * inner, width);
  const int64_t of_pairs = pairs * (8 + 2 * shape_.accumulator_bytes);
  return tokens * width * element + of_pairs + std::max(products, gate_up);
}

int64_t DecoderBytes::of_attention_backward(const PassShape& pass, LayerKind kind) const {
  const int64_t element = shape_.element_bytes, accumulator = shape_.accumulator_bytes;
  const int64_t width = shape_.hidden_size, query = shape_.query_width(), key = shape_.key_width();
  const int64_t tokens = pass.tokens;
  // The MLP's activations are freed before the backward of attention, so their bytes are subtracted. The
  // gradients are those of the residual, the output, q, k and v.
  const int64_t freed = tokens * (of_feed_forward(kind) + width * element +
                                  (shape_.post_norms ? width * element + accumulator : 0));
  const int64_t gradients = tokens * ((width + 2 * query) * element + 2 * key * accumulator +
                                      (element < accumulator ? 2 * key * element : 0));
  const int64_t workspace =
      tree_attention_bytes(kernels_, shape_.element_sizes(),
                           {shape_.num_heads, shape_.num_kv_heads, shape_.head_dim}, tokens, pass.stack_rows);
  return gradients + workspace - freed;
}

int64_t DecoderBytes::of_temporaries(const PassShape& pass, RecomputePolicy keep) const {
  const int64_t element = shape_.element_bytes, accumulator = shape_.accumulator_bytes;
  // The lm_head sums the gradient of the hidden states in the accumulator type. The gradient, rounded to the
  // model's type, lives until backward is done.
  const int64_t summed = pass.tokens * shape_.hidden_size * accumulator;
  const int64_t held = pass.tokens * shape_.hidden_size * element;
  int64_t of_largest_layer = 0;
  for (const LayerKind kind : kinds()) {
    int64_t mlp = kind == LayerKind::kDense ? of_mlp(pass.tokens) : of_experts(pass.tokens);
    int64_t attention = of_attention_backward(pass, kind);
    if (recomputes_layers(keep)) {
      // The activations of the recomputed layer without its input, which counts as kept. The gradient of the
      // layer's output lives as long as these activations.
      int64_t layer = of_layer(kind) - of_layer_input();
      if (keep != RecomputePolicy::kLayerInputsAndAttention) layer += of_attention();
      mlp += pass.tokens * layer;
      attention += pass.tokens * (layer + shape_.hidden_size * element);
    }
    of_largest_layer = std::max({of_largest_layer, mlp, attention});
  }
  // Indices: the label and the source of each lm_head row; the lm_head row and the position in the batch of
  // each loss row.
  const int64_t loss_rows = pass.loss_rows >= 0 ? pass.loss_rows : pass.head_rows;
  const int64_t numbers = 4 * pass.stack_rows + 16 * (pass.head_rows + loss_rows);
  return std::max(summed + of_head(pass), held + of_largest_layer) + numbers;
}

}  // namespace bough
