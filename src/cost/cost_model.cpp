#include "cost/cost_model.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "cost/attention_work.h"
#include "kernels/log_prob/log_prob_cost.h"

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
  const int64_t attention = hidden_size * (2 * query_width() + 2 * key_width());
  return 2.0 * static_cast<double>(num_layers * (attention + 3 * hidden_size * intermediate_size));
}

double ModelShape::flops_per_pair() const {
  return 4.0 * static_cast<double>(num_layers * query_width());
}

double ModelShape::scores_per_pair() const {
  return static_cast<double>(num_layers * num_heads);
}

double ModelShape::flops_per_head_row() const {
  return 2.0 * static_cast<double>(hidden_size * vocab_size);
}

double ModelShape::elements_per_token() const {
  // Two norms, two residual sums, q/k norm with rotary embedding, SwiGLU: what each reads and writes. Beside the
  // layers, the embedding's row and the final norm.
  const int64_t layer = 2 * 2 * hidden_size + 2 * 3 * hidden_size + 2 * (query_width() + 2 * key_width()) +
                        3 * intermediate_size;
  return static_cast<double>(num_layers * layer + 4 * hidden_size);
}

WorkModel work_model(const ModelShape& shape) {
  return {.flops_per_token = shape.linear_flops_per_token(),
          .flops_per_head_row = shape.flops_per_head_row(),
          .flops_per_pair = shape.flops_per_pair()};
}

int64_t ModelShape::num_parameters() const {
  const int64_t qkv = query_width() + 2 * key_width();
  const int64_t matrices = hidden_size * (qkv + query_width() + 3 * intermediate_size);
  const int64_t vectors =
      2 * hidden_size + (qk_norm ? 2 * head_dim : 0) + (qkv_bias ? qkv : 0) + (output_bias ? hidden_size : 0);
  return num_layers * (matrices + vectors) + hidden_size + (tied_head ? 1 : 2) * vocab_size * hidden_size;
}

int64_t ModelShape::parameter_bytes() const {
  return num_parameters() * (element_bytes + accumulator_bytes);
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
  shape.tied_head = found->tied;
  set_dtype(shape, dtype);
  return shape;
}

CostModel::CostModel(DeviceProfile device, ModelShape shape)
    : device_(std::move(device)), shape_(std::move(shape)) {
  device_.check_integrity();
  const int64_t bytes = device_.dtype == "bf16" ? 2 : device_.dtype == "fp32" ? 4 : 8;
  BOUGH_CHECK(shape_.element_bytes == bytes, "shape ", shape_.name, " has elements of ", shape_.element_bytes,
              " bytes, the profile of ", device_.name, " is for ", device_.dtype);
}

double CostModel::attention_seconds(const PassShape& pass, bool backward) const {
  if (pass.tokens == 0) return 0;
  const auto& cost = backward ? device_.attention_backward : device_.attention_forward;
  const int64_t stack_pairs =
      pass.stack_pairs >= 0 ? pass.stack_pairs : std::min(pass.pairs, pass.tokens * pass.stack_rows);
  const auto tokens = static_cast<double>(pass.tokens);
  const AttentionPass attention{pass.tokens, static_cast<double>(stack_pairs) / tokens,
                                static_cast<double>(pass.pairs - stack_pairs) / tokens, pass.pieces,
                                shape_.num_kv_heads};
  const int64_t rows = attention_rows(device_.attention, pass.tokens);
  const double keys =
      attention_work(device_.attention, device_.threads, attention) / static_cast<double>(rows) +
      cost.overhead_keys.clamped(rows);
  const double flops_per_key = shape_.flops_per_pair() + cost.score_flops * shape_.scores_per_pair();
  return keys * flops_per_key * cost.by_queries.at(rows);
}

double CostModel::attention_forward_seconds(const PassShape& pass) const {
  return attention_seconds(pass, false);
}

double CostModel::attention_backward_seconds(const PassShape& pass) const {
  return attention_seconds(pass, true);
}

double CostModel::forward_seconds(const PassShape& pass) const {
  if (pass.tokens == 0) return 0;
  const double work = shape_.linear_flops_per_token() * device_.linear_forward.at(pass.tokens) +
                      shape_.elements_per_token() * device_.elementwise_forward.at(pass.tokens) +
                      attention_forward_seconds(pass);
  const double constant = static_cast<double>(shape_.num_layers) * device_.seconds_per_layer_forward +
                          device_.seconds_per_pass_forward;
  return device_.launches_overlap ? std::max(work, constant) : work + constant;
}

double CostModel::backward_seconds(const PassShape& pass) const {
  if (pass.tokens == 0) return 0;
  const double work = shape_.linear_flops_per_token() * device_.linear_backward.at(pass.tokens) +
                      shape_.elements_per_token() * device_.elementwise_backward.at(pass.tokens) +
                      attention_backward_seconds(pass);
  const double constant = static_cast<double>(shape_.num_layers) * device_.seconds_per_layer_backward +
                          device_.seconds_per_pass_backward;
  return device_.launches_overlap ? std::max(work, constant) : work + constant;
}

double CostModel::head_seconds(const CostCurve& curve, int64_t rows) const {
  const int64_t chunk = head_chunk_rows(shape_.vocab_size);
  const int64_t whole = rows / chunk;
  double seconds = static_cast<double>(whole) * curve.at(chunk);
  if (rows % chunk > 0) seconds += curve.at(rows % chunk);
  return seconds * shape_.flops_per_head_row();
}

double CostModel::head_forward_seconds(const PassShape& pass) const {
  return head_seconds(device_.head_forward, pass.head_rows);
}

double CostModel::head_backward_seconds(const PassShape& pass) const {
  return head_seconds(device_.head_backward, pass.head_rows);
}

int64_t CostModel::stack_row_bytes() const {
  return shape_.num_layers * 2 * shape_.key_width() * (shape_.element_bytes + shape_.accumulator_bytes);
}

int64_t CostModel::attention_bytes() const {
  return shape_.num_layers *
         (shape_.query_width() * shape_.element_bytes + shape_.num_heads * shape_.accumulator_bytes);
}

int64_t CostModel::activation_bytes() const {
  const int64_t element = shape_.element_bytes, accumulator = shape_.accumulator_bytes;
  const int64_t projection = shape_.query_width() + 2 * shape_.key_width();
  // Of a layer: both residuals; q, k, v before and after norm and rotary embedding; gate and up; both norms' scales;
  // attention's output and log-sum-exp.
  const int64_t layer =
      (2 * shape_.hidden_size + 2 * projection + 2 * shape_.intermediate_size) * element + 2 * accumulator;
  // Beside the layers: the last residual, its norm and scale, rotary angles, token and position, its end.
  const int64_t pass =
      2 * shape_.hidden_size * element + (shape_.head_dim + 1) * accumulator + 2 * int64_t{8} + 4;
  return shape_.num_layers * layer + attention_bytes() + pass;
}

int64_t CostModel::exit_bytes() const {
  return shape_.hidden_size * (shape_.element_bytes + shape_.accumulator_bytes);
}

int64_t CostModel::row_bytes() const {
  // Advantage, two old log-probabilities, weight, log-probability, entropy; the sequence's number.
  return 6 * shape_.accumulator_bytes + 8;
}

// As kernels/matrix_product/matrix_product_cpu.cpp allocates, in elements: fp32 panels of 32 columns and a depth of 512, up
// to 256 KiB a thread; bf16 ones of the whole depth, up to 1 MiB of them, and one block of 32 rows; over a depth of more
// than 1,024, up to 16 panels, a part of a block of depth 512, and sums of up to 384 KiB.
int64_t CostModel::tile_bytes(bool bf16, int64_t rows, int64_t depth, int64_t columns) const {
  const int64_t panels = (columns + 31) / 32;
  const bool alone = static_cast<double>(rows) * static_cast<double>(depth) * static_cast<double>(columns) <
                     static_cast<double>(512 << 10);
  const int64_t threads = alone ? 1 : device_.threads;
  const int64_t block = bf16 ? (depth + 31) / 32 * 32 * 32 * shape_.element_bytes
                             : std::min<int64_t>(depth, 512) * 32 * shape_.accumulator_bytes;
  const int64_t share = panels >= threads ? (panels + threads - 1) / threads : panels;
  const bool in_parts = bf16 && depth > 1024;
  const int64_t fit = std::clamp<int64_t>(in_parts ? 16 : (bf16 ? 1 << 20 : 256 << 10) / block, 1, share);
  const int64_t groups = (share + fit - 1) / fit;
  const int64_t group = (share + groups - 1) / groups;
  const int64_t row_of_sums = group * 32 * 32 * shape_.accumulator_bytes;
  const int64_t near = in_parts ? 512 * 32 * shape_.element_bytes +
                                      std::max<int64_t>((384 << 10) / row_of_sums, 1) * row_of_sums
                                : 0;
  // In bf16 the last rows of a factor are packed, too.
  return threads * ((group + (bf16 ? 1 : 0)) * block + near);
}

int64_t CostModel::product_bytes(int64_t rows, int64_t depth, int64_t columns) const {
  const bool bf16 = device_.attention == DeviceProfile::Attention::kBf16Tiles;
  const bool ours = device_.packs_factors && (bf16 || shape_.element_bytes == shape_.accumulator_bytes);
  if (!ours) return 0;
  // Rows that do not end at a tile's are packed.
  const int64_t packed = bf16 && depth % 32 != 0 ? std::min<int64_t>((rows + 31) / 32 * 32, 1024) *
                                                       ((depth + 31) / 32 * 32) * shape_.element_bytes
                                                 : 0;
  return packed + tile_bytes(bf16, rows, depth, columns);
}

// In bf16 tiles x is packed whole and d_yᵀ up to 256 rows and 512 tokens at a time by each thread; in fp32 ones d_yᵀ is
// packed 1,024 rows and 512 tokens at a time. On a CPU without tiles of bf16 both factors are widened.
int64_t CostModel::weight_gradient_bytes(int64_t tokens, int64_t outputs, int64_t inputs) const {
  const bool bf16 = device_.attention == DeviceProfile::Attention::kBf16Tiles;
  const int64_t accumulator = shape_.accumulator_bytes;
  const auto padded = [](int64_t rows) { return (rows + 31) / 32 * 32; };
  int64_t bytes = 0;
  const bool widens = device_.attention == DeviceProfile::Attention::kTiles ||
                      device_.attention == DeviceProfile::Attention::kReference;
  if (widens && shape_.element_bytes < accumulator) bytes += tokens * (outputs + inputs) * accumulator;
  if (device_.packs_factors && bf16) {
    const int64_t share = padded((outputs + device_.threads - 1) / device_.threads);
    bytes += (padded(tokens) * padded(inputs) + device_.threads * std::min<int64_t>(share, 256) * 512) *
             shape_.element_bytes;
  } else if (device_.packs_factors) {
    const int64_t depth = std::min<int64_t>(tokens, 512), rows = std::min<int64_t>(padded(outputs), 1024);
    bytes += rows * depth * accumulator + tile_bytes(bf16, rows, depth, inputs);
  }
  return bytes;
}

int64_t CostModel::head_temporary_bytes(const PassShape& pass) const {
  const int64_t element = shape_.element_bytes, accumulator = shape_.accumulator_bytes;
  const int64_t width = shape_.hidden_size, vocab = shape_.vocab_size;
  const int64_t rows = std::min(pass.head_rows, head_chunk_rows(vocab));
  if (rows == 0) return 0;
  // The hidden states again where others are appended to them.
  const int64_t sources = pass.stack_rows > 0 ? pass.tokens * width * element : 0;
  const int64_t logits = rows * ((vocab + width) * element + 5 * accumulator + 16);
  // The loss and its graph hold tens of tensors of loss rows; then the weight's gradient; then the rows' own.
  const int64_t loss_rows = pass.loss_rows >= 0 ? pass.loss_rows : pass.head_rows;
  const int64_t chunk_loss_rows = (loss_rows * rows + pass.head_rows - 1) / pass.head_rows;
  const int64_t loss = chunk_loss_rows * (24 * accumulator + 24);
  const int64_t weight = weight_gradient_bytes(rows, vocab, width);
  const int64_t gradients =
      rows * width * element +
      std::max(product_bytes(rows, vocab, width), element < accumulator ? rows * width * accumulator : 0);
  return sources + logits + std::max({product_bytes(rows, width, vocab), loss, weight, gradients});
}

int64_t CostModel::mlp_temporary_bytes(const PassShape& pass) const {
  const int64_t element = shape_.element_bytes;
  const int64_t width = shape_.hidden_size, inner = shape_.intermediate_size;
  const int64_t tokens = pass.tokens;
  // Beside the residual's gradient: SwiGLU's output with `down`; the norm's with gate and up, whose weight's gradient
  // waits for the gradient of the input.
  const int64_t down = tokens * inner * element + std::max(product_bytes(tokens, width, inner),
                                                           weight_gradient_bytes(tokens, width, inner));
  const int64_t gate_up =
      tokens * width * element +
      std::max(product_bytes(tokens, 2 * inner, width),
               tokens * width * element + weight_gradient_bytes(tokens, 2 * inner, width));
  return tokens * width * element + std::max(down, gate_up);
}

int64_t CostModel::attention_temporary_bytes(const PassShape& pass) const {
  const int64_t element = shape_.element_bytes, accumulator = shape_.accumulator_bytes;
  const int64_t width = shape_.hidden_size, query = shape_.query_width(), key = shape_.key_width();
  const int64_t tokens = pass.tokens;
  // The MLP's activations are freed by then. Gradients of the residual, the output, q, k and v.
  const int64_t freed = tokens * (2 * shape_.intermediate_size + width) * element;
  const int64_t gradients = tokens * ((width + 2 * query) * element + 2 * key * accumulator +
                                      (element < accumulator ? 2 * key * element : 0));
  int64_t workspace = 0;
  switch (device_.attention) {
    case DeviceProfile::Attention::kTiles:
    case DeviceProfile::Attention::kBf16Tiles: {
      // Backward, queries and gradients of outputs in two layouts each, two scalars a row, and a sum of d_q for each
      // share of a group's keys; forward, a group's keys and values in another form for each thread. All in the width
      // of units.
      const bool bf16 = device_.attention == DeviceProfile::Attention::kBf16Tiles;
      const int64_t factor = bf16 ? element : accumulator, batch = bf16 ? 4 : 8;
      const int64_t head = (shape_.head_dim + 31) / 32 * 32, row = shape_.num_heads * head;
      const int64_t units = (pass.stack_rows + 31) / 32 + (tokens + 31) / 32;
      const int64_t shares =
          attention_shares(device_.threads, shape_.num_kv_heads, (units + batch - 1) / batch);
      const int64_t backward = attention_rows(device_.attention, tokens) *
                               (4 * row * factor + (shares * row + 2 * shape_.num_heads) * accumulator);
      workspace = std::max(backward, device_.threads * units * 32 * 2 * head * factor);
      break;
    }
    case DeviceProfile::Attention::kReference: {
      // Five matrices of scores at once; keys and values repeated for every query head.
      const int64_t keys = pass.stack_rows + tokens;
      workspace = (5 * shape_.num_heads * tokens * keys + (2 * query + 4 * key) * keys + 3 * query * tokens) *
                  accumulator;
      break;
    }
    case DeviceProfile::Attention::kFused: workspace = tokens * query * accumulator; break;
  }
  return gradients + workspace - freed;
}

int64_t CostModel::temporary_bytes(const PassShape& pass) const {
  const int64_t element = shape_.element_bytes, accumulator = shape_.accumulator_bytes;
  // The gradient of the hidden states lives until backward is done; in bf16 rounded, too.
  const int64_t seeds = pass.tokens * shape_.hidden_size * accumulator;
  const int64_t rounded = element < accumulator ? pass.tokens * shape_.hidden_size * element : 0;
  const int64_t backward = rounded + std::max(mlp_temporary_bytes(pass), attention_temporary_bytes(pass));
  return seeds + std::max(head_temporary_bytes(pass), backward) + 4 * pass.stack_rows;
}

}  // namespace bough
